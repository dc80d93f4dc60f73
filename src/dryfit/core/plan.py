"""How a trial is run: what changes only memory and time, never what is learned."""

from enum import StrEnum

from pydantic import Field, model_validator

from dryfit.core.settings import Settings


class DeviceKind(StrEnum):
    """Where tensors live."""

    CPU = "cpu"
    CUDA = "cuda"


class ExecutionSettings(Settings):
    """``[execution]``: wishes about how trials run; the plan of each trial is derived from them."""

    device: str = Field(
        default="auto", pattern="^(auto|cpu|cuda)$", description="auto takes CUDA where a device is free"
    )
    micro_batch: int | None = Field(default=None, ge=1, description="rows in memory at once; unset: the whole batch")
    checkpointing: bool = Field(
        default=False, description="recompute activations in backward: less memory, about 1.3x time"
    )
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads a trial; unset: cores / parallel")
    loader_workers: int = Field(default=0, ge=0, le=64, description="processes that load batches; 0: none")


class ExecutionPlan(Settings):
    """The plan of one trial. ``accumulation == ceil(effective_batch / micro_batch)``; the last one may be short."""

    device: DeviceKind
    effective_batch: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    checkpointing: bool = False
    threads: int = Field(default=1, ge=1)
    loader_workers: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _accumulation_fits(self) -> "ExecutionPlan":
        needed = -(-self.effective_batch // self.micro_batch)
        if self.accumulation != needed:
            raise ValueError(f"accumulation is {self.accumulation}, the batch needs {needed}")
        return self


def plan_execution(
    wishes: ExecutionSettings, *, effective_batch: int, device: DeviceKind, cores: int, parallel: int
) -> ExecutionPlan:
    """Derive a trial's plan from the study's wishes.

    Args:
        wishes: The ``[execution]`` table.
        effective_batch: Rows behind one optimizer step.
        device: Where the trial will run.
        cores: CPU cores this study may use.
        parallel: Trials that run side by side.
    """
    micro_batch = min(wishes.micro_batch or effective_batch, effective_batch)
    return ExecutionPlan(
        device=device,
        effective_batch=effective_batch,
        micro_batch=micro_batch,
        accumulation=-(-effective_batch // micro_batch),
        checkpointing=wishes.checkpointing,
        threads=wishes.threads or max(1, cores // parallel),
        loader_workers=wishes.loader_workers,
    )
