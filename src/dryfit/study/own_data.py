"""A study of the user's own rows: what their columns hold, and which is text and which the class."""

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.splits import SPLITS, TEST, TRAIN, VALIDATION, SplitRule, split_groups
from dryfit.settings.tables import HUB_PREFIX
from dryfit.settings.text import brief, csv_reader, did_you_mean, few
from dryfit.settings.wire import parse_json

# Facts about the columns of a table, by which ``dryfit init --data`` tells texts from classes.


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


# Find the text and class columns of a table by their names and content.


MOST_CLASSES: Final = 100
"""More different values are taken for free text or ids; ``data.labels`` may have more."""
_LONGEST_CLASS: Final = 60
_FEWEST_WORDS: Final = 2.0
"""Of a text, in the mean: ids and codes have one."""
_SHORTEST_WORD: Final = 3
"""Letters of a criterion that is a single word: a code has fewer, or a digit."""
_CLEARLY: Final = 2.0
"""A text is told from others without a known name where it is so many times as long."""
ROLES: Final = ("text", "label", "criterion", "group")
"""What a user may say the column of."""

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "label": (
        *("label", "labels", "answer", "class", "category", "target", "sentiment", "intent", "gold", "y", "stars"),
        *("score", "rating", "similarity"),
    ),
    "text": (
        *("text", "passage", "context", "body", "content", "sentence", "premise", "document", "review", "post"),
        *("message", "comment", "tweet", "abstract", "paragraph", "utterance", "description", "sentence1"),
    ),
    "criterion": ("criterion", "question", "hypothesis", "query", "claim", "symptom", "sentence2"),
    "group": (
        *("group", "author", "author_id", "user", "user_id", "document_id", "doc_id", "patient", "patient_id"),
        *("subject", "subject_id", "speaker", "conversation_id", "thread_id", "post_id", "source_id"),
    ),
    "id": ("id", "row_id", "uid", "guid", "example_id", "index", "idx", "pairid"),
}
"""Names that columns of such a kind usually have, the likeliest first."""


