"""What a study's trials rest on, taken from its file; and a point of one basis as a point of another."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dryfit.config.schema import StudyConfig
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.switches import TRIAL_NEEDS
from dryfit.core.settings.tables import DataSettings, TrialSettings
from dryfit.core.settings.task_facts import OWN_TABLE, TaskName, is_own, reads, task_word
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import searchable_keys, setting
from dryfit.search.space.params import Distribution, is_one_of
from dryfit.search.space.space import Space
from dryfit.store.events import ComparabilityKey

_OF_DATA: Final = ("num_labels", "multi_label", "folds")
"""Keys of ``[data]`` that the rows' fingerprint does not hold: a model's head does, and what a value is the mean of."""

FOLDS: Final = ("data.folds", "data.split_seed")
"""Keys that decide over which parts of the rows a value is the mean."""

_ONLY_ALLOWS: Final = frozenset({"model.trust_remote_code"})
"""Keys that say what may be done, not what is learned."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a key is where it is not drawn. ``known`` is False where there is no such key: one of a user's function."""

    value: Scalar = None
    known: bool = True


def comparability_key(config: StudyConfig, space: Space, *, data: str, folder: Path) -> ComparabilityKey:
    """What trials of a study file rest on.

    Args:
        config: The study file.
        space: Its search space.
        data: Fingerprint of the rows; empty where there are none, or nobody has looked.
        folder: Where the study lies.
    """
    own, task = config.objective, config.study.task
    function = f"{own.function}, version {own.version}" if own is not None else ""
    return ComparabilityKey(
        task=task,
        goals=config.goals,
        space=space.to_json(),
        own=_own(config.trial_settings, config.data) if own is None else {},
        function=f"{task_word(task)}, version {config.study.task_version}" if is_own(task) else function,
        data=data,
        folder=str(folder),
    )


def _own(settings: TrialSettings, data: DataSettings) -> dict[str, Scalar]:
    keys = (*searchable_keys(), *(f"{OWN_TABLE}.{name}" for name in settings.own.knobs))
    searchable = {key: setting(settings, key) for key in keys if key not in _ONLY_ALLOWS}
    # The seed of `file` decides which rows are which, and is in their fingerprint; that of folds is not.
    seed = data.split_seed if data.folds > 1 else 0
    return searchable | {f"data.{name}": getattr(data, name) for name in _OF_DATA} | {"data.split_seed": seed}


@cache
def _defaults() -> Mapping[str, Scalar]:
    return _own(TrialSettings(), DataSettings())


def whole(own: Mapping[str, Scalar], task: TaskName) -> Mapping[str, Scalar]:
    """A study file's own values, with the default of each key that the dryfit which wrote them did not have.

    A new key leaves everything as it was unless it is set.
    """
    return own if task is BuiltInTask.OBJECTIVE else {**_defaults(), **own}


class SearchGround:
    """A basis, ready to be asked.

    Attributes:
        basis: What it was made from.
        space: Its search space.
        own: The study file's own values, see :func:`whole`.
    """

    def __init__(self, basis: ComparabilityKey) -> None:
        self.basis = basis
        self.space = Space.from_json(basis.space)
        self.own = whole(basis.own or {}, basis.task)

    def values(self, name: str, drawn: Mapping[str, Scalar]) -> Fixed | Distribution:
        """What a key can be after some values were drawn."""
        param = self.space.active(name, drawn)
        return param.distribution if param is not None else self.fixed(name)

    def fixed(self, name: str) -> Fixed:
        """What a key is where it is not drawn."""
        return Fixed(self.own[name]) if name in self.own else Fixed(known=False)

    def is_read(self, name: str, values: Mapping[str, Scalar]) -> bool:
        """Whether a key acts in a trial.

        Args:
            name: The key.
            values: Of all keys that differ from the file's own.
        """
        if self.basis.task is BuiltInTask.OBJECTIVE:
            return True  # of a function of the user's own nobody knows
        needs = [need for need in TRIAL_NEEDS if need.key == name]
        if not reads(self.basis.task, name):
            return False
        return all(is_one_of(values.get(need.switch, self.own.get(need.switch)), need.values) for need in needs)


def point_in(ground: SearchGround, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
    """The values that a trial has of the searched keys; None where one of them cannot be drawn.

    Args:
        ground: Where it is to be a point.
        params: What the trial drew.
        own: The study file's own values when it did.
    """
    drawn: dict[str, Scalar] = {}
    for name in ground.space.names:
        param = ground.space.active(name, drawn)
        if param is None:
            continue
        value = params.get(name, own.get(name))
        known = name in params or name in own
        if not known or not param.contains(value):
            return None
        drawn[name] = value
    return drawn


def is_trial_of(ground: SearchGround, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> bool:
    """Whether a trial could be one of this basis: its point can be drawn, and everything else is what is fixed here.

    Args:
        ground: The basis.
        params: What the trial drew.
        own: The study file's own values when it did.
    """
    drawn = point_in(ground, params, own)
    if drawn is None:
        return False
    values = {**own, **params}
    for name in dict.fromkeys((*params, *ground.own)):
        if name in drawn or name in _ONLY_ALLOWS or not ground.is_read(name, values):
            continue
        here = ground.fixed(name)
        if not here.known or name not in values or not is_one_of(values[name], (here.value,)):
            return False
    return True
