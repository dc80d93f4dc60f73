"""Split the rows of a batch over the processes of a trial and into micro-batches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a batch that go through the model at once.

    Attributes:
        first: Index of the first row.
        rows: Number of rows.
        weighs: Whether they are learned from; False for a pass that only keeps step with the other processes.
    """

    first: int
    rows: int
    weighs: bool = True


def portions(rows: int, micro_batch: int, *, rank: int = 0, size: int = 1) -> tuple[Portion, ...]:
    """Return the rows that go through the model on one process; every process makes as many passes.

    Shares are consecutive rows and differ by one row at most. A process with fewer passes to make than another passes
    the batch's first row meanwhile and learns nothing from it.

    Args:
        rows: Rows of the batch.
        micro_batch: Rows at once on each process.
        rank: Number of the process.
        size: Number of processes.
    """
    begin, end = rank * rows // size, (rank + 1) * rows // size
    own = [Portion(first, min(micro_batch, end - first)) for first in range(begin, end, micro_batch)]
    largest = -(-rows // size)
    passes = -(-largest // micro_batch)
    return (*own, *[Portion(0, 1, weighs=False)] * (passes - len(own)))
