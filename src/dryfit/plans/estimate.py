"""The memory of a trial, estimated: segments from traces, composed to a run, replayed by the allocator."""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import Replay, min_cap, replay, sequences
from dryfit.gpu.constants import DeviceConstants, margin_bytes
from dryfit.gpu.events import Label, Segment, SegmentKind, Shape
from dryfit.plans.timeline import Timeline, compose, end_bytes
from dryfit.plans.trace_store import FitPlan, SegmentFit, TraceStore, fit, plan_fits, regime
from dryfit.plans.tracer import Tracer, Variant
from dryfit.settings.execution import MemoryPlan, WorstBatch
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, MemoryCategory, OptimizerImpl, PeakAt, StepPhase

# Segments for the memory estimate: from a recorded trace, else from a checked fit, else from a new trace.


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


# Estimate the memory of a trial: compose a run of segments and replay it through the simulated allocator.
#
# The run that is replayed is short and holds every kind of event in the order of a real one: loading, two steps (the
# first makes the optimizer's state), a validation, a third step in what the validation left, a checkpoint.


_ALIGNED = 8
_PAGE_BYTES = 2 * 2**20
_TOLERANCE = 5e-3

_QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Device:
    """The device that is planned for.

    Attributes:
        allocator: Settings of its caching allocator; the CPU has none and ignores them.
        torch: The version that will run there.
    """

    spec: DeviceSpec
    constants: DeviceConstants
    allocator: AllocatorSettings
    torch: str

    def of_ranks(self, ranks: int) -> "Device":
        """Return the device as one of several, with the buffers of NCCL."""
        return replace(self, constants=self.constants.communicating(self.spec, ranks, 1))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a trial's rows, in tokens.

    Attributes:
        longest: Length of the longest possible batch.
        rows: Tokens of each row of the data, cut to the longest allowed; empty where they are not known.
    """

    longest: int
    rows: tuple[int, ...] = ()

    @staticmethod
    def of(max_length: int, rows: Sequence[int] | None) -> "Lengths":
        """Cut the lengths of rows to the longest allowed; without rows, every batch is of that length."""
        cut = tuple(min(row, max_length) for row in rows or ())
        return Lengths(max(cut, default=max_length), cut)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Lengths among which one needs most memory: the longest, and the longest with a padded attention mask."""
        padded = [row for row in self.rows if row % _ALIGNED and row > self.longest - _ALIGNED]
        return tuple(dict.fromkeys((self.longest, *([max(padded)] if padded else []))))

    @property
    def spread(self) -> tuple[int, ...]:
        """A sample of the lengths, ascending, in steps of 8; the longest is last."""
        if not self.rows:
            return (self.longest,)
        ordered = sorted(self.rows)
        picked = [ordered[int(share * (len(ordered) - 1))] for share in _QUANTILES]
        # With the residue of the longest, so that one fit serves them all.
        steps = [self.longest - (self.longest - row) // _ALIGNED * _ALIGNED for row in picked]
        return tuple(sorted({*steps, self.longest}))


@dataclass(frozen=True, slots=True)
class Work:
    """How a trial uses memory.

    Attributes:
        evaluation_rows: Rows of a validation batch.
        measured_rows: Rows that a validation works on at once beyond that, to generate answers; 0: it does not.
        has_pages: Whether the optimizer's state is moved between host and device as it is needed.
    """

    variant: Variant
    effective_batch: int
    micro_batch: int
    evaluation_rows: int
    lengths: Lengths
    measured_rows: int = 0
    has_pages: bool = False


def estimate(source: SegmentSource, work: Work, device: Device) -> MemoryPlan:
    """Plan the memory of a trial whose batches all have the length that needs most.

    Raises:
        TraceError: The model's code cannot be traced.
    """
    return source.plan(_question(work, device, work.lengths.candidates), lambda: _estimate(source, work, device))


def _estimate(source: SegmentSource, work: Work, device: Device) -> MemoryPlan:
    runs = {length: run_of(source, work, (length, length, length), device) for length in work.lengths.candidates}
    length = max(runs, key=lambda candidate: runs[candidate].peak(rounded=_on_cuda(device)).bytes_)
    run = runs[length]
    if _on_cuda(device):
        blocks, deltas = run.blocks.tolist(), run.deltas.tolist()
        replayed = replay(blocks, deltas, device.allocator)
        cap_bytes = _smallest_capacity(blocks, deltas, device, replayed)
        allocated_bytes, reserved_bytes = replayed.peak_allocated_bytes, replayed.peak_reserved_bytes
        at, fragmented_bytes = replayed.peak_event, replayed.fragmented_bytes
    else:
        peak = run.peak(rounded=False)
        allocated_bytes = reserved_bytes = cap_bytes = peak.bytes_
        at, fragmented_bytes = peak.index, 0
    label = run.label_table[run.labels[at]]
    validates = label.phase is StepPhase.EVALUATE
    rows = work.evaluation_rows if validates else min(work.micro_batch, work.effective_batch)
    margin = margin_bytes(device.spec.kind, cap_bytes)
    return MemoryPlan(
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        min_cap_bytes=cap_bytes,
        overhead_bytes=device.constants.overhead_bytes,
        margin_bytes=margin,
        required_bytes=cap_bytes + device.constants.overhead_bytes + margin,
        fragmented_bytes=fragmented_bytes,
        by_category=_categories(run, at, allocated_bytes, device),
        by_phase=run.by_phase(rounded=_on_cuda(device)),
        peak_at=PeakAt(phase=label.phase, module=layer_of(label.module), op=label.op),
        worst_batch=WorstBatch(rows=rows, length=length, from_data=bool(work.lengths.rows)),
        host_bytes=_host_bytes(source, work),
    )


def with_fragmentation(plan: MemoryPlan, source: SegmentSource, work: Work, device: Device, *, seed: int) -> MemoryPlan:
    """Add the fragmentation that batches of varying lengths cause: the worst of several orders.

    Args:
        plan: Of the same work.
        seed: Of the shuffled orders.

    Raises:
        TraceError: The model's code cannot be traced.
    """
    lengths = work.lengths.spread
    if not _on_cuda(device) or len(lengths) == 1:
        return plan
    question = f"{_question(work, device, lengths)} {seed} {plan.min_cap_bytes}"
    return source.plan(question, lambda: _with_fragmentation(plan, source, work, device, seed))


def _with_fragmentation(plan: MemoryPlan, source: SegmentSource, work: Work, device: Device, seed: int) -> MemoryPlan:
    lengths = work.lengths.spread
    shapes = [Shape(rows, length) for length in lengths for rows in _micro_rows(work)]
    source.prepare(SegmentKind.MICRO_FIRST, shapes)
    source.prepare(SegmentKind.MICRO_NEXT, shapes)
    source.prepare(SegmentKind.BATCH, [Shape(work.effective_batch, length) for length in lengths])
    cap_bytes, fragmented_bytes = plan.min_cap_bytes, plan.fragmented_bytes
    for order in sorted({tuple(order) for order in sequences(lengths, seed=seed)}):
        run = run_of(source, work, order, device)
        blocks, deltas = run.blocks.tolist(), run.deltas.tolist()
        replayed = replay(blocks, deltas, device.allocator)
        fragmented_bytes = max(fragmented_bytes, replayed.fragmented_bytes)
        # Most orders fit into the capacity found so far: one replay shows it.
        if replay(blocks, deltas, device.allocator, capacity_bytes=cap_bytes).oom_event is not None:
            cap_bytes = max(cap_bytes, _smallest_capacity(blocks, deltas, device, replayed))
    margin = margin_bytes(device.spec.kind, cap_bytes)
    return plan.model_copy(
        update={
            "min_cap_bytes": cap_bytes,
            "margin_bytes": margin,
            "required_bytes": cap_bytes + plan.overhead_bytes + margin,
            "fragmented_bytes": fragmented_bytes,
        }
    )


def _question(work: Work, device: Device, lengths: Sequence[int]) -> str:
    """Return all that a plan depends on besides the segments; the device's size does not matter."""
    rows = (work.effective_batch, work.micro_batch, work.evaluation_rows, work.measured_rows, bool(work.lengths.rows))
    return f"{work.variant} {rows} {lengths} {device.spec.kind} {device.constants} {device.allocator}"


def layer_of(module: str) -> str:
    """Cut a module's name below the part of a layer: ``encoder.layer.23.attention``."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?:\.[^.]+)?(?=\.|$)", module)
    return match[0] if match else module


def run_of(source: SegmentSource, work: Work, lengths: Sequence[int], device: Device) -> Timeline:
    """Compose loading, a step of each length, a validation before the last step, and a checkpoint."""
    *early, last = (
        _step(source, work, length, SegmentKind.UPDATE if at else SegmentKind.UPDATE_FIRST)
        for at, length in enumerate(lengths)
    )
    validation = source.segment(SegmentKind.EVALUATE, work.variant, Shape(work.evaluation_rows, work.lengths.longest))
    measured = [
        [source.segment(SegmentKind.MEASURE, work.variant, Shape(work.measured_rows, work.lengths.longest))]
        for _ in range(work.measured_rows > 0)
    ]
    loading = source.segment(SegmentKind.LOAD, work.variant)
    saving = source.segment(SegmentKind.SAVE, work.variant)
    run = [[loading], *early, [validation], *measured, last, [saving]]
    return compose(run, workspace_bytes=device.constants.workspace_bytes)


def _step(source: SegmentSource, work: Work, length: int, update: SegmentKind) -> list[Segment]:
    first, *others = _micro_rows(work)
    return [
        source.segment(SegmentKind.BATCH, work.variant, Shape(work.effective_batch, length)),
        source.segment(SegmentKind.MICRO_FIRST, work.variant, Shape(first, length)),
        *(source.segment(SegmentKind.MICRO_NEXT, work.variant, Shape(rows, length)) for rows in others),
        source.segment(update, work.variant),
    ]


def _micro_rows(work: Work) -> list[int]:
    """Rows of a step's micro-batches; equal ones after the first repeat each other, so one of them is kept."""
    micro = min(work.micro_batch, work.effective_batch)
    whole, rest = divmod(work.effective_batch, micro)
    return [micro] * min(whole, 2) + [rest] * bool(rest)


def _categories(run: Timeline, at: int, allocated_bytes: int, device: Device) -> dict[MemoryCategory, int]:
    """The live memory at the peak. What the allocator gives beyond whole blocks counts as temporary."""
    sizes = run.by_category(at, rounded=_on_cuda(device))
    beyond = allocated_bytes - sum(sizes.values())
    if beyond:
        sizes[MemoryCategory.TEMPORARIES] = sizes.get(MemoryCategory.TEMPORARIES, 0) + beyond
    return sizes


def _host_bytes(source: SegmentSource, work: Work) -> int:
    """Page-locked host memory of what is offloaded, and what is paged."""
    inputs_bytes = _layer_inputs_bytes(source, work) if work.variant.offload_activations else 0
    paged_bytes = 0
    if work.has_pages:
        paged_bytes = end_bytes(source.segment(SegmentKind.UPDATE_HOST, work.variant), "optimizer:")
    return inputs_bytes + paged_bytes + _optimizer_bytes(source, work)


def _layer_inputs_bytes(source: SegmentSource, work: Work) -> int:
    """Inputs of the layers of the largest micro-batch.

    torch gives page-locked memory in powers of two and keeps it (``CachingHostAllocatorImpl::allocate`` in
    ATen/core/CachingHostAllocator.h), so batches of other lengths have some of their own: of each power.
    """
    sizes_bytes: dict[int, int] = {}
    for length in work.lengths.spread:
        shape = Shape(_micro_rows(work)[0], length)
        inputs = source.segment(SegmentKind.MICRO_HOST, work.variant, shape)
        counts = Counter(1 << (delta - 1).bit_length() for delta in inputs.deltas if delta > 0)
        for size_bytes, count in counts.items():
            sizes_bytes[size_bytes] = max(sizes_bytes.get(size_bytes, 0), size_bytes * count)
    return sum(sizes_bytes.values())


def _optimizer_bytes(source: SegmentSource, work: Work) -> int:
    """Host memory of an offloaded optimizer: its state, and a copy of each trained weight and of its gradient."""
    if not work.variant.offload_optimizer:
        return 0
    on_device = replace(work.variant, offload_optimizer=False)
    state_bytes = end_bytes(source.segment(SegmentKind.UPDATE_FIRST, on_device), "optimizer:")
    shape = Shape(_micro_rows(work)[0], work.lengths.longest)
    gradient_bytes = end_bytes(source.segment(SegmentKind.MICRO_FIRST, on_device, shape), "gradient:")
    return state_bytes + 2 * gradient_bytes


def _smallest_capacity(blocks: Sequence[int], deltas: Sequence[int], device: Device, unlimited: Replay) -> int:
    """Return the smallest sufficient capacity, to a quarter of the margin's share."""
    tolerance_bytes = max(_PAGE_BYTES, int(unlimited.peak_allocated_bytes * _TOLERANCE))
    return min_cap(blocks, deltas, device.allocator, tolerance_bytes=tolerance_bytes, unlimited=unlimited)


def _on_cuda(device: Device) -> bool:
    return device.spec.kind is DeviceKind.CUDA
