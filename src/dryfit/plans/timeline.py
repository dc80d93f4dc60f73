"""Runs composed of segments, and their memory: peak, by phase, by category.

The events of a run are columns of equal length, in order of time. A block's number is its own in the whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dryfit.gpu.events import BLOCK_BYTES, LT_WORKSPACE_BYTES, LT_WORKSPACE_OP, WORKSPACE_OP, Label, Segment
from dryfit.settings.errors import InternalError
from dryfit.settings.memory_terms import MemoryCategory, StepPhase

_BIAS = "bias"

_PERSISTENT = ("weight:", "gradient:", "optimizer:")
_CATEGORIES = tuple(MemoryCategory)
_PHASES = tuple(StepPhase)

Ints = NDArray[np.int64]


def most_by_phase(label_table: Sequence[Label], labels: Ints, allocated: Ints) -> dict[StepPhase, int]:
    """Return the most bytes allocated in each phase that occurs.

    Args:
        label_table: Every label of the run.
        labels: Index into it of each event.
        allocated: Bytes after each event.
    """
    phase_of = np.array([_PHASES.index(label.phase) for label in label_table], dtype=np.int64)
    most = np.full(len(_PHASES), -1, dtype=np.int64)
    np.maximum.at(most, phase_of[labels], allocated)
    return {phase: int(size) for phase, size in zip(_PHASES, most, strict=True) if size >= 0}


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a run.

    Attributes:
        index: Its place among all events.
        bytes_: Allocated right after it.
        label: Who allocated or freed.
    """

    index: int
    bytes_: int
    label: Label


