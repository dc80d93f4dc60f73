"""Suggestion of the next trial's parameters: what each sampler reads, and how it draws."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from typing import Any, Final, TypeAlias

from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, QMCSampler, RandomSampler
from optuna.trial import TrialState
from pydantic import Field

from dryfit.ledger.state import History, as_history
from dryfit.processes.helpers import Answering, python_command
from dryfit.search.history_view import Generations, Window, is_visible
from dryfit.search.private_apis import CMA_GENERATION, CMA_OPTIMIZER, CMAES, GENERATION, NSGA2, TPE, NumberedTpe
from dryfit.search.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.search.space import Distribution, Param, Point, Space, into_range, next_enqueued, only_value, to_text
from dryfit.settings.choices import Direction
from dryfit.settings.errors import MachineError
from dryfit.settings.private_names import require
from dryfit.settings.secrets import public_environment
from dryfit.settings.splits import derive_seed
from dryfit.settings.study_file import SamplerName, SearchSettings
from dryfit.settings.trial import Outcome, Scalar, TrialRecord
from dryfit.settings.wire import Wire

# Ask a process of its own for the suggestions of Gaussian processes: they need torch, which is not imported here.
#
# Every wait has a limit. A process that dies, hangs or answers nonsense is ended, and another one is asked once more.


ANSWER_S = 60.0
"""Longest wait for an answer, and for the imports before the first. Usual is a second."""

_TRIES = 2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class GpTrial(Wire):
    """A trial that the process learns from."""

    params: dict[str, Scalar]
    values: tuple[float, ...] = Field(default=(), description="its value for each goal; empty: it runs")
    excess: float | None = Field(default=None, description="share of the device by which it exceeds its memory")


class GpQuestion(Wire):
    """Everything that a suggestion depends on."""

    space: dict[str, str] = Field(description="Optuna's JSON of each distribution, by internal name")
    directions: tuple[Direction, ...]
    trials: tuple[GpTrial, ...]
    seed: int


class GpAnswer(Wire):
    """The suggested values, or why there are none."""

    params: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    trouble: str = ""


class GpProcess:
    """The process; it is started by the first question and kept for the next ones.

    Args:
        command: What is started instead, in tests.
        answer_s: Longest wait for an answer.
    """

    def __init__(self, command: tuple[str, ...] = (), answer_s: float = ANSWER_S) -> None:
        self._trouble = ""
        module = python_command("dryfit.search.gp_process", "--parent", str(os.getpid()))
        environment = {**public_environment(os.environ), **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
        self._process = Answering(command or module, environment=environment, answer_s=answer_s)

    def __enter__(self) -> "GpProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def warm(self) -> None:
        """Start the process before its first question."""
        with suppress(OSError):  # the question will tell
            self._process.start()

    def ask(self, question: GpQuestion) -> Mapping[str, Scalar] | None:
        """Return the suggested values; None where two processes gave none."""
        troubles: list[str] = []
        for _ in range(_TRIES):
            try:
                answer = GpAnswer.model_validate_json(self._process.ask(question.model_dump_json()))
            except (OSError, ValueError) as error:  # it could not start, is silent, has died, or answers nonsense
                answer = GpAnswer(trouble=" ".join(str(error).split())[:200])
            if answer.params.keys() == question.space.keys():
                return answer.params
            self.end()
            troubles.append(answer.trouble or "it answered something else")
        self._trouble = f"the Gaussian process gave no suggestion ({'; then '.join(dict.fromkeys(troubles))})"
        return None

    def take_trouble(self) -> str:
        """Return once why a question had no answer, in words; empty: each had one."""
        trouble, self._trouble = self._trouble, ""
        return trouble

    def end(self) -> None:
        """End the process."""
        self._process.end()


def ask_once(question: GpQuestion) -> Mapping[str, Scalar] | None:
    """Ask a process that is ended afterwards."""
    with GpProcess() as process:
        return process.ask(question)


# What a sampler may read to draw the parameters of one trial, and which trials it sees.


FreeParams: TypeAlias = Mapping[str, Distribution]
"""The parameters of one group that have more than one value, by internal name."""

Draw: TypeAlias = Callable[[FreeParams], Mapping[str, Scalar]]
"""Draws a group of parameters."""


SEES_REFUSALS: Final[Mapping[SamplerName, bool]] = {
    SamplerName.TPE: True,
    SamplerName.RANDOM: False,
    SamplerName.QMC: False,
    SamplerName.NSGA2: False,
    SamplerName.GP: True,
    SamplerName.CMAES: False,
}
"""Whether a sampler sees refused trials, as infeasible ones, which rank below every trial that ran.

