"""Parameter importances: how much each searched parameter mattered for the best results, and of how many trials."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import optuna
from optuna.trial import FrozenTrial

from dryfit.search.scratch_study import THROW_AWAY
from dryfit.search.space import Distribution, from_text, public_name
from dryfit.settings.choices import Direction
from dryfit.settings.trial import Outcome, TrialRecord

FEWEST_TRIALS = 10
"""Complete trials below which nothing is computed."""
ENOUGH_TRIALS = 50
"""Complete trials from which the best tenth holds the 5 that Optuna asks for."""
_TOP_SHARE = 0.1
_TOP_TRIALS = 5


@dataclass(frozen=True, slots=True)
class Importance:
    """One parameter.

    Attributes:
        name: Public dotted name; all its cases count as one.
        share: Its share of all importances.
        trials: Complete trials that drew it.
    """

    name: str
    share: float
    trials: int


@dataclass(frozen=True, slots=True)
class Importances:
    """All parameters, the most important first; empty with a reason where nothing was computed.

    Attributes:
        trials: Complete trials with a finite value.
        top: How many of them count as the best ones.
    """

    trials: int
    top: int
    params: tuple[Importance, ...] = ()
    missing: str = ""


def importances_of(history: Sequence[TrialRecord], direction: Direction) -> Importances:
    """Compute importances; that part of Optuna imports scikit-learn and scipy, which takes a second the first time.

    The method is Optuna's default, PED-ANOVA with conditional parameters (Watanabe, Bansal and Hutter, IJCAI 2023,
    arXiv:2304.10255; its extension to conditions, arXiv:2601.20800).

    Args:
        history: All trials; complete ones with a finite value count.
        direction: Whether larger or smaller values are better.
    """
    counted = [trial for trial in history if _counts(trial)]
    top = max(_TOP_TRIALS, math.ceil(_TOP_SHARE * len(counted)))
    if len(counted) < FEWEST_TRIALS:
        return Importances(len(counted), top, missing=f"it takes at least {FEWEST_TRIALS} complete trials")
    trials = [_public(trial) for trial in counted]
    counts = Counter(name for trial in trials for name in trial.params)
    if not counts:
        return Importances(len(counted), top, missing="no parameter could take more than one value")
    shares = _shares(trials, direction, quantile=top / len(counted))
    params = [Importance(name, share, counts[name]) for name, share in shares.items()]
    return Importances(len(counted), top, tuple(sorted(params, key=lambda param: (-param.share, param.name))))


def _shares(trials: Sequence[FrozenTrial], direction: Direction, *, quantile: float) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    study = optuna.create_study(study_name=THROW_AWAY, direction=direction.value)
    study.add_trials(trials)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beside each number stands how many trials it is from
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=quantile))


def _counts(trial: TrialRecord) -> bool:
    return trial.outcome is Outcome.COMPLETE and trial.value is not None and math.isfinite(trial.value)


def _public(trial: TrialRecord) -> FrozenTrial:
    """Return a trial with parameters by public name, those that could take one value only left out."""
    drawn = {name: _distribution(text) for name, text in trial.distributions.items() if name in trial.params}
    free = {name: distribution for name, distribution in drawn.items() if not distribution.single()}
    return optuna.create_trial(
        value=trial.value,
        params={public_name(name): trial.params[name] for name in free},
        distributions={public_name(name): distribution for name, distribution in free.items()},
    )


@cache
def _distribution(text: str) -> Distribution:
    return from_text(text)
