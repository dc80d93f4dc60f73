"""Samplers: what each reads of the history, and how it draws the parameters of one trial.

Optuna's samplers keep state in a long-lived study. Here each gets a scratch study with the state that it would have by
now, worked out from the history alone. :mod:`dryfit.search.sampling.history_view` selects the trials that they see.
"""

import warnings
from collections.abc import Mapping, Sequence

from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, QMCSampler, RandomSampler
from optuna.trial import TrialState

from dryfit.config.schema import SamplerName
from dryfit.core.private_names import require
from dryfit.core.seeds import derive_seed
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome, Scalar, TrialRecord
from dryfit.search.private_apis import GENERATION, NSGA2, TPE, NumberedTpe
from dryfit.search.sampling.cma_es import cma_es
from dryfit.search.sampling.gaussian_process import gaussian_process
from dryfit.search.sampling.history_view import Generations, Window, is_visible
from dryfit.search.sampling.sampler_input import Draw, FreeParams, SamplerInput
from dryfit.search.sampling.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.search.space.space import Space

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
