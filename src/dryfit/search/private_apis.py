"""Private names of Optuna, with self-tests; ``dryfit.meta.private_apis`` has those of other libraries."""

from typing import Final

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import CmaEsSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from dryfit.search.history_view import Floats
from dryfit.search.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.settings.choices import Direction
from dryfit.settings.private_names import PrivateNames

NAMES: Final = (
    # working out the numbers of a trial's values once, and not in each suggestion; until: Optuna keeps them
    # from one suggestion to the next
    "optuna.samplers.TPESampler._get_internal_repr",
    # giving trials of a scratch study their generation; until: NSGAIISampler takes the parents that it shall
    # choose from
    "optuna.samplers.NSGAIISampler._get_generation_key",
    # giving trials of a scratch study their generation; until: CmaEsSampler takes the generation that it shall
    # learn from
    "optuna.samplers.CmaEsSampler._attr_key_generation",
    # keeping the distribution that a generation has left; until: CmaEsSampler gives its state, and takes it
    "optuna.samplers.CmaEsSampler._attr_key_optimizer",
)

GENERATION: Final = "NSGAIISampler:generation"
"""System attribute in which Optuna's NSGA-II keeps the generation of a trial, as ``_get_generation_key`` says."""

CMA_GENERATION: Final = "cma:generation"
CMA_OPTIMIZER: Final = "cma:optimizer"
"""System attributes in which Optuna's CMA-ES keeps the generation of a trial, and, in parts, the distribution."""


class NumberedTpe(TPESampler):
    """Optuna's TPE, with the numbers of each trial's values worked out once instead of in each suggestion."""

    def _get_internal_repr(
        self, trials: list[FrozenTrial], search_space: dict[str, BaseDistribution], study: optuna.Study
    ) -> dict[str, Floats]:
        rows = [row for trial in trials if isinstance(trial, ScratchTrial) and (row := trial.in_numbers(search_space))]
        columns = np.array(rows, dtype=np.float64).reshape(-1, len(search_space)).T
        return dict(zip(search_space, columns, strict=True))

    def agrees(self, trials: list[ScratchTrial], space: dict[str, BaseDistribution], study: optuna.Study) -> bool:
        """Whether Optuna works out the same numbers."""
        theirs = super()._get_internal_repr([*trials], space, study)
        ours = self._get_internal_repr([*trials], space, study)
        return theirs.keys() == ours.keys() and all(np.array_equal(theirs[name], ours[name]) for name in ours)


def _tpe_misbehaves() -> str:
    space: dict[str, BaseDistribution] = {"x": FloatDistribution(0.1, 10.0, log=True), "y": FloatDistribution(0, 1)}
    points = ({"x": 1.0, "y": 0.5}, {"x": 2.0}, {"x": 3.0, "y": 0.25})
    trials = [scratch_trial(TrialState.COMPLETE, params=params, values=[0.0]) for params in points]
    asked, sampler = scratch_trial(TrialState.RUNNING), NumberedTpe(seed=0, multivariate=True, n_startup_trials=0)
    study = ScratchStudy(trials, asked, directions=[Direction.MAXIMIZE], sampler=sampler)
    sampler.sample_relative(study.study, study.trial, space)
    if any(trial.known.keys() != {("x", "y")} for trial in trials):
        return "optuna.samplers.TPESampler no longer asks _get_internal_repr for the numbers of trials"
    if not sampler.agrees(trials, space, study.study):
        return "optuna.samplers.TPESampler._get_internal_repr gives other numbers than those of each trial that has all"
    return ""


def _nsga2_misbehaves() -> str:
    found = NSGAIISampler._get_generation_key()  # pyright: ignore[reportPrivateUsage]
    return "" if found == GENERATION else f"NSGAIISampler keeps the generation of a trial as {found!r}"


def _cmaes_misbehaves() -> str:
    sampler = CmaEsSampler()
    found = sampler._attr_key_generation, sampler._attr_key_optimizer  # pyright: ignore[reportPrivateUsage]
    return "" if found == (CMA_GENERATION, CMA_OPTIMIZER) else f"CmaEsSampler keeps its state as {found}"


TPE: Final = PrivateNames("optuna", NAMES[:1], _tpe_misbehaves)
NSGA2: Final = PrivateNames("optuna", NAMES[1:2], _nsga2_misbehaves)
CMAES: Final = PrivateNames("optuna", NAMES[2:], _cmaes_misbehaves)
