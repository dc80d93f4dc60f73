"""A plan, or a planned search space, as the JSON object that ``plan --json`` prints."""

from dryfit.core.jobs.memory import (
    Confidence,
    ExecutionChoice,
    Fallback,
    MemoryCategory,
    MemoryPlan,
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
from dryfit.study.planning.plan_requests import SpacePlan


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
    eval_batches: tuple[int, ...]
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


_MEMORY_FIELDS = PlanView.model_fields.keys() & MemoryPlan.model_fields.keys()


def plan_view(answer: PlanAnswer) -> PlanView:
    """Return the JSON view of a plan."""
    memory = {name: getattr(answer.memory, name, None) for name in _MEMORY_FIELDS}
    capacity_bytes = answer.device.capacity_bytes
    return PlanView.of(
        answer, **memory, capacity_bytes=capacity_bytes, cut=answer.sharding, cannot_cut=answer.cannot_shard
    )


def space_view(plan: SpacePlan) -> SpaceView:
    """Return the JSON view of a planned search space."""
    cells = (CellView.of(cell, params=dict(cell.params), plan=plan_view(cell.answer)) for cell in plan.cells)
    return SpaceView.of(plan, kept=dict(plan.kept), cells=tuple(cells))