class AmbiguousError(ConfigError):
    """Several columns may be meant, or none is clearly.

    Attributes:
        role: What the column is to be.
        candidates: The columns that it may be.
    """

    def __init__(self, doing: str, role: str, candidates: tuple[str, ...]) -> None:
        self.role, self.candidates = role, candidates
        found = "several columns may be" if len(candidates) > 1 else "no column is clearly"
        hint = f"--{role} {candidates[0]}" if candidates else f"--{role} COLUMN"
        super().__init__(doing, f"{found} the {role}", few(map(repr, candidates), most=20) or "a column of it", hint)


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns of a study.

    Attributes:
        text: The text.
        label: The class, or the number; None: there is none, and rows have evidence.
        criterion: What the text is held against; None: there is none.
        group: What may not cross splits; None: each row is alone.
        id: The row's own id; None: it has none.
        evidence: Spans of characters; None: there are none.
    """

    text: str
    label: str | None
    criterion: str | None
    group: str | None
    id: str | None
    evidence: str | None

    def unread(self, columns: Mapping[str, Column]) -> list[str]:
        """Return the columns that have no role."""
        read = (self.text, self.label, self.criterion, self.group, self.id, self.evidence)
        return [name for name in columns if name not in read]


def find_roles(
    columns: Mapping[str, Column],
    given: Mapping[str, str],
    source: str,
    *,
    needs: frozenset[str] = frozenset({"label"}),
) -> Roles:
    """Return the role of each column.

    Args:
        columns: What they hold.
        given: Columns that the user named, by role.
        source: For messages.
        needs: What the task cannot do without: ``label``, ``evidence``, ``criterion``; with ``number`` a label may be
            one.

    Raises:
        ConfigError: There is no such column, or it was named twice.
        AmbiguousError: Several columns may be the one, or none is.
        DataError: A column that was named, or found, cannot be what it is to be, or there is no evidence.
    """
    may_be_numbers = "number" in needs
    doing = f"looking at the columns of {source}"
    _check_given(columns, given, doing)
    free = {name: column for name, column in columns.items() if name not in given.values()}
    evidence = _named(free, ("evidence",))
    evidence = evidence if evidence is not None and free[evidence].lists == free[evidence].rows else None
    if evidence is None and "evidence" in needs:
        raise DataError(doing, _said_of_no_evidence(columns.get("evidence")), "[[start, end], ...] in each row")
    free = _without(free, evidence)
    label = given.get("label")
    if label is None and "label" in needs:
        label = _label(free, doing, may_be_numbers=may_be_numbers)
    free = _without(free, label)
    text = given.get("text")
    criterion, named = given.get("criterion"), _named(_criteria(free), _NAMES["criterion"])
    if text is None:
        # A column `question` is the text where it is the only one.
        text = _text(_without(free, named) if _texts(_without(free, named)) else free, doing)
    free = _without(free, text)
    if criterion is None:
        criterion = _named(_criteria(free), _NAMES["criterion"])
    if criterion is None and "criterion" in needs:
        raise AmbiguousError(doing, "criterion", tuple(free))
    free = _without(free, criterion)
    row_id = next((name for name in _all_named(free, _NAMES["id"]) if _tells_rows(free[name])), None)
    group = given.get("group") or _group(_without(free, row_id), doing)
    _check_text(columns[text], "text", doing)
    if criterion is not None:
        _check_text(columns[criterion], "criterion", doing)
    if group is not None and columns[group].empty:
        raise DataError(doing, _emptiness(columns[group]), "a group for each row", "another --group, or fill them in")
    if label is not None:
        check_label(columns[label], doing, may_be_numbers=may_be_numbers)
    return Roles(text, label, criterion, group, row_id, evidence)


def check_label(column: Column, doing: str, *, may_be_numbers: bool = False) -> None:
    """Refuse a column that holds no classes, and no numbers where these may be labels.

    Raises:
        DataError: It lacks values, has one alone, or so many that it holds numbers, ids or free text.
    """
    name, values, rows = column.name, column.values, column.rows - column.empty
    if column.empty:
        raise DataError(doing, _emptiness(column), "a label for each row", "leave these rows out, or another --label")
    if column.is_numeric and may_be_numbers:
        _check_numbers(column, doing)
        return
    if column.numbers:
        number = next(one for one in values if not one.lstrip("+-").isdigit())
        found = f"column {name!r} holds numbers such as {number}: that looks like regression"
        raise DataError(doing, found, "classes: whole numbers, or names", "another --label, or classes made of it")
    if column.others:
        raise DataError(doing, f"column {name!r} holds objects", "classes: whole numbers, or names", "another --label")
    if column.lists and column.lists < column.rows:
        raise DataError(doing, f"column {name!r} has lists in some rows only", "a list of classes in each row, or none")
    if len(values) < 2 and not column.lists:
        only = next(iter(values))
        raise DataError(doing, f"column {name!r} is {only!r} in every row", "two classes at least", "another --label")
    longest = max(values, key=len)
    if column.is_unique and rows > 2 and not column.lists:
        found = f"column {name!r} has another value in each of {rows} rows, such as {brief(longest, 40)}"
        raise DataError(doing, f"{found}: ids, or free text", "classes, which several rows share", "another --label")
    if len(values) > MOST_CLASSES:
        count = "more than 1000" if column.has_many else str(len(values))
        found = f"column {name!r} has {count} different values: that looks like numbers or free text"
        hint = "another --label; many classes can be written into a study file by hand, and regression: num_labels = 1"
        raise DataError(doing, found, f"at most {MOST_CLASSES} classes", hint)
    if name.strip() in values:
        found = f"column {name!r} is called as one of its values: the first line looks like a row"
        raise DataError(doing, found, "a first line with the names of the columns", "add it")


def _check_numbers(column: Column, doing: str) -> None:
    """Refuse numbers that are all the same, or two whole ones: classes that were written with a point."""
    values = sorted({float(value) for value in column.values})
    if len(values) < 2:
        found = f"column {column.name!r} is {values[0]:g} in every row"
        raise DataError(doing, found, "two different numbers at least", "another --label")
    if len(values) == 2 and all(value.is_integer() for value in values):
        found = f"column {column.name!r} holds {values[0]} and {values[1]}: classes, written with a point"
        raise DataError(doing, found, "classes as whole numbers, or names", f"write {values[0]:g} and {values[1]:g}")


def _check_given(columns: Mapping[str, Column], given: Mapping[str, str], doing: str) -> None:
    roles: dict[str, str] = {}
    for role, name in given.items():
        if name not in columns:
            hint = did_you_mean(name, columns, written=f"--{role} {{}}")
            raise ConfigError(doing, f"there is no column {name!r}", f"its columns: {few(columns, most=20)}", hint)
        if name in roles:
            found = f"column {name!r} is given as --{roles[name]} and --{role}"
            raise ConfigError(doing, found, "a column of its own for each")
        roles[name] = role


def _label(columns: Mapping[str, Column], doing: str, *, may_be_numbers: bool) -> str:
    numeric = [name for name, column in columns.items() if may_be_numbers and column.is_numeric and not column.empty]
    named = list(_all_named(columns, _NAMES["label"]))
    if named:
        shaped = [name for name in named if name in numeric or _looks_like_classes(columns[name])]
        return (shaped or named)[0]  # what is wrong with it is said by its name
    others = {name for role in ("id", "group") for name in _all_named(columns, _NAMES[role])}
    shaped = [name for name, column in columns.items() if name not in others and _looks_like_classes(column)]
    shaped = shaped or [name for name in numeric if name not in others]
    if len(shaped) != 1:
        raise AmbiguousError(doing, "label", tuple(shaped or columns))
    return shaped[0]


def _looks_like_classes(column: Column) -> bool:
    """Whether a column has a few short values, each in several rows."""
    fits = not column.numbers and not column.others and not column.empty and not column.is_unique
    return fits and 2 <= len(column.values) <= MOST_CLASSES and max(map(len, column.values)) <= _LONGEST_CLASS


def _texts(columns: Mapping[str, Column]) -> dict[str, Column]:
    return {name: one for name, one in columns.items() if one.is_text and one.mean_words >= _FEWEST_WORDS}


def _criteria(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns that may hold criteria: texts, or single words that are no codes."""
    words = {name: one for name, one in columns.items() if one.is_text and all(map(_is_worded, one.values))}
    return {**_texts(columns), **words}


