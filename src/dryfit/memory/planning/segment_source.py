"""Where the estimate gets its segments: recorded traces first, then a checked fit, then a new trace."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import final

from dryfit.core.jobs.memory import MemoryPlan
from dryfit.memory.planning.interpolate import FitPlan, SegmentFit, fit, plan_fits, regime
from dryfit.memory.planning.trace_store import TraceStore
from dryfit.memory.tracing.events import Label, Segment, SegmentKind, Shape
from dryfit.memory.tracing.tracer import Tracer, Variant

_MICRO = (SegmentKind.MICRO_FIRST, SegmentKind.MICRO_NEXT)
_UPDATE = (SegmentKind.UPDATE_FIRST, SegmentKind.UPDATE)


def relevant(kind: SegmentKind, variant: Variant) -> Variant:
    """The variant without what a kind of segment does not depend on, so that fewer are traced."""
    if kind in _MICRO:
        return Variant(checkpointing=variant.checkpointing)
    if kind in _UPDATE:
        return replace(variant, checkpointing=False)
    return Variant()


def compact(segment: Segment, tables: dict[tuple[Label, ...], tuple[Label, ...]]) -> Segment:
    """The same segment in a quarter of the memory: columns of machine integers, one table for equal ones."""
    table = tables.setdefault(segment.label_table, segment.label_table)
    columns = (array("q", column) for column in (segment.blocks, segment.deltas, segment.labels))
    blocks, deltas, labels = columns
    return Segment(blocks, deltas, labels, table, segment.names, segment.gemm_at)


@dataclass(slots=True)
class _Strand:
    """What is known of one kind of segment under all variants that do not change it."""

    kind: SegmentKind
    variant: Variant
    traces: dict[Shape | None, Segment] = field(default_factory=dict)
    fits: list[SegmentFit] = field(default_factory=list)
    fitted: dict[Shape, Segment] = field(default_factory=dict)
    failed: set[FitPlan] = field(default_factory=set)


@final
class SegmentSource:
    """Segments of one subject.

    Args:
        tracer: Asked only for what is not known.
        store: Remembers traces, fits and plans; None: only this object does.
        twin: Segments of a subject that differs in its optimizer alone: only updates are traced then.
    """

    def __init__(self, tracer: Tracer, store: TraceStore | None = None, *, twin: "SegmentSource | None" = None) -> None:
        self._tracer = tracer
        self._store = store
        self._twin = twin
        self._tables: dict[tuple[Label, ...], tuple[Label, ...]] = {}
        self._plans: dict[str, MemoryPlan] = {}
        self._asked: dict[SegmentKind, set[Shape]] = defaultdict(set)
        self._strands: dict[tuple[SegmentKind, Variant], _Strand] = {}
        self.traced = 0
        """New traces made so far."""

    @property
    def key(self) -> str:
        """That of the tracer."""
        return self._tracer.key

    def prepare(self, kind: SegmentKind, shapes: Iterable[Shape]) -> None:
        """Say which shapes will be asked for, so that the fewest traces are made for all of them."""
        self._asked[kind].update(shapes)

    def segment(self, kind: SegmentKind, variant: Variant, shape: Shape | None = None) -> Segment:
        """One segment.

        Args:
            kind: Which part of training.
            variant: How it is run.
            shape: Rows and length where ``kind.has_shape``.

        Raises:
            TraceError: It is not known and cannot be traced.
        """
        if self._twin and kind not in _UPDATE:
            return self._twin.segment(kind, variant, shape)
        place = (kind, relevant(kind, variant))
        strand = self._strands.setdefault(place, _Strand(*place))
        known = self._known(strand, shape)
        if known is None and shape is not None:
            self._asked[kind].add(shape)
            known = self._from_fit(strand, variant, shape)
        return known or self._trace(strand, variant, shape)

    def plan(self, question: str, make: Callable[[], MemoryPlan]) -> MemoryPlan:
        """A plan made from this subject's segments: the recorded one, or a new one.

        Args:
            question: All that it depends on besides the segments.
            make: Makes it.

        Raises:
            TraceError: As ``make``.
        """
        question = f"{self.key}\n{question}"
        if question not in self._plans:
            found = self._store.plan(question) if self._store else None
            if found is None:
                found = make()
                if self._store:
                    self._store.put_plan(found, question)
            self._plans[question] = found
        return self._plans[question]

    def _known(self, strand: _Strand, shape: Shape | None) -> Segment | None:
        """A trace, made now or earlier."""
        if shape not in strand.traces and self._store:
            recorded = self._store.segment(self.key, strand.kind, strand.variant, shape)
            if recorded is not None:
                strand.traces[shape] = compact(recorded, self._tables)
        return strand.traces.get(shape)

    def _trace(self, strand: _Strand, variant: Variant, shape: Shape | None) -> Segment:
        """A trace under the variant that was asked for, though others give the same: its model is at hand."""
        known = self._known(strand, shape)
        if known is not None:
            return known
        segment = compact(self._tracer.trace(strand.kind, variant, shape), self._tables)
        self.traced += 1
        strand.traces[shape] = segment
        if self._store:
            self._store.put_segment(segment, self.key, strand.kind, strand.variant, shape)
        return segment

    def _from_fit(self, strand: _Strand, variant: Variant, shape: Shape) -> Segment | None:
        if shape not in strand.fitted:
            segment = self._interpolate(strand, variant, shape)
            if segment is None:
                return None
            strand.fitted[shape] = compact(segment, self._tables)
        return strand.fitted[shape]

    def _interpolate(self, strand: _Strand, variant: Variant, shape: Shape) -> Segment | None:
        for known in strand.fits:
            if known.covers(shape):
                return known.at(shape)
        found = self._recorded_fit(strand, shape) or self._new_fit(strand, variant, shape)
        if found is None:
            return None
        strand.fits.append(found)
        return found.at(shape)

    def _recorded_fit(self, strand: _Strand, shape: Shape) -> SegmentFit | None:
        if self._store is None:
            return None
        for length in (None, shape.length):
            found = self._store.fit(self.key, strand.kind, strand.variant, regime(shape), length)
            if found is not None and found.covers(shape):
                return found
        return None

    def _new_fit(self, strand: _Strand, variant: Variant, shape: Shape) -> SegmentFit | None:
        asked = self._asked[strand.kind]
        traced = [other for other in asked if self._known(strand, other) is not None]
        for plan in plan_fits(shape, asked, traced):
            if plan in strand.failed:
                continue
            found = fit(plan, {node: self._trace(strand, variant, node) for node in (*plan.nodes, *plan.checks)})
            if found is not None:
                if self._store:
                    self._store.put_fit(found, self.key, strand.kind, strand.variant)
                return found
            strand.failed.add(plan)
        return None
