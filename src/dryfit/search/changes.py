"""Two study files compared: which earlier trials still count, and the best points of another study."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dryfit.ledger.events import ComparabilityKey, Compatibility
from dryfit.ledger.replay import StudyState
from dryfit.search.space import (
    Distribution,
    Param,
    Space,
    contains,
    describe,
    describe_when,
    enumerated,
    is_one_of,
    only_value,
    public_name,
    setting,
)
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.tables import TRIAL_NEEDS, DataSettings, TrialSettings
from dryfit.settings.task_facts import OWN_TABLE, TaskName, facts_of, reads, task_word
from dryfit.settings.trial import Scalar

# Compare two study files: which settings changed, and whether earlier trials still count.
#
# The files are compared by the trials that they allow, not by how they are written. A key that is not searched has
# one value, the file's own. So a key is widened if it becomes searched and its old value can be drawn, and narrowed
# if it is no longer searched. Keys that depend on others are compared branch by branch of their conditions.


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
    """Return the settings that all trials of a study file share.

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
    keys = (*SEARCHABLE, *(f"{OWN_TABLE}.{name}" for name in settings.own.knobs))
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


_NEAR = 1e-8
"""How far a ratio of steps may be from an integer."""


@dataclass(frozen=True, slots=True)
class Change:
    """What has changed between two study files.

    Attributes:
        verdict: Whether earlier trials count.
        reasons: A sentence for each difference that matters.
        comparable: Whether earlier values may be compared with new ones: goals, data, folds, task and function are the
            same.
    """

    verdict: Compatibility
    reasons: tuple[str, ...] = ()
    comparable: bool = True


def compare(old: ComparabilityKey, new: ComparabilityKey) -> Change:
    """Compare the comparability key of earlier trials with that of new ones.

    EXTENDS: the new file allows every earlier trial. SAME: and the other way round. Anything else FORKS.
    """
    if old.own is None:
        return Change(Compatibility.FORKS, ("nobody wrote down what the trials so far were run with",), False)
    old = relocated(old, new.folder)
    apart = tuple(_not_comparable(old, new))
    before, after = PossibleTrials(old), PossibleTrials(new)
    reasons: list[str] = []
    lost = gained = False
    if old.task == new.task:  # otherwise the keys are not the same
        for name in dict.fromkeys((*before.space.names, *after.space.names, *before.own, *after.own)):
            if name in FOLDS:
                continue  # compared by _not_comparable
            loses, gains = not _covered(name, before, after), not _covered(name, after, before)
            lost, gained = lost or loses, gained or gains
            reasons += _sentences(name, before, after) if loses or gains else _redrawn(name, before, after)
    forks = bool(apart) or lost
    verdict = Compatibility.FORKS if forks else Compatibility.EXTENDS if gained else Compatibility.SAME
    return Change(verdict, (*apart, *reasons), not apart)


def comparable(old: ComparabilityKey, new: ComparabilityKey) -> bool:
    """Whether values of trials with one key may be compared with those of trials with the other."""
    return old.own is not None and not any(_not_comparable(relocated(old, new.folder), new))


def relocated(key: ComparabilityKey, folder: str) -> ComparabilityKey:
    """Return a key with the paths below the study's folder changed to the folder's present place."""
    if not key.folder or key.folder == folder:
        return key

    def at(value: Scalar) -> Scalar:
        if isinstance(value, str) and value.startswith(f"{key.folder}/"):
            return folder + value.removeprefix(key.folder)
        return value

    own = None if key.own is None else {name: at(value) for name, value in key.own.items()}
    space = Space.from_json(key.space).with_values(at).to_json()
    task = at(key.task) if facts_of(key.task).own else key.task
    return key.model_copy(update={"task": task, "own": own, "space": space, "folder": folder})