def _is_worded(value: str) -> bool:
    return len(value) >= _SHORTEST_WORD and not any(map(str.isdigit, value))


def _text(columns: Mapping[str, Column], doing: str) -> str:
    texts = _texts(columns)
    named = _named(texts, _NAMES["text"]) or _named(
        {name: column for name, column in columns.items() if column.is_text}, _NAMES["text"]
    )
    if named is not None:
        return named
    longest = sorted(texts, key=lambda name: -texts[name].chars)
    if not longest or (len(longest) > 1 and texts[longest[0]].chars < _CLEARLY * texts[longest[1]].chars):
        raise AmbiguousError(doing, "text", tuple(longest or columns))
    return longest[0]


def _group(columns: Mapping[str, Column], doing: str) -> str | None:
    """Return the column of groups, if one has the name of such and values that rows share."""
    named = [name for name in _all_named(columns, (*_NAMES["group"], *_NAMES["id"])) if _groups_rows(columns[name])]
    if len(named) > 1 and named[0].lower() != "group":
        raise AmbiguousError(doing, "group", tuple(named))
    return named[0] if named else None


def _groups_rows(column: Column) -> bool:
    plain = not (column.numbers or column.lists or column.others or column.empty)
    return plain and not column.is_unique and column.different > 1


def _tells_rows(column: Column) -> bool:
    return column.is_unique and not (column.empty or column.numbers or column.lists or column.others)


def _check_text(column: Column, role: str, doing: str) -> None:
    if column.empty:
        raise DataError(
            doing, _emptiness(column), f"a {role} for each row", f"leave these rows out, or another --{role}"
        )
    if not column.is_text:
        example = brief(next(iter(column.values), ""), 40)
        raise DataError(doing, f"column {column.name!r} holds no text, but {example}", "texts", f"another --{role}")


def _said_of_no_evidence(column: Column | None) -> str:
    if column is None:
        return "no column `evidence` with spans"
    empty = f"; the first that is empty in {column.first_empty}" if column.first_empty else ""
    return f"column 'evidence' holds a list in {column.lists} of {column.rows} rows{empty}"


def _emptiness(column: Column) -> str:
    rows = f"{column.empty} of {column.rows} rows"
    return f"column {column.name!r} is empty in {rows}, first in {column.first_empty}"


def _all_named(columns: Mapping[str, Column], names: tuple[str, ...]) -> Iterator[str]:
    """Yield the columns that have one of some names, in the order of these; capitals do not count."""
    for wanted in names:
        yield from (name for name in columns if name.strip().lower() == wanted)


def _named(columns: Mapping[str, Column], names: tuple[str, ...]) -> str | None:
    return next(_all_named(columns, names), None)


def _without(columns: Mapping[str, Column], name: str | None) -> dict[str, Column]:
    return {other: column for other, column in columns.items() if other != name}


# A study of the user's own rows: its ``[data]`` table from the columns' content, and the findings.


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
        needs: As for :func:`~dryfit.study.own_data.find_roles`.

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
    # Rows of one text are a group: in two splits they would be learned by heart.
    group = roles.group or (None if whole[roles.text].is_unique else roles.text)
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
