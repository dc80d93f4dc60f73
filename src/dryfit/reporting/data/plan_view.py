"""A plan, or a planned search space, as the JSON object that ``plan --json`` prints."""

from dryfit.core.jobs.memory import (
    Confidence,
    ExecutionChoice,
    Fallback,
    MemoryCategory,
    PeakAt,
    StepPhase,
    VerdictKind,
    WorstBatch,
)
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.settings.trial import Scalar
from dryfit.core.sharding.shard_summary import ShardSummary
from dryfit.reporting.data.json_view import Answer, View
from dryfit.study.planning.plan_requests import PlannedCell, SpacePlan


class PlanView(Answer):
    """One plan; unknown values are null."""

    verdict: VerdictKind
    device: DeviceSpec
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    min_cap_bytes: int | None
    overhead_bytes: int | None
    margin_bytes: int | None
    required_bytes: int | None
    capacity_bytes: int
    fragmented_bytes: int | None
    host_bytes: int | None
    by_category: dict[MemoryCategory, int] | None
    by_phase: dict[StepPhase, int] | None
    peak_at: PeakAt | None
    worst_batch: WorstBatch | None
    execution: ExecutionChoice | None
    fallbacks: tuple[ExecutionChoice, ...]
    ladder: tuple[Fallback, ...]
    shortfall_bytes: int
    reasons: tuple[str, ...]
    confidence: Confidence
    torch: str
    planner_s: float
    cut: ShardSummary | None
    cannot_cut: str


class CellView(View):
    """One combination of searched values, with or without checkpointing."""

    params: dict[str, Scalar]
    checkpointing: bool
    plan: PlanView


class SpaceView(Answer):
    """Which part of a search space fits.

    Attributes:
        varied: Searched keys whose values are all combined.
        kept: Searched keys planned at one value only.
    """

    device: DeviceSpec
    varied: tuple[str, ...]
    kept: dict[str, Scalar]
    cells: tuple[CellView, ...]
    planner_s: float


_MEMORY_FIELDS = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "min_cap_bytes", "overhead_bytes", "margin_bytes"),
    *("required_bytes", "fragmented_bytes", "host_bytes", "by_category", "by_phase", "peak_at", "worst_batch"),
)
_ANSWER_FIELDS = frozenset(PlanView.model_fields) - {
    "schema_version",
    "capacity_bytes",
    "cut",
    "cannot_cut",
    *_MEMORY_FIELDS,
}


def plan_view(answer: PlanAnswer) -> PlanView:
    """Return the JSON view of a plan."""
    memory = {name: getattr(answer.memory, name, None) for name in _MEMORY_FIELDS}
    rest = {name: getattr(answer, name) for name in _ANSWER_FIELDS}
    named = {"capacity_bytes": answer.device.capacity_bytes, "cut": answer.sharding, "cannot_cut": answer.cannot_shard}
    return PlanView.model_validate({**rest, **memory, **named})


def space_view(plan: SpacePlan) -> SpaceView:
    """Return the JSON view of a planned search space."""
    return SpaceView(
        device=plan.device,
        varied=plan.varied,
        kept=dict(plan.kept),
        cells=tuple(_cell_view(cell) for cell in plan.cells),
        planner_s=plan.planner_s,
    )


def _cell_view(cell: PlannedCell) -> CellView:
    return CellView(params=dict(cell.params), checkpointing=cell.checkpointing, plan=plan_view(cell.answer))
