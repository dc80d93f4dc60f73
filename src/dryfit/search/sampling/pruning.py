"""Whether a trial goes on after a report: a pure function of the history.

Optuna's own pruners decide, on a throw-away study that holds only what their verdict depends on: of all complete trials
the ones around the median, of all trials on a rung the one at its cutoff. A test holds them against a study with every
trial in it. ASHA remembers which rungs a trial has completed in the trial's system attributes; a verdict returns the
new ones, and the ledger keeps them.
"""

import warnings
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan

import numpy as np
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, PatientPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from dryfit.config.schema import PatientOf, PrunerName, SearchSettings
from dryfit.core.errors import InternalError
from dryfit.core.private_names import require
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.tables import TrialSettings
from dryfit.core.settings.trial import Outcome, TrialRecord
from dryfit.search.private_apis import HALVING, RUNG_PREFIX
from dryfit.search.sampling.scratch_study import ScratchStudy, ScratchTrial, scratch_trial
from dryfit.search.space.space import Space
from dryfit.store.history import History, as_history


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
    """Reports of the longest training that a space can have; with folds a trial has several of these."""
    epochs = space.most("train.epochs", settings.train.epochs)
    return int(epochs * space.most("train.evals_per_epoch", settings.train.evals_per_epoch))


def judge(history: Iterable[TrialRecord], number: int, rules: Rules) -> PruneVerdict:
    """Judge the latest report of a trial.

    The first ``warmup_reports`` reports of a trial prune it under no pruner.

    Args:
        history: All trials so far, this one and its latest report included. A
            :class:`~dryfit.store.history.History` is asked at the same cost however long it is.
        number: The trial that reported.
        rules: Which pruner, and what it goes by.
    """
    pruner = rules.search.pruner
    if pruner is PrunerName.NONE:
        return PruneVerdict(True, reason="no pruner")
    past = as_history(history)
    own = past.get(number)
    if own is None or own.outcome is not None:
        raise InternalError("judging a report", f"history has no running trial {number}")
    if not own.reports:
        return PruneVerdict(True, reason="nothing reported yet")
    own = _in_fold(own)
    match pruner:
        case PrunerName.MEDIAN:
            return _median(own, past, rules)
        case PrunerName.ASHA:
            return _asha(own, past, rules)
        case PrunerName.HYPERBAND:
            return _hyperband(own, past, rules)
        case PrunerName.PATIENT:
            behind = _median if rules.search.patient_of is PatientOf.MEDIAN else _asha
            return _spared(own, rules) or behind(own, past, rules)


def _in_fold(own: TrialRecord) -> TrialRecord:
    """A trial as its present fold shows it: all of a trial that trains once.

    A trial is compared with others by the report that it has just made, and with itself by those before. Of another
    fold these say how hard its rows were: after an easy one no trial would ever look worse than the others.
    """
    fold = own.reports[-1].fold
    return replace(own, reports=tuple(point for point in own.reports if point.fold == fold))


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
    study = _study([], scratch_trial(TrialState.RUNNING, reports=reports), rules, pruner)
    if pruner.prune(study.study, study.trial):
        return None
    return PruneVerdict(True, reason=f"its last {allowed + 1} validations are no worse than those before")


def _study(trials: Iterable[ScratchTrial], trial: ScratchTrial, rules: Rules, pruner: BasePruner) -> ScratchStudy:
    sampler = RandomSampler()
    return ScratchStudy(trials, trial, directions=(rules.direction,), sampler=sampler, pruner=pruner, label=rules.study)


# ---- median


class Curves:
    """The reports of complete trials: sorted values of each. NaN has no place among them."""

    def __init__(self) -> None:
        self.complete = 0
        """How many trials completed."""
        self._values: dict[int, list[float]] = {}

    def apply(self, record: TrialRecord) -> None:
        """Hear of one more trial that ended."""
        if record.outcome is not Outcome.COMPLETE:
            return
        self.complete += 1
        for point in record.reports:
            if not isnan(point.value):
                insort(self._values.setdefault(point.n, []), point.value)

    def at(self, n: int) -> Sequence[float]:
        """All values of report ``n``, in order."""
        return self._values.get(n, ())


