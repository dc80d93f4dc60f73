"""A throw-away in-memory Optuna study: filled with what one decision reads, asked once, forgotten."""

import logging
from collections.abc import Iterable, Mapping

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from dryfit.core.settings import Direction
from dryfit.core.trial import Scalar

_NAME = "dryfit-throw-away"


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
    value: float | None = None,
    reports: Mapping[int, float] | None = None,
    system_attrs: Mapping[str, float] | None = None,
) -> Sealed:
    """A trial with only what is given. It has no distributions: nothing that reads it here asks for them."""
    return Sealed(
        number=-1,
        trial_id=-1,
        state=state,
        value=value,
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
        trials: The trials to fill it with.
        trial: The trial that is asked about.
    """

    def __init__(
        self,
        trials: Iterable[Sealed],
        trial: Sealed,
        *,
        direction: Direction,
        sampler: BaseSampler,
        pruner: BasePruner | None = None,
    ) -> None:
        self._storage = InMemoryStorage()
        self.study = optuna.create_study(
            study_name=_NAME,
            storage=self._storage,
            sampler=sampler,
            pruner=pruner or NopPruner(),
            direction=direction.value,
        )
        study_id = self._storage.get_study_id_from_name(_NAME)
        for other in trials:
            self._storage.create_new_trial(study_id, other)
        self._trial_id = self._storage.create_new_trial(study_id, trial)

    @property
    def trial(self) -> FrozenTrial:
        """The trial that is asked about, as the storage has it now."""
        return self._storage.get_trial(self._trial_id)
