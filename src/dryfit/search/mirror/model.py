"""The trials of a ledger as the Optuna mirror shows them."""

from dataclasses import dataclass, field
from datetime import datetime
from math import isnan
from typing import Any, Final

from optuna.distributions import BaseDistribution, check_distribution_compatibility, json_to_distribution
from optuna.trial import TrialState as OptunaState
from pydantic import ValidationError

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome
from dryfit.search.mirror.attributes import user_attributes
from dryfit.store.events import EVENT, Event, GenerationBegan, StudyCreated, TrialAsked, TrialEvent
from dryfit.store.replay import StudyState
from dryfit.store.state import GenerationState, TrialState

_STATES: Final = {
    None: OptunaState.RUNNING,
    Outcome.COMPLETE: OptunaState.COMPLETE,
    Outcome.PRUNED: OptunaState.PRUNED,
    Outcome.REFUSED: OptunaState.PRUNED,
    Outcome.FAILED: OptunaState.FAIL,
    Outcome.CANCELLED: OptunaState.FAIL,
}

_NO_EVENT: Final = ("json_invalid", "union_tag_invalid", "union_tag_not_found")
"""How pydantic calls a line that is no JSON, or of an event that only a newer dryfit knows."""


@dataclass(frozen=True, slots=True)
class MirroredTrial:
    """One trial as Optuna has it.

    Attributes:
        trial: What the ledger knows of it so far.
        params: Its values by their names in the mirror.
        distributions: What they were drawn from.
        goals: How many values are optimised.
    """

    trial: TrialState
    params: dict[str, Any]
    distributions: dict[str, BaseDistribution]
    goals: int

    @property
    def started(self) -> datetime:
        """When it was asked for."""
        return datetime.fromtimestamp(self.trial.asked_at_s)

    @property
    def ended(self) -> datetime | None:
        """When it ended; None while it runs."""
        ended_s = self.trial.finished_at_s
        return None if ended_s is None else datetime.fromtimestamp(ended_s)

    @property
    def reports(self) -> dict[int, float]:
        """Its reported values by their number."""
        return {point.n: point.value for point in self.trial.reports}

    @property
    def values(self) -> list[float] | None:
        """One number for each goal; None where it does not have them all, or failed."""
        trial = self.trial
        values = (trial.value, *trial.also)
        if trial.outcome is Outcome.PRUNED and trial.reports:
            values = (trial.reports[-1].value,)  # as optuna.Study.tell does; reports are of the first goal alone
        numbers = [value for value in values if value is not None and not isnan(value)]
        ended_well = _STATES[trial.outcome] in (OptunaState.COMPLETE, OptunaState.PRUNED)
        return numbers if ended_well and len(numbers) == self.goals else None

    @property
    def state(self) -> OptunaState:
        """Its state. Optuna has no complete trial without numbers: that one has failed."""
        state = _STATES[self.trial.outcome]
        return OptunaState.FAIL if state is OptunaState.COMPLETE and self.values is None else state

    @property
    def user_attrs(self) -> dict[str, Any]:
        """Its user attributes."""
        return user_attributes(self.trial)

    @property
    def system_attrs(self) -> dict[str, float]:
        """The rungs that it has completed."""
        return self.trial.system_attrs


@dataclass(slots=True)
class MirroredStudy:
    """One generation: in the mirror it is a study of its own, as its goals and choices may be others.

    Attributes:
        generation: What the ledger knows of it.
        trials: By their number in the mirror, where the generation's first trial is 0.
        kinds: Different distributions that each internal name has stood for.
    """

    generation: GenerationState
    trials: list[MirroredTrial] = field(default_factory=list[MirroredTrial])
    kinds: dict[str, list[BaseDistribution]] = field(default_factory=dict[str, list[BaseDistribution]])

    @property
    def suffix(self) -> str:
        """What is put behind the study's name."""
        return f"-g{self.generation.number}" if self.generation.number > 1 else ""

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Whether each goal is maximised or minimised."""
        return tuple(goal.direction for goal in self.generation.comparability.goals)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """User attributes of the study."""
        own = self.generation
        if own.number == 1:
            return {}
        return {"generation": own.number, "reasons": [*own.reasons], "told": [*own.reused]}

    def add(self, trial: TrialState) -> None:
        """Add a trial that was asked for."""
        params: dict[str, Any] = {}
        distributions: dict[str, BaseDistribution] = {}
        for internal, value in trial.internal.items():
            distribution = json_to_distribution(trial.distributions[internal])
            name = _name(self.kinds.setdefault(internal, []), internal, distribution)
            params[name], distributions[name] = value, distribution
        self.trials.append(MirroredTrial(trial, params, distributions, len(self.directions)))


class MirrorModel:
    """All generations of a ledger. The same events always give the same trials: a restart needs no memory."""

    def __init__(self) -> None:
        self.studies: list[MirroredStudy] = []
        self._state = StudyState()

    def apply(self, event: Event) -> tuple[int, int] | None:
        """Apply one event.

        Returns:
            The index of the study and the number of the trial in it that the event is about; None: about no trial.
        """
        self._state.apply(event)
        if isinstance(event, StudyCreated | GenerationBegan):
            # A generation without a trial may begin again, as another one.
            self.studies = [*self.studies[: len(self._state.generations) - 1], MirroredStudy(self._state.generation)]
        if not isinstance(event, TrialEvent):
            return None
        trial = self._state.trials[event.number]
        study = self.studies[trial.generation - 1]
        if isinstance(event, TrialAsked):
            study.add(trial)
        return trial.generation - 1, event.number - study.generation.first


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


def _compatible(first: BaseDistribution, second: BaseDistribution) -> bool:
    try:
        check_distribution_compatibility(first, second)
    except ValueError:
        return False
    return True


def parse_event(line: bytes) -> Event | None:
    """Parse a line of the ledger; None where it holds no event that this dryfit knows."""
    try:
        return EVENT.validate_json(line)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] in _NO_EVENT:
            return None
        raise
