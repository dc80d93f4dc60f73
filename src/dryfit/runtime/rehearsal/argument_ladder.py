"""The ladder of a rehearsal: which arguments of a ``TrainingArguments`` script are tried next. Pure.

First what changes nothing but rounding: smaller micro-batches with as many more accumulation steps, the effective batch
kept; then activation checkpointing with each of them. Where not even the smallest of these fits, what changes the
experiment: bfloat16, then an optimizer with smaller state. Each stage is entered by its smallest member, because a
rehearsal takes as long as the script takes to begin: what does not fit there fits nowhere in the stage. Then the
largest micro-batch that fits is looked for by halving.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dryfit.core.jobs.memory import Effect, StepPhase
from dryfit.core.jobs.rehearsal import ArgumentValue, RehearsalAnswer, SeenArguments

BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
EVALUATION_BATCH = "per_device_eval_batch_size"
_EIGHT_BIT, _ADAFACTOR = "adamw_bnb_8bit", "adafactor"
_SMALL_OPTIMIZERS = (_ADAFACTOR, "sgd", "lomo", "galore", "apollo", "adalomo", "8bit", "4bit", "8-bit", "4-bit")


@dataclass(frozen=True, slots=True)
class ArgumentChange:
    """Arguments to be rehearsed instead of the script's own.

    Attributes:
        values: By name; what is not here stays.
    """

    values: Mapping[str, ArgumentValue]
    effect: Effect

    @property
    def words(self) -> tuple[str, ...]:
        """As they are added to the script's command line."""
        return tuple(word for name, value in self.values.items() for word in (f"--{name}", str(value)))


@dataclass(frozen=True, slots=True)
class TriedChange:
    """A change that was rehearsed, and whether the script fits with it."""

    change: ArgumentChange
    fits: bool


def next_change(answer: RehearsalAnswer, tried: Sequence[TriedChange], *, has_eight_bit: bool) -> ArgumentChange | None:
    """Return the change to rehearse next; None: the ladder has been climbed.

    Args:
        answer: What was said of the script as it is.
        tried: The changes so far, in order.
        has_eight_bit: Whether bitsandbytes is installed.
    """
    seen = answer.training_arguments
    if seen is None:
        return None
    known = {_key(one.change): one.fits for one in tried}
    for stage in _stages(seen, answer, has_eight_bit=has_eight_bit):
        change, is_over = _within(stage, lambda change: known.get(_key(change)))
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


def _within(
    stage: Sequence[ArgumentChange], fits: Callable[[ArgumentChange], bool | None]
) -> tuple[ArgumentChange | None, bool]:
    """Return the next change of a stage, largest first, and whether the stage answers the question."""
    if not stage:
        return None, False
    smallest = fits(stage[-1])
    if smallest is None:
        return stage[-1], False
    if not smallest:
        return None, False
    low, high = 0, len(stage) - 1  # stage[high] fits; the first that fits is at low or after it
    while low < high:
        middle = (low + high) // 2
        known = fits(stage[middle])
        if known is None:
            return stage[middle], False
        low, high = (low, middle) if known else (middle + 1, high)
    return None, True


def _stages(
    seen: SeenArguments, answer: RehearsalAnswer, *, has_eight_bit: bool
) -> Iterator[tuple[ArgumentChange, ...]]:
    batches = _micro_batches(seen)
    evaluation = _evaluation(seen, answer)
    changes: list[tuple[dict[str, ArgumentValue], Effect]] = [({}, Effect.NUMERICS)]
    if seen.checkpointing and not seen.values.get(seen.checkpointing):
        changes.append(({seen.checkpointing: True}, Effect.NUMERICS))
    milder = dict(changes[-1][0])
    if not (seen.values.get("bf16") or seen.values.get("fp16")) and "bf16" in seen.values:
        milder |= {"bf16": True}
        changes.append((dict(milder), Effect.SEMANTICS))
    optimizer = str(seen.values.get("optim", ""))
    if "optim" in seen.values and not any(name in optimizer for name in _SMALL_OPTIMIZERS):
        changes.append((milder | {"optim": _EIGHT_BIT if has_eight_bit else _ADAFACTOR}, Effect.SEMANTICS))
    for extra, effect in changes:
        members = tuple(ArgumentChange({**batch, **evaluation, **extra}, effect) for batch in batches)
        yield tuple(change for change in members if change.values)


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


def _key(change: ArgumentChange) -> tuple[tuple[str, ArgumentValue], ...]:
    return tuple(sorted(change.values.items()))
