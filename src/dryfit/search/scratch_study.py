"""Temporary Optuna studies in memory, each filled with the trials that one suggestion reads."""

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from dryfit.settings.choices import Direction
from dryfit.settings.trial import Scalar

THROW_AWAY = "dryfit-throw-away"
"""The name of every scratch study."""


def _not_ours(record: logging.LogRecord) -> bool:
    return THROW_AWAY not in record.getMessage()


# Optuna logs every study that is made in memory. Only the lines about scratch studies are dropped, by their name; the
# level of Optuna's loggers stays as the user set it.
logging.getLogger(InMemoryStorage.__module__).addFilter(_not_ours)


class ScratchTrial(FrozenTrial):
    """A trial of scratch studies.

    Storages copy each trial that they get; this one is handed over as it is, as nobody else holds it. Its values are
    of one space, so the numbers of each group of its parameters are worked out once.
    """

    known: dict[tuple[str, ...], tuple[float, ...] | None]
    """Its values as numbers, by each group that was asked for."""
    limits: dict[str, float]
    """By how much it exceeds what constrains it, by name; 0 or below: it does not."""

    def in_numbers(self, group: Mapping[str, BaseDistribution]) -> tuple[float, ...] | None:
        """Return its values of a group as samplers compute with them; None where it does not have them all."""
        names = tuple(group)
        if names not in self.known:
            params = self.params
            has_all = group.keys() <= params.keys()
            self.known[names] = (
                tuple(float(kind.to_internal_repr(params[name])) for name, kind in group.items()) if has_all else None
            )
        return self.known[names]

    def __deepcopy__(self, memo: dict[int, object]) -> "ScratchTrial":
        return self

    @property
    def constraints(self) -> dict[str, float]:
        """Its constraints. TPE asks each trial in each group, and Optuna would search the attributes each time."""
        return self.limits


class _Filled(InMemoryStorage):
    """A storage that begins with all its trials except the one that is asked about.

    Optuna's own adds them one by one and compares each with the best so far, which is most of the cost.

    Args:
        trials: The other trials in order, which gives them their numbers.
        place: The place among them of the trial that will be created.
    """

    def __init__(self, trials: Sequence[FrozenTrial], place: int) -> None:
        super().__init__()
        self._before, self._after = trials[:place], trials[place:]
        for number, trial in enumerate(self._before):
            trial.number = number
        for number, trial in enumerate(self._after, place + 1):
            trial.number = number

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        trial_id = super().create_new_trial(study_id, template_trial)
        self.get_trial(trial_id).number = len(self._before)
        return trial_id

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = [*self._before, *super().get_all_trials(study_id, deepcopy), *self._after]
        return trials if states is None else [trial for trial in trials if trial.state in states]


def scratch_trial(
    state: TrialState,
    *,
    params: Mapping[str, Scalar] | None = None,
    values: Sequence[float] | None = None,
    reports: Mapping[int, float] | None = None,
    system_attrs: Mapping[str, Any] | None = None,
    excess: float | None = None,
) -> ScratchTrial:
    """Make a trial with only what is given. It has no distributions: no sampler here reads them.

    Args:
        state: How it ended.
        params: Its values by internal name.
        values: Its value for each goal.
        reports: Its validations.
        system_attrs: What a sampler or pruner keeps with it.
        excess: The share of the device's memory by which it exceeds it; None: it has no constraint.
    """
    made = ScratchTrial(
        number=-1,
        trial_id=-1,
        state=state,
        value=None,
        values=values,
        datetime_start=None,
        datetime_complete=None,
        params=dict(params or {}),
        distributions={},
        user_attrs={},
        system_attrs=dict(system_attrs or {}),
        intermediate_values=dict(reports or {}),
    )
    made.known = {}
    made.limits = {} if excess is None else {"memory": excess}
    return made


class ScratchStudy:
    """A study, its storage, and the trial to suggest.

    Args:
        trials: The trials to fill it with, in order: Optuna numbers them from 0.
        trial: The trial that is asked about; the last one, unless it is among the others.
        directions: Whether each goal is maximised or minimised.
    """

    def __init__(
        self,
        trials: Iterable[ScratchTrial],
        trial: ScratchTrial,
        *,
        directions: Sequence[Direction],
        sampler: BaseSampler,
    ) -> None:
        others = list(trials)
        place = next((place for place, other in enumerate(others) if other is trial), len(others))
        self._storage = _Filled([other for other in others if other is not trial], place)
        self.study = optuna.create_study(
            study_name=THROW_AWAY,
            storage=self._storage,
            sampler=sampler,
            pruner=NopPruner(),
            directions=[direction.value for direction in directions],
        )
        self._study_id = self._storage.get_study_id_from_name(THROW_AWAY)
        self._trial_id = self._storage.create_new_trial(self._study_id, trial)

    @property
    def trial(self) -> FrozenTrial:
        """The trial that is asked about, as the storage has it now."""
        return self._storage.get_trial(self._trial_id)

    @property
    def study_attrs(self) -> dict[str, object]:
        """The study's attributes as the sampler has set them."""
        return self._storage.get_study_system_attrs(self._study_id)

    def set_study_attrs(self, attrs: Mapping[str, int]) -> None:
        """Give the study the attributes that a long-lived one would have by now."""
        for key, value in attrs.items():
            self._storage.set_study_system_attr(self._study_id, key, value)