TPE and the Gaussian process then turn away from what does not fit; if they were failed or hidden it would be proposed
again and again. The others read no history, or only complete trials, and asking them again is cheap."""


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """The input of a sampler that draws the parameters of one trial.

    Attributes:
        space: What may be drawn.
        history: The trials so far.
        search: The sampler's settings.
        directions: Whether each goal is maximised or minimised.
        seed: The study's seed.
        number: The number of the next trial.
        ask_gp: Asks the process of Gaussian processes; None where it gives no answer.
    """

    space: Space
    history: History
    search: SearchSettings
    directions: tuple[Direction, ...]
    seed: int
    number: int
    ask_gp: Callable[[GpQuestion], Mapping[str, Scalar] | None] = ask_once

    @property
    def trial_seed(self) -> int:
        """The seed of this trial's draws."""
        return derive_seed(self.seed, "suggest", self.number)

    @property
    def sees_refusals(self) -> bool:
        """Whether the sampler sees refused trials."""
        return SEES_REFUSALS[self.search.sampler]

    def unconditional(self) -> dict[str, Distribution]:
        """Return the parameters that every trial has and that have more than one value, by internal name."""
        every = (param for param in self.space.params if not param.when and not param.distribution.single())
        return {param.internal: param.distribution for param in every}


# Samplers: the trials that each reads, and how each draws the parameters of a trial.
#
# Optuna's samplers keep state in a long-lived study. Here each gets a scratch study with the state that it would have
# by now, worked out from the history alone. :mod:`dryfit.search.history_view` selects the trials that they see.
# Gaussian processes need torch, and so are asked in a process of their own (:mod:`dryfit.search.samplers`).


_GP_BEST = 50
_GP_LAST = 150
"""What is read of the ended trials: all up to 200. What a suggestion costs grows with the cube of their number."""

_UNKNOWN_EXCESS = 0.1
"""Of a trial that ran out of memory, or failed because of its parameters, whatever its plan said."""


def gaussian_process(inputs: SamplerInput, otherwise: Draw) -> Draw:
    """Draw the keys without a condition together, by Optuna's GP sampler; the others, and all at first, otherwise.

    Complete trials and those that run are learned from. One that did not fit is an infeasible point: Optuna models how
    far trials are beyond the device's memory and multiplies the chance of fitting in. It has no value, so it is given
    the worst that was seen.
    """
    free = inputs.unconditional()
    trials = _gp_trials(inputs, free)
    if not free or sum(bool(trial.values) and (trial.excess or 0) <= 0 for trial in trials) < _gp_needed(inputs):
        return otherwise
    question = GpQuestion(
        space={name: to_text(kind) for name, kind in free.items()},
        directions=inputs.directions,
        trials=tuple(trials),
        seed=inputs.trial_seed,
    )
    point: Mapping[str, Scalar] | None = None

    def draw(group: FreeParams) -> Mapping[str, Scalar]:
        nonlocal point
        if not group or not group.keys() <= free.keys():
            return otherwise(group)
        point = inputs.ask_gp(question) if point is None else point
        return otherwise(group) if point is None else {name: point[name] for name in group}

    return draw


def _gp_needed(inputs: SamplerInput) -> int:
    return max(1, inputs.search.startup_trials)


def _gp_trials(inputs: SamplerInput, free: FreeParams) -> list[GpTrial]:
    """Return the trials to learn from, by number: those that have a value of every key."""
    directions = inputs.directions
    seen = inputs.history.projected(("gp", directions), lambda: _GpLearned(directions)).window.records()
    worst = _worst_values([record.values or () for record in seen if record.outcome is Outcome.COMPLETE], directions)
    constrained = any(record.outcome is Outcome.REFUSED for record in seen)
    trials: list[GpTrial] = []
    for record in sorted([*seen, *inputs.history.running], key=lambda record: record.number):
        params = inputs.space.read(record.params, record.own)
        if not free.keys() <= params.keys():
            continue
        known = {name: params[name] for name in free}
        if record.outcome is None:
            trials.append(GpTrial(params=known))
        elif record.outcome is Outcome.REFUSED:
            above = record.excess if record.excess is not None and record.excess > 0 else _UNKNOWN_EXCESS
            trials.append(GpTrial(params=known, values=worst, excess=above))
        else:
            below = min(0.0, record.excess or 0.0) if constrained else None
            trials.append(GpTrial(params=known, values=record.values or (), excess=below))
    return trials


