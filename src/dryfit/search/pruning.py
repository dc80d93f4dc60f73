"""Whether a trial goes on after a report: a pure function of the history.

Optuna's own pruners decide, on a throw-away study that holds only what they read. ASHA remembers which rungs a trial
has completed in the trial's system attributes; a verdict returns the new ones, and the ledger keeps them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np
from optuna.pruners import MedianPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from dryfit.config.schema import PrunerName, SearchSettings
from dryfit.core.errors import InternalError
from dryfit.core.settings import Direction
from dryfit.core.trial import Outcome, TrialRecord
from dryfit.search.throwaway import Sealed, ThrowAway, sealed

_RUNG_PREFIX = "completed_rung_"
"""What Optuna's successive halving calls its system attributes."""


@dataclass(frozen=True, slots=True)
class PruneVerdict:
    """The answer to a report.

    Attributes:
        proceed: Whether the trial goes on.
        system_attrs: What the pruner must find in this trial from now on.
        reason: One sentence.
    """

    proceed: bool
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    reason: str = ""


def judge(history: Sequence[TrialRecord], number: int, *, search: SearchSettings, direction: Direction) -> PruneVerdict:
    """Judge the latest report of a trial.

    The first ``warmup_reports`` reports of a trial prune it under no pruner.

    Args:
        history: All trials so far, this one and its latest report included.
        number: The trial that reported.
        search: Which pruner, and its settings.
        direction: What is better.
    """
    if search.pruner is PrunerName.NONE:
        return PruneVerdict(True, reason="no pruner")
    own = next((record for record in history if record.number == number), None)
    if own is None:
        raise InternalError("judging a report", f"history has no trial {number}")
    if not own.reports:
        return PruneVerdict(True, reason="nothing reported yet")
    others = [record for record in history if record.number != number]
    match search.pruner:
        case PrunerName.MEDIAN:
            return _median(own, others, search, direction)
        case PrunerName.ASHA:
            return _asha(own, others, search, direction)


def _median(
    own: TrialRecord, others: Iterable[TrialRecord], search: SearchSettings, direction: Direction
) -> PruneVerdict:
    n = own.reports[-1].n
    completed = [record for record in others if record.outcome is Outcome.COMPLETE]
    if not completed or len(completed) < search.pruner_startup_trials:
        needed = max(1, search.pruner_startup_trials)
        return PruneVerdict(True, reason=f"{len(completed)} of {needed} complete trials a median needs")
    if n < search.warmup_reports:
        return PruneVerdict(True, reason="warming up")
    if all(isnan(point.value) for point in own.reports):
        # As Optuna decides; its own way there warns from inside numpy.
        return PruneVerdict(False, reason="every report is NaN")
    # NaN has no place in a median, and Optuna leaves it out, but with a warning where nothing else is there.
    at_n = [
        sealed(TrialState.COMPLETE, value=0.0, reports={n: point.value})
        for record in completed
        for point in record.reports
        if point.n == n and not isnan(point.value)
    ]
    if not at_n:
        return PruneVerdict(True, reason=f"no complete trial has report {n}")
    reports = {point.n: point.value for point in own.reports}
    pruner = MedianPruner(n_startup_trials=0, n_warmup_steps=search.warmup_reports)
    study = ThrowAway(
        at_n,
        sealed(TrialState.RUNNING, reports=reports),
        direction=direction,
        sampler=RandomSampler(),
        pruner=pruner,
    )
    with np.errstate(invalid="ignore"):  # two infinities around the median: NaN, which prunes nothing
        stop = pruner.prune(study.study, study.trial)
    side = "worse" if stop else "no worse"
    return PruneVerdict(not stop, reason=f"{side} than the median of {len(at_n)} trials at report {n}")


def _asha(
    own: TrialRecord, others: Iterable[TrialRecord], search: SearchSettings, direction: Direction
) -> PruneVerdict:
    """Optuna's asynchronous successive halving; its resource is the number of reports, so its steps count from 1.

    With a warm-up of w and a reduction of r, decisions fall at report w + 1, (w + 1) r, (w + 1) r^2, ...
    """
    pruner = SuccessiveHalvingPruner(min_resource=search.warmup_reports + 1, reduction_factor=search.reduction)
    trial = sealed(
        TrialState.RUNNING,
        reports={point.n + 1: point.value for point in own.reports},
        system_attrs=own.system_attrs,
    )
    study = ThrowAway(_on_rungs(others), trial, direction=direction, sampler=RandomSampler(), pruner=pruner)
    stop = pruner.prune(study.study, study.trial)
    after: dict[str, float] = study.trial.system_attrs
    new = {key: value for key, value in after.items() if key not in own.system_attrs}
    n = own.reports[-1].n
    if stop and isnan(own.reports[-1].value):
        return PruneVerdict(False, new, f"report {n} is NaN")
    if stop:
        return PruneVerdict(False, new, f"not among the best 1/{search.reduction} of its rung at report {n}")
    return PruneVerdict(True, new, f"promoted at report {n}" if new else f"report {n} decides no rung")


def _on_rungs(records: Iterable[TrialRecord]) -> list[Sealed]:
    """Only the rungs of other trials are read; how those ended does not matter."""
    rungs = [
        {key: value for key, value in record.system_attrs.items() if key.startswith(_RUNG_PREFIX)}
        for record in records
        if record.system_attrs
    ]
    return [sealed(TrialState.RUNNING, system_attrs=one) for one in rungs if one]
