"""The ladder: how a training can be changed so that it takes less memory. Pure.

One table has all changes: those of our own tasks' trials, which ``plans/ladder.py`` tries by estimates, and those of
scripts with ``TrainingArguments``, which :func:`climb` tries by rehearsals.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dryfit.settings.bracket import Bracket, Tried
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import Effect, OptimizerImpl, StepPhase
from dryfit.settings.rehearsal_messages import (
    ACCUMULATION,
    BATCH,
    CHECKPOINTING,
    EVALUATION_BATCH,
    ArgumentValue,
    RehearsalAnswer,
    SeenArguments,
)


class Change(Enum):
    """Something that a training can be run with, to take less memory, in the order in which it is told.

    Attributes:
        key: The field of :class:`ExecutionChoice`, and of the execution settings; else a name.
        words: What it is called, of a choice and the one that was asked for, or of a value before and after.
        effect: What it does to the experiment.
        time: A rough factor on the time of a step, for ordering and for people: nothing is decided by its third digit.
        cannot: The fields of a planned trial that say why it cannot be run so.
    """

    MICRO_BATCH = (
        "micro-batch {asked.micro_batch} -> {choice.micro_batch}, accumulate {choice.accumulation}",
        Effect.NUMERICS,
        1.05,
    )
    EVAL_BATCH = "validation batch {asked.eval_rows} -> {choice.eval_rows}", Effect.NUMERICS
    CHECKPOINTING = "activation checkpointing", Effect.EXACT, 1.3, "cannot_checkpoint"
    CHUNKED_LOSS = "loss in chunks", Effect.NUMERICS, 1.03, "cannot_chunk"
    OFFLOAD_ACTIVATIONS = (
        "inputs of layers in host memory",
        Effect.EXACT,
        1.15,
        "cannot_checkpoint",
        "cannot_offload_activations",
    )
    OFFLOAD_OPTIMIZER = "optimizer state in host memory", Effect.EXACT, 1.5, "cannot_offload"
    OPTIMIZER_IMPL = "{choice.optimizer_impl} optimizer", Effect.NUMERICS, 1.02
    BF16 = "bfloat16", Effect.SEMANTICS
    SMALL_OPTIMIZER = "8-bit optimizer state", Effect.SEMANTICS
    SMALLER_RANK = "lora.r {before} -> {after}", Effect.SEMANTICS
    SHORTER = "train.max_length {before} -> {after}", Effect.SEMANTICS
    SMALLER_BATCH = "train.batch_size {before} -> {after}", Effect.SEMANTICS

    def __init__(self, words: str, effect: Effect, time: float = 1.0, *cannot: str) -> None:
        self.key, self.words, self.effect, self.time, self.cannot = self.name.lower(), words, effect, time, cannot


SWITCHES: Final = tuple(one for one in Change if one.cannot)
"""Those that are on or off, where a trial can be run with them."""

# Of changes that take more or less time than the table says.
_SMALL_HALVING_TIME = 1.1
_SMALL_MICRO_TOKENS = 4096
"""Below so many tokens a micro-batch no longer keeps a device busy, and halving it costs more."""
_PLAIN_TIME = 1.1


def made(choice: ExecutionChoice, asked: ExecutionChoice) -> list[Change]:
    """Return the changes by which a choice differs from another."""
    values = [(one, getattr(choice, one.key, None), getattr(asked, one.key, None)) for one in Change]
    return [one for one, after, before in values if after and after != before]


def describe(choice: ExecutionChoice, asked: ExecutionChoice) -> str:
    """Describe in words how a choice differs from the plan as asked."""
    return " + ".join(one.words.format(choice=choice, asked=asked) for one in made(choice, asked))


def effect(choice: ExecutionChoice, asked: ExecutionChoice) -> Effect:
    """Return what running a trial by ``choice`` instead of ``asked`` does to its numbers."""
    return Effect.most(one.effect for one in made(choice, asked))


def time_factor(choice: ExecutionChoice, asked: ExecutionChoice, longest: int) -> float:
    """Return a rough factor on the time of a step; a validation batch is no part of one.

    Args:
        choice: How the trial is run.
        asked: How it was to be.
        longest: Tokens of its longest row.
    """
    factor = 1.0
    for one in made(choice, asked):
        if one is Change.OPTIMIZER_IMPL and choice.optimizer_impl is OptimizerImpl.PLAIN:
            factor *= _PLAIN_TIME
        elif one is not Change.MICRO_BATCH:
            factor *= one.time
    for micro in list(halvings(asked.micro_batch))[1:]:
        if micro >= choice.micro_batch:
            factor *= _SMALL_HALVING_TIME if micro * longest < _SMALL_MICRO_TOKENS else Change.MICRO_BATCH.time
    return round(factor, 3)


def halvings(rows: int) -> Iterator[int]:
    """Yield the rows of a batch, their half, and so on down to one row."""
    yield rows
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


def with_micro_batch(choice: ExecutionChoice, micro_batch: int, effective_batch: int) -> ExecutionChoice:
    """Return the choice with another micro-batch and the same effective batch."""
    update = {"micro_batch": micro_batch, "accumulation": -(-effective_batch // micro_batch)}
    return choice.model_copy(update=update)


def is_below(choice: ExecutionChoice, other: ExecutionChoice) -> bool:
    """Whether a choice only takes memory away, compared with another."""
    return (
        choice != other
        and choice.optimizer_impl is other.optimizer_impl
        and choice.micro_batch <= other.micro_batch
        and choice.eval_rows <= other.eval_rows
        and not set(made(other, choice)) & set(SWITCHES)
    )


# Choices of execution as ``TrainingArguments``, and back.


_ARGUMENTS: Final = (
    ("micro_batch", BATCH),
    ("accumulation", ACCUMULATION),
    ("eval_batch", EVALUATION_BATCH),
    *(("checkpointing", name) for name in CHECKPOINTING),
)


def arguments_of(choice: ExecutionChoice | None) -> dict[str, ArgumentValue]:
    """Return the ``TrainingArguments`` that carry out a choice; none where nothing is to be changed."""
    return {name: value for key, name in _ARGUMENTS if (value := getattr(choice, key, None))}


def smaller_micro_batches(rows: int, accumulation: int) -> list[tuple[int, int]]:
    """Return the rows and accumulation of smaller micro-batches of the same effective batch, largest first."""
    return [(part, accumulation * (rows // part)) for part in range(rows // 2, 0, -1) if rows % part == 0]


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
        return tuple(word for name, value in self.changed for word in (f"--{name}", str(value)))

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.changed)


def choice_of(seen: SeenArguments | None, change: ArgumentChange | None = None) -> ExecutionChoice | None:
    """Return arguments, or a change of them, as a choice of execution; None where there are none."""
    if seen is None or not seen.whole(BATCH):
        return None
    changed = change.values if change is not None else {}
    values = seen.model_copy(update={"values": {**seen.values, **changed}})
    return ExecutionChoice(
        micro_batch=values.whole(BATCH),
        accumulation=values.whole(ACCUMULATION) or 1,
        eval_batch=values.whole(EVALUATION_BATCH) if EVALUATION_BATCH in changed else None,
        checkpointing=bool(values.values.get(seen.checkpointing)),
    )


# The search for arguments with which a script fits.
#
# First what changes nothing but rounding: smaller micro-batches with as many more accumulation steps, the effective
# batch kept; then activation checkpointing with each of them. Where not even the smallest of these fits, what changes
# the experiment: bfloat16, then an optimizer with smaller state. Each stage is entered by its smallest member, because
# a rehearsal takes as long as the script takes to begin. Then the largest micro-batch that fits is bracketed.


_MOST_CHANGES: Final = 16
_EIGHT_BIT, _ADAFACTOR = "adamw_bnb_8bit", "adafactor"
_SMALL_OPTIMIZERS = (_ADAFACTOR, "sgd", "lomo", "galore", "apollo", "adalomo", "8bit", "4bit", "8-bit", "4-bit")


def climb(
    answer: RehearsalAnswer, rehearse: Callable[[ArgumentChange], Tried], *, allow: Effect, has_eight_bit: bool
) -> ArgumentChange | None:
    """Rehearse changes until it is known which of them fits.

    Args:
        answer: What was said of the script as it is.
        rehearse: Rehearses it with a change.
        allow: What a change may do to the experiment at most.
        has_eight_bit: Whether bitsandbytes is installed.

    Returns:
        The change to recommend, of the mildest stage with the largest micro-batch; None where none fits.
    """
    seen, memory, capacity_bytes = answer.training_arguments, answer.memory, answer.device.capacity_bytes
    left = _MOST_CHANGES
    if seen is None:
        return None
    known = {seen.whole(BATCH) or 1: memory.required_bytes} if memory is not None else {}  # of the first stage
    for stage in _stages(seen, answer, allow, has_eight_bit=has_eight_bit):
        tried: dict[int, Tried] = {}
        while left and (rows := Bracket.of(tried, capacity_bytes, known).next_of(list(stage))) is not None:
            tried[rows] = rehearse(stage[rows])
            left -= 1
        if largest := Bracket.of(tried, capacity_bytes).low:
            return stage[largest]
        known = {}
    return None


def _stages(
    seen: SeenArguments, answer: RehearsalAnswer, allow: Effect, *, has_eight_bit: bool
) -> Iterator[dict[int, ArgumentChange]]:
    """Yield the changes of each stage by their micro-batch, largest first; the script's own is left as it is."""
    own_rows, steps = seen.whole(BATCH), seen.whole(ACCUMULATION)
    batches: dict[int, dict[str, ArgumentValue]] = {own_rows or 1: {}}
    evaluation: dict[str, ArgumentValue] = {}
    if Change.MICRO_BATCH.effect.within(allow):
        smaller = smaller_micro_batches(own_rows, steps) if steps else []
        batches |= {rows: {BATCH: rows, ACCUMULATION: more} for rows, more in smaller}
        evaluation = _evaluation(seen, answer)
    extra: dict[str, ArgumentValue] = {}
    effects = [Effect.EXACT]
    for change, arguments in (Change.MICRO_BATCH, {}), *_changes(seen, has_eight_bit=has_eight_bit):
        if change.effect.within(allow):
            extra |= arguments
            effects.append(change.effect)
            members = {rows: {**batch, **evaluation, **extra} for rows, batch in batches.items()}
            most = Effect.most(effects)
            yield {rows: ArgumentChange(tuple(one.items()), most) for rows, one in members.items() if one}


