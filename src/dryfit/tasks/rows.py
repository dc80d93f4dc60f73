"""Rows of a data set: read, checked and split. A task of your own imports ``Row`` and ``Readable`` from here."""

import csv
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, cast

import xxhash

from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.splits import SPLITS, TEST, TRAIN, VALIDATION, SplitRule, split_groups
from dryfit.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX, DataSettings
from dryfit.settings.text import bounded_lines, brief, check_names, csv_reader, decoded, existing_file, few, first_line
from dryfit.settings.wire import parse_json

# Read raw rows from JSONL, CSV, Parquet and hub data sets, each with its place in the source.


_READERS = (".jsonl", ".csv", ".parquet")
_PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file has it.

    Attributes:
        values: Column to value.
        source: The file, or hub name, it came from.
        number: Line of a text file, counted from 1; index of any other row, from 0.
    """

    values: dict[str, Any]
    source: str
    number: int

    @property
    def place(self) -> str:
        """Where the row is, for messages."""
        unit = "line" if self.source.endswith((".jsonl", ".csv")) else "row"
        return f"{self.source}, {unit} {self.number}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read, while the rows after it can.

    Attributes:
        number: As of a :class:`RawRow`.
        error: What is wrong with it.
    """

    number: int
    error: DataError


def read_rows(source: str) -> list[RawRow]:
    """Read every row of a source.

    Args:
        source: A ``.jsonl``, ``.csv`` or ``.parquet`` file, or ``hub:NAME[:SPLIT[:CONFIG]]``.

    Raises:
        DataError: The source is missing, of another kind or not UTF-8, or a line is not a JSON object.
    """
    rows: list[RawRow] = []
    for row in stream_rows(source):
        if isinstance(row, BadRow):
            raise row.error
        rows.append(row)
    return rows


def stream_rows(source: str) -> Iterator[RawRow | BadRow]:
    """Read a source row by row; files take the memory of a few rows, whatever their size.

    Args:
        source: As for :func:`read_rows`.

    Yields:
        Each row, or its error where the next row can still be read.

    Raises:
        DataError: The source cannot be read any further; or at once, where it is missing or of another kind.
    """
    if source.startswith(HUB_PREFIX):
        return _hub(source)
    path = existing_file(source, allowed="a .jsonl, .csv or .parquet file, or hub:NAME[:SPLIT[:CONFIG]]")
    match path.suffix:
        case ".jsonl":
            return _jsonl(path, source)
        case ".csv":
            return _csv(path, source)
        case ".parquet":
            return _parquet(path, source)
        case suffix:
            raise DataError(f"reading {source}", f"files of kind {suffix!r} are not read", allowed=", ".join(_READERS))


