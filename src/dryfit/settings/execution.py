"""Execution of trials: settings and plans that change memory and time, never what is learned."""

from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from dryfit.settings.choices import BaseFormat, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import (
    Allocator,
    DeviceKind,
    DeviceSpec,
    Effect,
    MemoryCategory,
    OptimizerImpl,
    PeakAt,
    StepPhase,
)
from dryfit.settings.sharding import AUTO
from dryfit.settings.tables import LoraSettings, Settings, TrainSettings, TrialSettings
from dryfit.settings.task_facts import TaskName, facts_of
from dryfit.settings.text import parse_bytes

# Formats of frozen weights, a row each: bits, compute format, requirements.


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of the weights that stay frozen under adapters.

    Attributes:
        name: As ``lora.base`` names it.
        bits: Of one weight of a linear layer, without the scales beside it.
        compute: Number format that layers compute in. All that is not quantised is stored in it, and so are all weights
            of a merged model.
        quantised: Whether linear layers hold integers and scales. Norms, embeddings and the output layer never do.
        double_quant: Whether the scales are quantised too.
    """

    name: BaseFormat
    bits: int
    compute: Precision
    quantised: bool = False
    double_quant: bool = False

    def problem(self, precision: Precision) -> str:
        """Return why it cannot be trained with a precision; empty where it can."""
        if self.name is BaseFormat.INT8 and self.compute is Precision.FP32:
            return "its layers would compute in fp32, and LLM.int8() computes in 16 bits"
        # Half-precision layers outside autocast: their gradients have no scale, whatever the others compute in.
        unscaled = (Precision.FP32, Precision.BF16) if self.quantised else (Precision.FP32,)
        if self.compute is Precision.FP16 and precision.stored in unscaled:
            return f"train.precision is {precision}: gradients would pass through fp16 without a scale, and vanish"
        return ""


WEIGHT_FORMATS: Final = MappingProxyType(
    {
        row.name: row
        for row in (
            WeightFormat(BaseFormat.FP32, 32, Precision.FP32),
            WeightFormat(BaseFormat.FP16, 16, Precision.FP16),
            WeightFormat(BaseFormat.BF16, 16, Precision.BF16),
            WeightFormat(BaseFormat.INT8, 8, Precision.FP16, quantised=True),
            WeightFormat(BaseFormat.NF4, 4, Precision.BF16, quantised=True),
        )
    }
)
"""Every format by its name; a quantised one computes in what :func:`base_format` says."""

PRECISIONS_WITH: Final = MappingProxyType(
    {
        BaseFormat.FP16: 'train.precision = "fp16" or "bf16" with it',
        BaseFormat.INT8: 'train.precision and lora.compute "bf16", or both "fp16"',
        BaseFormat.NF4: 'lora.compute = "bf16" or "fp32", or "fp16" with train.precision = "fp16"',
    }
)
"""What is allowed beside the formats that do not go with every precision."""


def base_format(lora: LoraSettings, train: TrainSettings) -> WeightFormat:
    """Return the format of the weights under adapters; unset, it and the compute format follow the training's."""
    row = WEIGHT_FORMATS[lora.base or BaseFormat(train.precision.stored)]
    if not row.quantised:
        return row
    return replace(row, compute=lora.compute or train.precision.stored, double_quant=lora.double_quant)


def check_precision(base: WeightFormat, precision: Precision) -> None:
    """Refuse frozen weights that cannot be trained with a precision.

    Raises:
        ConfigError: The combination is refused.
    """
    if problem := base.problem(precision):
        raise ConfigError(
            f'checking lora.base = "{base.name}"',
            problem,
            allowed=PRECISIONS_WITH[base.name],
            hint="or leave lora.base out: the base then has the format of train.precision",
        )


def check_sharded(base: WeightFormat) -> None:
    """Refuse a format of which a process cannot read its slice.

    Raises:
        ConfigError: It is one.
    """
    if base.quantised:
        names = [row.name for row in WEIGHT_FORMATS.values() if not row.quantised]
        raise ConfigError(
            "sharding a trial's model over processes",
            f'lora.base is "{base.name}"',
            allowed=f"{', '.join(names[:-1])} or {names[-1]}",
            hint="leave execution.tp and execution.dp out",
        )


_EVAL_ROWS_MOST = 64
_EVAL_ROWS_PER_TRAINING_ROW = 4


