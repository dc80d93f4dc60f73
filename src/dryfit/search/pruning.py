"""Prune a trial, or let it go on, after a report: a pure function of the history.

The comparisons are those of Optuna's percentile, successive-halving, Hyperband and patient pruners; property tests
compare the verdicts with Optuna's own over random histories. One thing differs: a trial's last report ends nothing,
where Optuna calls a trial pruned that is trained to its end. A projection of the ended trials keeps what they read, so
a verdict costs the same however many trials there are. Which rungs a trial has completed is part of its verdicts: the
ledger keeps it under the names that Optuna gives its system attributes.
"""

import math
from binascii import crc32
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Final

import numpy as np

from dryfit.ledger.state import History, as_history
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.errors import InternalError
from dryfit.settings.study_file import PatientOf, PrunerName, SearchSettings
from dryfit.settings.tables import TrialSettings
from dryfit.settings.trial import Outcome, TrialRecord

_RUNG_PREFIX: Final = "completed_rung_"
"""How Optuna's successive halving names the system attribute of a rung, which the number of the rung follows."""

_HASHED_NAME: Final = "dryfit-throw-away:"
"""What stands before the study's name where Hyperband hashes it; as it ever was, so trials keep their brackets."""


@dataclass(frozen=True, slots=True)
class PruneVerdict:
    """The answer to a report.

    Attributes:
        proceed: Whether the trial goes on.
        system_attrs: Values by rung that the trial has completed with this report.
        reason: One sentence.
    """

    proceed: bool
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that a verdict depends on, beside the history.

    Attributes:
        search: Which pruner, and its settings.
        direction: Whether larger or smaller values are better.
        study: Name of the study; Hyperband assigns trials to brackets by it.
        most_reports: Reports of the longest trial that the study can have; Hyperband's maximum resource.
    """

    search: SearchSettings
    direction: Direction
    study: str
    most_reports: int


def most_reports(space: Space, settings: TrialSettings) -> int:
    """Return the number of reports of the longest training that a space allows; of one fold where there are several."""
    epochs = space.most("train.epochs", settings.train.epochs)
    return int(epochs * space.most("train.evals_per_epoch", settings.train.evals_per_epoch))


def judge(history: Iterable[TrialRecord], number: int, rules: Rules, *, last: bool = False) -> PruneVerdict:
    """Judge the latest report of a trial.

    The first ``warmup_reports`` reports of a trial prune it under no pruner, and neither does its last: training is
    over then, so nothing would be saved, and a result that is paid for would be thrown away. Rungs that it reaches are
    kept all the same: others are compared with them.

    Args:
        history: All trials so far, this one and its latest report included. A
            :class:`~dryfit.ledger.state.History` makes the cost independent of its length.
        number: The trial that reported.
        rules: Which pruner, and its settings.
        last: Training ends with this report, whatever the verdict.
    """
    verdict = _judged(history, number, rules)
    if last and not verdict.proceed:
        return replace(verdict, proceed=True, reason=f"{verdict.reason}, but trained to its end")
    return verdict


def _judged(history: Iterable[TrialRecord], number: int, rules: Rules) -> PruneVerdict:
    """Judge a report after which training would go on."""
    pruner = rules.search.pruner
    if pruner is PrunerName.NONE:
        return PruneVerdict(True, reason="no pruner")
    past = as_history(history)
    own = past.get(number)
    if own is None or own.outcome is not None:
        raise InternalError("judging a report", f"history has no running trial {number}")
    if not own.reports:
        return PruneVerdict(True, reason="nothing reported yet")
    own = _present_fold(own)
    if pruner is PrunerName.PATIENT and (patient := _patience(own, rules)):
        return patient
    match PatientOf(rules.search.deciding_pruner):
        case PatientOf.MEDIAN:
            return _percentile(own, past, rules, 50, "the median")
        case PatientOf.PERCENTILE:
            return _percentile(own, past, rules, rules.search.percentile, f"the best {rules.search.percentile:g} %")
        case PatientOf.ASHA:
            return _asha(own, past, rules)
        case PatientOf.HYPERBAND:
            return _hyperband(own, past, rules)


def _present_fold(own: TrialRecord) -> TrialRecord:
    """Return a trial with the reports of its present fold alone.

    A trial is compared with others by its latest report, and with itself by those before. Reports of other folds say
    how hard the rows of those folds are: after an easy fold no trial would ever look worse than the others.
    """
    fold = own.reports[-1].fold
    return replace(own, reports=tuple(point for point in own.reports if point.fold == fold))


def _best(values: Iterable[float], direction: Direction) -> float:
    """Return the best of some values, NaN left out; NaN where no number is among them."""
    best = max if direction is Direction.MAXIMIZE else min
    return best((value for value in values if not isnan(value)), default=math.nan)


def _patience(own: TrialRecord, rules: Rules) -> PruneVerdict | None:
    """Let a trial go on that is not worse than it was by ``min_delta``; None where the wrapped pruner decides."""
    allowed, min_delta = rules.search.patience_reports, rules.search.min_delta
    values = [point.value for point in own.reports]
    before = _best(values[: -allowed - 1], rules.direction)
    since = _best(values[-allowed - 1 :], rules.direction)
    if isnan(before) or isnan(since):
        return PruneVerdict(True, reason=f"no validation to compare the last {allowed + 1} with")
    maximize = rules.direction is Direction.MAXIMIZE
    if before - min_delta > since if maximize else before + min_delta < since:
        return None
    return PruneVerdict(True, reason=f"its last {allowed + 1} validations are no worse than those before")


# ---- median and other percentiles


class Curves:
    """The reports of all complete trials: the sorted values of each report, without NaN."""

    def __init__(self) -> None:
        self.complete = 0
        """How many trials completed."""
        self._values: dict[int, list[float]] = {}

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended."""
        if record.outcome is not Outcome.COMPLETE:
            return
        self.complete += 1
        for point in record.reports:
            if not isnan(point.value):
                insort(self._values.setdefault(point.n, []), point.value)

    def at(self, n: int) -> Sequence[float]:
        """Return all values of report ``n``, sorted."""
        return self._values.get(n, ())