def middle(values: Sequence[float]) -> Sequence[float]:
    """The two or three of some ordered values that their median is computed from: it is the same without the rest."""
    return values[max(0, (len(values) - 1) // 2 - (len(values) % 2)) : len(values) // 2 + 1 + (len(values) % 2)]


def _median(own: TrialRecord, past: History, rules: Rules) -> PruneVerdict:
    search = rules.search
    n = own.reports[-1].n
    curves = past.projected("curves", Curves)
    if not curves.complete or curves.complete < search.pruner_startup_trials:
        needed = max(1, search.pruner_startup_trials)
        return PruneVerdict(True, reason=f"{curves.complete} of {needed} complete trials a median needs")
    if n < search.warmup_reports:
        return PruneVerdict(True, reason="warming up")
    if all(isnan(point.value) for point in own.reports):
        # As Optuna decides; its own way there warns from inside numpy.
        return PruneVerdict(False, reason="every report is NaN")
    values = curves.at(n)
    if not values:
        return PruneVerdict(True, reason=f"no complete trial has report {n}")
    at_n = [scratch_trial(TrialState.COMPLETE, values=(0.0,), reports={n: value}) for value in middle(values)]
    reports = {point.n: point.value for point in own.reports}
    pruner = MedianPruner(n_startup_trials=0, n_warmup_steps=search.warmup_reports)
    study = _study(at_n, scratch_trial(TrialState.RUNNING, reports=reports), rules, pruner)
    with np.errstate(invalid="ignore"):  # two infinities around the median: NaN, which prunes nothing
        stop = pruner.prune(study.study, study.trial)
    side = "worse" if stop else "no worse"
    return PruneVerdict(not stop, reason=f"{side} than the median of {len(values)} trials at report {n}")


# ---- successive halving


class Rungs:
    """The rungs of the trials that have ended: sorted values on each, bracket by bracket.

    Args:
        bracket_of: The bracket of a trial.
    """

    def __init__(self, bracket_of: Callable[[int], int]) -> None:
        self._bracket_of = bracket_of
        self._values: dict[tuple[int, str], list[float]] = {}

    def apply(self, record: TrialRecord) -> None:
        """Hear of one more trial that ended; how does not matter."""
        rungs = _rungs(record)
        if rungs:
            bracket = self._bracket_of(record.number)
            for key, value in rungs.items():
                insort(self._values.setdefault((bracket, key), []), value)

    def cutoffs(self, own: TrialRecord, running: Iterable[TrialRecord], rules: Rules) -> dict[str, float]:
        """What a trial must reach on each rung to be promoted, judged by the others of its bracket.

        Of ``k`` trials on a rung, itself included, the best ``k / reduction`` are promoted, and at least one: so all
        that counts of the others is the one that stands last among these.
        """
        bracket, most = self._bracket_of(own.number), rules.direction is Direction.MAXIMIZE
        beside = [
            rungs
            for record in running
            if record.number != own.number and (rungs := _rungs(record)) and self._bracket_of(record.number) == bracket
        ]
        ended = {key: values for (where, key), values in self._values.items() if where == bracket}
        found: dict[str, float] = {}
        for key in dict.fromkeys([*ended, *(key for rungs in beside for key in rungs)]):
            values, more = ended.get(key, []), [rungs[key] for rungs in beside if key in rungs]
            last = max(0, (len(values) + len(more) + 1) // rules.search.reduction - 1)
            first = max(0, last - len(more))  # only the running ones can move that place, each by one
            end = len(values)
            near = values[max(0, end - 1 - last) : end - first] if most else values[first : last + 1]
            found[key] = sorted([*near, *more], reverse=most)[last - first]
        return found


def _asha(own: TrialRecord, past: History, rules: Rules) -> PruneVerdict:
    """Optuna's asynchronous successive halving; its resource is the number of reports, so its steps count from 1.

    With a warm-up of w and a reduction of r, decisions fall at report w + 1, (w + 1) r, (w + 1) r^2, ...
    """
    search = rules.search
    pruner = SuccessiveHalvingPruner(min_resource=search.warmup_reports + 1, reduction_factor=search.reduction)
    rungs = past.projected("rungs", lambda: Rungs(lambda number: 0))
    return _halved(own, rungs.cutoffs(own, past.running, rules), rules, pruner)


def _hyperband(own: TrialRecord, past: History, rules: Rules) -> PruneVerdict:
    """Optuna's Hyperband: brackets of successive halving, the later ones with a longer first rung."""
    search = rules.search
    key: Hashable = ("brackets", rules.study, rules.most_reports, search.warmup_reports, search.reduction)
    rungs = past.projected(key, lambda: Rungs(partial(_bracket, rules)))
    return _halved(own, rungs.cutoffs(own, past.running, rules), rules, _hyperband_pruner(rules))


def _hyperband_pruner(rules: Rules) -> HyperbandPruner:
    return HyperbandPruner(
        min_resource=rules.search.warmup_reports + 1,
        max_resource=rules.most_reports,
        reduction_factor=rules.search.reduction,
    )


def _bracket(rules: Rules, number: int) -> int:
    """The bracket that Optuna deals a trial out to, by a hash of the study's name and the trial's number.

    It says so only by what it does: a trial that nobody competes with completes all the rungs of its bracket at its
    last report.
    """
    climbing = scratch_trial(TrialState.RUNNING, reports={rules.most_reports: 0.0})
    pruner = _hyperband_pruner(rules)
    study = _study([], climbing, rules, pruner)
    climbing.number = number
    pruner.prune(study.study, study.trial)
    return len(study.trial.system_attrs)


def _halved(own: TrialRecord, cutoffs: Mapping[str, float], rules: Rules, pruner: BasePruner) -> PruneVerdict:
    """Let Optuna compare a trial with one that stands at the cutoff of each rung."""
    require("comparing a trial with others at a rung", HALVING)
    reports = {point.n + 1: point.value for point in own.reports}
    climbing = scratch_trial(TrialState.RUNNING, reports=reports, system_attrs=own.system_attrs)
    standing = scratch_trial(TrialState.RUNNING, system_attrs=cutoffs)
    study = _study([standing], climbing, rules, pruner)
    standing.number = climbing.number = own.number  # Hyperband looks only at trials of the same bracket
    stop = pruner.prune(study.study, study.trial)
    after: dict[str, float] = study.trial.system_attrs
    new = {key: value for key, value in after.items() if key not in own.system_attrs}
    n = own.reports[-1].n
    if stop and isnan(own.reports[-1].value):
        return PruneVerdict(False, new, f"report {n} is NaN")
    if stop:
        return PruneVerdict(False, new, f"not among the best 1/{rules.search.reduction} of its rung at report {n}")
    return PruneVerdict(True, new, f"promoted at report {n}" if new else f"report {n} decides no rung")


def _rungs(record: TrialRecord) -> dict[str, float]:
    """All that is read of another trial."""
    return {key: value for key, value in record.system_attrs.items() if key.startswith(RUNG_PREFIX)}