class _GpLearned:
    """A projection of the ended trials: those that are learned from, complete ones with finite values and refused ones.

    Args:
        directions: Whether each goal is maximised or minimised.
    """

    def __init__(self, directions: tuple[Direction, ...]) -> None:
        self.window = Window(directions, refused=True, best=_GP_BEST, last=_GP_LAST)

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended."""
        finite = record.outcome is Outcome.COMPLETE and all(isfinite(value) for value in record.values or ())
        if finite or record.outcome is Outcome.REFUSED:
            self.window.apply(record)


def _worst_values(values: Sequence[Sequence[float]], directions: Sequence[Direction]) -> tuple[float, ...]:
    """Return the worst value of each goal; zeros where there is none, which no sampler is then asked about."""
    columns = zip(*values, strict=True) if values else [(0.0,)] * len(directions)
    worse = (min if direction is Direction.MAXIMIZE else max for direction in directions)
    return tuple(pick(column) for pick, column in zip(worse, columns, strict=True))


def demand_package(sampler: SamplerName) -> None:
    """Refuse to begin where a sampler lacks its package.

    Raises:
        MachineError: It is not installed.
    """
    if sampler is SamplerName.CMAES and find_spec("cmaes") is None:
        hint = "pip install 'dryfit[cmaes]'"
        raise MachineError('preparing search.sampler = "cmaes"', "cmaes is not installed", "cmaes >= 0.12", hint)


def cma_es(inputs: SamplerInput, otherwise: Draw) -> Draw:
    """Draw the numbers without a condition together by CMA-ES; choices and conditional keys otherwise.

    As with NSGA-II, a generation is so many complete trials by number, whatever made them. Optuna counts only trials
    that were drawn from the present distribution, so that of trials side by side many are lost.
    """
    free = {
        name: kind for name, kind in inputs.unconditional().items() if not isinstance(kind, CategoricalDistribution)
    }
    if not free:
        return otherwise
    demand_package(inputs.search.sampler)
    require("suggesting values by CMA-ES", CMAES)
    (direction,) = inputs.directions
    size = population_size(len(free))
    step = partial(_cma_asked, free, direction, size)

    def follow(generation: Sequence[TrialRecord], before: _CmaState | None) -> _CmaState:
        told = [(_cma_values(inputs.space, record), record.value or 0.0) for record in generation]
        return step(before, told, seed=0)[1]

    def counts(record: TrialRecord) -> bool:
        has_value = record.outcome is Outcome.COMPLETE and record.value is not None and isfinite(record.value)
        return has_value and free.keys() <= _cma_values(inputs.space, record).keys()

    key = ("cmaes", id(inputs.space), direction)  # the projection holds the space, so no other gets its id
    state = inputs.history.projected(key, lambda: Generations(size, counts, follow)).latest()
    point, _ = step(state, (), seed=inputs.trial_seed)

    def draw(group: FreeParams) -> Mapping[str, Scalar]:
        rest = {name: kind for name, kind in group.items() if name not in point}
        return {**{name: point[name] for name in group if name in point}, **otherwise(rest)}

    return draw


def population_size(dimensions: int) -> int:
    """Return the trials of a generation (Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv:1604.00772)."""
    return 4 + math.floor(3 * math.log(dimensions))


_CmaState = tuple[int, dict[str, Any]]
"""Generations so far, and the attributes in which Optuna keeps the distribution after them."""


def _cma_values(space: Space, record: TrialRecord) -> dict[str, Scalar]:
    return space.read(record.params, record.own)


def _cma_asked(
    free: FreeParams,
    direction: Direction,
    size: int,
    before: _CmaState | None,
    told: Sequence[tuple[Mapping[str, Scalar], float]],
    seed: int,
) -> tuple[Mapping[str, Scalar], _CmaState]:
    """Tell Optuna's sampler a generation, or nothing, and ask it; return the point, and the state after it."""
    generations, attrs = before or (0, {})
    trials: list[ScratchTrial] = [
        scratch_trial(TrialState.COMPLETE, params=params, values=[value], system_attrs={CMA_GENERATION: generations})
        for params, value in told
    ]
    if attrs:
        trials.append(scratch_trial(TrialState.COMPLETE, values=[0.0], system_attrs=attrs))
    sampler = CmaEsSampler(seed=seed, popsize=size, n_startup_trials=0, warn_independent_sampling=False)
    study = ScratchStudy(trials, scratch_trial(TrialState.RUNNING), directions=[direction], sampler=sampler)
    point = sampler.sample_relative(study.study, study.trial, dict(free))
    kept = {key: value for key, value in study.trial.system_attrs.items() if key.startswith(CMA_OPTIMIZER)}
    return point, (generations + 1, kept)


