"""Which rows of a batch go through the model on which process of a trial."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a batch that go through the model at once.

    Attributes:
        first: The first of them.
        rows: How many.
        weighs: Whether they are learned from; else they go through because other processes are at it.
    """

    first: int
    rows: int
    weighs: bool = True


def portions(rows: int, micro_batch: int, *, rank: int = 0, size: int = 1) -> tuple[Portion, ...]:
    """Which rows of a batch go through the model on one of several processes: as many passes on each.

    Shares are rows one after another and differ by one at most. Where a process has fewer passes to make than another,
    it passes the batch's first row, and learns nothing from it.

    Args:
        rows: Of the batch.
        micro_batch: Rows at once on each process.
        rank: Of the process.
        size: How many there are.
    """
    begin, end = rank * rows // size, (rank + 1) * rows // size
    found = [Portion(first, min(micro_batch, end - first)) for first in range(begin, end, micro_batch)]
    largest = -(-rows // size)
    passes = -(-largest // micro_batch)
    return (*found, *[Portion(0, 1, weighs=False)] * (passes - len(found)))