def _jsonl(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    with path.open("rb") as file:
        for number, line in bounded_lines(file, source):
            if line.strip():
                yield _json_row(line.removesuffix(b"\n"), source, number)


def _json_row(line: bytes, source: str, number: int) -> RawRow | BadRow:
    where = f"reading {source}, line {number}"
    try:
        values = parse_json(decoded(line, where))
    except DataError as error:
        return BadRow(number, error)
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    except ValueError as error:
        return BadRow(number, DataError(where, first_line(error), allowed="one JSON object a line"))
    if not isinstance(values, dict):
        problem = f"{brief(line.decode(), 60)} is no object"
        return BadRow(number, DataError(where, problem, allowed="one JSON object a line"))
    return RawRow(values, source, number)


def _csv(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    with path.open("rb") as file:
        reader = csv_reader(file, source)
        header: list[str] | None = None
        try:
            for cells in reader:
                number: int = reader.line_num
                if header is None:
                    header = list[str](cells)
                    check_names(header, f"{source}, line {number}")
                elif cells and len(cells) != len(header):
                    problem = f"the row has not {len(header)} columns like the header"
                    where = f"reading {source}, line {number}"
                    yield BadRow(number, DataError(where, problem, hint="check the quoting"))
                elif cells:
                    yield RawRow(dict(zip(header, cells, strict=True)), source, number)
        except csv.Error as error:
            raise DataError(f"reading {source}, line {reader.line_num}", f"not CSV: {error}") from error


def _parquet(path: Path, source: str) -> Iterator[RawRow | BadRow]:
    import pyarrow  # heavy, and only such files need it
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_names(file.schema_arrow.names, source)
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield from _batch_rows(batch, source, number)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"reading {source}", f"not Parquet: {first_line(error)}") from error


def _batch_rows(batch: Any, source: str, first: int) -> Iterator[RawRow | BadRow]:
    """Yield the rows of an Arrow batch; those with a value that Python cannot hold as bad ones."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # texts that are not UTF-8; dates of other ages
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _batch_rows(batch.slice(index, 1), source, first + index)
            return
        rows = [_unreadable(batch, source, first)]
    for number, values in enumerate(rows, start=first):
        yield values if isinstance(values, BadRow) else RawRow(values, source, number)


def _unreadable(row: Any, source: str, number: int) -> BadRow:
    """Return the error of a batch of one row, with the name of its column."""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist()
        except (ValueError, OverflowError) as error:
            problem = f"column {name!a} cannot be read: {first_line(error)}"
            return BadRow(number, DataError(f"reading {source}, row {number}", problem, "text in UTF-8, and numbers"))
    raise AssertionError("each column can be read, and the row cannot")


def _hub(source: str) -> Iterator[RawRow | BadRow]:
    import datasets  # heavy, and only such sources need it
    from datasets.exceptions import DatasetsError

    doing = f"reading {source}"
    allowed = f"hub:NAME[:SPLIT[:CONFIG]]; without SPLIT: {HUB_DEFAULT_SPLIT}"
    name, split, config = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    if not name.strip() or "\0" in source:
        raise DataError(f"reading {source!a}", "it names no data set", allowed=allowed)
    try:
        rows = datasets.load_dataset(name, config or None, split=split or HUB_DEFAULT_SPLIT)
    except (ValueError, FileNotFoundError, ConnectionError, DatasetsError) as error:
        raise DataError(doing, first_line(error), allowed=allowed) from error
    for number in range(len(rows)):
        try:
            row = RawRow(dict(rows[number]), source, number)
        except (ValueError, OverflowError) as error:
            row = BadRow(number, DataError(f"{doing}, row {number}", first_line(error), "text in UTF-8, and numbers"))
        yield row


# Names of classes: those of ``data.labels``, or of the training rows where these have no integers.


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


# Checked rows and splits of a data set; errors name file, row and value before any trial starts.
#
# Labels are checked here as the user's files have them. :mod:`dryfit.tasks.guard` checks them again as tensors, in
# tokens and batches, which a cache or a worker may have damaged.


_OPTIONAL: Final = ("id", "criterion", "group", "evidence")
"""Columns that are read where the source has them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row.

    Attributes:
        id: Unique over all splits.
        criterion: The question about the text; None where the data set has text alone.
        label: Its class, or with ``data.multi_label`` all its classes in order, which may be none; of a regression a
            float. None where the task reads no label.
        group: Rows of one group stay in one split; the row's own id where the data set has no groups.
        evidence: Spans [start, end) of characters of the text.
        place: Where the row came from, for messages.
    """

    id: str
    text: str
    criterion: str | None
    label: int | float | tuple[int, ...] | None
    group: str
    evidence: tuple[tuple[int, int], ...]
    place: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Columns that the task asks for, as they stand in the source."""


@dataclass(frozen=True, slots=True)
class UnlabelledRow:
    """One row to predict. See :class:`Row`."""

    id: str | None
    text: str
    criterion: str | None
    place: str


class Readable(Protocol):
    """A row that a model can read."""

    @property
    def text(self) -> str:
        """Its text."""
        ...

    @property
    def criterion(self) -> str | None:
        """The question about the text."""
        ...


Splits = dict[str, tuple[Row, ...]]
"""Rows by split: train, validation and, where asked for, test."""


_NUMBER: Final = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_LARGEST: Final = 3.4028234663852886e38
"""The largest number of fp32, in which losses are computed."""

LABELLED: Final = frozenset({"label"})
"""Columns that a row must have by default."""


def load_splits(data: DataSettings, required: Set[str] = LABELLED, further: tuple[str, ...] = ()) -> Splits:
    """Read and check all splits of a study.

    Args:
        data: Where they are.
        required: What each row must have beside its text: ``label``, ``evidence``, ``criterion``. These are keys of
            ``[data]``, whose values name the columns.
        further: Columns that each row must have and keeps in ``extra``.

    Raises:
        ConfigError: Sources are missing, or named twice.
        DataError: A file, row or value is wrong.
    """
    named = {TRAIN: data.train, VALIDATION: data.validation, TEST: data.test}
    if data.file is not None:
        if any(named.values()):
            others = ", ".join(f"data.{name}" for name, source in named.items() if source)
            raise ConfigError("reading [data]", f"data.file and {others} are both given", allowed="one or the other")
        splits = split_by_group(_checked(data.file, data, required, further), data)
    else:
        absent = [f"data.{name}" for name in (TRAIN, VALIDATION) if not named[name]]
        if absent:
            raise ConfigError(
                "reading [data]",
                f"{' and '.join(absent)} not given",
                allowed="data.train and data.validation, or data.file",
            )
        splits = {name: _checked(source, data, required, further) for name, source in named.items() if source}
        splits[TRAIN] = splits[TRAIN][: data.train_limit]
        splits[VALIDATION] = splits[VALIDATION][: data.validation_limit]
    _check_across(splits, data)
    return splits


def split_by_group(rows: tuple[Row, ...], data: DataSettings) -> Splits:
    """Divide one source into splits, no group in two of them; see :func:`dryfit.settings.splits.split_groups`."""
    rule = SplitRule(data.validation_fraction, data.test_fraction, data.split_seed)
    of_group = split_groups(
        (row.group for row in rows),
        rule,
        doing=f"splitting {data.file} by {data.group}",
        hint="change data.validation_fraction and data.test_fraction, or add rows",
    )
    splits = {
        name: tuple(row for row in rows if of_group[row.group] == name)
        for name in SPLITS
        if name != TEST or rule.test > 0
    }
    splits[TRAIN] = splits[TRAIN][: data.train_limit]
    splits[VALIDATION] = splits[VALIDATION][: data.validation_limit]
    return splits


def fingerprint(splits: Splits) -> str:
    """Return a hash of all prepared rows, in order."""
    state = xxhash.xxh3_128()
    for name in sorted(splits):
        state.update(f"\x1d{name}\x1d{len(splits[name])}".encode())
        for row in splits[name]:
            parts = (row.id, row.text, row.criterion, row.label, row.group, row.evidence)
            parts = (*parts, row.extra) if row.extra else parts
            state.update(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def label_counts(rows: tuple[Row, ...]) -> dict[int, int]:
    """Return the number of rows of each class; a row with several counts for each, one with a number for none."""
    return dict(sorted(Counter(label for row in rows for label in _labels_of(row)).items()))


def _labels_of(row: Row) -> tuple[int, ...]:
    if row.label is None or isinstance(row.label, float):
        return ()
    return row.label if isinstance(row.label, tuple) else (row.label,)


def unlabelled_row(raw: RawRow, *, text: str, criterion: str | None, row_id: str) -> UnlabelledRow:
    """Check a row to predict; columns that the model does not read are ignored.

    Args:
        raw: The row.
        text: Column with the text.
        criterion: Column with the criterion; None: the model reads text alone.
        row_id: Column with the row's id, which may be absent.

    Raises:
        DataError: A column is missing, or a text is empty or no text.
    """
    for column in (text, criterion):
        if column is not None and column not in raw.values:
            listed = few(map(str, raw.values), most=20)
            raise _error(raw, f"column {column!r} is missing", allowed=f"columns of this row: {listed}")
    return UnlabelledRow(
        id=_name(raw, row_id) if row_id in raw.values else None,
        text=_text(raw, text),
        criterion=_text(raw, criterion) if criterion is not None else None,
        place=raw.place,
    )


def _checked(source: str, data: DataSettings, required: Set[str], further: tuple[str, ...]) -> tuple[Row, ...]:
    raw_rows = read_rows(source)
    if not raw_rows:
        raise DataError(f"reading {source}", "it has no rows", allowed="at least one row")
    first = raw_rows[0].values
    has = {name: name in required or getattr(data, name) in first for name in _OPTIONAL} | {
        "label": "label" in required
    }
    return tuple(_row(raw, data, has, further) for raw in raw_rows)


def _row(raw: RawRow, data: DataSettings, has: Mapping[str, bool], further: tuple[str, ...]) -> Row:
    # A label that the task does not read may be there or not.
    expected = {name: wanted for name, wanted in has.items() if wanted or name != "label"}
    columns = {data.text: True, **{getattr(data, name): wanted for name, wanted in expected.items()}}
    for column, wanted in (columns | dict.fromkeys(further, True)).items():
        if wanted != (column in raw.values):
            problem = f"column {column!r} is missing" if wanted else f"column {column!r} is here, not in the first row"
            raise _error(raw, problem, allowed=f"columns of this row: {few(map(str, raw.values), most=20)}")
    text = _text(raw, data.text)
    label_of = _several_labels if data.multi_label else _number if data.is_regression else _label
    row_id = _name(raw, data.id) if has["id"] else f"{raw.source}:{raw.number}"
    return Row(
        id=row_id,
        text=text,
        criterion=_text(raw, data.criterion) if has["criterion"] else None,
        label=label_of(raw, data) if has["label"] else None,
        group=_name(raw, data.group) if has["group"] else row_id,
        evidence=_spans(raw, data.evidence, text) if has["evidence"] else (),
        place=raw.place,
        extra={column: raw.values[column] for column in further},
    )


def _text(raw: RawRow, column: str) -> str:
    value = raw.values[column]
    if not isinstance(value, str):
        raise _error(raw, f"{column} is {brief(value)}", allowed="text")
    if not value.strip():
        raise _error(raw, f"{column} is empty: {brief(value)}", allowed="text that is not only white space")
    return value


def _name(raw: RawRow, column: str) -> str:
    value = raw.values[column]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _error(raw, f"{column} is {brief(value)}", allowed="a text or an integer")
    return str(value)


def _label(raw: RawRow, data: DataSettings) -> int:
    value = raw.values[data.label]
    if data.labels:
        return named_class(value, data, raw.place)
    allowed = f"an integer from 0 to {data.num_labels - 1} (data.num_labels = {data.num_labels})"
    hint = "data.labels names the classes where they are not numbered from 0"
    if isinstance(value, str) and raw.source.endswith(".csv") and re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
        value = int(value)  # CSV has text alone
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error(raw, f"{data.label} is {brief(value)}, not an integer", allowed=allowed, hint=hint)
    if not 0 <= value < data.num_labels:
        raise _error(raw, f"{data.label} is {brief(value)}", allowed=allowed, hint=hint)
    return value


def _number(raw: RawRow, data: DataSettings) -> float:
    value = raw.values[data.label]
    allowed = "a number (data.num_labels = 1: regression)"
    if isinstance(value, str) and raw.source.endswith(".csv") and _NUMBER.fullmatch(value.strip()):
        value = float(value)  # CSV has text alone
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "for classes write data.num_labels = 2, or more"
        raise _error(raw, f"{data.label} is {brief(value)}, not a number", allowed=allowed, hint=hint)
    if not -_LARGEST <= value <= _LARGEST:  # NaN is in no order
        raise _error(raw, f"{data.label} is {brief(value)}", allowed="a finite number that fp32 can hold")
    return float(value)


def _several_labels(raw: RawRow, data: DataSettings) -> tuple[int, ...]:
    value = _from_csv(raw, raw.values[data.label])
    allowed = f"a list of different integers from 0 to {data.num_labels - 1} (data.num_labels = {data.num_labels})"
    if not isinstance(value, list):
        hint = "with data.multi_label = true a row without a class has []"
        raise _error(raw, f"{data.label} is {brief(value)}, not a list", allowed=allowed, hint=hint)
    if data.labels:
        value = [named_class(label, data, raw.place) for label in cast("list[object]", value)]
    for label in value:
        if type(label) is not int or not 0 <= label < data.num_labels:
            raise _error(raw, f"{data.label} has {brief(label)}", allowed=allowed)
    if len(set(value)) < len(value):
        raise _error(raw, f"{data.label} is {brief(value)}, with a class twice", allowed=allowed)
    return tuple(sorted(value))


def _from_csv(raw: RawRow, value: Any, *, empty: str = "") -> Any:
    """Return the value of a cell: CSV has text alone, so that a list stands there as JSON."""
    if isinstance(value, str) and raw.source.endswith(".csv"):
        with suppress(ValueError):  # refused by the caller, with its value
            return parse_json(value or empty)
    return value


def _spans(raw: RawRow, column: str, text: str) -> tuple[tuple[int, int], ...]:
    value: Any = _from_csv(raw, raw.values[column], empty="[]")
    allowed = f"a list of [start, end) with 0 <= start < end <= {len(text)}, the length of the text"
    if not isinstance(value, list):
        raise _error(raw, f"{column} is {brief(value)}", allowed=allowed)
    spans: list[tuple[int, int]] = []
    for span in value:
        if not isinstance(span, list) or len(span) != 2 or not all(type(end) is int for end in span):
            raise _error(raw, f"{column} has {brief(span)}", allowed=allowed)
        if not 0 <= span[0] < span[1] <= len(text):
            raise _error(raw, f"{column} has {brief(span)}, outside the text", allowed=allowed)
        spans.append((span[0], span[1]))
    return tuple(spans)


def _error(raw: RawRow, problem: str, *, allowed: str, hint: str = "") -> DataError:
    return DataError(f"reading {raw.place}", problem, allowed=allowed, hint=hint)


def _check_across(splits: Splits, data: DataSettings) -> None:
    """Refuse what no row shows alone: repeated ids, groups in two splits, criteria in some splits only."""
    seen: dict[str, str] = {}
    split_of: dict[str, tuple[str, Row]] = {}
    with_criterion = splits[TRAIN][0].criterion is not None if splits[TRAIN] else True
    for name, rows in splits.items():
        if not rows:
            raise DataError(f"preparing the split {name}", "it has no rows", allowed="at least one row")
        for row in rows:
            if row.id in seen:
                raise DataError(
                    f"reading {row.place}", f"id {row.id!r} is there already: {seen[row.id]}", allowed="unique ids"
                )
            seen[row.id] = row.place
            first_split, first_row = split_of.setdefault(row.group, (name, row))
            if first_split != name:
                raise DataError(
                    f"reading {row.place} ({name})",
                    f"group {row.group!r} is in the split {first_split} too: {first_row.place}",
                    allowed="each group in one split",
                    hint="give one source as data.file: it is split by group",
                )
        if (rows[0].criterion is not None) != with_criterion:
            raise DataError(
                f"reading {rows[0].place} ({name})",
                f"column {data.criterion!r} is in some splits only",
                allowed="a criterion in all rows or in none",
            )


def check_classes(splits: Splits, data: DataSettings) -> None:
    """Refuse classes that cannot be learned: no training row has them, or with ``multi_label`` every row.

    Raises:
        DataError: There is such a class.
    """
    rows = splits[TRAIN]
    counts = label_counts(rows)
    absent = [data.class_name(label) for label in range(data.num_labels) if label not in counts]
    if absent:
        raise DataError(
            "preparing the split train",
            f"no row has label {', '.join(absent)}",
            allowed=f"rows of all {data.num_labels} classes (data.num_labels)",
        )
    everywhere = (
        [data.class_name(label) for label, count in counts.items() if count == len(rows)] if data.multi_label else []
    )
    if everywhere:
        raise DataError(
            "preparing the split train",
            f"every row has label {', '.join(everywhere)}",
            allowed="for each class rows that have it and rows that do not",
            hint="leave out a class that all rows have",
        )


def check_numbers(splits: Splits) -> None:
    """Refuse labels from which no regression can be learned: one number for all training rows.

    Raises:
        DataError: They have.
    """
    rows = splits[TRAIN]
    if len({row.label for row in rows}) < 2:
        found = f"every row has label {rows[0].label}"
        raise DataError("preparing the split train", found, "rows of different labels", "look at data.label")
