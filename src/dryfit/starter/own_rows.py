"""A study of the user's own rows: its ``[data]`` table from the columns' content, and the findings."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dryfit.core.errors import DataError
from dryfit.core.settings.splits import SPLITS, TEST, TRAIN, VALIDATION, SplitRule, split_groups
from dryfit.core.settings.tables import HUB_PREFIX
from dryfit.core.text.words import few
from dryfit.starter.columns import Column, cell, columns_of, listed, value_name
from dryfit.starter.roles import Roles, find_roles

NO_COLUMN: Final = "(none)"
"""In a study file, the name of a column that is not there: a column of the usual name is something else."""

_SHARE: Final = 0.2
"""Of the groups, for validation and for test each."""
_FEWEST_FOR_TEST: Final = 5
"""Groups from which on some are kept for test."""
_SEEDS: Final = 50
_CHARS_A_TOKEN: Final = 4.0
"""Of text in an alphabet; of other scripts each character is a token. Subword vocabularies of English give 4 to 5."""
_ALPHABETS_END: Final = 0x2E80
_SPECIAL_TOKENS: Final = 3
_MOST_ROWS_LONG: Final = 0.95
_LENGTHS: Final = (32, 512)
"""Tokens that ``train.max_length`` is at least, and at most: as many as usual encoders read."""

Written = str | int | float | bool | tuple[str, ...]
"""A value of a study file."""

Keys = dict[str, Written]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Findings about the rows of a new study.

    Attributes:
        data: Keys of ``[data]``.
        max_length: ``train.max_length``.
        train_rows: Rows of the training split.
        found: What was found, line by line.
    """

    data: Keys
    max_length: int
    train_rows: int
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Rows as a split sees them: the group and the classes of each, its number, and its length in tokens, estimated."""

    groups: list[str]
    classes: list[tuple[str, ...]]
    tokens: list[int]
    numbers: list[float]


def own_rows(
    copied: Path, source: str, place: str, given: Mapping[str, str], *, needs: frozenset[str] = frozenset({"label"})
) -> OwnRows:
    """Return the settings of a study of some rows.

    Args:
        copied: The rows as the job ROWS has written them, with all columns.
        source: The file, absolute, or hub name that they were read from.
        place: What the study file calls it.
        given: Columns that the user named, by role.
        needs: As for :func:`~dryfit.starter.roles.find_roles`.

    Raises:
        ConfigError: A column was named that is not there, or it is not clear which one is meant.
        DataError: A row cannot be read, or the rows are none that can be learned from.
    """
    of_csv = source.endswith(".csv")
    columns = columns_of(_rows(copied, source), of_csv=of_csv)
    if not columns:
        raise DataError(f"reading {source}", "it has no rows", "at least two rows")
    rows = max(column.rows for column in columns.values())
    if rows < 2:
        raise DataError(f"reading {source}", "it has 1 row", "rows to learn from, and rows to validate on")
    asked = {*given.values(), *({"evidence"} & needs)}
    for column in columns.values():
        if column.rows < rows and column.name in asked:
            raise DataError(
                f"reading {source}", f"column {column.name!r} is in {column.rows} of {rows} rows", "all rows"
            )
    whole = {name: column for name, column in columns.items() if column.rows == rows}
    may_be_numbers = "number" in needs
    roles = find_roles(whole, given, source, needs=needs)
    column = columns[roles.label] if roles.label is not None else None
    group = roles.group or _of_repeated_texts(whole[roles.text])
    numeric = column is not None and column.is_numeric and may_be_numbers
    seen = _seen(_rows(copied, source), source, roles, group, of_csv=of_csv, numeric=numeric)
    data: Keys = {"file": place, **_columns(roles, group, columns)}
    data |= {"num_labels": 1} if numeric else _classes(column) if column is not None else {}
    split, rule = _split(seen, source)
    data |= {"validation_fraction": rule.validation, "test_fraction": rule.test}
    data |= {"split_seed": rule.seed} if rule.seed else {}
    longest = sorted(seen.tokens)[math.ceil(_MOST_ROWS_LONG * rows) - 1]
    least, most = _LENGTHS
    max_length = min(most, max(least, -(-longest // 16) * 16))
    called = source if source.startswith(HUB_PREFIX) else Path(source).name
    said = [
        f"{called}: {rows} rows, columns {few(columns, most=12)}",
        _said_of_roles(roles, group, columns),
        *([_said_of_numbers(seen.numbers) if numeric else _said_of_classes(column)] if column is not None else []),
        f"length: 95 % of the rows have at most {longest} tokens, estimated; train.max_length is {max_length}",
        _said_of_split(split, seen),
    ]
    unread = roles.unread(columns)
    train_rows = sum(split[group] == TRAIN for group in seen.groups)
    return OwnRows(data, max_length, train_rows, (*said, *([f"not read: {few(unread, most=12)}"] if unread else [])))


def is_regression(data: Mapping[str, object]) -> bool:
    """Return whether the keys of ``[data]`` make labels numbers."""
    return data.get("num_labels") == 1 and not data.get("multi_label")


def reference(source: str, folder: Path) -> str:
    """Return a source's path in a study file: relative to its folder if that is short, else absolute."""
    if source.startswith(HUB_PREFIX):
        return source
    path = os.path.relpath(source, folder.absolute())
    return path if Path(path).parts.count("..") < 2 else source  # further away it would hold for one of them alone


