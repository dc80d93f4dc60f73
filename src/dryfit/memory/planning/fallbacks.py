"""The fallbacks of the fit ladder: how else a trial can be run, in which order, and what each changes.

As asked; activation checkpointing; a loss in chunks; smaller micro-batches, each without and with both, the faster
first; with checkpointing, the inputs of layers in host memory; another implementation of the optimizer; its state in
host memory. Each of them, as asked too, is also tried with smaller validation batches where validation is what does not
fit, before the next: that costs training nothing. The effective batch never changes. What would change the experiment
is a :class:`SettingChange`, which is only suggested.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.memory import Effect, ExecutionChoice
from dryfit.core.settings.execution import ExecutionSettings, OptimizerImpl
from dryfit.memory.planning.estimate import Lengths

# Rough factors on the time of a step, for ordering and for people; nothing is decided by their third digit.
_HALVING_TIME = 1.05
_SMALL_HALVING_TIME = 1.1
_SMALL_MICRO_TOKENS = 4096
"""Below so many tokens a micro-batch no longer keeps a device busy, and halving it costs more."""
_PLAIN_TIME = 1.1
_FOREACH_TIME = 1.02


class _Switch(NamedTuple):
    """Something that a trial can be run with, to take less memory.

    Attributes:
        name: The field of :class:`ExecutionChoice`, and of the execution settings.
        words: What it is called.
        time: Its factor.
        rounds: Whether sums are then taken in another order.
        cannot: The fields of :class:`PlannedTrial` that say why a trial cannot be run so.
    """

    name: str
    words: str
    time: float
    cannot: tuple[str, ...]
    rounds: bool = False


_SWITCHES = (
    _Switch("checkpointing", "activation checkpointing", 1.3, ("cannot_checkpoint",)),
    _Switch("chunked_loss", "loss in chunks", 1.03, ("cannot_chunk",), rounds=True),
    _Switch(
        "offload_activations",
        "inputs of layers in host memory",
        1.15,
        ("cannot_checkpoint", "cannot_offload_activations"),
    ),
    _Switch("offload_optimizer", "optimizer state in host memory", 1.5, ("cannot_offload",)),
)


def _added(choice: ExecutionChoice, asked: ExecutionChoice) -> list[_Switch]:
    """Return what a choice has switched on, and the plan as asked has not."""
    return [one for one in _SWITCHES if getattr(choice, one.name) and not getattr(asked, one.name)]


class ChangeKind(StrEnum):
    """A change of the experiment itself."""

    EIGHT_BIT_OPTIMIZER = "eight_bit_optimizer"
    SHORTER = "shorter"
    SMALLER_BATCH = "smaller_batch"
    SMALLER_RANK = "smaller_rank"


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A change: of the optimizer state's bits, ``train.max_length``, ``train.batch_size`` or ``lora.r``."""

    kind: ChangeKind
    before: int
    after: int

    def __str__(self) -> str:
        key = {
            ChangeKind.SHORTER: "train.max_length",
            ChangeKind.SMALLER_BATCH: "train.batch_size",
            ChangeKind.SMALLER_RANK: "lora.r",
        }.get(self.kind)
        return f"{key} {self.before} -> {self.after}" if key else "8-bit optimizer state"


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """The facts about a trial that the ladder needs.

    Attributes:
        optimizer_impls: Implementations of its optimizer on the device; the one that ``auto`` takes is first.
        measured_rows: Gives the rows that answers are generated for at once by those of a validation batch; 0: none.
        cannot_checkpoint: Why the model cannot recompute activations; None where it can.
        cannot_chunk: Why its loss cannot be computed in chunks of tokens; None where it can.
        chunks_for_free: Whether a loss in chunks costs no time: it is then as asked where nothing is set.
        cannot_offload: Why the optimizer's state cannot be in host memory; None where it can.
        cannot_offload_activations: Why what layers are recomputed from cannot be in host memory; None where it can.
        lora_rank: Rank of its adapters; None without.
        has_pages: Whether its optimizer's state is moved between host and device as it is needed.
    """

    effective_batch: int
    lengths: Lengths
    optimizer_impls: tuple[OptimizerImpl, ...]
    cannot_checkpoint: str | None = None
    cannot_offload: str | None = None
    cannot_chunk: str | None = "its loss is not over the words of a vocabulary"
    chunks_for_free: bool = False
    cannot_offload_activations: str | None = "on the CPU they lie in host memory already"
    lora_rank: int | None = None
    measured_rows: Callable[[int], int] = lambda _: 0
    has_pages: bool = False


@dataclass(frozen=True, slots=True)
class FallbackStage:
    """Choices of one kind, in the order to try.

    Attributes:
        is_brief: Where another choice fits already, only the first of these is priced, to show what it saves.
    """

    choices: tuple[ExecutionChoice, ...]
    is_brief: bool = False


