"""Choose what of large sets of cases `make test` and `make proof` run; `make nightly` runs all of them.

``@pytest.mark.each_value`` keeps so many members of a product that each value of each parameter occurs,
``@pytest.mark.each_pair`` so many that each pair of values of two parameters does, and ``@pytest.mark.every(n)`` each
n-th member, beginning with another one in each test of a file. Members that are left out are marked ``nightly``. Of
the examples of a property a fourth is drawn: :func:`examples`.
"""

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

import pytest

FULL_VARIABLE: Final = "DRYFIT_FULL"
"""Set by `make nightly`."""
_SHARE: Final = 4
_FEWEST_EXAMPLES: Final = 20
Row = Mapping[str, Hashable]
STRENGTHS: Final = {"each_value": 1, "each_pair": 2}


def examples(most: int) -> int:
    """Return how many examples of a property to draw, where so many are drawn at night."""
    return most if FULL_VARIABLE in os.environ else max(_FEWEST_EXAMPLES, most // _SHARE)


def some(cases: Mapping[str, str], every: int) -> dict[str, str]:
    """Return each n-th of named cases, and all of them at night."""
    return dict(list(cases.items())[:: 1 if FULL_VARIABLE in os.environ else every])


def cover(rows: Sequence[Row], strength: int) -> list[int]:
    """Return the positions of rows in which every combination of so many values occurs that occurs in any row.

    Greedy: the row that adds most comes next; of several the one whose values have been taken least, so that the values
    of a short parameter are spread over those of a long one.

    Args:
        rows: The members of a product, or of a part of it: the value of each parameter.
        strength: Of how many parameters values are combined.
    """
    parts = [set(combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing = set().union(*parts)
    taken: Counter[object] = Counter()
    chosen: list[int] = []
    while missing:
        gains = ((len(part & missing), -sum(taken[item] for item in rows[at].items())) for at, part in enumerate(parts))
        best, _ = max(enumerate(gains), key=lambda one: one[1])
        missing -= parts[best]
        taken.update(rows[best].items())
        chosen.append(best)
    return sorted(chosen)


def leave_to_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark what the tests' own markers allow to leave out."""
    members: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            members.setdefault((str(item.path), item.originalname), []).append(item)
    order: Counter[str] = Counter()
    for (path, _), functions in members.items():
        kept = _kept(functions, order[path])
        order[path] += 1
        for at, function in enumerate(functions):
            if at not in kept:
                function.add_marker(pytest.mark.nightly)


def _kept(functions: Sequence[pytest.Function], shift: int) -> Iterable[int]:
    first = functions[0]
    every = first.get_closest_marker("every")
    if every is not None:
        return [at for at in range(len(functions)) if (at + shift) % every.args[0] == 0]
    for name, strength in STRENGTHS.items():
        if first.get_closest_marker(name) is not None:
            return cover([_values(function) for function in functions], strength)
    return range(len(functions))


def _values(function: pytest.Function) -> Row:
    """Return what tells the values of each parameter apart: the same object stands in every member that has it."""
    return {name: id(value) for name, value in function.callspec.params.items()}
