"""A throw-away in-memory Optuna study: filled with what one decision reads, asked once, forgotten."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from dryfit.core.choices import Direction
from dryfit.core.trial import Scalar

_NAME = "dryfit-throw-away"


def throw_away_name(label: str) -> str:
    """The name of a throw-away study."""
    return f"{_NAME}:{label}" if label else _NAME


def _not_ours(record: logging.LogRecord) -> bool:
    return _NAME not in record.getMessage()


# Optuna logs every study that is made in memory. Only the lines about ours are dropped: the name decides, and the
# level of Optuna's loggers stays as the user set it.
logging.getLogger("optuna.storages._in_memory").addFilter(_not_ours)


class Sealed(FrozenTrial):
    """A trial made for one throw-away study.

    The storage copies each trial it takes, by far the largest cost of filling a study. Nobody else holds these.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> "Sealed":
        return self


def sealed(
    state: TrialState,
    *,
    params: Mapping[str, Scalar] | None = None,
    values: Sequence[float] | None = None,
    reports: Mapping[int, float] | None = None,
    system_attrs: Mapping[str, float] | None = None,
) -> Sealed:
    """A trial with only what is given. It has no distributions: nothing that reads it here asks for them."""
    return Sealed(
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


class ThrowAway:
    """The study, its storage, and the one trial the decision is about.

    Args:
        trials: The trials to fill it with, in order: Optuna numbers them from 0.
        trial: The trial that is asked about; the last one, unless it is among the others.
        directions: What is better, of each goal.
        label: Part of the study's name, for deciders that read it.
    """

    def __init__(
        self,
        trials: Iterable[Sealed],
        trial: Sealed,
        *,
        directions: Sequence[Direction],
        sampler: BaseSampler,
        pruner: BasePruner | None = None,
        label: str = "",
    ) -> None:
        self._storage = InMemoryStorage()
        name = throw_away_name(label)
        self.study = optuna.create_study(
            study_name=name,
            storage=self._storage,
            sampler=sampler,
            pruner=pruner or NopPruner(),
            directions=[direction.value for direction in directions],
        )
        self._study_id = self._storage.get_study_id_from_name(name)
        trial_id: int | None = None
        for other in trials:
            created = self._storage.create_new_trial(self._study_id, other)
            trial_id = created if other is trial else trial_id
        self._trial_id = self._storage.create_new_trial(self._study_id, trial) if trial_id is None else trial_id

    @property
    def trial(self) -> FrozenTrial:
        """The trial that is asked about, as the storage has it now."""
        return self._storage.get_trial(self._trial_id)

    @property
    def study_attrs(self) -> dict[str, object]:
        """What a sampler has written down about the study."""
        return self._storage.get_study_system_attrs(self._study_id)

    def set_study_attrs(self, attrs: Mapping[str, int]) -> None:
        """Give the study the attributes that a long-lived one would have by now."""
        for key, value in attrs.items():
            self._storage.set_study_system_attr(self._study_id, key, value)