def _not_comparable(old: ComparabilityKey, new: ComparabilityKey) -> Iterator[str]:
    if old.task != new.task:
        yield f"study.task was {old.task}, is now {new.task}"
    elif old.function != new.function:
        what = "the task" if facts_of(new.task).own else f"the {task_word(new.task)}"
        yield f"{what} was {old.function}, is now {new.function}"
    if old.goals != new.goals:
        was, now = (", ".join(f"{goal.direction} {goal.name}" for goal in key.goals) for key in (old, new))
        yield f"the study's goal was to {was}, is now to {now}"
    if old.task == new.task and old.data and new.data and old.data != new.data:
        yield f"the data has changed: fingerprint {new.data}, it was {old.data}"
    if old.task == new.task:
        yield from _other_folds(with_defaults(old.own or {}, old.task), with_defaults(new.own or {}, new.task))


def _other_folds(old: Mapping[str, Scalar], new: Mapping[str, Scalar]) -> Iterator[str]:
    """Say how the folds differ, as values are then means over other parts of the rows."""
    for key in FOLDS:
        if old.get(key) != new.get(key):
            yield f"{key} was {old.get(key)}, is now {new.get(key)}"
            return


# ---- whether one side allows all values of a key that the other allows


def _covered(name: str, inner: PossibleTrials, outer: PossibleTrials) -> bool:
    """Whether the outer side allows all values of a key that the inner one allows, beside the same other values."""
    for values in _branches(name, inner, outer):
        drawn = _drawn(outer, values)
        if drawn is None:
            continue  # the branch cannot be drawn: its own keys report that
        known = {key: value for key, value in values.items() if not isinstance(value, _Other)}
        # A switch whose value is unknown counts as one by which the key is read.
        unknown = any(need.key == name and need.switch in values.keys() - known.keys() for need in TRIAL_NEEDS)
        if not unknown and not inner.is_read(name, known) and not outer.is_read(name, known):
            continue
        if not _covers(outer.values(name, drawn), inner.values(name, _drawn(inner, values) or {})):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Other:
    """Stands for all values of a distribution that no condition asks for."""

    distribution: Distribution


_Value = Scalar | _Other


def _branches(name: str, inner: PossibleTrials, outer: PossibleTrials) -> list[dict[str, _Value]]:
    """Return all values that the inner side can give the keys on which a key depends, on either side."""
    branches: list[dict[str, _Value]] = [{}]
    for key in _closure(name, inner, outer):
        asked = tuple(_asked(key, (inner, outer)))
        branches = [
            {**values, key: value}
            for values in branches
            for value in _classes(inner.values(key, _drawn(inner, values) or {}), asked)
        ]
    return branches


def _closure(name: str, inner: PossibleTrials, outer: PossibleTrials) -> list[str]:
    """Return the keys on which a key depends, on either side, in an order in which the inner side can draw them."""
    needed, waiting = set[str](), [name]
    while waiting:
        key = waiting.pop()
        conditions = {on for possible in (inner, outer) for case in possible.space.cases(key) for on, _ in case.when}
        conditions |= {need.switch for need in TRIAL_NEEDS if need.key == key and need.switch in inner.own}
        waiting += conditions - needed
        needed |= conditions
    drawn = [key for key in inner.space.names if key in needed]
    return [*drawn, *sorted(needed - set(drawn))]


def _asked(key: str, sides: Iterable[PossibleTrials]) -> Iterator[Scalar]:
    """Yield the values of a key that conditions name."""
    for possible in sides:
        for param in possible.space.params:
            for on, values in param.when:
                yield from values if on == key else ()
    yield from (value for need in TRIAL_NEEDS if need.switch == key for value in need.values)


def _classes(values: Fixed | Distribution, asked: tuple[Scalar, ...]) -> list[_Value]:
    """Return the values that conditions distinguish, and one that stands for all others."""
    if isinstance(values, Fixed):
        return [values.value]
    named: list[Scalar] = []
    for value in asked:
        if contains(values, value) and not is_one_of(value, tuple(named)):
            named.append(value)
    listed = enumerated(values, len(named))
    with_defaults = listed is not None and all(is_one_of(value, tuple(named)) for value in listed)
    return [*named] if with_defaults else [*named, _Other(values)]


