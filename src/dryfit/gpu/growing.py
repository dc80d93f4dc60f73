"""A piece of a run that comes again and again, each time a little larger: its allocations without its computation."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from dryfit.gpu.allocator_settings import SMALL_BYTES
from dryfit.gpu.script_recorder import LiveAllocations, NoRoomError

_MOST_PIECES = 8192
"""Of more pieces some are passed over, at even distances: a rehearsal would be as long as its events."""


class _Change(NamedTuple):
    """An allocation of a piece, or the release of a block that this piece or the piece before it allocated.

    Attributes:
        size_bytes: Of an allocation, the last time; 0 for a release.
        growth_bytes: How much larger an allocation is each time.
        label: Number of the event's label.
        of: Of a release: how many pieces before it, and at which of their changes, the block was allocated; None of
            an allocation.
    """

    size_bytes: int
    growth_bytes: int
    label: int
    of: tuple[int, int] | None = None


def repeat_growing(held: LiveAllocations, marks: Sequence[int], times: int) -> None:
    """Allocate and free as further pieces of a run would, where the last two pieces differ in their sizes alone.

    Where they differ otherwise, nothing is repeated. Repeating ends where the device has no room.

    An allocator that serves ever larger blocks cannot use what the smaller ones leave: what it reserves depends on
    every piece. Blocks of the small pool share segments, so they are left out. All blocks of the last piece, real
    and repeated, are free afterwards: the caller makes its tensors anew.

    Args:
        held: The allocations of the run.
        marks: Number of events at the beginning of the last two pieces and at the end of the last one.
        times: Further pieces.
    """
    changes = _changes(held, *marks)
    largest = {
        number: one.size_bytes + one.growth_bytes * times for number, one in enumerate(changes) if one.of is None
    }
    counted = {number for number, size_bytes in largest.items() if size_bytes > SMALL_BYTES}
    before = {number: held.blocks[marks[1] + number] for number in counted}
    here: dict[int, int] = {}
    with suppress(NoRoomError):
        for time in range(1, times + 1, -(-times // _MOST_PIECES)):
            here = {}
            for number, one in enumerate(changes):
                if one.of is not None:
                    ago, of = one.of
                    if of in counted:
                        held.free((here, before)[ago].pop(of))
                elif number in counted:
                    here[number] = held.allocate(max(1, one.size_bytes + one.growth_bytes * time), one.label)
            before = here
    for block in (*before.values(), *here.values()):
        held.free(block)


def _changes(held: LiveAllocations, first: int, second: int, end: int) -> list[_Change]:
    """Return what the last piece did; nothing where the piece before it did something else."""
    length = end - second
    if second - first != length or held.labels[first:second] != held.labels[second:end]:
        return []
    made = {held.blocks[at]: (at >= second, (at - first) % length) for at in range(first, end) if held.deltas[at] > 0}
    changes: list[_Change] = []
    for before, at in zip(range(first, second), range(second, end), strict=True):
        size_bytes, label = held.deltas[at], held.labels[at]
        if (held.deltas[before] > 0) != (size_bytes > 0):
            return []
        if size_bytes > 0:
            changes.append(_Change(size_bytes, size_bytes - held.deltas[before], label))
        elif held.blocks[at] not in made:
            return []
        else:
            is_here, of = made[held.blocks[at]]
            changes.append(_Change(0, 0, label, (int(not is_here), of)))
    return changes
