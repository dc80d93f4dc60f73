"""What a rehearsed run took: from its allocations to the numbers of the answer."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dryfit.gpu.caching_allocator import min_cap, replay
from dryfit.gpu.constants import DeviceConstants, margin_bytes
from dryfit.gpu.events import BLOCK_BYTES, Label
from dryfit.gpu.loaders import KeptOfBatch
from dryfit.gpu.script_recorder import LiveAllocations, Places
from dryfit.settings.memory_terms import DeviceKind, MemoryCategory, PeakAt, StepPhase
from dryfit.settings.rehearsal_messages import (
    EvaluationGrowth,
    Growth,
    LineBytes,
    RehearsalMemory,
    StepMemory,
    TimelinePoint,
)

Part = TypeVar("Part", bound=Hashable)
_LINES = 40
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_POINTS = 2_000
_LEAST_GROWTH_BYTES = 64 * BLOCK_BYTES
"""32 KiB: the losses that a script keeps for its log are no growth that anybody would look for."""

_LASTING = frozenset(
    {MemoryCategory.WEIGHTS, MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER}
)


@dataclass(frozen=True, slots=True)
class StepMark:
    """The end of an optimizer step.

    Attributes:
        event: Number of events until then.
    """

    number: int
    event: int


def summarize(
    run: LiveAllocations,
    categories: dict[int, MemoryCategory],
    steps: Sequence[StepMark],
    constants: DeviceConstants,
    places: Places,
    *,
    failed_at: Sequence[int] = (),
    enough_bytes: int | None = None,
) -> RehearsalMemory | None:
    """Return the memory of a run; None where nothing was allocated.

    Args:
        run: Its allocations.
        categories: What blocks turned out to be.
        steps: Ends of the optimizer steps, in order.
        constants: What the device takes besides.
        places: Reads the lines of the script.
        failed_at: Number of events at each out-of-memory error.
        enough_bytes: A capacity of the allocator with which the run is known to go on to its end; None: none is.
    """
    if not run.blocks:
        return None
    labels = settled(run, categories, failed_at)
    at = max(range(len(run.allocated)), key=run.allocated.__getitem__)
    held = _held(run, labels, at)
    settings = run.allocator.settings
    plain = replay(run.blocks, run.deltas, settings)
    cap_bytes = min_cap(run.blocks, run.deltas, settings, unlimited=plain)
    if enough_bytes is not None:
        cap_bytes = min(cap_bytes, enough_bytes)
    margin = margin_bytes(DeviceKind.CUDA, cap_bytes)
    if failed_at and enough_bytes is not None:  # it went on with what there was
        margin = min(margin, enough_bytes - cap_bytes)
    peak = labels[run.labels[at], run.blocks[at]] if run.deltas[at] > 0 else run.label_table[run.labels[at]]
    return RehearsalMemory(
        peak_allocated_bytes=run.allocated[at],
        peak_reserved_bytes=max(run.reserved),
        min_cap_bytes=cap_bytes,
        overhead_bytes=constants.overhead_bytes,
        nccl_bytes=constants.nccl_bytes,
        margin_bytes=margin,
        required_bytes=cap_bytes + constants.overhead_bytes + margin,
        fragmented_bytes=plain.fragmented_bytes,
        by_category=_summed(held, lambda label: label.category),
        by_phase=_most_by_phase(run),
        peak_at=PeakAt(phase=peak.phase, module=peak.module, op=peak.op),
        peak_line=peak.line,
        peak_code=places.code_of(peak.line),
        peak_source=peak.source,
        by_line=_lines(held, places),
        by_module=dict(list(_summed(held, lambda label: label.module).items())[:_LINES]),
        steps=_steps(run.allocated, steps),
        growth=_growth(run, labels, steps, places),
        timeline=_timeline(run, steps),
    )


def _most_by_phase(run: LiveAllocations) -> dict[StepPhase, int]:
    """Return the most bytes allocated in each phase that occurs."""
    most = dict.fromkeys(StepPhase, -1)
    for number, allocated_bytes in zip(run.labels, run.allocated, strict=True):
        phase = run.label_table[number].phase
        most[phase] = max(most[phase], allocated_bytes)
    return {phase: size for phase, size in most.items() if size >= 0}


def _summed(held: dict[Label, int], part: Callable[[Label], Part]) -> dict[Part, int]:
    """Sum up what is held by a part of its labels, the largest first."""
    sums: dict[Part, int] = defaultdict(int)
    for label, size in held.items():
        sums[part(label)] += size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def least_bytes(
    run: LiveAllocations, categories: dict[int, MemoryCategory], constants: DeviceConstants, *, is_traced: bool
) -> int:
    """Return the capacity that a device must have if compiled code keeps as little as it may.

    Args:
        run: Allocations of a script that compiles.
        categories: What blocks turned out to be.
        constants: What the device takes besides.
        is_traced: Whether all that was compiled ran as graphs; else only what lasts beyond a pass is known to be kept.
    """
    cap_bytes = min_cap(*run.least(), run.allocator.settings) if is_traced else _lasting_bytes(run, categories)
    return cap_bytes + constants.overhead_bytes + margin_bytes(DeviceKind.CUDA, cap_bytes)


def _lasting_bytes(run: LiveAllocations, categories: dict[int, MemoryCategory]) -> int:
    held_bytes = most_bytes = 0
    for block, delta in zip(run.blocks, run.deltas, strict=True):
        if categories.get(block) in _LASTING:
            held_bytes += delta
            most_bytes = max(most_bytes, held_bytes)
    return most_bytes


def settled(
    run: LiveAllocations, categories: dict[int, MemoryCategory], failed_at: Sequence[int]
) -> dict[tuple[int, int], Label]:
    """Return the label of each allocation, by number of label and block, with the category it turned out to have.

    What ends in the phase that made it is temporary; what an out-of-memory error ended would have lived on.
    """
    table = run.label_table
    cut_short = {block for at in failed_at for block in _live(run, at - 1)}
    freed_in = {b: table[n].phase for b, d, n in zip(run.blocks, run.deltas, run.labels, strict=True) if d < 0}
    settled: dict[tuple[int, int], Label] = {}
    interned: dict[Label, Label] = {}
    for block, delta, number in zip(run.blocks, run.deltas, run.labels, strict=True):
        if delta > 0:
            label = table[number]
            category = categories.get(block, label.category)
            if category is MemoryCategory.ACTIVATIONS and freed_in.get(block) is label.phase and block not in cut_short:
                category = MemoryCategory.TEMPORARIES
            if category is not label.category:
                label = replace(label, category=category)
            settled[number, block] = interned.setdefault(label, label)
    return settled


def _live(run: LiveAllocations, at: int, since: int = 0) -> dict[int, tuple[int, int]]:
    """Return label and bytes of each block that is held after an event, allocated from another one on.

    A block has the bytes that the allocator gave it: rounded, and with a remainder that was too small to be split off.
    """
    live: dict[int, tuple[int, int]] = {}
    for index in range(since, at + 1):
        block, before = run.blocks[index], run.allocated[index - 1] if index else 0
        if run.deltas[index] > 0:
            live[block] = (run.labels[index], run.allocated[index] - before)
        else:
            live.pop(block, None)
    return live


def _held(run: LiveAllocations, labels: dict[tuple[int, int], Label], at: int, since: int = 0) -> dict[Label, int]:
    """Return the bytes that are held after an event, by label, of blocks allocated from another event on."""
    held: dict[Label, int] = defaultdict(int)
    for block, (number, size) in _live(run, at, since).items():
        held[labels[number, block]] += size
    return held


def _lines(held: dict[Label, int], places: Places) -> tuple[LineBytes, ...]:
    """Sum up by line, source, module (all layers as one) and category; the largest first."""
    sums: dict[tuple[str, str, str, MemoryCategory], int] = defaultdict(int)
    for label, size in held.items():
        sums[label.line, label.source, _LAYER.sub(".*", label.module), label.category] += size
    largest = sorted(sums.items(), key=lambda item: -item[1])[:_LINES]
    return tuple(
        LineBytes(
            line=line,
            code=places.code_of(line),
            source=source,
            module=module,
            category=category,
            bytes=size,
            source_code=places.code_of(source) if source != line else "",
        )
        for (line, source, module, category), size in largest
    )


def _steps(allocated: Sequence[int], steps: Sequence[StepMark]) -> tuple[StepMemory, ...]:
    begin, found = 0, []
    for mark in steps:
        part = allocated[begin : mark.event]
        if part:
            found.append(StepMemory(number=mark.number, peak_bytes=max(part), end_bytes=part[-1]))
        begin = mark.event
    return tuple(found)


def _growth(
    run: LiveAllocations,
    labels: dict[tuple[int, int], Label],
    steps: Sequence[StepMark],
    places: Places,
) -> Growth | None:
    """Return what each step adds and keeps, with the line that keeps most; the first step makes lasting state.

    A line adds what both of the last two steps have made there and not freed, or the smaller of the two: batches of
    other sizes, and what is made once, are no growth. Nor is what takes the place of older memory of the same line,
    or stays until the step after the next.
    """
    if len(steps) < 3:
        return None
    begin, middle, end = (mark.event for mark in steps[-3:])
    kept_of_last, kept_of_both = (_kept_by_place(_held(run, labels, end - 1, since)) for since in (middle, begin))
    grown = {place: min(size, kept_of_both[place] - size) for place, size in kept_of_last.items()}
    if sum(grown.values()) < _LEAST_GROWTH_BYTES:
        return None
    first, before, now = (_kept_by_place(_held(run, labels, mark - 1)) for mark in (begin, middle, end))
    for place, size in grown.items():
        held = [one.get(place, 0) for one in (first, before, now)]
        grown[place] = max(0, min(size, held[2] - held[1], held[1] - held[0]))
    total_bytes = sum(grown.values())
    if total_bytes < _LEAST_GROWTH_BYTES:
        return None
    line, source = max(grown, key=grown.__getitem__)
    return Growth(bytes_per_step=total_bytes, line=line, code=places.code_of(line), source=source)


def _kept_by_place(held: dict[Label, int]) -> dict[tuple[str, str], int]:
    """Sum up by line and source what is neither a gradient nor optimizer state."""
    made = (MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER)
    kept = {label: size for label, size in held.items() if label.category not in made}
    return _summed(kept, lambda label: (label.line, label.source))


def evaluation_growth(run: LiveAllocations, kept: KeptOfBatch, places: Places) -> EvaluationGrowth:
    """Return what an evaluation keeps of each batch, with the line that made most of what it has kept."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for number, size in _live(run, kept.until - 1, kept.since).values():
        label = run.label_table[number]
        sums[label.line, label.source] += size
    line, source = max(sums, key=sums.__getitem__, default=("", ""))
    return EvaluationGrowth(
        bytes_per_batch=kept.bytes, batches_left_out=kept.others, line=line, code=places.code_of(line), source=source
    )


def _timeline(run: LiveAllocations, steps: Sequence[StepMark]) -> tuple[TimelinePoint, ...]:
    """Return the highest and the lowest moment of each of equal parts of the run, in order."""
    events = len(run.allocated)
    count = min(events, _POINTS // 2)
    parts = [range(events * part // count, events * (part + 1) // count) for part in range(count)]
    chosen = sorted({pick(part, key=run.allocated.__getitem__) for part in parts for pick in (max, min)})
    table, ends = run.label_table, [mark.event for mark in steps]
    points: list[TimelinePoint] = []
    for event in chosen:
        label = table[run.labels[event]]
        points.append(
            TimelinePoint(
                event=event,
                step=bisect_right(ends, event) + 1,
                phase=label.phase,
                allocated_bytes=run.allocated[event],
                reserved_bytes=run.reserved[event],
                module=label.module,
                line=label.line,
                source=label.source,
            )
        )
    return tuple(points)
