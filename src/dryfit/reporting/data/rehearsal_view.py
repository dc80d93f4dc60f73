"""A rehearsal as the JSON object that ``rehearse --json`` prints: the keys of a plan, and those of a script."""

from dryfit.core.jobs.memory import Confidence, MemoryCategory, PeakAt, StepPhase, VerdictKind
from dryfit.core.jobs.rehearsal import (
    EvaluationGrowth,
    Growth,
    LargestBatch,
    LineBytes,
    Muted,
    OutOfMemory,
    PricedArguments,
    RehearsalAnswer,
    RehearsalMemory,
    ScriptEnd,
    SeenArguments,
    StepMemory,
    TimelinePoint,
    Unknown,
)
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.wall.places import Wall
from dryfit.reporting.data.json_view import Answer
from dryfit.reporting.data.plan_view import PlanView


class RehearsalView(Answer):
    """One rehearsal; unknown values are null.

    Attributes:
        ran: Whether the script came so far that something is known of its memory; else the exit status is 2.
        planner_s: Seconds that the rehearsal took.
        host_bytes: Always null: a script's own tensors in host memory are real, and nothing is planned for them.
        execution, fallbacks, eval_batches, cut, cannot_cut: Keys of a plan, which a script has not; null or empty.
        by_line: What is held at the peak, largest first.
        wall: What kept the script from the user's files; null: no script was run.
        sent_bytes: Bytes that a rank sends in one step, by kind; null for one rank.
    """

    verdict: VerdictKind
    end: ScriptEnd
    ran: bool
    device: DeviceSpec
    ranks: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    min_cap_bytes: int | None
    overhead_bytes: int | None
    margin_bytes: int | None
    required_bytes: int | None
    capacity_bytes: int
    fragmented_bytes: int | None
    host_bytes: None = None
    by_category: dict[MemoryCategory, int] | None
    by_phase: dict[StepPhase, int] | None
    by_line: tuple[LineBytes, ...] | None
    by_module: dict[str, int] | None
    peak_at: PeakAt | None
    peak_line: str | None
    peak_code: str | None
    peak_source: str | None
    steps: tuple[StepMemory, ...] | None
    growth: Growth | None
    evaluation_growth: EvaluationGrowth | None
    timeline: tuple[TimelinePoint, ...] | None
    out_of_memory: tuple[OutOfMemory, ...]
    flops_per_step: int | None
    bytes_per_step: int | None
    least_step_s: float | None
    rates: str | None
    sent_bytes: dict[str, int] | None
    worst_batch: LargestBatch | None
    execution: None = None
    fallbacks: tuple[()] = ()
    eval_batches: tuple[()] = ()
    training_arguments: SeenArguments | None
    ladder: tuple[PricedArguments, ...]
    shortfall_bytes: int
    wall: Wall | None
    muted: tuple[Muted, ...]
    unknown: tuple[Unknown, ...]
    notes: tuple[str, ...]
    reasons: tuple[str, ...]
    traceback: str
    confidence: Confidence
    torch: str
    planner_s: float
    host_peak_bytes: int
    cut: None = None
    cannot_cut: str = ""


PLAN_KEYS = frozenset(PlanView.model_fields)
"""All of them are keys of a rehearsal too."""
_MEMORY_FIELDS = RehearsalView.model_fields.keys() & RehearsalMemory.model_fields.keys()
_WORK_FIELDS = ("flops_per_step", "bytes_per_step", "least_step_s", "rates")


def rehearsal_view(answer: RehearsalAnswer) -> RehearsalView:
    """Return the JSON view of a rehearsal."""
    memory = {name: getattr(answer.memory, name, None) for name in _MEMORY_FIELDS}
    work = {name: getattr(answer.work, name, None) for name in _WORK_FIELDS}
    return RehearsalView.of(
        answer,
        **memory,
        **work,
        capacity_bytes=answer.device.capacity_bytes,
        planner_s=answer.rehearsal_s,
        sent_bytes=answer.sent,
    )