def eval_rows(micro_batch: int, eval_batch: int | None) -> int:
    """Return how many rows are validated at once.

    Args:
        micro_batch: Rows of a training micro-batch.
        eval_batch: What was set or planned; None: several micro-batches, as there is no backward pass.
    """
    return eval_batch or min(_EVAL_ROWS_MOST, _EVAL_ROWS_PER_TRAINING_ROW * micro_batch)


class UnknownPolicy(StrEnum):
    """What to do with a trial whose memory cannot be planned."""

    EXCLUSIVE = "exclusive"
    """Run it as configured, with no other trial beside it."""
    REFUSE = "refuse"
    """Refuse it, as if it did not fit."""


class PlanSubject(Settings):
    """What is trained, as far as memory depends on it.

    Attributes:
        source: Hash of the file of a user's own class; else empty.
        multi_label: Whether a row may have any number of classes.
        lora: Adapters, of a decoder; None: all weights are trained.
    """

    task: TaskName
    source: str = ""
    settings: TrialSettings
    num_labels: int = Field(default=2, ge=1)
    multi_label: bool = False
    lora: LoraSettings | None = None


def adapters(task: TaskName, settings: TrialSettings) -> LoraSettings | None:
    """Return the adapters that a trial trains, with the format of their base; None if it trains all weights."""
    if not facts_of(task).decoder or not settings.lora.r:
        return None
    return settings.lora.model_copy(update={"base": base_format(settings.lora, settings.train).name})


