"""Whether a trial goes on after a report: a pure function of the history.

Optuna's own pruners decide, on a throw-away study that holds only what they read. ASHA remembers which rungs a trial
has completed in the trial's system attributes; a verdict returns the new ones, and the ledger keeps them.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, PatientPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from dryfit.config.schema import PatientOf, PrunerName, SearchSettings
from dryfit.core.errors import InternalError
from dryfit.core.settings import Direction, TrialSettings
from dryfit.core.trial import Outcome, TrialRecord
from dryfit.search.space import Space
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


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides beside the history.

    Attributes:
        search: Which pruner, and its settings.
        direction: What is better.
        study: Name of the study; Hyperband deals its trials out by it.
        most_reports: Reports of the longest trial that the study can have; Hyperband's maximum resource.
    """

    search: SearchSettings
    direction: Direction
    study: str
    most_reports: int


def most_reports(space: Space, settings: TrialSettings) -> int:
    """Reports of the longest trial that a space can have."""
    epochs = space.most("train.epochs", settings.train.epochs)
    return int(epochs * space.most("train.evals_per_epoch", settings.train.evals_per_epoch))


def judge(history: Sequence[TrialRecord], number: int, rules: Rules) -> PruneVerdict:
    """Judge the latest report of a trial.

    The first ``warmup_reports`` reports of a trial prune it under no pruner.

    Args:
        history: All trials so far, this one and its latest report included.
        number: The trial that reported.
        rules: Which pruner, and what it goes by.
    """
    pruner = rules.search.pruner
    if pruner is PrunerName.NONE:
        return PruneVerdict(True, reason="no pruner")
    own = next((record for record in history if record.number == number), None)
    if own is None:
        raise InternalError("judging a report", f"history has no trial {number}")
    if not own.reports:
        return PruneVerdict(True, reason="nothing reported yet")
    others = [record for record in history if record.number != number]
    match pruner:
        case PrunerName.MEDIAN:
            return _median(own, others, rules)
        case PrunerName.ASHA:
            return _asha(own, others, rules)
        case PrunerName.HYPERBAND:
            return _hyperband(own, others, rules)
        case PrunerName.PATIENT:
            behind = _median if rules.search.patient_of is PatientOf.MEDIAN else _asha
            return _spared(own, rules) or behind(own, others, rules)


def _spared(own: TrialRecord, rules: Rules) -> PruneVerdict | None:
    """Why a patient pruner does not ask the one behind it; None where it does.

    Optuna's patient pruner around nothing says whether it would ask.
    """
    allowed = rules.search.patience_reports
    reports = {point.n: point.value for point in own.reports}
    values = [reports[n] for n in sorted(reports)]
    before, since = values[: -allowed - 1], values[-allowed - 1 :]
    # Without a number on either side Optuna spares the trial too, but with a warning from inside numpy.
    if all(isnan(value) for value in before) or all(isnan(value) for value in since):
        return PruneVerdict(True, reason=f"no validation to compare the last {allowed + 1} with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # its constructor says so each time
        pruner = PatientPruner(None, patience=allowed, min_delta=rules.search.min_delta)
    study = _study([], sealed(TrialState.RUNNING, reports=reports), rules, pruner)
    if pruner.prune(study.study, study.trial):
        return None
    return PruneVerdict(True, reason=f"its last {allowed + 1} validations are no worse than those before")


def _study(trials: Iterable[Sealed], trial: Sealed, rules: Rules, pruner: BasePruner) -> ThrowAway:
    sampler = RandomSampler()
    return ThrowAway(trials, trial, directions=(rules.direction,), sampler=sampler, pruner=pruner, label=rules.study)


def _median(own: TrialRecord, others: Iterable[TrialRecord], rules: Rules) -> PruneVerdict:
    search = rules.search
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
        sealed(TrialState.COMPLETE, values=(0.0,), reports={n: point.value})
        for record in completed
        for point in record.reports
        if point.n == n and not isnan(point.value)
    ]
    if not at_n:
        return PruneVerdict(True, reason=f"no complete trial has report {n}")
    reports = {point.n: point.value for point in own.reports}
    pruner = MedianPruner(n_startup_trials=0, n_warmup_steps=search.warmup_reports)
    study = _study(at_n, sealed(TrialState.RUNNING, reports=reports), rules, pruner)
    with np.errstate(invalid="ignore"):  # two infinities around the median: NaN, which prunes nothing
        stop = pruner.prune(study.study, study.trial)
    side = "worse" if stop else "no worse"
    return PruneVerdict(not stop, reason=f"{side} than the median of {len(at_n)} trials at report {n}")


def _asha(own: TrialRecord, others: Iterable[TrialRecord], rules: Rules) -> PruneVerdict:
    """Optuna's asynchronous successive halving; its resource is the number of reports, so its steps count from 1.

    With a warm-up of w and a reduction of r, decisions fall at report w + 1, (w + 1) r, (w + 1) r^2, ...
    """
    search = rules.search
    pruner = SuccessiveHalvingPruner(min_resource=search.warmup_reports + 1, reduction_factor=search.reduction)
    return _halved(own, _on_rungs(others), _climbing(own), rules, pruner)


def _hyperband(own: TrialRecord, others: Iterable[TrialRecord], rules: Rules) -> PruneVerdict:
    """Optuna's Hyperband: brackets of successive halving, the later ones with a longer first rung.

    It deals trials out to brackets by a hash of the study's name and the trial's number, so the throw-away study
    holds every trial under its own number.
    """
    search = rules.search
    pruner = HyperbandPruner(
        min_resource=search.warmup_reports + 1,
        max_resource=rules.most_reports,
        reduction_factor=search.reduction,
    )
    climbing = _climbing(own)
    known = {record.number: record for record in others}
    numbered = [
        climbing if number == own.number else sealed(TrialState.RUNNING, system_attrs=_rungs(known.get(number)))
        for number in range(max([own.number, *known]) + 1)
    ]
    return _halved(own, numbered, climbing, rules, pruner)


def _climbing(own: TrialRecord) -> Sealed:
    reports = {point.n + 1: point.value for point in own.reports}
    return sealed(TrialState.RUNNING, reports=reports, system_attrs=own.system_attrs)


def _halved(
    own: TrialRecord, trials: Iterable[Sealed], climbing: Sealed, rules: Rules, pruner: BasePruner
) -> PruneVerdict:
    study = _study(trials, climbing, rules, pruner)
    stop = pruner.prune(study.study, study.trial)
    after: dict[str, float] = study.trial.system_attrs
    new = {key: value for key, value in after.items() if key not in own.system_attrs}
    n = own.reports[-1].n
    if stop and isnan(own.reports[-1].value):
        return PruneVerdict(False, new, f"report {n} is NaN")
    if stop:
        return PruneVerdict(False, new, f"not among the best 1/{rules.search.reduction} of its rung at report {n}")
    return PruneVerdict(True, new, f"promoted at report {n}" if new else f"report {n} decides no rung")


def _on_rungs(records: Iterable[TrialRecord]) -> list[Sealed]:
    found = [_rungs(record) for record in records]
    return [sealed(TrialState.RUNNING, system_attrs=rungs) for rungs in found if rungs]


def _rungs(record: TrialRecord | None) -> dict[str, float]:
    """All that is read of another trial; how it ended does not matter."""
    attrs = record.system_attrs if record is not None else {}
    return {key: value for key, value in attrs.items() if key.startswith(_RUNG_PREFIX)}
