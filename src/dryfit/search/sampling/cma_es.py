"""CMA-ES: generations of complete trials move and shape a normal distribution, from which the next trial is drawn."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from math import isfinite
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.samplers import CmaEsSampler
from optuna.trial import TrialState

from dryfit.config.schema import SamplerName
from dryfit.core.errors import MachineError
from dryfit.core.private_names import require
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome, Scalar, TrialRecord
from dryfit.search.private_apis import CMA_GENERATION, CMA_OPTIMIZER, CMAES
from dryfit.search.sampling.history_view import Generations
from dryfit.search.sampling.sampler_input import Draw, FreeParams, SamplerInput
from dryfit.search.sampling.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.search.space.space import Space


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
    step = partial(_asked, free, direction, size)

    def follow(generation: Sequence[TrialRecord], before: _State | None) -> _State:
        told = [(_values(inputs.space, record), record.value or 0.0) for record in generation]
        return step(before, told, seed=0)[1]

    def counts(record: TrialRecord) -> bool:
        has_value = record.outcome is Outcome.COMPLETE and record.value is not None and isfinite(record.value)
        return has_value and free.keys() <= _values(inputs.space, record).keys()

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


_State = tuple[int, dict[str, Any]]
"""Generations so far, and the attributes in which Optuna keeps the distribution after them."""


def _values(space: Space, record: TrialRecord) -> dict[str, Scalar]:
    return space.read(record.params, record.own)


def _asked(
    free: FreeParams,
    direction: Direction,
    size: int,
    before: _State | None,
    told: Sequence[tuple[Mapping[str, Scalar], float]],
    seed: int,
) -> tuple[Mapping[str, Scalar], _State]:
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