_BEST = 50
_LAST = 650
"""What TPE reads of the finished trials: all up to 700, as many as it can at the cost that docs/search.md promises. It
draws candidates around the best 25 and takes the one with the fewest trials near it, so the best are never forgotten;
and what it proposes is near what it proposed lately, so the last trials say most about what has been tried there.
docs/benchmarks.md compares windows."""


def make_draw(inputs: SamplerInput) -> Draw:
    """Return the function that draws this trial's groups of parameters."""
    match inputs.search.sampler:
        case SamplerName.TPE:
            return _tpe(inputs) or _random(inputs)
        case SamplerName.RANDOM:
            return _random(inputs)
        case SamplerName.QMC:
            return _qmc(inputs)
        case SamplerName.NSGA2:
            return _nsga2(inputs)
        case SamplerName.GP:
            return gaussian_process(inputs, _tpe(inputs) or _random(inputs))
        case SamplerName.CMAES:
            return cma_es(inputs, _tpe(inputs) or _random(inputs))


def drawn_otherwise(space: Space, sampler: SamplerName) -> tuple[str, ...]:
    """Return the searched keys that a sampler leaves to TPE, by public name, in order."""
    if sampler not in (SamplerName.GP, SamplerName.CMAES):
        return ()
    left = (
        param.name
        for param in space.params
        if param.when or (sampler is SamplerName.CMAES and isinstance(param.distribution, CategoricalDistribution))
    )
    return tuple(dict.fromkeys(left))


def _random(inputs: SamplerInput) -> Draw:
    sampler = RandomSampler(seed=inputs.trial_seed)
    study = _study([], inputs, sampler)

    def draw(free: FreeParams) -> Mapping[str, Scalar]:
        return {name: sampler.sample_independent(study.study, study.trial, name, kind) for name, kind in free.items()}

    return draw


def _study(trials: Sequence[ScratchTrial], inputs: SamplerInput, sampler: BaseSampler) -> ScratchStudy:
    return ScratchStudy(trials, scratch_trial(TrialState.RUNNING), directions=inputs.directions, sampler=sampler)


# ---- TPE


