"""The planner's answer as one JSON object: what ``plan --json`` prints."""

from dryfit.core.jobs import PlanAnswer
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
from dryfit.core.settings.execution import DeviceSpec
from dryfit.core.settings.trial import Scalar
from dryfit.core.sharding.shard_summary import ShardSummary
from dryfit.reporting.data.json_view import Answer, View
from dryfit.study.planning.plan_requests import PlannedCell, SpacePlan


class PlanView(Answer):
    """One plan. What is unknown is null."""

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
        varied: Keys whose values are all combined.
        kept: Searched keys of which one value was planned.
    """

    device: DeviceSpec
    varied: tuple[str, ...]
    kept: dict[str, Scalar]
    cells: tuple[CellView, ...]
    planner_s: float


def plan_view(answer: PlanAnswer) -> PlanView:
    """A plan as JSON shows it."""
    memory = answer.memory
    return PlanView(
        verdict=answer.verdict,
        device=answer.device,
        peak_allocated_bytes=memory.peak_allocated_bytes if memory else None,
        peak_reserved_bytes=memory.peak_reserved_bytes if memory else None,
        min_cap_bytes=memory.min_cap_bytes if memory else None,
        overhead_bytes=memory.overhead_bytes if memory else None,
        margin_bytes=memory.margin_bytes if memory else None,
        required_bytes=memory.required_bytes if memory else None,
        capacity_bytes=answer.device.capacity_bytes,
        fragmented_bytes=memory.fragmented_bytes if memory else None,
        host_bytes=memory.host_bytes if memory else None,
        by_category=memory.by_category if memory else None,
        by_phase=memory.by_phase if memory else None,
        peak_at=memory.peak_at if memory else None,
        worst_batch=memory.worst_batch if memory else None,
        execution=answer.execution,
        fallbacks=answer.fallbacks,
        ladder=answer.ladder,
        shortfall_bytes=answer.shortfall_bytes,
        reasons=answer.reasons,
        confidence=answer.confidence,
        torch=answer.torch,
        planner_s=answer.planner_s,
        cut=answer.sharding,
        cannot_cut=answer.cannot_shard,
    )


def space_view(plan: SpacePlan) -> SpaceView:
    """A planned space as JSON shows it."""
    return SpaceView(
        device=plan.device,
        varied=plan.varied,
        kept=dict(plan.kept),
        cells=tuple(_cell_view(cell) for cell in plan.cells),
        planner_s=plan.planner_s,
    )


def _cell_view(cell: PlannedCell) -> CellView:
    return CellView(params=dict(cell.params), checkpointing=cell.checkpointing, plan=plan_view(cell.answer))
