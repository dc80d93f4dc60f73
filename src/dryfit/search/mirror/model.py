"""What the Optuna mirror should show: the ledger's events folded into one record a trial."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isnan
from typing import Any, cast

from optuna.distributions import BaseDistribution, check_distribution_compatibility, json_to_distribution
from optuna.trial import TrialState

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome
from dryfit.search.mirror.attributes import PlannedMemory, end_attributes, failure_attributes

_STATES = {
    Outcome.COMPLETE: TrialState.COMPLETE,
    Outcome.PRUNED: TrialState.PRUNED,
    Outcome.REFUSED: TrialState.PRUNED,
    Outcome.FAILED: TrialState.FAIL,
    Outcome.CANCELLED: TrialState.FAIL,
}


@dataclass(slots=True)
class MirroredTrial:
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


@dataclass(slots=True)
class MirroredStudy:
    """How one generation should look in the mirror: a study of its own, as its goals and choices may be others.

    Attributes:
        suffix: What is put behind the study's name.
        directions: What is better, of each goal.
        first: The number that its first trial has in the ledger; here it is trial 0.
        user_attrs: Of the study.
        trials: By their number here.
    """

    suffix: str
    directions: tuple[Direction, ...]
    first: int = 0
    user_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    trials: dict[int, MirroredTrial] = field(default_factory=dict[int, MirroredTrial])
    kinds: dict[str, list[BaseDistribution]] = field(default_factory=dict[str, list[BaseDistribution]])


class MirrorModel:
    """Folds ledger events. The same events always give the same trials: a restart needs no memory."""

    def __init__(self) -> None:
        self.studies: list[MirroredStudy] = []
        self._trials = 0
        self._answers: dict[str, Mapping[str, Any]] = {}

    def apply(self, event: Mapping[str, Any]) -> tuple[int, int] | None:
        """Take one event; which trial of which study it changed, None where it changed none."""
        match event.get("type"):
            case "study_created":
                also = cast("list[dict[str, str]]", event.get("also", []))
                directions = (event["direction"], *(goal["direction"] for goal in also))
                self.studies = [MirroredStudy("", tuple(map(Direction, directions)))]
            case "generation_began":
                self._begin(event)
            case _:
                pass
        number = event.get("number")
        if not isinstance(number, int) or not self.studies:
            return None
        if event.get("type") == "trial_asked":
            self._trials = max(self._trials, number + 1)
        at = next(index for index in reversed(range(len(self.studies))) if self.studies[index].first <= number)
        own = number - self.studies[at].first
        return (at, own) if self._apply_to_trial(self.studies[at], own, event) else None

    def _begin(self, event: Mapping[str, Any]) -> None:
        generation = int(event["generation"])
        del self.studies[generation - 1 :]  # it began before, and had no trial yet
        directions = tuple(Direction(goal["direction"]) for goal in event["basis"]["goals"])
        attrs = {"generation": generation, "reasons": event["reasons"], "told": event["told"]} if generation > 1 else {}
        suffix = f"-g{generation}" if generation > 1 else ""
        self.studies.append(MirroredStudy(suffix, directions, self._trials, attrs))

    def _apply_to_trial(self, study: MirroredStudy, number: int, event: Mapping[str, Any]) -> bool:
        """Fold an event of a trial; whether it changed anything."""
        if event.get("type") == "trial_asked":
            study.trials.setdefault(number, _asked(study, event))
            return True
        trial = study.trials.get(number)
        if trial is None:
            return False
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
                    return False
                trial.user_attrs |= failure_attributes(event["failure"])
                if trial.plan is not None:
                    trial.plan.note_failure(event["failure"])
                    trial.user_attrs |= trial.plan.attributes
            case "trial_finished":
                _finish(trial, event, len(study.directions))
            case _:
                return False
        return True

    def _plan(self, trial: MirroredTrial, event: Mapping[str, Any]) -> None:
        """Take a plan; one without an answer has that of an earlier one with the same key."""
        answer = self._answers[event["key"]] = event.get("answer") or self._answers[event["key"]]
        trial.plan = PlannedMemory.of(answer)
        trial.user_attrs |= {"planned_bytes": trial.plan.peak_bytes, **trial.plan.attributes}


def _asked(study: MirroredStudy, event: Mapping[str, Any]) -> MirroredTrial:
    params: dict[str, Any] = {}
    distributions: dict[str, BaseDistribution] = {}
    for internal, value in cast("dict[str, Any]", event["internal"]).items():
        distribution = json_to_distribution(event["distributions"][internal])
        name = _name(study.kinds.setdefault(internal, []), internal, distribution)
        params[name], distributions[name] = value, distribution
    attributes = {"params": event["params"], "trial": event["number"], "seed": event["seed"], "cuda_error": False}
    return MirroredTrial(params, distributions, _time(event), user_attrs=attributes)


def _name(kinds: list[BaseDistribution], internal: str, distribution: BaseDistribution) -> str:
    """The internal name, or ``name~2``, ``name~3``, ... where choices were added, or a scale changed, meanwhile.

    Optuna allows one name one set of choices in a study.

    Args:
        kinds: What the name has stood for so far; a new one is added.
        internal: The name.
        distribution: What it stands for now.
    """
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


def _finish(trial: MirroredTrial, event: Mapping[str, Any], goals: int) -> None:
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
