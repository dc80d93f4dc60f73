"""The fit ladder: fallbacks in their order, and the first by which a trial fits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, estimate, with_fragmentation
from dryfit.plans.tracer import Variant
from dryfit.settings.errors import ConfigError, TraceError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, Fallback, MemoryPlan
from dryfit.settings.ladder import (
    SWITCHES,
    Change,
    describe,
    effect,
    halvings,
    is_below,
    time_factor,
    with_micro_batch,
)
from dryfit.settings.memory_terms import Effect, OptimizerImpl, StepPhase, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.text import gib

# How else a trial can be run, and in which order: changes are those of ``settings/ladder.py``.
#
# As asked; activation checkpointing; a loss in chunks; smaller micro-batches, each without and with both, the faster
# first; with checkpointing, the inputs of layers in host memory; another implementation of the optimizer; its state
# in host memory. Each of them, as asked too, is also tried with smaller validation batches where validation is what
# does not fit, before the next: that costs training nothing. The effective batch never changes. What would change the
# experiment is a :class:`SettingChange`, which is only suggested.


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A change of the experiment: of the optimizer state's bits, tokens, rows or the adapters' rank."""

    kind: Change
    before: int
    after: int

    def __str__(self) -> str:
        return self.kind.words.format(before=self.before, after=self.after)


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
    for switch in SWITCHES:
        reasons = _why_not(trial, switch)
        if getattr(execution, switch.key) and reasons:
            key = f"execution.{switch.key}"
            raise ConfigError("planning a trial", f"{key} is true, but {reasons[0]}", hint=f"leave {key} out")
    impl = trial.optimizer_impls[0] if execution.optimizer_impl is OptimizerImpl.AUTO else execution.optimizer_impl
    if impl not in trial.optimizer_impls:
        raise ConfigError(
            "planning a trial",
            f"execution.optimizer_impl is {impl.value!r}, which this optimizer does not have here",
            allowed=", ".join(("auto", *(known.value for known in trial.optimizer_impls))),
        )
    update = {"optimizer_impl": impl, "chunked_loss": _chunked(trial, execution)}
    return execution.choice(trial.effective_batch).model_copy(update=update)


def _chunked(trial: PlannedTrial, execution: ExecutionSettings) -> bool | None:
    if execution.chunked_loss is not None:
        return execution.chunked_loss
    return trial.chunks_for_free if trial.cannot_chunk is None else None


def fallback_stages(
    trial: PlannedTrial, execution: ExecutionSettings, asked: ExecutionChoice
) -> tuple[FallbackStage, ...]:
    """Return the choices that may be tried after ``asked``, in order."""
    may = {one for one in Change if _is_open(one, execution) and not _why_not(trial, one)}

    def values(switch: Change) -> tuple[bool | None, ...]:
        own = getattr(asked, switch.key)
        return (own, True) if switch in may and not own else (own,)

    def switched_on(switch: Change, choices: Iterable[ExecutionChoice]) -> tuple[ExecutionChoice, ...]:
        return tuple(choice.model_copy(update={switch.key: True}) for choice in choices if switch in may)

    micros = halvings(asked.micro_batch) if Change.MICRO_BATCH in may else [asked.micro_batch]
    grid = [
        with_micro_batch(asked, micro, trial.effective_batch).model_copy(
            update={"checkpointing": recompute, "chunked_loss": in_chunks}
        )
        for micro, recompute, in_chunks in product(micros, values(Change.CHECKPOINTING), values(Change.CHUNKED_LOSS))
    ]
    by_impl = [
        [choice.model_copy(update={"optimizer_impl": impl}) for choice in dict.fromkeys((asked, grid[-1]))]
        for impl in trial.optimizer_impls
        if Change.OPTIMIZER_IMPL in may and impl is not asked.optimizer_impl
    ]
    # First those that leave every number as it is, then the faster ones.
    longest = trial.lengths.longest
    grid.sort(key=lambda choice: (effect(choice, asked) is not Effect.EXACT, time_factor(choice, asked, longest)))
    inputs_on_host = switched_on(Change.OFFLOAD_ACTIVATIONS, (choice for choice in grid if choice.checkpointing))
    on_host = switched_on(Change.OFFLOAD_OPTIMIZER, (*grid, *inputs_on_host))
    stages = (
        FallbackStage(tuple(choice for choice in grid if choice != asked)),
        FallbackStage(inputs_on_host, is_brief=True),
        *(FallbackStage(tuple(choices), is_brief=True) for choices in by_impl),
        FallbackStage(on_host, is_brief=True),
    )
    return tuple(stage for stage in stages if stage.choices)


