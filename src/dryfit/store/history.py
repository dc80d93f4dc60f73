"""The trials of a study as samplers and pruners see them, with projections of the ended ones.

A sampler's or pruner's decision is a function of the trials alone. To keep its cost constant as trials accumulate, each
keeps a :class:`Projection` here, to which every ended trial is applied once. A projection can be dropped: the next
question makes it again.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import isnan
from typing import Protocol, TypeVar, cast, overload

from dryfit.core.errors import InternalError
from dryfit.core.settings.trial import Outcome, TrialRecord


class Projection(Protocol):
    """A summary of all ended trials; it must not depend on the order in which they ended."""

    def apply(self, record: TrialRecord) -> None:
        """Add a trial that ended."""
        ...


ProjectionT = TypeVar("ProjectionT", bound=Projection)


class History(Sequence[TrialRecord]):
    """All trials, by number.

    Args:
        records: Those so far, in any order.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._records: list[TrialRecord] = []
        self._places: dict[int, int] = {}
        self._open: dict[int, TrialRecord] = {}
        self._ended: list[TrialRecord] = []
        self._projections: dict[Hashable, tuple[Projection, int]] = {}
        for record in sorted(records, key=lambda record: record.number):
            self.put(record)

    @property
    def running(self) -> list[TrialRecord]:
        """Trials without an end, by number."""
        return list(self._open.values())

    def put(self, record: TrialRecord) -> None:
        """Add a new trial, or replace one that had not ended.

        Raises:
            InternalError: The trial had ended already, or its number is smaller than the last one's.
        """
        number = record.number
        place = self._places.get(number)
        if place is None:
            if self._records and number < self._records[-1].number:
                raise InternalError("keeping the history", f"trial {number} after {self._records[-1].number}")
            self._places[number] = len(self._records)
            self._records.append(record)
        elif number in self._open:
            self._records[place] = record
        else:
            raise InternalError("keeping the history", f"trial {number} has ended before")
        if record.outcome is None:
            self._open[number] = record
        else:
            self._open.pop(number, None)
            self._ended.append(record)

    def get(self, number: int) -> TrialRecord | None:
        """Return a trial; None where there is none of this number."""
        place = self._places.get(number)
        return None if place is None else self._records[place]

    def before(self, number: int) -> "History":
        """Return the trials with smaller numbers: this history itself if it has no others."""
        if not self._records or self._records[-1].number < number:
            return self
        return History(record for record in self._records if record.number < number)

    def projected(self, key: Hashable, make: Callable[[], ProjectionT]) -> ProjectionT:
        """Return the projection of all ended trials, up to date.

        Args:
            key: Identifies it among the projections.
            make: Makes an empty one, the first time.
        """
        projection, applied = self._projections.get(key) or (make(), 0)
        for record in self._ended[applied:]:
            projection.apply(record)
        self._projections[key] = projection, len(self._ended)
        return cast("ProjectionT", projection)

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self._records)

    def __iter__(self) -> Iterator[TrialRecord]:
        """Iterate over them by number."""
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> TrialRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrialRecord]: ...
    def __getitem__(self, index: int | slice) -> TrialRecord | list[TrialRecord]:
        """Return a trial by its index, which is its number where none is missing."""
        return self._records[index]


def as_history(records: Iterable[TrialRecord]) -> History:
    """Return trials as a history: the same object where they are one already."""
    return records if isinstance(records, History) else History(records)


class Ranking:
    """Complete trials by the study's metric, as :func:`~dryfit.core.settings.trial.best_first` orders them.

    Args:
        sign: -1 where larger values are better, else 1.
        first: Trials with smaller numbers are left out: reused ones of earlier generations.
    """

    def __init__(self, sign: float, first: int = 0) -> None:
        self._sign = sign
        self._first = first
        self._ranked: list[tuple[bool, float, int]] = []

    def apply(self, record: TrialRecord) -> None:
        """Add a trial that ended."""
        if (
            record.number >= self._first
            and record.outcome is Outcome.COMPLETE
            and record.value is not None
            and not isnan(record.value)
        ):
            insort(self._ranked, (record.is_collapsed, self._sign * record.value, record.number))

    def numbers(self, most: int) -> list[int]:
        """Return the numbers of the best ``most`` trials."""
        return [number for _, _, number in self._ranked[:most]]
