"""Memory plans of trials: phases, categories, peaks, execution choices and fallbacks.

All bytes are integers; ``GiB`` in texts is 2**30 bytes.
"""

from pydantic import Field

from dryfit.settings.execution import ExecutionPlan, eval_rows
from dryfit.settings.memory_terms import Effect, MemoryCategory, OptimizerImpl, PeakAt, StepPhase
from dryfit.settings.tables import Settings


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


class ExecutionChoice(Settings):
    """The part of an execution plan that the planner may choose; the effective batch stays as requested.

    Attributes:
        eval_batch: Rows validated at once; None: as ``execution.eval_batch`` says, else :func:`eval_rows`.
        chunked_loss: Whether a loss of tokens is computed in chunks of them; None: it cannot be.
        tp: Tensor-parallel ranks that the planner chose; None: as ``execution.tp`` says, and 1 if that is "auto".
    """

    micro_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    eval_batch: int | None = Field(default=None, ge=1)
    checkpointing: bool = False
    chunked_loss: bool | None = None
    offload_activations: bool = False
    optimizer_impl: OptimizerImpl = OptimizerImpl.AUTO
    offload_optimizer: bool = False
    tp: int | None = Field(default=None, ge=2)

    @property
    def eval_rows(self) -> int:
        """Rows validated at once."""
        return eval_rows(self.micro_batch, self.eval_batch)

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