class TpeMemory:
    """A projection of the ended trials: those that TPE reads, each converted for Optuna once.

    Args:
        space: Today's space, in which their values are read.
        directions: Whether each goal is maximised or minimised.
        refused: Whether refused trials are visible.
    """

    def __init__(self, space: Space, directions: tuple[Direction, ...], *, refused: bool) -> None:
        self._space = space
        self._goals = len(directions)
        self._window = Window(directions, refused=refused, best=_BEST, last=_LAST)
        self._trials: dict[int, ScratchTrial] = {}

    @property
    def visible_count(self) -> int:
        """How many trials were visible in all."""
        return self._window.count

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended."""
        self._window.apply(record)

    def trials(self, running: Sequence[TrialRecord]) -> list[ScratchTrial]:
        """Return the trials that TPE reads now and the running ones, by number."""
        read = self._window.records()
        self._trials = {record.number: self._trials.get(record.number) or self._made(record) for record in read}
        every = self._trials | {record.number: self._made(record) for record in running}
        return [every[number] for number in sorted(every)]

    def _made(self, record: TrialRecord) -> ScratchTrial:
        params = self._space.read(record.params, record.own)
        match record.outcome:
            case Outcome.COMPLETE:
                return scratch_trial(TrialState.COMPLETE, params=params, values=record.values)
            case None:
                return scratch_trial(TrialState.RUNNING, params=params)
            case Outcome.PRUNED if self._goals == 1:
                reports = {point.n: point.value for point in record.reports}
                return scratch_trial(TrialState.PRUNED, params=params, reports=reports)
            case _:  # refused; or of several goals, which a report of one of them cannot rank
                return scratch_trial(TrialState.PRUNED, params=params, excess=record.excess)


def _tpe(inputs: SamplerInput) -> Draw | None:
    """Return TPE; None while too few trials are visible to it."""
    space, directions, refused = inputs.space, inputs.directions, inputs.sees_refusals
    key = ("tpe", id(space), directions, refused)  # the memory holds the space, so no other gets its id
    memory = inputs.history.projected(key, lambda: TpeMemory(space, directions, refused=refused))
    if memory.visible_count < inputs.search.startup_trials:
        return None
    running = inputs.history.running
    require("suggesting values by TPE", TPE)
    sampler = NumberedTpe(seed=inputs.trial_seed, multivariate=True, n_startup_trials=0, constant_liar=bool(running))
    study = _study(memory.trials(running), inputs, sampler)

    def draw(free: FreeParams) -> Mapping[str, Scalar]:
        # The order is the space's own and so the same in every process.
        return sampler.sample_relative(study.study, study.trial, dict(free)) if free else {}

    return draw


# ---- QMC


def _qmc(inputs: SamplerInput) -> Draw:
    """Give trial ``n`` point ``n`` of one quasi-random sequence over the whole space.

    Optuna counts the points that it has given out in an attribute of the study, and draws conditional parameters at
    random. Here the number of the trial is the count, so two trials never share a point, and each case of each key has
    a coordinate of its own: those that do not apply to a trial go unused. In any box that conditions cut out of the
    space the points of the sequence are again evenly spread.
    """
    free = {
        param.internal: param.distribution
        for param in sorted(inputs.space.params, key=lambda param: param.internal)
        if not param.distribution.single()
    }
    if not free:
        return lambda group: {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # its constructor says so each time
        sampler = QMCSampler(
            qmc_type=inputs.search.qmc_sequence.value, scramble=True, seed=derive_seed(inputs.seed, "qmc")
        )
    study = _study([], inputs, sampler)
    point = sampler.sample_relative(study.study, study.trial, dict(free))
    if inputs.number > 0:
        study.set_study_attrs(dict.fromkeys(study.study_attrs, inputs.number - 1))
        point = sampler.sample_relative(study.study, study.trial, dict(free))
    return lambda group: {name: point[name] for name in group}


# ---- NSGA-II


def _nsga2(inputs: SamplerInput) -> Draw:
    """Draw children of the parents that Optuna's selection leaves of all full generations.

    A generation is ``population_size`` complete trials, by number; what made them does not matter, so that enqueued
    points and trials of another sampler count. Optuna crosses what all parents have and draws the rest at
    random; here each group of parameters is crossed among the parents that have it.
    """
    at_random = _random(inputs)
    parents = [(inputs.space.read(parent.params, parent.own), parent.values or ()) for parent in nsga2_parents(inputs)]
    names = {param.name for param in inputs.space.params if not param.distribution.single()}

    def draw(free: FreeParams) -> Mapping[str, Scalar]:
        having = [(params, values) for params, values in parents if free.keys() <= params.keys()]
        if not free or len(having) < 2:
            return at_random(free)
        sampler = NSGAIISampler(
            population_size=len(having),
            mutation_prob=1 / len(names),  # one value of a whole point, as Optuna has it without conditions
            seed=derive_seed(inputs.trial_seed, *free),
        )
        study = _study(_generation(having), inputs, sampler)
        child = sampler.sample_relative(study.study, study.trial, dict(free))
        mutated = {name: kind for name, kind in free.items() if name not in child}
        return {**child, **at_random(mutated)}

    return draw


def nsga2_parents(inputs: SamplerInput) -> list[TrialRecord]:
    """Return the parents of the next child, by number; none before the first generation is full."""
    size, directions = inputs.search.population_size, inputs.directions

    def counts(record: TrialRecord) -> bool:
        return record.outcome is Outcome.COMPLETE and is_visible(record, len(directions), refused=False)

    def survivors(generation: Sequence[TrialRecord], parents: list[TrialRecord] | None) -> list[TrialRecord]:
        pool = [*generation, *(parents or ())]
        kept = _selected([record.values or () for record in pool], directions, size)
        return sorted((pool[index] for index in kept), key=lambda record: record.number)

    key = ("nsga2", size, directions)
    return inputs.history.projected(key, lambda: Generations(size, counts, survivors)).latest() or []


def _selected(pool: Sequence[tuple[float, ...]], directions: tuple[Direction, ...], size: int) -> list[int]:
    """Return the indices of those that Optuna's NSGA-II selects from a generation and its parents."""
    sampler = NSGAIISampler(population_size=size, seed=0)  # selection draws nothing
    trial = scratch_trial(TrialState.RUNNING)
    study = ScratchStudy(_generation([({}, own) for own in pool]), trial, directions=directions, sampler=sampler)
    return [trial.number for trial in sampler.select_parent(study.study, 1)]


