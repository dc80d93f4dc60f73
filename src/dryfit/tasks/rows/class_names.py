"""Names of classes: those of ``data.labels``, or of the training rows where these have no integers."""

import difflib
import json
import re
from collections.abc import Set
from typing import Any, Final

from dryfit.core.errors import DataError
from dryfit.core.settings.tables import DataSettings
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.words import brief, few
from dryfit.tasks.rows.sources import BadRow, RawRow, stream_rows

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")
_MOST_NAMES: Final = 1000
"""As many as ``data.labels`` may have."""


def with_names(data: DataSettings, required: Set[str]) -> DataSettings:
    """Return the data settings with the names of the classes, where these are not integers.

    The training rows decide: where the first of them has a class that is no integer, all their classes are names,
    sorted; those that are all integers (texts of Parquet or JSONL) by their value. A column of integers is read no
    further than its first row.

    Args:
        data: Where the rows are.
        required: What each row must have; without ``label`` there are no classes.

    Raises:
        DataError: The source cannot be read, or there are not as many names as ``data.num_labels`` says.
    """
    source = data.train or data.file
    if data.labels or data.is_regression or "label" not in required or source is None:
        return data
    names: set[str] = set()
    for row in stream_rows(source):
        if isinstance(row, BadRow) or data.label not in row.values:
            return data  # refused with the rows
        for value in _classes(row, data):
            name = name_of(value)
            if name is None or (not names and _is_integer(value, row)):
                return data
            names.add(name)
        if len(names) > _MOST_NAMES:
            break
    if not names:
        return data
    found = sorted_names(names)
    if len(found) != data.num_labels:
        raise DataError(
            f"reading {source}",
            f"its column {data.label!r} has {len(found)} names of classes ({few(found, most=8)}), "
            f"and data.num_labels is {data.num_labels}",
            "as many names as classes",
            f"data.labels = {json.dumps(found, ensure_ascii=False)}" if len(found) <= 20 else "another data.label",
        )
    return data.model_copy(update={"labels": tuple(found)})


def name_of(value: object) -> str | None:
    """Return the name that a value is; None where it is none: no text, and neither an integer nor a truth value."""
    match value:
        case str():
            return value.strip() or None
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case _:
            return None


def sorted_names(names: Set[str]) -> list[str]:
    """Return names in order: integers by their value, all else as text."""
    if all(_INTEGER.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def named_class(value: object, data: DataSettings, place: str) -> int:
    """Return the class that a value of a row names: by its name, or where no name is an integer by its number.

    Raises:
        DataError: There is no such class.
    """
    name = name_of(value)
    if name in data.labels:
        return data.labels.index(name)
    numbered = not any(_INTEGER.fullmatch(label) for label in data.labels)
    if numbered and name is not None and _INTEGER.fullmatch(name) and 0 <= int(name) < len(data.labels):
        return int(name)
    near = difflib.get_close_matches((name or "").lower(), [label.lower() for label in data.labels], n=1)
    meant = [label for label in data.labels if near and label.lower() == near[0]]
    raise DataError(
        f"reading {place}",
        f"{data.label} is {brief(value)}",
        f"one of data.labels: {few(data.labels, most=20)}",
        f"did you mean {meant[0]}?" if meant else "",
    )


def _classes(row: RawRow, data: DataSettings) -> list[Any]:
    value = row.values[data.label]
    if not data.multi_label:
        return [value]
    if isinstance(value, str) and row.source.endswith(".csv"):
        try:
            value = parse_json(value)
        except ValueError:
            return [None]
    return value if isinstance(value, list) else [None]


def _is_integer(value: object, row: RawRow) -> bool:
    """Whether a class is given by its number; CSV has text alone."""
    if isinstance(value, str):
        return row.source.endswith(".csv") and _INTEGER.fullmatch(value.strip()) is not None
    return isinstance(value, int) and not isinstance(value, bool)