def quantile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, from the two beside it alone; bit for bit numpy's, of all of them."""
    place = (len(values) - 1) * (percent / 100)
    low = math.floor(place)
    near = (values[low], values[min(low + 1, len(values) - 1)])
    with np.errstate(invalid="ignore"):  # NaN beside an infinity, as in Optuna; it prunes nothing
        return float(np.quantile(near, place - low))


def _percentile(own: TrialRecord, past: History, rules: Rules, percent: float, words: str) -> PruneVerdict:
    search = rules.search
    n = own.reports[-1].n
    curves = past.projected("curves", Curves)
    if not curves.complete or curves.complete < search.pruner_startup_trials:
        needed = max(1, search.pruner_startup_trials)
        return PruneVerdict(True, reason=f"{curves.complete} of {needed} complete trials that it takes to compare")
    if n < search.warmup_reports:
        return PruneVerdict(True, reason="warming up")
    best = _best((point.value for point in own.reports), rules.direction)
    if isnan(best):
        return PruneVerdict(False, reason="every report is NaN")
    values = curves.at(n)
    if not values:
        return PruneVerdict(True, reason=f"no complete trial has report {n}")
    maximize = rules.direction is Direction.MAXIMIZE
    cutoff = quantile(values, 100 - percent if maximize else percent)
    stop = best < cutoff if maximize else best > cutoff
    side = "worse" if stop else "no worse"
    return PruneVerdict(not stop, reason=f"{side} than {words} of {len(values)} trials at report {n}")


# ---- successive halving