def _changes(seen: SeenArguments, *, has_eight_bit: bool) -> Iterator[tuple[Change, dict[str, ArgumentValue]]]:
    """Yield the changes that a script has not made itself; each is made beside those before."""
    if seen.checkpointing and not seen.values.get(seen.checkpointing):
        yield Change.CHECKPOINTING, {seen.checkpointing: True}
    if "bf16" in seen.values and not (seen.values["bf16"] or seen.values.get("fp16")):
        yield Change.BF16, {"bf16": True}
    optimizer = str(seen.values.get("optim", ""))
    if "optim" in seen.values and not any(name in optimizer for name in _SMALL_OPTIMIZERS):
        yield Change.SMALL_OPTIMIZER, {"optim": _EIGHT_BIT if has_eight_bit else _ADAFACTOR}


def _evaluation(seen: SeenArguments, answer: RehearsalAnswer) -> dict[str, ArgumentValue]:
    """Return evaluation by single rows where evaluation is what does not fit: metrics are those of all rows anyway."""
    failed = any(error.phase is StepPhase.EVALUATE for error in answer.out_of_memory if not error.caught)
    memory = answer.memory
    peaks = memory is not None and memory.peak_at.phase is StepPhase.EVALUATE
    return {EVALUATION_BATCH: 1} if (failed or peaks) and seen.whole(EVALUATION_BATCH) > 1 else {}
