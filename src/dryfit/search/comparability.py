"""Comparability keys: what trials of a study file have in common, and which trials it allows."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from dryfit.config.schema import StudyConfig
from dryfit.core.settings.switches import TRIAL_NEEDS
from dryfit.core.settings.tables import DataSettings, TrialSettings
from dryfit.core.settings.task_facts import OWN_TABLE, TaskName, facts_of, reads, task_word
from dryfit.core.settings.trial import Scalar
from dryfit.search.space.fields import searchable_keys, setting
from dryfit.search.space.params import Distribution, is_one_of
from dryfit.search.space.space import Space
from dryfit.store.events import ComparabilityKey

_OF_DATA: Final = ("num_labels", "multi_label", "folds")
"""Keys of ``[data]`` that are not in the fingerprint of the rows, but change the model's head,
or what a value is the mean of."""

FOLDS: Final = ("data.folds", "data.split_seed")
"""Keys that decide over which parts of the rows a value is the mean."""

_ONLY_ALLOWS: Final = frozenset({"model.trust_remote_code"})
"""Keys that permit something and change nothing of what is learned."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The value of a key that is not searched; ``known`` is False for an unknown key of a user's own function."""

    value: Scalar = None
    known: bool = True


def comparability_key(config: StudyConfig, space: Space, *, data: str, folder: Path) -> ComparabilityKey:
    """Return what all trials of a study file have in common.

    Args:
        config: The study file.
        space: Its search space.
        data: Fingerprint of the rows; empty where there are none, or they were not read yet.
        folder: Where the study lies.
    """
    own, task = config.function, config.study.task
    function = f"{own.function}, version {own.version}" if own is not None else ""
    return ComparabilityKey(
        task=task,
        goals=config.goals,
        space=space.to_json(),
        own=_own(config.trial_settings, config.data) if own is None else {},
        function=f"{task_word(task)}, version {config.study.task_version}" if facts_of(task).own else function,
        data=data,
        folder=str(folder),
    )


def _own(settings: TrialSettings, data: DataSettings) -> dict[str, Scalar]:
    keys = (*searchable_keys(), *(f"{OWN_TABLE}.{name}" for name in settings.own.knobs))
    searchable = {key: setting(settings, key) for key in keys if key not in _ONLY_ALLOWS}
    # With a split from `file` the seed is in the fingerprint of the rows; with folds it is not.
    seed = data.split_seed if data.folds > 1 else 0
    return searchable | {f"data.{name}": getattr(data, name) for name in _OF_DATA} | {"data.split_seed": seed}


@cache
def _defaults() -> Mapping[str, Scalar]:
    return _own(TrialSettings(), DataSettings())


def with_defaults(own: Mapping[str, Scalar], task: TaskName) -> Mapping[str, Scalar]:
    """Add the defaults of keys that the dryfit which recorded a study file's values did not have yet.

    So a new key changes nothing unless it is set.
    """
    return own if facts_of(task).calls_function else {**_defaults(), **own}


class PossibleTrials:
    """The trials that a comparability key allows: which values each key can have, and whether a trial is one of them.

    Attributes:
        key: The comparability key.
        space: Its search space.
        own: The study file's own values, see :func:`with_defaults`.
    """

    def __init__(self, key: ComparabilityKey) -> None:
        self.key = key
        self.space = Space.from_json(key.space)
        self.own = with_defaults(key.own or {}, key.task)

    def values(self, name: str, drawn: Mapping[str, Scalar]) -> Fixed | Distribution:
        """Return what a key can be, given the values drawn so far."""
        param = self.space.active(name, drawn)
        return param.distribution if param is not None else self.fixed(name)

    def fixed(self, name: str) -> Fixed:
        """Return the value of a key where it is not drawn."""
        return Fixed(self.own[name]) if name in self.own else Fixed(known=False)

    def is_read(self, name: str, values: Mapping[str, Scalar]) -> bool:
        """Whether a key acts in a trial.

        Args:
            name: The key.
            values: Values of all keys that differ from the file's own.
        """
        if facts_of(self.key.task).calls_function:
            return True  # what a user's function reads is not known
        needs = [need for need in TRIAL_NEEDS if need.key == name]
        if not reads(self.key.task, name):
            return False
        return all(is_one_of(values.get(need.switch, self.own.get(need.switch)), need.values) for need in needs)

    def searched_values(self, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
        """Return a trial's values of the keys that are searched here; None where one of them cannot be drawn.

        Args:
            params: What the trial drew.
            own: The study file's own values at that time.
        """
        drawn: dict[str, Scalar] = {}
        for name in self.space.names:
            param = self.space.active(name, drawn)
            if param is None:
                continue
            value = params.get(name, own.get(name))
            known = name in params or name in own
            if not known or not param.contains(value):
                return None
            drawn[name] = value
        return drawn

    def allows(self, params: Mapping[str, Scalar], own: Mapping[str, Scalar]) -> bool:
        """Whether a trial could be drawn here, with all other keys at the values that are fixed here.

        Args:
            params: What the trial drew.
            own: The study file's own values at that time.
        """
        drawn = self.searched_values(params, own)
        if drawn is None:
            return False
        values = {**own, **params}
        for name in dict.fromkeys((*params, *self.own)):
            if name in drawn or name in _ONLY_ALLOWS or not self.is_read(name, values):
                continue
            here = self.fixed(name)
            if not here.known or name not in values or not is_one_of(values[name], (here.value,)):
                return False
        return True
