"""Parameter importances: how much each searched parameter mattered for the best results, and of how many trials."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome, TrialRecord
from dryfit.search.space.params import from_text, public_name

FEWEST_TRIALS = 10
"""Complete trials below which nothing is computed."""
ENOUGH_TRIALS = 50
"""Complete trials from which the best tenth holds the 5 that Optuna asks for."""
_TOP_SHARE = 0.1
_TOP_TRIALS = 5
_TIMEOUT_S = 120.0


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


def importances_of(
    history: Sequence[TrialRecord], direction: Direction, *, timeout_s: float = _TIMEOUT_S
) -> Importances:
    """Compute importances in a short-lived process; a failure there is a reason, not an error.

    Args:
        history: All trials; complete ones with a finite value count.
        direction: Whether larger or smaller values are better.
        timeout_s: How long the process may take.
    """
    counted = [trial for trial in history if _counts(trial)]
    top = max(_TOP_TRIALS, math.ceil(_TOP_SHARE * len(counted)))
    if len(counted) < FEWEST_TRIALS:
        return Importances(len(counted), top, missing=f"it takes at least {FEWEST_TRIALS} complete trials")
    trials = [_public(trial) for trial in counted]
    counts: dict[str, int] = {}
    for params, _ in trials:
        for name in params:
            counts[name] = counts.get(name, 0) + 1
    if not counts:
        return Importances(len(counted), top, missing="no parameter could take more than one value")
    request = {
        "direction": direction.value,
        "quantile": top / len(counted),
        "trials": [
            {"params": params, "distributions": distributions, "value": trial.value}
            for trial, (params, distributions) in zip(counted, trials, strict=True)
        ],
    }
    shares, missing = _asked(json.dumps(request), timeout_s)
    params = [Importance(name, share, counts[name]) for name, share in shares.items()]
    return Importances(len(counted), top, tuple(sorted(params, key=lambda param: (-param.share, param.name))), missing)


def _counts(trial: TrialRecord) -> bool:
    return trial.outcome is Outcome.COMPLETE and trial.value is not None and math.isfinite(trial.value)


def _public(trial: TrialRecord) -> tuple[dict[str, object], dict[str, str]]:
    """Parameters and distributions by public name, those that could take one value only left out."""
    drawn = {name: text for name, text in trial.distributions.items() if name in trial.params and not _single(text)}
    params = {public_name(name): trial.params[name] for name in drawn}
    return cast("dict[str, object]", params), {public_name(name): text for name, text in drawn.items()}


@cache
def _single(distribution: str) -> bool:
    return from_text(distribution).single()


def _asked(request: str, timeout_s: float) -> tuple[dict[str, float], str]:
    command = [sys.executable, "-P", "-m", "dryfit.search.sampling.importance_process"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"the process that computes it did not answer: {error}"
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {}, f"the process that computes it failed: {last[0]}"
    return json.loads(done.stdout)["importances"], ""
