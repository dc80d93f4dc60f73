"""Segments for the memory estimate: from a recorded trace, else from a checked fit, else from a new trace."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import final

from dryfit.core.jobs.memory import MemoryPlan
from dryfit.core.settings.execution import OptimizerImpl
from dryfit.memory.planning.interpolate import FitPlan, SegmentFit, fit, plan_fits, regime
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.memory.tracing.events import Label, Segment, SegmentKind, Shape
from dryfit.memory.tracing.tracer import Tracer, Variant

_MICRO = (SegmentKind.MICRO_FIRST, SegmentKind.MICRO_NEXT, SegmentKind.MICRO_HOST)
_UPDATE = (SegmentKind.UPDATE_FIRST, SegmentKind.UPDATE, SegmentKind.UPDATE_HOST)


def relevant(kind: SegmentKind, variant: Variant) -> Variant:
    """Return the variant without choices that do not change a kind of segment, so that fewer are traced."""
    if kind in _MICRO:
        return replace(variant, optimizer_impl=OptimizerImpl.AUTO, offload_optimizer=False)
    if kind in _UPDATE:
        return Variant(optimizer_impl=variant.optimizer_impl, offload_optimizer=variant.offload_optimizer)
    return Variant(chunked_loss=variant.chunked_loss and kind is SegmentKind.EVALUATE)


def compact(segment: Segment, tables: dict[tuple[Label, ...], tuple[Label, ...]]) -> Segment:
    """Return the segment in a quarter of the memory: columns of machine integers, equal label tables shared."""
    table = tables.setdefault(segment.label_table, segment.label_table)
    columns = (array("q", column) for column in (segment.blocks, segment.deltas, segment.labels))
    blocks, deltas, labels = columns
    return Segment(blocks, deltas, labels, table, segment.names, segment.gemm_at, segment.bias_at)


@dataclass(slots=True)
class _Family:
    """Traces and fits of one kind of segment, under all variants that do not change it."""

    kind: SegmentKind
    variant: Variant
    traces: dict[Shape | None, Segment] = field(default_factory=dict)
    fits: list[SegmentFit] = field(default_factory=list)
    fitted: dict[Shape, Segment] = field(default_factory=dict)
    failed: set[FitPlan] = field(default_factory=set)


@final
class SegmentSource:
    """Gives the segments of one subject.

    Args:
        tracer: Traces what is neither recorded nor fitted.
        store: Keeps traces, fits and plans for other processes; None: this object alone keeps them.
        twin: Segments of a subject that differs in its optimizer alone: only updates are traced then.
    """

    def __init__(self, tracer: Tracer, store: TraceStore | None = None, *, twin: "SegmentSource | None" = None) -> None:
        self._tracer = tracer
        self._store = store
        self._twin = twin
        self._tables: dict[tuple[Label, ...], tuple[Label, ...]] = {}
        self._plans: dict[str, MemoryPlan] = {}
        self._asked: dict[SegmentKind, set[Shape]] = defaultdict(set)
        self._families: dict[tuple[SegmentKind, Variant], _Family] = {}
        self.traced = 0
        """New traces made so far."""

    @property
    def key(self) -> str:
        """The tracer's key."""
        return self._tracer.key

    def prepare(self, kind: SegmentKind, shapes: Iterable[Shape]) -> None:
        """Announce the shapes that will be asked for, so that few traces serve all of them."""
        self._asked[kind].update(shapes)

    def segment(self, kind: SegmentKind, variant: Variant, shape: Shape | None = None) -> Segment:
        """Return one segment.

        Args:
            kind: Which part of training.
            variant: How it is run.
            shape: Rows and length where ``kind.has_shape``.

        Raises:
            TraceError: It is not known and cannot be traced.
        """
        if self._twin and kind not in _UPDATE:
            return self._twin.segment(kind, variant, shape)
        key = (kind, relevant(kind, variant))
        family = self._families.setdefault(key, _Family(*key))
        known = self._known(family, shape)
        if known is None and shape is not None:
            self._asked[kind].add(shape)
            known = self._from_fit(family, variant, shape)
        return known or self._trace(family, variant, shape)

    def plan(self, question: str, make: Callable[[], MemoryPlan]) -> MemoryPlan:
        """Return the recorded answer to a question about this subject's segments, or make and record it.

        Args:
            question: All that the plan depends on besides the segments.
            make: Makes the plan.

        Raises:
            TraceError: As ``make``.
        """
        question = f"{self.key}\n{question}"
        if question not in self._plans:
            plan = self._store.plan(question) if self._store else None
            if plan is None:
                plan = make()
                if self._store:
                    self._store.put_plan(plan, question)
            self._plans[question] = plan
        return self._plans[question]

    def _known(self, family: _Family, shape: Shape | None) -> Segment | None:
        """Return a trace that was made or read earlier, or is in the store; None where there is none."""
        if shape not in family.traces and self._store:
            recorded = self._store.segment(self.key, family.kind, family.variant, shape)
            if recorded is not None:
                family.traces[shape] = compact(recorded, self._tables)
        return family.traces.get(shape)

    def _trace(self, family: _Family, variant: Variant, shape: Shape | None) -> Segment:
        """Trace under the very variant that was asked for: others give the same, but its model is built already."""
        known = self._known(family, shape)
        if known is not None:
            return known
        segment = compact(self._tracer.trace(family.kind, variant, shape), self._tables)
        self.traced += 1
        family.traces[shape] = segment
        if self._store:
            self._store.put_segment(segment, self.key, family.kind, family.variant, shape)
        return segment

    def _from_fit(self, family: _Family, variant: Variant, shape: Shape) -> Segment | None:
        if shape not in family.fitted:
            fit_here = next((known for known in family.fits if known.covers(shape)), None)
            if fit_here is None:
                fit_here = self._recorded_fit(family, shape) or self._new_fit(family, variant, shape)
                if fit_here is None:
                    return None
                family.fits.append(fit_here)
            segment = fit_here.at(shape)
            if segment is None:
                return None
            family.fitted[shape] = compact(segment, self._tables)
        return family.fitted[shape]

    def _recorded_fit(self, family: _Family, shape: Shape) -> SegmentFit | None:
        if self._store is None:
            return None
        for length in (None, shape.length):
            fitted = self._store.fit(self.key, family.kind, family.variant, regime(shape), length)
            if fitted is not None and fitted.covers(shape):
                return fitted
        return None

    def _new_fit(self, family: _Family, variant: Variant, shape: Shape) -> SegmentFit | None:
        asked = self._asked[family.kind]
        traced = [other for other in asked if self._known(family, other) is not None]
        for plan in plan_fits(shape, asked, traced):
            if plan in family.failed:
                continue
            fitted = fit(plan, {node: self._trace(family, variant, node) for node in (*plan.nodes, *plan.checks)})
            if fitted is not None:
                if self._store:
                    self._store.put_fit(fitted, self.key, family.kind, family.variant)
                return fitted
            family.failed.add(plan)
        return None