def _rows(copied: Path, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    unit = "line" if source.endswith((".jsonl", ".csv")) else "row"
    with copied.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            row = json.loads(line)
            place = f"{unit} {row['row']}"
            if "error" in row:
                raise DataError(f"reading {source}, {place}", row["error"], "a row with the columns of the others")
            yield place, row["values"]


def _seen(
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    source: str,
    roles: Roles,
    group: str | None,
    *,
    of_csv: bool,
    numeric: bool,
) -> _Seen:
    seen = _Seen([], [], [], [])
    for place, values in rows:
        number = place.rpartition(" ")[2]
        name = group or roles.id
        seen.groups.append(str(values[name]) if name is not None else f"{source}:{number}")
        held: Any = cell(values[roles.label], of_csv=of_csv) if roles.label is not None else list[Any]()
        if numeric and not math.isfinite(held):
            raise DataError(f"reading {source}, {place}", f"{roles.label} is {held}", "a finite number in each row")
        seen.numbers.extend([float(held)] if numeric else [])
        seen.classes.append(() if numeric else tuple(value_name(one) for one in listed(held)))
        texts = [str(values[name]) for name in (roles.criterion, roles.text) if name is not None]
        seen.tokens.append(sum(map(_tokens, texts)) + _SPECIAL_TOKENS)
    return seen


def _tokens(text: str) -> int:
    dense = 0 if text.isascii() else sum(ord(char) >= _ALPHABETS_END for char in text)
    return math.ceil((len(text) - dense) / _CHARS_A_TOKEN) + dense


def _of_repeated_texts(text: Column) -> str | None:
    """Return the column of texts where some are there twice: in two splits they would be learned by heart."""
    return None if text.is_unique else text.name


def _columns(roles: Roles, group: str | None, columns: Mapping[str, Column]) -> Keys:
    """Return the keys that name columns, where these have not the usual names, or others have them."""
    named = {"text": roles.text, "criterion": roles.criterion, "label": roles.label, "group": group, "id": roles.id}
    named |= {"evidence": roles.evidence}
    keys: Keys = {}
    for key, name in named.items():
        if name is not None and name != key:
            keys[key] = name
        elif name is None and key in columns and key != "label":
            keys[key] = NO_COLUMN
    return keys


def _classes(column: Column) -> Keys:
    """Return the keys of the classes: their number where they are numbered from 0, else their names."""
    names = _sorted(column.values)
    numbered = column.integers == column.rows or (column.lists and all(name.isdigit() for name in names))
    several: Keys = {"multi_label": True} if column.lists else {}
    if numbered and names == [str(number) for number in range(len(names))]:
        return {"num_labels": len(names), **several}
    return {"labels": tuple(names), **several}


def _sorted(values: Mapping[str, int]) -> list[str]:
    """Return names of classes in the order in which rows have them without ``data.labels``."""
    try:
        return sorted(values, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(values)


def _split(seen: _Seen, source: str) -> tuple[Mapping[str, str], SplitRule]:
    """Return the split of each group by the first seed that gives every split every class, or else train.

    Raises:
        DataError: No seed tried gives train every class.
    """
    groups = set(seen.groups)
    test = _SHARE if len(groups) >= _FEWEST_FOR_TEST else 0.0
    every = {name for names in seen.classes for name in names}
    best: tuple[int, Mapping[str, str], SplitRule] | None = None
    for seed in range(_SEEDS):
        rule = SplitRule(_SHARE, test, seed)
        split = split_groups(groups, rule, doing=f"splitting {source} by group", hint="add rows of other groups")
        lacking = _lacking(split, seen, every)
        if not lacking[TRAIN] and (best is None or len(lacking[VALIDATION]) + len(lacking[TEST]) < best[0]):
            best = (len(lacking[VALIDATION]) + len(lacking[TEST]), split, rule)
        if best is not None and best[0] == 0:
            break
    if best is None:
        few_rows = min(every, key=lambda name: sum(name in names for names in seen.classes))
        rows = sum(few_rows in names for names in seen.classes)
        found = f"no split leaves rows of every class for training: {few_rows!r} has {rows} row(s), in too few groups"
        raise DataError(f"splitting {source} by group", found, "several groups of each class", "add rows")
    return best[1], best[2]


def _lacking(split: Mapping[str, str], seen: _Seen, every: set[str]) -> dict[str, set[str]]:
    """Return the classes that no row of a split has; of a split without groups none."""
    lacking = {name: set(every) if name in split.values() else set[str]() for name in SPLITS}
    for group, names in zip(seen.groups, seen.classes, strict=True):
        lacking[split[group]].difference_update(names)
    return lacking


def _said_of_roles(roles: Roles, group: str | None, columns: Mapping[str, Column]) -> str:
    named = {"text": roles.text, "criterion": roles.criterion, "label": roles.label, "id": roles.id}
    said = [f"{role}: {name}" for role, name in {**named, "evidence": roles.evidence}.items() if name is not None]
    if group is None:
        return "; ".join([*said, "each row is a group of its own"])
    together = f"{columns[group].different} groups" if group != roles.text else "rows of one text are a group"
    return "; ".join([*said, f"group: {group} ({together})"])


def _said_of_classes(column: Column) -> str:
    counts = [f"{name} ({column.values[name]})" for name in _sorted(column.values)]
    several = ", any number of them to a row" if column.lists else ""
    return f"{len(counts)} classes{several}: {few(counts, most=12)}"


def _said_of_numbers(numbers: Sequence[float]) -> str:
    mean = math.fsum(numbers) / len(numbers)
    return f"numbers from {min(numbers):g} to {max(numbers):g}, {mean:.4g} in the mean: regression"


def _said_of_split(split: Mapping[str, str], seen: _Seen) -> str:
    rows = Counter(split[group] for group in seen.groups)
    text = ", ".join(f"{rows[name]} {name}" for name in SPLITS if rows[name])
    lacking = _lacking(split, seen, {name for names in seen.classes for name in names})
    absent = [f"{name} lacks {few(sorted(classes))}" for name, classes in lacking.items() if classes]
    return f"split by group: {text} rows" + (f"; {'; '.join(absent)}" if absent else "")
