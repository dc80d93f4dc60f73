"""What the Optuna mirror should show: the ledger's events folded into one record a trial."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isnan
from typing import Any, cast

from optuna.distributions import BaseDistribution, check_distribution_compatibility, json_to_distribution
from optuna.trial import TrialState

from dryfit.core.trial import Outcome
from dryfit.search.mirror_attributes import PlannedMemory, end_attributes, failure_attributes

_STATES = {
    Outcome.COMPLETE: TrialState.COMPLETE,
    Outcome.PRUNED: TrialState.PRUNED,
    Outcome.REFUSED: TrialState.PRUNED,
    Outcome.FAILED: TrialState.FAIL,
    Outcome.CANCELLED: TrialState.FAIL,
}


@dataclass(slots=True)
class Wanted:
    """How one trial should look in the mirror."""

    params: dict[str, Any]
    distributions: dict[str, BaseDistribution]
    started: datetime
    state: TrialState = TrialState.RUNNING
    values: list[float] | None = None
    ended: datetime | None = None
    reports: dict[int, float] = field(default_factory=dict[int, float])
    user_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    system_attrs: dict[str, float] = field(default_factory=dict[str, float])
    plan: PlannedMemory | None = None


class MirrorModel:
    """Folds ledger events. The same events always give the same trials: a restart needs no memory."""

    def __init__(self) -> None:
        self.trials: dict[int, Wanted] = {}
        self._kinds: dict[str, list[BaseDistribution]] = {}
        self._answers: dict[str, Mapping[str, Any]] = {}
        self._goals = 1

    def fold(self, event: Mapping[str, Any]) -> int | None:
        """Take one event; the number of the trial it changed, None where it changed none."""
        number = event.get("number")
        if event.get("type") == "study_created":
            self._goals = 1 + len(cast("list[object]", event.get("also", [])))
        if not isinstance(number, int):
            return None
        if event.get("type") == "trial_asked":
            self.trials.setdefault(number, self._asked(event))
            return number
        trial = self.trials.get(number)
        if trial is None:
            return None
        match event.get("type"):
            case "report":
                point = event["point"]
                trial.reports[int(point["n"])] = float(point["value"])
            case "verdict":
                trial.system_attrs.update(event["system_attrs"])
            case "trial_planned":
                self._plan(trial, event)
            case "attempt_placed":
                trial.user_attrs["attempts"] = event["attempt"]
            case "attempt_ended":
                if event["failure"] is None:
                    return None
                trial.user_attrs |= failure_attributes(event["failure"])
                if trial.plan is not None:
                    trial.plan.note_failure(event["failure"])
            case "trial_finished":
                _finish(trial, event, self._goals)
            case _:
                return None
        return number

    def _asked(self, event: Mapping[str, Any]) -> Wanted:
        params: dict[str, Any] = {}
        distributions: dict[str, BaseDistribution] = {}
        for internal, value in cast("dict[str, Any]", event["internal"]).items():
            distribution = json_to_distribution(event["distributions"][internal])
            name = self._name(internal, distribution)
            params[name], distributions[name] = value, distribution
        attributes = {"params": event["params"], "seed": event["seed"], "cuda_error": False}
        return Wanted(params, distributions, _time(event), user_attrs=attributes)

    def _plan(self, trial: Wanted, event: Mapping[str, Any]) -> None:
        """Take a plan; one without an answer has that of an earlier one with the same key."""
        answer = self._answers[event["key"]] = event.get("answer") or self._answers[event["key"]]
        trial.plan = PlannedMemory.of(answer)
        trial.user_attrs["planned_bytes"] = trial.plan.peak_bytes

    def _name(self, internal: str, distribution: BaseDistribution) -> str:
        """The internal name, or ``name~2``, ``name~3``, ... where choices or kind changed meanwhile.

        Optuna allows one name one set of choices in a study.
        """
        kinds = self._kinds.setdefault(internal, [])
        index = next((at for at, kind in enumerate(kinds) if _compatible(kind, distribution)), len(kinds))
        if index == len(kinds):
            kinds.append(distribution)
        return internal if index == 0 else f"{internal}~{index + 1}"


def _compatible(one: BaseDistribution, other: BaseDistribution) -> bool:
    try:
        check_distribution_compatibility(one, other)
    except ValueError:
        return False
    return True


def _time(event: Mapping[str, Any]) -> datetime:
    return datetime.fromtimestamp(event["at"])


def _finish(trial: Wanted, event: Mapping[str, Any], goals: int) -> None:
    outcome = Outcome(event["outcome"])
    trial.user_attrs |= end_attributes(event, trial.plan)
    trial.ended = _time(event)
    trial.state = _STATES[outcome]
    found: list[object] = [event.get("value"), *cast("list[object]", event.get("also", []))]
    if outcome is Outcome.PRUNED and trial.reports:
        found = [trial.reports[max(trial.reports)]]  # as optuna.Study.tell does; they are of the first goal alone
    numbers = [float(value) for value in found if isinstance(value, int | float) and not isnan(value)]
    whole = len(numbers) == goals
    if trial.state is TrialState.COMPLETE and not whole:
        trial.state = TrialState.FAIL  # Optuna has no complete trial without numbers
    trial.values = numbers if whole and trial.state is not TrialState.FAIL else None


def parse(line: bytes) -> dict[str, Any] | None:
    """One ledger line as an object; None where it is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", event) if isinstance(event, dict) else None