@dataclass(frozen=True)
class Timeline:
    """All events of a run.

    Attributes:
        blocks: Number of the block of each event.
        deltas: Bytes asked for, above 0, or minus as many where the block is freed.
        labels: Index into ``label_table`` of each event.
        label_table: Every label of the run.
    """

    blocks: Ints
    deltas: Ints
    labels: Ints
    label_table: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.deltas)

    @cached_property
    def rounded(self) -> Ints:
        """``deltas`` rounded away from zero to whole blocks of the CUDA caching allocator."""
        return np.sign(self.deltas) * (-(-np.abs(self.deltas) // BLOCK_BYTES) * BLOCK_BYTES)

    def peak(self, *, rounded: bool = True) -> Event:
        """Return the first moment at which most is allocated."""
        running = np.cumsum(self.rounded if rounded else self.deltas)
        index = int(np.argmax(running))
        return Event(index, int(running[index]), self.label_table[self.labels[index]])

    def by_phase(self, *, rounded: bool = True) -> dict[StepPhase, int]:
        """Return the most bytes allocated in each phase that occurs."""
        return most_by_phase(self.label_table, self.labels, np.cumsum(self.rounded if rounded else self.deltas))

    def by_category(self, index: int, *, rounded: bool = True) -> dict[MemoryCategory, int]:
        """Return the bytes allocated right after event ``index``, by category."""
        category_of_label = np.array([_CATEGORIES.index(label.category) for label in self.label_table], dtype=np.int64)
        taken = self.deltas > 0
        category_of = np.zeros(int(self.blocks.max(initial=-1)) + 1, dtype=np.int64)
        category_of[self.blocks[taken]] = category_of_label[self.labels[taken]]
        sizes = (self.rounded if rounded else self.deltas)[: index + 1]
        # Sums of whole bytes stay exact in float64 below 2**53.
        sums = np.bincount(category_of[self.blocks[: index + 1]], weights=sizes, minlength=len(_CATEGORIES))
        return {category: int(size) for category, size in zip(_CATEGORIES, sums, strict=True) if size > 0}


def compose(parts: Sequence[Sequence[Segment]], *, workspace_bytes: int = 0) -> Timeline:
    """Compose a run of segments.

    Weights, gradients and optimizer state live on from segment to segment. All else that is live at the end of a
    part is freed there: a step's input, and what its code still held.

    Args:
        parts: The parts of the run in order, each the segments of one step (or of loading, evaluating, saving).
        workspace_bytes: Memory that each thread takes at its first matrix product and keeps.

    Raises:
        InternalError: A segment frees a block that no earlier one left.
    """
    run = _Run(workspace_bytes)
    for part in parts:
        for segment in part:
            run.add(segment)
        run.end_part()
    return run.timeline()


@dataclass(slots=True)
class _Run:
    workspace_bytes: int
    blocks: list[Ints] = field(default_factory=list)
    deltas: list[Ints] = field(default_factory=list)
    labels: list[Ints] = field(default_factory=list)
    table: dict[Label, int] = field(default_factory=dict)
    next_block: int = 0
    holders: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name: number and bytes of its block."""
    loose: dict[int, int] = field(default_factory=dict)
    """Bytes of the live blocks that end with the part, by number."""
    with_workspace: set[object] = field(default_factory=set)
    """Threads that have theirs: whether of backward passes; and products with a bias."""

    def add(self, segment: Segment) -> None:
        local = np.asarray(segment.blocks, dtype=np.int64)
        deltas = np.array(segment.deltas, dtype=np.int64)
        if len(local) == 0:
            return
        count = int(local.max()) + 1
        numbers = self.next_block + np.arange(count, dtype=np.int64)
        self.next_block += count
        first, live_bytes = _ends(local, deltas, count)
        for block in np.flatnonzero(deltas[first] < 0).tolist():
            self._take_over(segment, block, numbers, deltas, int(first[block]))
        for block in np.flatnonzero(live_bytes > 0).tolist():
            name = segment.names.get(block)
            if name is not None and name.startswith(_PERSISTENT):
                self.holders[name] = (int(numbers[block]), int(live_bytes[block]))
            else:
                self.loose[int(numbers[block])] = int(live_bytes[block])
                if name is not None:
                    self.holders[name] = (int(numbers[block]), int(live_bytes[block]))
        translation = np.array([self.table.setdefault(label, len(self.table)) for label in segment.label_table])
        self._append(numbers[local], deltas, translation[np.asarray(segment.labels, dtype=np.int64)])
        self._add_workspaces(segment, offset=len(deltas))

    def _take_over(self, segment: Segment, block: int, numbers: Ints, deltas: Ints, at: int) -> None:
        """Take over a block whose first event is a free: an earlier segment left it under the same name."""
        name = segment.names.get(block, "")
        if name not in self.holders:
            raise InternalError(
                "putting segments of a trace together", f"{name or 'a block without a name'} is freed, but not there"
            )
        numbers[block], size_bytes = self.holders.pop(name)
        self.loose.pop(int(numbers[block]), None)
        deltas[at] = -size_bytes

    def _add_workspaces(self, segment: Segment, *, offset: int) -> None:
        """Insert the workspace of each thread's first matrix product; backward passes run in a thread of their own."""
        if not self.workspace_bytes:
            return
        due: dict[object, tuple[int, StepPhase, str, int]] = {}
        if segment.bias_at is not None and _BIAS not in self.with_workspace:
            due[_BIAS] = (segment.bias_at, StepPhase.FORWARD, LT_WORKSPACE_OP, LT_WORKSPACE_BYTES)
        for phase, at in sorted(segment.gemm_at.items(), key=lambda item: item[1]):
            backward = phase is StepPhase.BACKWARD
            if backward not in self.with_workspace:
                due.setdefault(backward, (at, phase, WORKSPACE_OP, self.workspace_bytes))
        self.with_workspace |= due.keys()
        for at, phase, op, size_bytes in sorted(due.values(), key=lambda item: item[0], reverse=True):
            label = Label(phase, MemoryCategory.WORKSPACES, "", op)
            columns = (self.next_block, size_bytes, self.table.setdefault(label, len(self.table)))
            for column, value in zip((self.blocks, self.deltas, self.labels), columns, strict=True):
                column[-1] = np.insert(column[-1], at, value)
            self.next_block += 1
        assert len(self.deltas[-1]) == offset + len(due)

    def end_part(self) -> None:
        """Free the blocks that do not outlive their part, newest first."""
        if not self.loose:
            return
        last = int(self.labels[-1][-1])
        blocks = list(reversed(self.loose))
        frees = [-self.loose[block] for block in blocks]
        self._append(np.array(blocks), np.array(frees), np.full(len(blocks), last))
        gone = set(blocks)
        self.holders = {name: held for name, held in self.holders.items() if held[0] not in gone}
        self.loose = {}

    def _append(self, blocks: Ints, deltas: Ints, labels: Ints) -> None:
        self.blocks.append(blocks)
        self.deltas.append(deltas)
        self.labels.append(labels)

    def timeline(self) -> Timeline:
        none = [np.zeros(0, dtype=np.int64)]
        columns = (np.concatenate(column or none) for column in (self.blocks, self.deltas, self.labels))
        return Timeline(*columns, label_table=tuple(self.table))


def _ends(local: Ints, deltas: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the index of each block's first event, and the bytes it still has at the end."""
    _, first = np.unique(local, return_index=True)
    live = np.bincount(local, weights=deltas, minlength=count).astype(np.int64)
    return first.astype(np.int64), live


def end_bytes(segment: Segment, prefix: str) -> int:
    """Return the bytes of the blocks that a segment leaves behind under names with a prefix."""
    local = np.asarray(segment.blocks, dtype=np.int64)
    live = np.bincount(local, weights=np.asarray(segment.deltas, dtype=np.int64)).astype(np.int64)
    return sum(int(live[block]) for block, name in segment.names.items() if name.startswith(prefix) and live[block] > 0)


def peak_bytes(segment: Segment) -> int:
    """Return the most bytes that a segment holds beyond what was there at its start."""
    return int(np.cumsum(np.asarray(segment.deltas, dtype=np.int64)).max(initial=0))
