"""What changed between the space a study was created with and today's, in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from optuna.distributions import CategoricalDistribution

from dryfit.search.params import Distribution, Param, describe, describe_when, is_one_of
from dryfit.search.space import Space


class ChangeKind(StrEnum):
    """How much of what was tried still says something."""

    SAME = "same"
    EXTENDS = "extends"
    """Every old point can still be drawn."""
    NARROWS = "narrows"
    """Every point of today could be drawn before; some old points no longer."""
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class SpaceChange:
    """The change as a whole, and one sentence for each difference."""

    kind: ChangeKind
    sentences: tuple[str, ...]


def compare(old: Space, new: Space) -> SpaceChange:
    """Compare the space a study was created with (``Space.from_json``) and today's.

    Every kind is usable: suggestions read old trials by value and leave out what cannot be drawn any more.
    """
    found = list(_differences(old, new))
    kinds = {kind for kind, _ in found}
    kind = kinds.pop() if len(kinds) == 1 else ChangeKind.CHANGED if kinds else ChangeKind.SAME
    return SpaceChange(kind, tuple(sentence for _, sentence in found))


def _differences(old: Space, new: Space) -> Iterator[tuple[ChangeKind, str]]:
    for name in old.names:
        if not new.cases(name):
            yield ChangeKind.CHANGED, f"{name} is no longer searched"
    for name in new.names:
        if not old.cases(name):
            yield ChangeKind.CHANGED, f"{name} is searched now"
            continue
        before = {param.when: param for param in old.cases(name)}
        after = {param.when: param for param in new.cases(name)}
        for when in before.keys() - after.keys():
            yield ChangeKind.CHANGED, f"{name} lost its case for {describe_when(when)}"
        for when, param in after.items():
            if when in before:
                yield from _changes(before[when], param)
            else:
                yield ChangeKind.CHANGED, f"{name} has a new case for {describe_when(when)}"


def _changes(old: Param, new: Param) -> Iterator[tuple[ChangeKind, str]]:
    before, after = old.distribution, new.distribution
    if before == after:
        return
    where = f" (when {describe_when(new.when)})" if new.when else ""
    grows, shrinks = _covers(after, before), _covers(before, after)
    sentence = f"{new.name}{where}: {describe(before)} became {describe(after)}"
    if grows and not shrinks:
        yield ChangeKind.EXTENDS, sentence
    elif shrinks and not grows:
        yield ChangeKind.NARROWS, sentence
    elif not grows:
        yield ChangeKind.CHANGED, sentence
    elif not isinstance(before, CategoricalDistribution):
        yield ChangeKind.CHANGED, sentence  # the same values, drawn in another way
    # else: the same choices in another order. TPE reads them by value, so nothing has changed.


def _covers(outer: Distribution, inner: Distribution) -> bool:
    """Whether all values of ``inner`` can be drawn from ``outer``, in the same way."""
    if isinstance(outer, CategoricalDistribution) or isinstance(inner, CategoricalDistribution):
        if not isinstance(outer, CategoricalDistribution) or not isinstance(inner, CategoricalDistribution):
            return False
        return all(is_one_of(choice, tuple(outer.choices)) for choice in inner.choices)
    same_way = type(outer) is type(inner) and outer.log == inner.log and outer.step == inner.step
    return same_way and outer.low <= inner.low and inner.high <= outer.high