def execution_asked(trial: PlannedTrial, execution: ExecutionSettings) -> ExecutionChoice:
    """Return the execution settings as they stand, and the fastest choice where they are silent.

    Raises:
        ConfigError: They ask for what this trial cannot do.
    """
    for switch in _SWITCHES:
        reasons = [reason for name in switch.cannot if (reason := getattr(trial, name))]
        if getattr(execution, switch.name) and reasons:
            key = f"execution.{switch.name}"
            raise ConfigError("planning a trial", f"{key} is true, but {reasons[0]}", hint=f"leave {key} out")
    impl = trial.optimizer_impls[0] if execution.optimizer_impl is OptimizerImpl.AUTO else execution.optimizer_impl
    if impl not in trial.optimizer_impls:
        raise ConfigError(
            "planning a trial",
            f"execution.optimizer_impl is {impl.value!r}, which this optimizer does not have here",
            allowed=", ".join(("auto", *(known.value for known in trial.optimizer_impls))),
        )
    return with_micro_batch(
        ExecutionChoice(
            micro_batch=1,
            accumulation=1,
            eval_batch=execution.eval_batch,
            checkpointing=execution.recomputes,
            offload_activations=bool(execution.offload_activations),
            optimizer_impl=impl,
            offload_optimizer=bool(execution.offload_optimizer),
            chunked_loss=_chunked(trial, execution),
        ),
        min(execution.micro_batch or trial.effective_batch, trial.effective_batch),
        trial.effective_batch,
    )


def _chunked(trial: PlannedTrial, execution: ExecutionSettings) -> bool | None:
    if execution.chunked_loss is not None:
        return execution.chunked_loss
    return trial.chunks_for_free if trial.cannot_chunk is None else None


def fallback_stages(
    trial: PlannedTrial, execution: ExecutionSettings, asked: ExecutionChoice
) -> tuple[FallbackStage, ...]:
    """Return the choices that may be tried after ``asked``, in order."""
    may_round = execution.allow == "numerics"
    may_checkpoint = execution.checkpointing is None and trial.cannot_checkpoint is None and not asked.checkpointing
    micros = list(halvings(asked.micro_batch)) if may_round and execution.micro_batch is None else [asked.micro_batch]
    checkpointing = (False, True) if may_checkpoint else (asked.checkpointing,)
    may_chunk = may_round and execution.chunked_loss is None and trial.cannot_chunk is None
    chunked = (False, True) if may_chunk and not asked.chunked_loss else (asked.chunked_loss,)
    grid = [
        with_micro_batch(asked, micro, trial.effective_batch).model_copy(
            update={"checkpointing": recompute, "chunked_loss": in_chunks}
        )
        for micro, recompute, in_chunks in product(micros, checkpointing, chunked)
    ]
    # First those that leave every number as it is, then the faster ones.
    longest = trial.lengths.longest
    grid.sort(key=lambda choice: (effect(choice, asked) is not Effect.EXACT, time_factor(choice, asked, longest)))
    smallest = grid[0].model_copy(update=grid[-1].model_dump(include={"micro_batch", "accumulation"}))
    smallest = smallest.model_copy(update={"checkpointing": checkpointing[-1], "chunked_loss": chunked[-1]})
    impls = trial.optimizer_impls if may_round and execution.optimizer_impl is OptimizerImpl.AUTO else ()
    by_impl = [
        [choice.model_copy(update={"optimizer_impl": impl}) for choice in dict.fromkeys((asked, smallest))]
        for impl in impls
        if impl is not asked.optimizer_impl
    ]
    may_move_inputs = execution.offload_activations is None and trial.cannot_offload_activations is None
    recomputed = [choice for choice in grid if choice.checkpointing] if may_move_inputs else []
    inputs_on_host = [choice.model_copy(update={"offload_activations": True}) for choice in recomputed]
    may_offload = execution.offload_optimizer is None and trial.cannot_offload is None
    moved = (*grid, *inputs_on_host) if may_offload else ()
    on_host = [choice.model_copy(update={"offload_optimizer": True}) for choice in moved]
    stages = (
        FallbackStage(tuple(choice for choice in grid if choice != asked)),
        FallbackStage(tuple(inputs_on_host), is_brief=True),
        *(FallbackStage(tuple(choices), is_brief=True) for choices in by_impl),
        FallbackStage(tuple(on_host), is_brief=True),
    )
    return tuple(stage for stage in stages if stage.choices)


def halvings(rows: int) -> Iterator[int]:
    """Yield the rows of a batch, their half, and so on down to one row."""
    yield rows
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


