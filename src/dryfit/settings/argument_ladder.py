"""The ladder of a rehearsal: which arguments of a ``TrainingArguments`` script are tried next. Pure.

First what changes nothing but rounding: smaller micro-batches with as many more accumulation steps, the effective batch
kept; then activation checkpointing with each of them. Where not even the smallest of these fits, what changes the
experiment: bfloat16, then an optimizer with smaller state. Each stage is entered by its smallest member, because a
rehearsal takes as long as the script takes to begin: what does not fit there fits nowhere in the stage. Then the
largest micro-batch that fits is looked for by halving, and by what is known: a peak is the greatest of several amounts
that grow with the rows, so that memory is convex in them. Between two known points it lies below their chord, outside
above it; what must fit so is tried next, what cannot is not tried.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import Effect, StepPhase
from dryfit.settings.rehearsal_messages import (
    ACCUMULATION,
    BATCH,
    CHECKPOINTING,
    EVALUATION_BATCH,
    ArgumentValue,
    RehearsalAnswer,
    SeenArguments,
)

_MOST_CHANGES: Final = 16
CERTAIN = 1.02
"""Fragmentation moves what is needed by less."""
_EIGHT_BIT, _ADAFACTOR = "adamw_bnb_8bit", "adafactor"
_SMALL_OPTIMIZERS = (_ADAFACTOR, "sgd", "lomo", "galore", "apollo", "adalomo", "8bit", "4bit", "8-bit", "4-bit")


@dataclass(frozen=True, slots=True)
class ArgumentChange:
    """Arguments to be rehearsed instead of the script's own.

    Attributes:
        changed: Names and values; what is not here stays.
    """

    changed: tuple[tuple[str, ArgumentValue], ...]
    effect: Effect

    @property
    def values(self) -> dict[str, ArgumentValue]:
        """By name."""
        return dict(self.changed)

    @property
    def words(self) -> tuple[str, ...]:
        """As they are added to the script's command line."""
        return tuple(word for name, value in self.values.items() for word in (f"--{name}", str(value)))

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.changed)


@dataclass(frozen=True, slots=True)
class TriedChange:
    """A rehearsed change, whether the script fits with it, and its memory; None: unknown."""

    change: ArgumentChange
    fits: bool
    required_bytes: int | None = None


def arguments_of(choice: ExecutionChoice | None) -> dict[str, ArgumentValue]:
    """Return the ``TrainingArguments`` that carry out a choice; none where nothing is to be changed."""
    if choice is None:
        return {}
    batches: dict[str, ArgumentValue] = {BATCH: choice.micro_batch, ACCUMULATION: choice.accumulation}
    evaluation = {EVALUATION_BATCH: choice.eval_batch} if choice.eval_batch is not None else {}
    return {**batches, **evaluation, **(dict.fromkeys(CHECKPOINTING, True) if choice.checkpointing else {})}


def climb(
    answer: RehearsalAnswer, rehearse: Callable[[ArgumentChange], TriedChange], *, allow: Effect, has_eight_bit: bool
) -> ArgumentChange | None:
    """Rehearse changes until it is known which of them fits; return the one to recommend, None where none fits.

    Args:
        answer: What was said of the script as it is.
        rehearse: Rehearses it with a change.
        allow: What a change may do to the experiment at most.
        has_eight_bit: Whether bitsandbytes is installed.
    """
    tried: list[TriedChange] = []
    while len(tried) < _MOST_CHANGES:
        change = next_change(answer, tried, allow=allow, has_eight_bit=has_eight_bit)
        if change is None:
            break
        tried.append(rehearse(change))
    return best_change(tried)


def next_change(
    answer: RehearsalAnswer,
    tried: Sequence[TriedChange],
    *,
    has_eight_bit: bool,
    allow: Effect = Effect.SEMANTICS,
) -> ArgumentChange | None:
    """Return the change to rehearse next, as :func:`climb` does; None: the ladder has been climbed."""
    seen = answer.training_arguments
    if seen is None:
        return None
    own_rows = _whole(seen.values.get(BATCH))
    for number, stage in enumerate(_stages(seen, answer, allow, has_eight_bit=has_eight_bit)):
        known = {one.change: one for one in tried if one.change in stage}
        members = [_member(change, known.get(change), own_rows) for change in stage]
        points = {one.rows: one.required_bytes for one in members if one.required_bytes is not None}
        if number == 0 and answer.memory is not None:
            points[own_rows] = answer.memory.required_bytes
        change, is_over = _within(members, Needs(points, answer.device.capacity_bytes))
        if change is not None or is_over:
            return change
    return None


def best_change(tried: Sequence[TriedChange]) -> ArgumentChange | None:
    """Return the change to recommend: of those that fit, one of the mildest stage, with the largest micro-batch."""
    fitting = [one.change for one in tried if one.fits]
    order = list(Effect)
    return min(
        fitting,
        key=lambda change: (order.index(change.effect), BATCH in change.values, -_whole(change.values.get(BATCH))),
        default=None,
    )


class _Member(NamedTuple):
    """A change of a stage: its micro-batch, and what is known of it, if it was rehearsed."""

    change: ArgumentChange
    rows: int
    fits: bool | None
    required_bytes: int | None