def _generation(trials: Sequence[tuple[Mapping[str, Scalar], Sequence[float]]]) -> list[ScratchTrial]:
    """Return complete trials of generation 0 with some parameters and values."""
    require("suggesting values by NSGA-II", NSGA2)
    attrs = {GENERATION: 0}
    return [scratch_trial(TrialState.COMPLETE, params=params, values=own, system_attrs=attrs) for params, own in trials]


# Suggest the parameters of the next trial: a pure function of space, history, study seed and trial number.
#
# Each call fills a scratch study with what the sampler reads of the history and asks a new sampler, seeded by the
# trial's number. So the suggestion after a crash is the one that would have been made without it. The space is
# declared, so no search space is inferred from history: parameters with one condition are one group, drawn together,
# and only groups that apply are drawn. Together with TPE's window, and projections of the history that hold what
# samplers read, this keeps the cost flat.


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The parameters of the next trial.

    Attributes:
        params: Values by public dotted name.
        internal: The same values by internal name.
        distributions: Optuna's JSON of the distribution behind each internal name.
        enqueued: The enqueued point it is made from; empty where there is none.
    """

    params: dict[str, Scalar]
    internal: dict[str, Scalar]
    distributions: dict[str, str]
    enqueued: dict[str, Scalar] = field(default_factory=dict[str, Scalar])


def suggest(
    space: Space,
    history: Iterable[TrialRecord],
    *,
    search: SearchSettings,
    directions: tuple[Direction, ...],
    points: Sequence[Point],
    seed: int,
    number: int,
) -> Suggestion:
    """Choose the values of one trial.

    The sampler sees a completed trial with its values, a pruned one with its reports, a running one as running, and a
    refused one if :data:`~dryfit.search.samplers.SEES_REFUSALS` says so; others are not visible, see
    :func:`~dryfit.search.history_view.is_visible`.

    Args:
        space: What may be drawn.
        history: All trials so far; those with this number or a later one are ignored. A
            :class:`~dryfit.ledger.state.History` makes the cost independent of its length.
        search: Which sampler, and its settings.
        directions: Whether each goal is maximised or minimised.
        points: Enqueued points, see :func:`~dryfit.search.space.enqueued_points`. The first that no trial was
            made from gives its values, as far as the space allows them; the rest is drawn.
        seed: The study's seed.
        number: The number of the next trial.
    """
    past = as_history(history).before(number)
    inputs = SamplerInput(space=space, history=past, search=search, directions=directions, seed=seed, number=number)
    return suggest_next(inputs, points)


def suggest_next(inputs: SamplerInput, points: Sequence[Point]) -> Suggestion:
    """Choose the values of one trial, see :func:`suggest`."""
    enqueued = next_enqueued(points, inputs.history)
    return replace(suggest_at(inputs, enqueued), enqueued=dict(enqueued))


def suggest_at(inputs: SamplerInput, given: Point) -> Suggestion:
    """Choose the values of a trial that is to have some of them already, as far as the space allows these.

    Group after group is drawn; one whose condition does not hold is left out.
    """
    space, draw = inputs.space, make_draw(inputs)
    drawn: dict[str, Scalar] = {}
    chosen: dict[str, Param] = {}
    for group in space.groups:
        if not group[0].applies(drawn):
            continue
        values = _draw_group(group, draw)
        for param in group:
            wanted = given.get(param.name)
            drawn[param.name] = wanted if param.contains(wanted) else values[param.internal]
            chosen[param.name] = param
    return Suggestion(
        params={name: drawn[name] for name in space.names if name in drawn},
        internal={chosen[name].internal: drawn[name] for name in space.names if name in drawn},
        distributions={param.internal: to_text(param.distribution) for param in chosen.values()},
    )


def _draw_group(group: tuple[Param, ...], draw: Draw) -> Mapping[str, Scalar]:
    fixed: dict[str, Scalar] = {p.internal: only_value(p.distribution) for p in group if p.distribution.single()}
    free = {p.internal: p.distribution for p in group if p.internal not in fixed}
    return fixed | {name: into_range(free[name], value) for name, value in draw(free).items()}
