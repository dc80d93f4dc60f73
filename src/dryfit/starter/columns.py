"""Facts about the columns of a table, by which ``dryfit init --data`` tells texts from classes."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from dryfit.core.errors import DataError
from dryfit.core.text.json_text import parse_json
from dryfit.core.text.lines import csv_reader

MOST_VALUES: Final = 1000
"""Different values of a column that are kept; a column with more is none of classes."""
_MOST_KNOWN: Final = 200_000
"""Rows in which a value that is there twice is looked for: memory must not grow with the file."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?|nan", re.IGNORECASE)
_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars"}
_TO_COMMAS: Final = (
    'csv.writer(open("new.csv", "w", newline="")).writerows(csv.reader(open("old.csv"), delimiter={!r}))'
)


@dataclass(slots=True)
class Column:
    """One column.

    Attributes:
        name: Its name.
        rows: Rows that have it.
        empty: Rows where it is null, or white space alone.
        first_empty: The place of the first of them.
        integers: Rows with a whole number; in CSV one that is written so.
        numbers: Rows with any other number.
        lists: Rows with a list; in CSV one in JSON.
        others: Rows with something that is neither text nor any of these.
        words: Words of all texts.
        chars: Characters of all texts.
        values: Rows of each value, by its name; no more than :data:`MOST_VALUES` of them.
        different: Different values among the first rows.
    """

    name: str
    rows: int = 0
    empty: int = 0
    first_empty: str = ""
    integers: int = 0
    numbers: int = 0
    lists: int = 0
    others: int = 0
    words: int = 0
    chars: int = 0
    values: Counter[str] = field(default_factory=Counter[str])
    seen: set[int] = field(default_factory=set[int])

    @property
    def different(self) -> int:
        """Different values, among the rows that were compared."""
        return len(self.seen)

    @property
    def is_unique(self) -> bool:
        """Whether no value is there twice."""
        return len(self.seen) == min(self.rows, _MOST_KNOWN)

    @property
    def has_many(self) -> bool:
        """Whether there are too many values for classes."""
        return len(self.values) > MOST_VALUES

    @property
    def is_numeric(self) -> bool:
        """Whether all values are numbers, some of which are not written as whole ones."""
        return self.numbers > 0 and self.integers + self.numbers == self.rows - self.empty

    @property
    def is_text(self) -> bool:
        """Whether most values are texts that are no numbers."""
        return 2 * (self.integers + self.numbers + self.lists + self.others + self.empty) < self.rows

    @property
    def mean_words(self) -> float:
        """Words of a text, in the mean."""
        return self.words / max(1, self.rows - self.empty)

    def add(self, value: Any, place: str, *, of_csv: bool) -> None:
        """Count a value."""
        self.rows += 1
        if value is None or (isinstance(value, str) and not value.strip()):
            self.empty += 1
            self.first_empty = self.first_empty or place
            return
        held = cell(value, of_csv=of_csv)
        match held:
            case str():
                self.words += len(held.split())
                self.chars += len(held)
            case bool():
                pass
            case int():
                self.integers += 1
            case float():
                self.numbers += 1
            case list():
                self.lists += 1
            case _:
                self.others += 1
        if self.rows <= _MOST_KNOWN:
            self.seen.add(hash(str(value)))
        if len(self.values) <= MOST_VALUES:
            for one in listed(held):
                self.values[value_name(one)] += 1


def cell(value: Any, *, of_csv: bool) -> Any:
    """Return a value; of CSV, which has text alone, the number or the list that a text writes."""
    if not of_csv or not isinstance(value, str):
        return value
    text = value.strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.startswith("[") and text.endswith("]"):
        try:
            return parse_json(text)
        except ValueError:
            return value
    return value


def listed(held: Any) -> list[Any]:
    """Return the items of a list; of anything else, itself alone."""
    return cast("list[Any]", held) if isinstance(held, list) else [held]


def value_name(value: Any) -> str:
    """Return the name of a value, as of a class."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def columns_of(rows: Iterable[tuple[str, Mapping[str, Any]]], *, of_csv: bool) -> dict[str, Column]:
    """Return the facts about the columns of some rows, in order; columns without a name are left out.

    Args:
        rows: The place and the values of each.
        of_csv: The values are texts, some of which write numbers and lists.
    """
    found: dict[str, Column] = {}
    for place, values in rows:
        for name, value in values.items():
            if name.strip():
                found.setdefault(name, Column(name)).add(value, place, of_csv=of_csv)
    return found


def check_separator(source: str) -> None:
    """Refuse a CSV whose columns are separated by something else than commas.

    Raises:
        DataError: Its only column has a name with such characters in it.
    """
    path = Path(source)
    if path.suffix != ".csv" or not path.is_file():
        return  # refused where it is read
    try:
        with path.open("rb") as file:
            header: list[str] = next(csv_reader(file, source), list[str]())
    except (csv.Error, DataError):
        return
    for separator, words in _SEPARATORS.items():
        if len(header) == 1 and separator in header[0] and header[0].replace(separator, "").isprintable():
            raise DataError(
                f"reading {source}",
                f"its columns are separated by {words}",
                "commas",
                f"write it again: {_TO_COMMAS.format(separator)}",
            )
