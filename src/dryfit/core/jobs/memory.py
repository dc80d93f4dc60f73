"""What is known of a trial's memory before it runs: phases, categories, plans, fallbacks and the planner's answer.

All bytes are integers; ``GiB`` in texts is 2**30 bytes.
"""

from enum import StrEnum

from pydantic import Field

from dryfit.core.settings.execution import ExecutionPlan, OptimizerImpl
from dryfit.core.settings.tables import Settings


class StepPhase(StrEnum):
    """What a trial does while memory is taken."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"


class MemoryCategory(StrEnum):
    """What memory is taken for."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"


class Confidence(StrEnum):
    """How far a plan was compared with a device of its kind."""

    CALIBRATED = "calibrated"
    """Constants and errors were measured on this very device type."""
    FAMILY = "family"
    """They were measured on another device of the same compute capability."""
    UNCALIBRATED = "uncalibrated"
    """They come from documentation and source code."""


class Effect(StrEnum):
    """What a change of the plan does to the experiment."""

    EXACT = "exact"
    """The same numbers."""
    NUMERICS = "numerics"
    """Equal up to rounding."""
    SEMANTICS = "semantics"
    """Another experiment: only ever suggested."""


class VerdictKind(StrEnum):
    """The planner's answer in a word."""

    FITS = "fits"
    FITS_WITH = "fits_with"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def fits(self) -> bool:
        """Whether the trial fits, as asked or with changes that keep the experiment."""
        return self in (VerdictKind.FITS, VerdictKind.FITS_WITH)


class PeakAt(Settings):
    """Where the most memory is allocated.

    Attributes:
        module: Dotted name in the model, empty outside of it.
        op: The operator that allocated last.
    """

    phase: StepPhase
    module: str
    op: str


class WorstBatch(Settings):
    """The batch that needs most.

    Attributes:
        rows: Rows of a micro-batch.
        length: Tokens it is padded to.
        from_data: Whether the lengths of the data are known; else the longest input allowed was taken.
    """

    rows: int
    length: int
    from_data: bool


class MemoryPlan(Settings):
    """The memory of one trial on one device.

    Attributes:
        peak_allocated_bytes: What ``torch.cuda.max_memory_allocated`` would say.
        peak_reserved_bytes: What ``torch.cuda.max_memory_reserved`` would say where memory is plenty.
        min_cap_bytes: The smallest capacity of the caching allocator under which all steps go through.
        overhead_bytes: Outside of the allocator: CUDA context, libraries, NCCL.
        margin_bytes: Kept free for what no plan sees.
        required_bytes: ``min_cap + overhead + margin``: what the device must have.
        fragmented_bytes: Reserved but not allocated, at the worst moment of the worst order of batches.
        by_category: What is allocated at the peak.
        by_phase: Peak of each phase.
        host_bytes: Host memory of tensors kept off the device.
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
    """The part of an execution plan that the planner may choose; the effective batch stays as asked.

    Attributes:
        tp: Ranks that the planner cuts the model over; None: as many as ``execution.tp`` says, and 1 where that is
            "auto".
    """

    micro_batch: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    checkpointing: bool = False
    optimizer_impl: OptimizerImpl = OptimizerImpl.AUTO
    offload_optimizer: bool = False
    tp: int | None = Field(default=None, ge=2)

    def carried_out(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan of a trial with this choice in it; what the planner may not choose stays.

        Raises:
            pydantic.ValidationError: The choice is for another effective batch.
        """
        chosen = {name: value for name in ExecutionChoice.model_fields if (value := getattr(self, name)) is not None}
        kept = {name: getattr(plan, name) for name in ExecutionPlan.model_fields if name not in chosen}
        return ExecutionPlan(**kept, **chosen)


class Fallback(Settings):
    """One step of the fit ladder.

    Attributes:
        change: What is changed, in words: ``micro-batch 16 -> 8, accumulate 2``.
        execution: The whole choice after it; None for what is only ever suggested.
        required_bytes: What the device must have then.
        saves_bytes: Compared with the plan as asked.
        time_factor: Rough factor on the time of a step; of several devices, without what they add and save.
        fits: Whether it would fit.
        devices: How many devices it needs; the bytes are those of each.
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