@dataclass(frozen=True, slots=True)
class Needs:
    """What micro-batches of a stage, or other numbers, need, as far as it is known.

    Attributes:
        points: Bytes by rows.
        capacity_bytes: What the device has.
    """

    points: Mapping[int, int]
    capacity_bytes: int

    def must_fit(self, rows: int) -> bool:
        """Whether the chord between the known points around it says so."""
        below = max((known for known in self.points if known < rows), default=None)
        above = min((known for known in self.points if known > rows), default=None)
        return below is not None and above is not None and self._on_line(below, above, rows) <= self.capacity_bytes

    def cannot_fit(self, rows: int) -> bool:
        """Whether the line through the two known points before it says so."""
        below = sorted(known for known in self.points if known < rows)[-2:]
        return len(below) == 2 and self._on_line(below[0], below[1], rows) > CERTAIN * self.capacity_bytes

    def crossing(self, first: int, second: int) -> int:
        """Return the last value on the line through two points that the device has room for."""
        slope = (self.points[second] - self.points[first]) / (second - first)
        return math.floor(first + (self.capacity_bytes - self.points[first]) / slope)

    def _on_line(self, first: int, second: int, rows: int) -> float:
        slope = (self.points[second] - self.points[first]) / (second - first)
        return self.points[first] + slope * (rows - first)


def _within(stage: Sequence[_Member], needs: Needs) -> tuple[ArgumentChange | None, bool]:
    """Return the next change of a stage, largest first, and whether the stage answers the question."""
    if not stage:
        return None, False
    if stage[-1].fits is None:
        return stage[-1].change, False
    if not stage[-1].fits:
        return None, False
    low, high = 0, len(stage) - 1  # stage[high] fits; the first that fits is at low or after it
    while low < high:
        likely = (number for number in range(low, high) if needs.must_fit(stage[number].rows))
        at = next(likely, (low + high) // 2)
        fits = False if stage[at].fits is None and needs.cannot_fit(stage[at].rows) else stage[at].fits
        if fits is None:
            return stage[at].change, False
        low, high = (low, at) if fits else (at + 1, high)
    return None, True


def _member(change: ArgumentChange, tried: TriedChange | None, own_rows: int) -> _Member:
    rows = _whole(change.values.get(BATCH)) or own_rows
    return (
        _Member(change, rows, None, None) if tried is None else _Member(change, rows, tried.fits, tried.required_bytes)
    )


def _stages(
    seen: SeenArguments, answer: RehearsalAnswer, allow: Effect, *, has_eight_bit: bool
) -> Iterator[tuple[ArgumentChange, ...]]:
    recomputes = seen.checkpointing and not seen.values.get(seen.checkpointing)
    if allow is Effect.EXACT:
        yield (ArgumentChange(((seen.checkpointing, True),), Effect.EXACT),) if recomputes else ()
        return
    batches = _micro_batches(seen)
    evaluation = _evaluation(seen, answer)
    changes: list[tuple[dict[str, ArgumentValue], Effect]] = [({}, Effect.NUMERICS)]
    if recomputes:
        changes.append(({seen.checkpointing: True}, Effect.NUMERICS))
    milder = dict(changes[-1][0])
    if not (seen.values.get("bf16") or seen.values.get("fp16")) and "bf16" in seen.values:
        milder |= {"bf16": True}
        changes.append((dict(milder), Effect.SEMANTICS))
    optimizer = str(seen.values.get("optim", ""))
    if "optim" in seen.values and not any(name in optimizer for name in _SMALL_OPTIMIZERS):
        changes.append((milder | {"optim": _EIGHT_BIT if has_eight_bit else _ADAFACTOR}, Effect.SEMANTICS))
    for extra, effect in changes if allow is Effect.SEMANTICS else changes[: 1 + bool(recomputes)]:
        members = tuple(ArgumentChange(tuple({**batch, **evaluation, **extra}.items()), effect) for batch in batches)
        yield tuple(change for change in members if change.changed)


def _micro_batches(seen: SeenArguments) -> list[dict[str, ArgumentValue]]:
    """Return the micro-batches of the same effective batch, largest first; the script's own is without a value."""
    batch, steps = _whole(seen.values.get(BATCH)), _whole(seen.values.get(ACCUMULATION))
    own: list[dict[str, ArgumentValue]] = [{}]
    if not batch or not steps:
        return own
    divisors = [rows for rows in range(batch // 2, 0, -1) if batch % rows == 0]
    return own + [{BATCH: rows, ACCUMULATION: steps * (batch // rows)} for rows in divisors]


def _evaluation(seen: SeenArguments, answer: RehearsalAnswer) -> dict[str, ArgumentValue]:
    """Return evaluation by single rows where evaluation is what does not fit: metrics are those of all rows anyway."""
    failed = any(error.phase is StepPhase.EVALUATE for error in answer.out_of_memory if not error.caught)
    memory = answer.memory
    peaks = memory is not None and memory.peak_at.phase is StepPhase.EVALUATE
    rows = _whole(seen.values.get(EVALUATION_BATCH))
    return {EVALUATION_BATCH: 1} if (failed or peaks) and rows > 1 else {}


def _whole(value: ArgumentValue) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