def _is_open(change: Change, execution: ExecutionSettings) -> bool:
    """Whether the settings leave a change open, and allow what it does to numbers."""
    is_set = getattr(execution, change.key, True) not in (None, OptimizerImpl.AUTO)
    return not is_set and change.effect.within(Effect(execution.allow))


def _why_not(trial: PlannedTrial, change: Change) -> list[str]:
    return [reason for name in change.cannot if (reason := getattr(trial, name))]


def smaller_validations(choice: ExecutionChoice, execution: ExecutionSettings) -> tuple[ExecutionChoice, ...]:
    """Return the choice with half the validation batch, a quarter, and so on down to one row.

    A trained weight never depends on the validation batch, and a metric does up to rounding only: a row is scored among
    other rows, padded to another length.
    """
    if not _is_open(Change.EVAL_BATCH, execution):
        return ()
    _, *smaller = halvings(choice.eval_rows)
    return tuple(choice.model_copy(update={"eval_batch": rows}) for rows in smaller)


def suggested(
    trial: PlannedTrial, base: ExecutionChoice
) -> Iterator[tuple[SettingChange, PlannedTrial, ExecutionChoice]]:
    """Yield changes of the experiment, each by half, with the trial and its choice then."""
    # The state is small enough for the device, and its library has one implementation.
    own = {"offload_optimizer": False, "optimizer_impl": OptimizerImpl.AUTO}
    yield SettingChange(Change.SMALL_OPTIMIZER, 32, 8), trial, base.model_copy(update=own)
    rank, longest, rows = trial.lora_rank or 1, trial.lengths.longest, trial.effective_batch
    if rank > 1:
        yield SettingChange(Change.SMALLER_RANK, rank, rank // 2), trial, base
    if longest > 1:
        half = -(-longest // 2)
        shorter = replace(trial, lengths=Lengths.of(half, trial.lengths.rows or None))
        yield SettingChange(Change.SHORTER, longest, half), shorter, base
    if rows > 1:
        half = rows // 2
        choice = with_micro_batch(base, min(base.micro_batch, half), half)
        yield SettingChange(Change.SMALLER_BATCH, rows, half), replace(trial, effective_batch=half), choice


# The fit ladder: find the first fallback by which a trial fits, and price the others.


_ORDER_SEED = 0
"""Seed of the shuffled orders of batches, so that the same question gets the same answer."""


Resubject = Callable[[SettingChange], SegmentSource | None]
"""Gives the segments of a trial after a change of optimizer or adapters; None where it has none to change."""


def plan_by_ladder(
    trial: PlannedTrial,
    execution: ExecutionSettings,
    source: SegmentSource,
    device: Device,
    *,
    resubject: Resubject,
    every_fallback: bool = False,
) -> PlanAnswer:
    """Find how a trial is to be run so that it fits.

    Args:
        trial: What is fixed.
        execution: The settings; what they set is kept.
        source: Gives the segments of the trial.
        device: The device it is to fit on.
        resubject: Gives the segments of a changed trial, for the suggestions.
        every_fallback: Report all fallbacks and suggestions; else the ladder ends with the first fallback that fits.

    Raises:
        ConfigError: The settings ask for what this trial cannot do.
    """
    climb = _Climb(trial, execution, source, device, every_fallback)
    asked = climb.asked
    answer = partial(
        PlanAnswer,
        device=device.spec,
        confidence=device.constants.confidence,
        torch=device.torch,
        planner_s=0.0,  # whoever asks measures it
    )
    try:
        if execution.dp > 1:  # what one process alone would take is no answer
            reason = f"execution.dp is {execution.dp}: weights that are put together layer by layer are not traced"
            raise TraceError("planning the memory of a trial", reason, "execution.dp = 1, or execution.tp")
        as_asked = climb.memory(asked)
    except TraceError as error:
        return answer(verdict=VerdictKind.UNKNOWN, reasons=(str(error),))
    chosen = climb.first_that_fits()
    ladder = climb.ladder()
    if every_fallback:
        ladder += climb.suggestions(chosen, resubject)
    answer = partial(
        answer,
        shortfall_bytes=max(0, as_asked.required_bytes - climb.capacity_bytes),
        ladder=tuple(ladder),
    )
    if chosen is None:
        return answer(verdict=VerdictKind.REFUSED, memory=as_asked, reasons=climb.reasons())
    return answer(
        verdict=VerdictKind.FITS if chosen == asked else VerdictKind.FITS_WITH,
        memory=climb.memory(chosen),
        execution=chosen,
        fallbacks=climb.fallbacks(chosen),
        eval_batches=tuple(choice.eval_rows for choice in smaller_validations(chosen, execution)),
    )


def work_of(trial: PlannedTrial, choice: ExecutionChoice) -> Work:
    """Return how a trial uses memory when it runs by a choice."""
    return Work(
        variant=Variant.of(choice),
        effective_batch=trial.effective_batch,
        micro_batch=choice.micro_batch,
        evaluation_rows=choice.eval_rows,
        lengths=trial.lengths,
        measured_rows=trial.measured_rows(choice.eval_rows),
        has_pages=trial.has_pages,
    )


def memory_of(source: SegmentSource, work: Work, device: Device, most_bytes: int) -> MemoryPlan:
    """Plan some work; batches of varying lengths are only tried where the longest alone fit.

    Raises:
        TraceError: The model's code cannot be traced.
    """
    plan_of_longest = estimate(source, work, device)
    if plan_of_longest.required_bytes > most_bytes:
        return plan_of_longest
    return with_fragmentation(plan_of_longest, source, work, device, seed=_ORDER_SEED)


@dataclass(slots=True)
class _Climb:
    """The choices tried so far."""

    trial: PlannedTrial
    execution: ExecutionSettings
    source: SegmentSource
    device: Device
    every_fallback: bool
    capacity_bytes: int = field(init=False)
    asked: ExecutionChoice = field(init=False)
    stages: tuple[FallbackStage, ...] = field(init=False)
    tried: dict[ExecutionChoice, MemoryPlan] = field(default_factory=dict)
    untraceable: dict[ExecutionChoice, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity_bytes = self.execution.limited(self.device.spec).capacity_bytes
        self.asked = execution_asked(self.trial, self.execution)
        self.stages = fallback_stages(self.trial, self.execution, self.asked)

    def fits(self, memory: MemoryPlan) -> bool:
        return memory.required_bytes <= self.capacity_bytes

    def memory(self, choice: ExecutionChoice) -> MemoryPlan:
        """Plan a choice once."""
        if choice not in self.tried:
            work = work_of(self.trial, choice)
            self.tried[choice] = memory_of(self.source, work, self.device, self.capacity_bytes)
        return self.tried[choice]

    def first_that_fits(self) -> ExecutionChoice | None:
        """Try what was asked for, then the stages; None where nothing fits."""
        chosen = self.asked if self.fits(self.memory(self.asked)) else None
        if chosen is None or self.every_fallback:
            smaller = self.try_validations(self.asked, priced=True)
            chosen = chosen or smaller
        for stage in self.stages:
            if chosen is None or self.every_fallback:
                chosen = self.try_stage(stage, chosen)
        if chosen is None:  # so that the least that is told is the least there is
            self.try_validations(min(self.tried, key=self.training_bytes), priced=True)
        return chosen

    def ladder(self) -> list[Fallback]:
        """Return what was tried besides ``asked``, in the order of trying."""
        bases = (self.asked, *(choice for stage in self.stages for choice in stage.choices))
        return [
            self.fallback(choice)
            for base in bases
            for choice in (base, *smaller_validations(base, self.execution))
            if choice in self.tried and choice != self.asked
        ]

    def try_stage(self, stage: FallbackStage, chosen: ExecutionChoice | None) -> ExecutionChoice | None:
        """Try the choices of a stage; the first that fits is taken unless one was chosen before."""
        choices = stage.choices[:1] if stage.is_brief and chosen is not None else stage.choices
        if self.every_fallback:
            # Sorted, because a tracer rebuilds its model where checkpointing changes.
            for choice in sorted(choices, key=lambda choice: (choice.checkpointing, bool(choice.chunked_loss))):
                self._try(choice, stage.choices)
        for choice in choices if chosen is None else ():
            memory = self._try(choice, stage.choices)
            if memory is not None and self.fits(memory):
                return choice
            if memory is not None and (smaller := self.try_validations(choice)) is not None:
                return smaller
        return chosen

    def try_validations(self, choice: ExecutionChoice, *, priced: bool = False) -> ExecutionChoice | None:
        """Try smaller validation batches of a planned choice, as long as validation is its peak.

        Args:
            choice: What was tried.
            priced: Whether to try them even where the rest of the trial alone takes more than there is.

        Returns:
            The first with which the trial fits; None where none does.
        """
        smaller = smaller_validations(choice, self.execution)
        self._prepare_validations([choice, *smaller])
        memory = self.tried[choice]
        for other in smaller:
            in_vain = self.training_bytes(choice) + self.device.constants.overhead_bytes > self.capacity_bytes
            if memory.peak_at.phase is not StepPhase.EVALUATE or (in_vain and not priced):
                return None
            tried = self._try(other)
            if tried is None or self.fits(tried):
                return None if tried is None else other
            memory = tried
        return None

    def training_bytes(self, choice: ExecutionChoice) -> int:
        """Return the peak of a choice tried, but for its validations."""
        phases = self.tried[choice].by_phase.items()
        return max((size for phase, size in phases if phase is not StepPhase.EVALUATE), default=0)

    def least(self) -> ExecutionChoice:
        """Return the choice tried that needs least."""
        return min(self.tried, key=lambda choice: self.tried[choice].required_bytes)

    def _try(self, choice: ExecutionChoice, stage: Sequence[ExecutionChoice] = ()) -> MemoryPlan | None:
        """Plan a choice, of a stage that may be tried after it; None where it cannot be traced."""
        if choice in self.untraceable:
            return None
        if choice.micro_batch < self.trial.effective_batch:
            self._prepare(stage)
        try:
            return self.memory(choice)
        except TraceError as error:
            self.untraceable[choice] = str(error)
            return None

    def _prepare(self, stage: Sequence[ExecutionChoice]) -> None:
        """Announce the shapes that may come, so that some are interpolated."""
        longest, effective = self.trial.lengths.candidates, self.trial.effective_batch
        rows = {choice.micro_batch for choice in stage}
        rests = {effective % micro for micro in rows} - {0}
        for kind, wanted in (
            (SegmentKind.MICRO_FIRST, rows),
            (SegmentKind.MICRO_NEXT, {micro for micro in rows if micro < effective} | rests),
        ):
            self.source.prepare(kind, [Shape(row, length) for row in wanted for length in longest])
        self._prepare_validations(stage)

    def _prepare_validations(self, choices: Sequence[ExecutionChoice]) -> None:
        evaluated = {choice.eval_rows for choice in choices}
        measured = {self.trial.measured_rows(rows) for rows in evaluated} - {0}
        for kind, wanted in ((SegmentKind.EVALUATE, evaluated), (SegmentKind.MEASURE, measured)):
            self.source.prepare(kind, [Shape(row, self.trial.lengths.longest) for row in wanted])

    def fallback(self, choice: ExecutionChoice) -> Fallback:
        fallback = self._priced(describe(choice, self.asked), effect(choice, self.asked), self.tried[choice], choice)
        return fallback.model_copy(update={"execution": choice})

    def _priced(self, change: str, effect: Effect, memory: MemoryPlan, choice: ExecutionChoice) -> Fallback:
        return Fallback(
            change=change,
            execution=None,
            required_bytes=memory.required_bytes,
            saves_bytes=self.tried[self.asked].required_bytes - memory.required_bytes,
            time_factor=time_factor(choice, self.asked, self.trial.lengths.longest),
            effect=effect,
            fits=self.fits(memory),
        )

    def suggestions(self, chosen: ExecutionChoice | None, resubject: Resubject) -> list[Fallback]:
        """Price changes of the experiment, on the plan as asked; where nothing fits, on the smallest choice tried."""
        base = self.asked if chosen else self.least()
        priced: list[Fallback] = []
        for change, trial, choice in suggested(self.trial, base):
            source = resubject(change) if trial is self.trial else self.source
            if source is None:
                continue
            try:
                memory = estimate(source, work_of(trial, choice), self.device)
            except TraceError:
                continue
            note = f"with {describe(choice, self.asked)}" if base != self.asked else ""
            suggestion = self._priced(str(change), Effect.SEMANTICS, memory, base)
            priced.append(suggestion.model_copy(update={"note": note}))
        return priced

    def fallbacks(self, chosen: ExecutionChoice) -> tuple[ExecutionChoice, ...]:
        """List choices below the chosen one: each only takes memory away, and its plan, if any, confirms it."""
        most_bytes = self.tried[chosen].required_bytes
        most_rows = chosen.eval_rows
        return tuple(
            choice
            for stage in self.stages
            for choice in (choice.with_eval_rows_at_most(most_rows) for choice in stage.choices)
            if is_below(choice, chosen) and (choice not in self.tried or self.tried[choice].required_bytes < most_bytes)
        )

    def reasons(self) -> tuple[str, ...]:
        asked, memory = self.asked, self.tried[self.asked]
        peak = memory.peak_at
        place = f"{peak.phase.value}, {peak.module or peak.op}"
        least = self.least()
        least_memory = self.tried[least]
        needs = (
            f"the trial needs {gib(memory.required_bytes)}, {self.device.spec.name} has {gib(self.capacity_bytes)}: "
            f"peak in {place}, {memory.worst_batch.rows} rows of {memory.worst_batch.length} tokens"
        )
        smallest = f"the least that was found is {gib(least_memory.required_bytes)}: {describe(least, asked)}"
        return (needs, *([smallest] if least != asked else []), *dict.fromkeys(self.untraceable.values()))