class ExecutionSettings(Settings):
    """``[execution]``: how trials run; the plan of each trial is derived from these settings.

    The planner keeps what is set, and chooses what is unset so that the trial fits.
    """

    device: str = Field(
        default="auto", pattern="^(auto|cpu|cuda)$", description="auto takes CUDA where a device is free"
    )
    memory_limit: str | None = Field(
        default=None,
        pattern=r"^\d+(\.\d+)? ?([KMGT]i?B|B)$",
        description='most memory a trial may take, "14GiB"; it binds the planner and the trial\'s process',
    )
    micro_batch: int | None = Field(
        default=None, ge=1, description="rows in memory at once; unset: the whole batch if it fits"
    )
    eval_batch: int | None = Field(
        default=None,
        ge=1,
        description="rows validated at once; unset: four micro-batches, 64 rows at most, fewer where they do not fit",
    )
    checkpointing: bool | None = Field(
        default=None, description="recompute activations in backward; unset: where the trial does not fit otherwise"
    )
    chunked_loss: bool | None = Field(
        default=None,
        description="causal-lm: compute the loss from the scores of some tokens at a time; unset: wherever that costs "
        "no time, and in fp16 where the trial does not fit otherwise",
    )
    offload_activations: bool | None = Field(
        default=None,
        description="what checkpointed layers are recomputed from in host memory (CUDA); unset: where smaller "
        "micro-batches with checkpointing do not make it fit",
    )
    reentrant: bool = Field(default=False, description="checkpointing by reentrant autograd, as older code does it")
    optimizer_impl: OptimizerImpl = Field(
        default=OptimizerImpl.AUTO, description="auto (the fastest there is), fused, foreach or plain"
    )
    offload_optimizer: bool | None = Field(
        default=None, description="optimizer state in host memory (CUDA); unset: where nothing else makes it fit"
    )
    allow: Literal["exact", "numerics"] = Field(
        default="numerics", description="what the planner may change: nothing but rounding (numerics), or not even that"
    )
    unknown: UnknownPolicy = Field(
        default=UnknownPolicy.EXCLUSIVE,
        description="a trial whose memory cannot be planned: exclusive (runs with none beside it) or refuse",
    )
    allocator: Allocator = Field(
        default=Allocator.EXPANDABLE, description="segments of the CUDA caching allocator: expandable or native"
    )
    tp: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default=1,
        description="processes, each with a device, that a trial's model is cut over; "
        '"auto": the fewest of 1, 2, 4, 8 with which its plan fits',
    )
    dp: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes, each with a device, that divide a trial's weights and batches",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of each process; unset: cores / parallel / processes, measured with parallel auto",
    )
    loader_workers: int = Field(default=0, ge=0, le=64, description="processes that load batches; 0: none")
    compile: Literal["off", "auto"] = Field(
        default="off",
        description="auto: torch.compile compiles the layers of a trial that trains on one CUDA device; where it "
        "fails, they run as they are",
    )

    @model_validator(mode="after")
    def _one_way_to_divide(self) -> "ExecutionSettings":
        if self.tp == AUTO and self.dp > 1:
            raise ValueError(
                'tp is "auto" and dp is over 1: a trial is cut over processes or divided among them, not both'
            )
        if self.ranks > 1 and self.dp > 1:
            raise ValueError("tp and dp are both over 1: a trial is cut over processes or divided among them, not both")
        return self

    @model_validator(mode="after")
    def _offloads_what_is_recomputed(self) -> "ExecutionSettings":
        if self.offload_activations and self.checkpointing is False:
            raise ValueError(
                "offload_activations is true and checkpointing false: only what is recomputed from is moved"
            )
        return self

    def choice(self, effective_batch: int) -> "ExecutionChoice":
        """Return what is set for a batch of so many rows, and where nothing is, what changes nothing."""
        micro_batch = min(self.micro_batch or effective_batch, effective_batch)
        return ExecutionChoice(
            micro_batch=micro_batch,
            accumulation=-(-effective_batch // micro_batch),
            eval_batch=self.eval_batch,
            checkpointing=self.recomputes,
            chunked_loss=self.chunked_loss,
            offload_activations=bool(self.offload_activations),
            optimizer_impl=self.optimizer_impl,
            offload_optimizer=bool(self.offload_optimizer),
        )

    @property
    def limit_bytes(self) -> int | None:
        """Most memory that a trial may take; None: all there is."""
        return parse_bytes(self.memory_limit) if self.memory_limit is not None else None

    def limited(self, device: DeviceSpec) -> DeviceSpec:
        """Return a device with no more memory than a trial may take."""
        most_bytes = min(device.capacity_bytes, self.limit_bytes or device.capacity_bytes)
        return device.model_copy(update={"capacity_bytes": most_bytes})

    @property
    def recomputes(self) -> bool:
        """Whether activations are to be recomputed whatever else is done."""
        return bool(self.checkpointing or self.offload_activations)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks of every trial; 1 if each trial's plan decides them."""
        return 1 if self.tp == AUTO else self.tp

    @property
    def processes(self) -> int:
        """Processes that train one trial together, each with its own device if there are devices.

        If ``tp`` is "auto", the least that a trial takes.
        """
        return self.ranks * self.dp


class StepExecution(Settings):
    """How the steps and validations of a trial run.

    Attributes:
        eval_batch: Rows validated at once; None: as ``execution.eval_batch`` says, else :func:`eval_rows`.
    """

    micro_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    eval_batch: int | None = Field(default=None, ge=1)
    checkpointing: bool = False
    chunked_loss: bool | None = None
    offload_activations: bool = False
    optimizer_impl: OptimizerImpl = OptimizerImpl.AUTO
    offload_optimizer: bool = False

    @property
    def eval_rows(self) -> int:
        """Rows validated at once."""
        return eval_rows(self.micro_batch, self.eval_batch)


class ExecutionPlan(StepExecution):
    """How a trial runs. ``accumulation == ceil(effective_batch / micro_batch)``; the last micro-batch may be short.

    Attributes:
        chunked_loss: Whether a loss of tokens is computed in chunks of them; None: the trial's process decides, as the
            planner does where nothing is set.
        compiled: Whether layers are compiled, as far as torch can do it.
    """

    device: DeviceKind
    effective_batch: int = Field(ge=1)
    reentrant: bool = False
    allocator: Allocator = Allocator.EXPANDABLE
    memory_limit_bytes: int | None = Field(default=None, gt=0)
    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    loader_workers: int = Field(default=0, ge=0)
    compiled: bool = False

    @property
    def processes(self) -> int:
        """Processes that train the trial together."""
        return self.tp * self.dp

    @model_validator(mode="after")
    def _accumulation_fits(self) -> "ExecutionPlan":
        needed = -(-self.effective_batch // self.micro_batch)
        if self.accumulation != needed:
            raise ValueError(f"accumulation is {self.accumulation}, the batch needs {needed}")
        return self


def plan_execution(
    execution: ExecutionSettings,
    *,
    effective_batch: int,
    device: DeviceKind,
    cores: int,
    parallel: int,
    ranks: int | None = None,
) -> ExecutionPlan:
    """Derive a trial's execution plan from the study file, without regard to memory.

    Args:
        execution: The ``[execution]`` table.
        effective_batch: Rows per optimizer step.
        device: Where the trial will run.
        cores: CPU cores that the study may use.
        parallel: Trials that run at the same time.
        ranks: Tensor-parallel ranks; None: as the settings say.
    """
    tp = execution.ranks if ranks is None else ranks
    as_set = execution.model_dump(include=set(ExecutionPlan.model_fields))
    derived: dict[str, Any] = {
        "device": device,
        "effective_batch": effective_batch,
        **execution.choice(effective_batch).model_dump(exclude={"tp"}),
        "memory_limit_bytes": execution.limit_bytes,
        "tp": tp,
        "threads": execution.threads or max(1, cores // (parallel * tp * execution.dp)),
        "compiled": execution.compile == "auto" and device is DeviceKind.CUDA and tp * execution.dp == 1,
    }
    return ExecutionPlan(**{**as_set, **derived})


# Memory plans of trials: phases, categories, peaks, execution choices and fallbacks.
#
# All bytes are integers; ``GiB`` in texts is 2**30 bytes.


class WorstBatch(Settings):
    """The batch that needs the most memory.

    Attributes:
        rows: Rows of a micro-batch; of a validation batch where that is the peak.
        length: Tokens that rows are padded to.
        from_data: Whether the data's lengths are known; else the longest allowed input is assumed.
    """

    rows: int
    length: int
    from_data: bool


class MemoryPlan(Settings):
    """The memory of one trial on one device.

    Attributes:
        peak_allocated_bytes: As ``torch.cuda.max_memory_allocated`` would report.
        peak_reserved_bytes: As ``torch.cuda.max_memory_reserved`` would report, with unlimited memory.
        min_cap_bytes: The smallest capacity of the caching allocator with which all steps succeed.
        overhead_bytes: Memory outside the allocator: CUDA context, libraries, NCCL.
        margin_bytes: Kept free for what cannot be planned.
        required_bytes: ``min_cap + overhead + margin``: the capacity that the device must have.
        fragmented_bytes: Reserved but not allocated, at the worst moment with the worst order of batches.
        by_category: Allocated bytes at the peak.
        by_phase: Peak of each phase.
        host_bytes: Host memory of offloaded tensors.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    min_cap_bytes: int
    overhead_bytes: int
    margin_bytes: int
    required_bytes: int
    fragmented_bytes: int = 0
    by_category: dict[MemoryCategory, int]
    by_phase: dict[StepPhase, int]
    peak_at: PeakAt
    worst_batch: WorstBatch
    host_bytes: int = 0


class ExecutionChoice(StepExecution):
    """The part of an execution plan that the planner may choose; the effective batch stays as requested.

    Attributes:
        chunked_loss: Whether a loss of tokens is computed in chunks of them; None: it cannot be.
        tp: Tensor-parallel ranks that the planner chose; None: as ``execution.tp`` says, and 1 if that is "auto".
    """

    tp: int | None = Field(default=None, ge=2)

    @property
    def offloads(self) -> bool:
        """Whether something of the trial is kept in host memory."""
        return self.offload_optimizer or self.offload_activations

    def with_eval_rows_at_most(self, rows: int) -> "ExecutionChoice":
        """Return the choice with no more than so many rows validated at once."""
        return self if self.eval_rows <= rows else self.model_copy(update={"eval_batch": rows})

    def carried_out(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a trial's execution plan with this choice applied.

        Raises:
            pydantic.ValidationError: The choice is for another effective batch.
        """
        chosen = {name: value for name in ExecutionChoice.model_fields if (value := getattr(self, name)) is not None}
        kept = {name: getattr(plan, name) for name in ExecutionPlan.model_fields if name not in chosen}
        return ExecutionPlan(**kept, **chosen)


class Fallback(Settings):
    """One step of the fit ladder: a change that needs less memory.

    Attributes:
        change: The change in words: ``micro-batch 16 -> 8, accumulate 2``.
        execution: The whole choice after the change; None if the change is only suggested.
        required_bytes: The capacity that the device must have then.
        saves_bytes: Difference to the plan as requested.
        time_factor: Rough factor on a step's duration, without the cost and gain of several devices.
        fits: Whether the trial fits then.
        devices: Devices it needs; all bytes are per device.
    """

    change: str
    execution: ExecutionChoice | None
    required_bytes: int
    saves_bytes: int
    time_factor: float
    effect: Effect
    fits: bool
    devices: int = Field(default=1, ge=1)
    note: str = ""