def _drawn(possible: PossibleTrials, values: Mapping[str, _Value]) -> dict[str, Scalar] | None:
    """Return the part of some values that a side draws; None where it cannot draw one of them.

    A value that no condition names is left out, as no condition holds by it.
    """
    drawn: dict[str, Scalar] = {}
    for name in possible.space.names:
        if name not in values:
            continue
        param, value = possible.space.active(name, drawn), values[name]
        if param is None:
            continue
        if isinstance(value, _Other):
            if not _covers(param.distribution, value.distribution):
                return None
        elif param.contains(value):
            drawn[name] = value
        else:
            return None
    return drawn


def _covers(outer: Fixed | Distribution, inner: Fixed | Distribution) -> bool:
    """Whether ``outer`` has all values of ``inner``."""
    if isinstance(inner, Fixed):
        if isinstance(outer, Fixed):
            return inner.known == outer.known and is_one_of(inner.value, (outer.value,))
        return inner.known and contains(outer, inner.value)
    if isinstance(outer, Fixed):
        return outer.known and inner.single() and is_one_of(only_value(inner), (outer.value,))
    if isinstance(outer, CategoricalDistribution) and isinstance(inner, CategoricalDistribution):
        return all(is_one_of(choice, tuple(outer.choices)) for choice in inner.choices)
    if isinstance(outer, IntDistribution) and isinstance(inner, IntDistribution):
        fine = inner.single() or inner.step % outer.step == 0
        return fine and contains(outer, inner.low) and contains(outer, inner.high)
    if isinstance(outer, FloatDistribution) and isinstance(inner, FloatDistribution):
        return _grid_covers(outer, inner) and contains(outer, inner.low) and contains(outer, inner.high)
    return False  # another type is another parameter


def _grid_covers(outer: FloatDistribution, inner: FloatDistribution) -> bool:
    if outer.step is None or inner.single():
        return True
    if inner.step is None:
        return False
    ratio = inner.step / outer.step
    return round(ratio) >= 1 and abs(ratio - round(ratio)) < _NEAR


# ---- in words


def _sentences(name: str, before: PossibleTrials, after: PossibleTrials) -> list[str]:
    was, now = before.space.cases(name), after.space.cases(name)
    if not was and not now:
        return [f"{name} was {_text(before.fixed(name))}, is now {_text(after.fixed(name))}"]
    if not was:
        held = before.fixed(name)
        return [f"{name} is searched now" + (f", it was {_text(held)}" if held.known else "")]
    if not now:
        held = after.fixed(name)
        return [f"{name} is no longer searched" + (f", it is {_text(held)} now" if held.known else "")]
    sentences = list(_case_sentences(name, was, now))
    if not sentences and before.fixed(name) != after.fixed(name):
        sentences = [
            f"{name} was {_text(before.fixed(name))} where it is not searched, is now {_text(after.fixed(name))}"
        ]
    return sentences or [f"{name} is searched under other conditions"]


def _case_sentences(name: str, was: tuple[Param, ...], now: tuple[Param, ...]) -> Iterator[str]:
    before, after = {param.when: param for param in was}, {param.when: param for param in now}
    if len(was) == len(now) == 1 and was[0].when != now[0].when:
        yield f"{name} is searched {_under(now[0])}, it was {_under(was[0])}"
        yield from _range_sentences(was[0], now[0])
        return
    for when, param in before.items():
        if when in after:
            yield from _range_sentences(param, after[when])
        else:
            yield f"{name} lost its case for {describe_when(when)}"
    for when in after.keys() - before.keys():
        yield f"{name} has a new case for {describe_when(when)}"


def _under(param: Param) -> str:
    return f"where {describe_when(param.when)}" if param.when else "always"