def smaller_validations(choice: ExecutionChoice, execution: ExecutionSettings) -> tuple[ExecutionChoice, ...]:
    """Return the choice with half the validation batch, a quarter, and so on down to one row.

    A trained weight never depends on the validation batch, and a metric does up to rounding only: a row is scored among
    other rows, padded to another length.
    """
    if execution.allow != "numerics" or execution.eval_batch is not None:
        return ()
    _, *smaller = halvings(choice.eval_rows)
    return tuple(choice.model_copy(update={"eval_batch": rows}) for rows in smaller)


def with_micro_batch(choice: ExecutionChoice, micro_batch: int, effective_batch: int) -> ExecutionChoice:
    """Return the choice with another micro-batch and the same effective batch."""
    update = {"micro_batch": micro_batch, "accumulation": -(-effective_batch // micro_batch)}
    return choice.model_copy(update=update)


def effect(choice: ExecutionChoice, asked: ExecutionChoice) -> Effect:
    """Return what running a trial by ``choice`` instead of ``asked`` does to its numbers."""
    rounding = ("micro_batch", "optimizer_impl", "eval_rows", *(one.name for one in _SWITCHES if one.rounds))
    same = all(getattr(choice, name) == getattr(asked, name) for name in rounding)
    return Effect.EXACT if same else Effect.NUMERICS


def time_factor(choice: ExecutionChoice, asked: ExecutionChoice, longest: int) -> float:
    """Return a rough factor on the time of a step; a validation batch is no part of one.

    Args:
        choice: How the trial is run.
        asked: How it was to be.
        longest: Tokens of its longest row.
    """
    factor = math.prod((one.time for one in _added(choice, asked)), start=1.0)
    if choice.optimizer_impl is not asked.optimizer_impl:
        factor *= _PLAIN_TIME if choice.optimizer_impl is OptimizerImpl.PLAIN else _FOREACH_TIME
    for micro in list(halvings(asked.micro_batch))[1:]:
        if micro >= choice.micro_batch:
            factor *= _SMALL_HALVING_TIME if micro * longest < _SMALL_MICRO_TOKENS else _HALVING_TIME
    return round(factor, 3)


def describe(choice: ExecutionChoice, asked: ExecutionChoice) -> str:
    """Describe in words how a choice differs from the plan as asked."""
    words: list[str] = []
    if choice.micro_batch != asked.micro_batch:
        words.append(f"micro-batch {asked.micro_batch} -> {choice.micro_batch}, accumulate {choice.accumulation}")
    if choice.eval_batch != asked.eval_batch:
        words.append(f"validation batch {asked.eval_rows} -> {choice.eval_rows}")
    words += [one.words for one in _added(choice, asked)]
    if choice.optimizer_impl is not asked.optimizer_impl:
        words.append(f"{choice.optimizer_impl.value} optimizer")
    return " + ".join(words)


def changes(trial: PlannedTrial) -> Iterator[SettingChange]:
    """Yield the changes of the experiment that are suggested, each by half."""
    yield SettingChange(ChangeKind.EIGHT_BIT_OPTIMIZER, 32, 8)
    if trial.lora_rank and trial.lora_rank > 1:
        yield SettingChange(ChangeKind.SMALLER_RANK, trial.lora_rank, trial.lora_rank // 2)
    if trial.lengths.longest > 1:
        yield SettingChange(ChangeKind.SHORTER, trial.lengths.longest, -(-trial.lengths.longest // 2))
    if trial.effective_batch > 1:
        yield SettingChange(ChangeKind.SMALLER_BATCH, trial.effective_batch, trial.effective_batch // 2)


def changed(trial: PlannedTrial, base: ExecutionChoice, change: SettingChange) -> tuple[PlannedTrial, ExecutionChoice]:
    """Return the trial and its choice after a change; a changed model or optimizer is traced elsewhere."""
    match change.kind:
        case ChangeKind.SHORTER:
            rows = trial.lengths.rows or None
            return replace(trial, lengths=Lengths.of(change.after, rows)), base
        case ChangeKind.SMALLER_BATCH:
            choice = with_micro_batch(base, min(base.micro_batch, change.after), change.after)
            return replace(trial, effective_batch=change.after), choice
        case ChangeKind.EIGHT_BIT_OPTIMIZER:
            # Its state is small enough for the device, and its library has one implementation.
            own = {"offload_optimizer": False, "optimizer_impl": OptimizerImpl.AUTO}
            return trial, base.model_copy(update=own)
        case ChangeKind.SMALLER_RANK:
            return trial, base


def is_below(choice: ExecutionChoice, other: ExecutionChoice) -> bool:
    """Whether a choice only takes memory away, compared with another."""
    return (
        choice != other
        and choice.optimizer_impl is other.optimizer_impl
        and choice.micro_batch <= other.micro_batch
        and choice.eval_rows <= other.eval_rows
        and not _added(other, choice)
    )