class Rungs:
    """The rungs of the trials that have ended: the sorted values on each, by bracket.

    Args:
        bracket_of: Returns the bracket of a trial.
    """

    def __init__(self, bracket_of: Callable[[int], int]) -> None:
        self._bracket_of = bracket_of
        self._values: dict[tuple[int, str], list[float]] = {}

    def apply(self, record: TrialRecord) -> None:
        """Add one more trial that ended, with whichever outcome."""
        rungs = _rungs(record)
        if rungs:
            bracket = self._bracket_of(record.number)
            for key, value in rungs.items():
                insort(self._values.setdefault((bracket, key), []), value)

    def cutoffs(self, own: TrialRecord, running: Iterable[TrialRecord], rules: Rules) -> dict[str, float]:
        """Return the value that a trial must reach on each rung to be promoted.

        Of ``k`` trials on a rung of its bracket, itself included, the best ``k / reduction`` are promoted, and at least
        one: the cutoff is the value of the last of these among the others.
        """
        bracket, most = self._bracket_of(own.number), rules.direction is Direction.MAXIMIZE
        beside = [
            rungs
            for record in running
            if record.number != own.number and (rungs := _rungs(record)) and self._bracket_of(record.number) == bracket
        ]
        ended = {key: values for (where, key), values in self._values.items() if where == bracket}
        cutoffs: dict[str, float] = {}
        for key in dict.fromkeys([*ended, *(key for rungs in beside for key in rungs)]):
            values, more = ended.get(key, []), [rungs[key] for rungs in beside if key in rungs]
            last = max(0, (len(values) + len(more) + 1) // rules.search.reduction - 1)
            first = max(0, last - len(more))  # only the running ones can move that place, each by one
            end = len(values)
            near = values[max(0, end - 1 - last) : end - first] if most else values[first : last + 1]
            cutoffs[key] = sorted([*near, *more], reverse=most)[last - first]
        return cutoffs


def _asha(own: TrialRecord, past: History, rules: Rules) -> PruneVerdict:
    """Judge by asynchronous successive halving."""
    rungs = past.projected("rungs", lambda: Rungs(lambda number: 0))
    return _halved(own, rungs.cutoffs(own, past.running, rules), rules, bracket=0)


def _hyperband(own: TrialRecord, past: History, rules: Rules) -> PruneVerdict:
    """Judge by Hyperband: brackets of successive halving, the later ones with a longer first rung."""
    search = rules.search
    if not (budgets := _bracket_budgets(rules)):
        return PruneVerdict(True, reason=f"report {own.reports[-1].n} decides no rung")  # all trials are too short
    bracket_of = partial(_bracket, rules.study, budgets)
    key: Hashable = ("brackets", rules.study, rules.most_reports, search.warmup_reports, search.reduction)
    rungs = past.projected(key, lambda: Rungs(bracket_of))
    return _halved(own, rungs.cutoffs(own, past.running, rules), rules, bracket_of(own.number))


def _bracket_budgets(rules: Rules) -> tuple[int, ...]:
    """Return how many trials each bracket gets in turn, as in Optuna's ``HyperbandPruner``; none without a rung."""
    reduction = rules.search.reduction
    count = math.floor(math.log(rules.most_reports / (rules.search.warmup_reports + 1), reduction)) + 1
    return tuple(math.ceil(count * reduction**left / (left + 1)) for left in reversed(range(count)))


def _bracket(study: str, budgets: Sequence[int], number: int) -> int:
    """Return the bracket of a trial, by Optuna's hash of the study's name and the trial's number."""
    place = crc32(f"{_HASHED_NAME}{study}_{number}".encode()) % sum(budgets)
    return next(bracket for bracket in range(len(budgets)) if place < sum(budgets[: bracket + 1]))


def _halved(own: TrialRecord, cutoffs: Mapping[str, float], rules: Rules, bracket: int) -> PruneVerdict:
    """Take a trial up the rungs that its latest report reaches, until it is below a cutoff.

    With a warm-up of w, a reduction of r and bracket b, rung i is reached at report (w + 1) r^(b + i), counted from 1.
    """
    n, value, reduction = own.reports[-1].n, own.reports[-1].value, rules.search.reduction
    rung = len(_rungs(own))
    new: dict[str, float] = {}
    while n + 1 >= (rules.search.warmup_reports + 1) * reduction ** (bracket + rung):
        if isnan(value):
            return PruneVerdict(False, new, f"report {n} is NaN")
        key = f"{_RUNG_PREFIX}{rung}"
        new[key] = value
        cutoff = cutoffs.get(key, value)
        if value < cutoff if rules.direction is Direction.MAXIMIZE else value > cutoff:
            return PruneVerdict(False, new, f"not among the best 1/{reduction} of its rung at report {n}")
        rung += 1
    return PruneVerdict(True, new, f"promoted at report {n}" if new else f"report {n} decides no rung")


def _rungs(record: TrialRecord) -> dict[str, float]:
    """Return the values on the rungs that a trial has completed."""
    return {key: value for key, value in record.system_attrs.items() if key.startswith(_RUNG_PREFIX)}