def _range_sentences(old: Param, new: Param) -> Iterator[str]:
    was, now = old.distribution, new.distribution
    if _covers(was, now) and _covers(now, was):
        return
    where = f" (when {describe_when(new.when)})" if new.when else ""
    kinds = (_kind(was), _kind(now)) if type(was) is not type(now) else ("", "")
    yield f"{new.name}{where}: {kinds[0]}{describe(was)} became {kinds[1]}{describe(now)}"


def _kind(distribution: Distribution) -> str:
    match distribution:
        case IntDistribution():
            return "integers from "
        case FloatDistribution():
            return "numbers from "
        case _:
            return "one of "


def _redrawn(name: str, before: PossibleTrials, after: PossibleTrials) -> list[str]:
    """Describe distributions whose values are the same but drawn on another scale."""
    was = {param.when: param.distribution for param in before.space.cases(name)}
    now = {param.when: param.distribution for param in after.space.cases(name)}
    return [
        f"{name}: {describe(was[when])} became {describe(now[when])}: the same values, drawn in another way"
        for when in was.keys() & now.keys()
        if _logarithmic(was[when]) != _logarithmic(now[when])
    ]


def _logarithmic(distribution: Distribution) -> bool:
    return not isinstance(distribution, CategoricalDistribution) and distribution.log


def _text(fixed: Fixed) -> str:
    return "unset" if fixed.value is None else json.dumps(fixed.value)


# Enqueued points from the best trials of another study.


@dataclass(frozen=True, slots=True)
class TakenPoints:
    """Points that a study takes from another study.

    Attributes:
        points: Values by public dotted name, the best first, each point once.
        notes: In words where they come from, and what of them is left to the sampler.
    """

    points: tuple[dict[str, Scalar], ...] = ()
    notes: tuple[str, ...] = ()


def take_points(other: StudyState, count: int, source: str, space: Space) -> TakenPoints:
    """Return the best trials of a study as points of a space.

    A key that they did not draw has the value of their study file. What the space could not draw is left out, with all
    that depends on it.

    Args:
        other: The other study.
        count: How many of its best trials to take at most.
        source: The setting, for messages.
        space: The space of the new study.

    Raises:
        ConfigError: The other study has no trial with a value, or none has a value in the space.
    """
    doing = f"reading search.enqueue_from = {source}"
    basis = other.generation.comparability
    best = other.ranked[:count]
    if not best:
        raise ConfigError(doing, "that study has no complete trial yet", "a study with complete trials")
    points: list[dict[str, Scalar]] = []
    left: dict[str, list[int]] = {}
    for trial in best:
        own = with_defaults(trial.own or basis.own or {}, basis.task)
        point = {public_name(name): value for name, value in space.read(trial.params, own).items()}
        missing = [name for name in space.names if name not in point and space.active(name, point) is not None]
        for name in missing:
            left.setdefault(name, []).append(trial.number)
        if point and point not in points:
            points.append(point)
    if not points:
        raise ConfigError(doing, "no value of its best trials lies in [space]", "a study of some of the same keys")
    numbers = _listed([trial.number for trial in best])
    tried = f"trying {len(points)} point(s) first: trials {numbers} of {source}, the best by {other.goals[0].name}"
    notes = [tried]
    for name, trials in left.items():
        notes.append(f"{name} of its trials {_listed(trials)} is unknown or outside [space]: the sampler draws it")
    if dropped := {name: None for trial in best for name in trial.params if name not in space.names}:
        notes.append(f"searched there and not here, so left out: {', '.join(dropped)}")
    return TakenPoints(tuple(points), tuple(notes))


def not_taken(source: str, before: str) -> tuple[str, ...]:
    """Return the note for an existing study that began with other points, or with none."""
    if source == before:
        return ()
    began = f"with {before}" if before else "without it"
    hint = "further points can stand in [[search.enqueue]]"
    return (f"search.enqueue_from = {source} is not read: it says how a study begins, and this began {began}; {hint}",)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
