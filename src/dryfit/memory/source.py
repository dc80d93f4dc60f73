"""Where the estimate gets its segments: recorded traces first, then a checked fit, then a new trace."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import final

from dryfit.memory.events import Segment, SegmentKind, Shape
from dryfit.memory.interpolate import FitPlan, SegmentFit, fit, plan_fits, regime
from dryfit.memory.store import TraceStore
from dryfit.memory.tracer import Tracer, Variant


def relevant(kind: SegmentKind, variant: Variant) -> Variant:
    """The variant without what a kind of segment does not depend on, so that fewer are traced."""
    match kind:
        case SegmentKind.MICRO_FIRST | SegmentKind.MICRO_NEXT:
            return replace(variant, offload_optimizer=False)
        case SegmentKind.UPDATE_FIRST | SegmentKind.UPDATE:
            return replace(variant, checkpointing=False)
        case SegmentKind.LOAD | SegmentKind.BATCH | SegmentKind.EVALUATE | SegmentKind.SAVE:
            return replace(variant, checkpointing=False, offload_optimizer=False)


@final
class SegmentSource:
    """Segments of one subject.

    Args:
        tracer: Asked only for what is not known.
        store: Remembers traces and fits; None: only this object does.
    """

    def __init__(self, tracer: Tracer, store: TraceStore | None = None) -> None:
        self._tracer = tracer
        self._store = store
        self._asked: dict[SegmentKind, set[Shape]] = defaultdict(set)
        self._traces: dict[tuple[SegmentKind, Variant], dict[Shape | None, Segment]] = defaultdict(dict)
        self._fits: dict[tuple[SegmentKind, Variant], list[SegmentFit]] = defaultdict(list)
        self._fitted: dict[tuple[SegmentKind, Variant, Shape], Segment] = {}
        self._failed: set[tuple[SegmentKind, Variant, FitPlan]] = set()
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
        variant = relevant(kind, variant)
        if shape is None:
            return self._trace(kind, variant, None)
        known = self._known(kind, variant, shape)
        if known is not None:
            return known
        self._asked[kind].add(shape)
        return self._from_fit(kind, variant, shape) or self._trace(kind, variant, shape)

    def _known(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment | None:
        """A trace, made now or earlier."""
        traces = self._traces[kind, variant]
        if shape not in traces and self._store:
            recorded = self._store.segment(self.key, kind, variant, shape)
            if recorded is not None:
                traces[shape] = recorded
        return traces.get(shape)

    def _trace(self, kind: SegmentKind, variant: Variant, shape: Shape | None) -> Segment:
        known = self._known(kind, variant, shape)
        if known is not None:
            return known
        segment = self._tracer.trace(kind, variant, shape)
        self.traced += 1
        self._traces[kind, variant][shape] = segment
        if self._store:
            self._store.put_segment(segment, self.key, kind, variant, shape)
        return segment

    def _from_fit(self, kind: SegmentKind, variant: Variant, shape: Shape) -> Segment | None:
        place = (kind, variant, shape)
        if place not in self._fitted:
            segment = self._interpolate(kind, variant, shape)
            if segment is None:
                return None
            self._fitted[place] = segment
        return self._fitted[place]

    def _interpolate(self, kind: SegmentKind, variant: Variant, shape: Shape) -> Segment | None:
        for found in self._fits[kind, variant]:
            if found.covers(shape):
                return found.at(shape)
        found = self._recorded_fit(kind, variant, shape) or self._new_fit(kind, variant, shape)
        if found is None:
            return None
        self._fits[kind, variant].append(found)
        return found.at(shape)

    def _recorded_fit(self, kind: SegmentKind, variant: Variant, shape: Shape) -> SegmentFit | None:
        if self._store is None:
            return None
        for length in (None, shape.length):
            found = self._store.fit(self.key, kind, variant, regime(shape), length)
            if found is not None and found.covers(shape):
                return found
        return None

    def _new_fit(self, kind: SegmentKind, variant: Variant, shape: Shape) -> SegmentFit | None:
        asked = self._asked[kind]
        traced = {other for other in asked if self._known(kind, variant, other) is not None}
        for plan in plan_fits(shape, asked, traced):
            if (kind, variant, plan) in self._failed:
                continue
            found = fit(plan, {node: self._trace(kind, variant, node) for node in (*plan.nodes, *plan.checks)})
            if found is not None:
                if self._store:
                    self._store.put_fit(found, self.key, kind, variant)
                return found
            self._failed.add((kind, variant, plan))
        return None
