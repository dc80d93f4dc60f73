"""Formats of data sets: readers of files of other programs, which yield rows, rejected parts and left-out rows."""

import csv
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr, ValidationError

from dryfit.settings.errors import DataError
from dryfit.settings.splits import derive_seed
from dryfit.settings.text import bounded_lines, csv_reader, decoded, existing_file, few, first_line
from dryfit.settings.wire import parse_json
from dryfit.study.import_options import ColumnMap

# Items that the reader of a format yields: rows, rejected parts and left-out rows; with helpers for spans.


Span: TypeAlias = tuple[int, int]
"""``[start, end)`` in characters of a text."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ImportedRow:
    """One row as it will be written; see docs/data.md.

    Attributes:
        id: Unique in what is written.
        group: Rows of a group stay in one split; None: the row is a group of its own.
        criterion: The statement that the text is judged by; None: the data set has text alone.
        text: The text.
        label: Its class.
        evidence: Spans of the text, in order; None: the data set has no evidence.
        place: Where it came from, for messages.
    """

    id: str
    group: str | None
    criterion: str | None
    text: str
    label: int
    evidence: tuple[Span, ...] | None
    place: str

    def as_json(self) -> str:
        """Return the row as one line; fields that are None are absent."""
        fields = {name: value for name, value in asdict(self).items() if name != "place" and value is not None}
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A part of the source that does not fit, and gives no row.

    Attributes:
        place: File, and line or path in its JSON.
        reason: What is wrong, never with the text of a row: data sets may hold what people said of themselves.
    """

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Valid rows that were left out on request.

    Attributes:
        rows: How many.
    """

    rows: int


Item: TypeAlias = ImportedRow | Rejected | LeftOut


class UnfitError(Exception):
    """Why a part of a source gives no row.

    Args:
        reason: As of :class:`Rejected`.
        at: Where in the part: ``.answers[0]``.
    """

    def __init__(self, reason: str, at: str = "") -> None:
        super().__init__(reason)
        self.at = at


def fault_of(row: ImportedRow) -> str | None:
    """Return why a study would refuse a row; None if it is valid."""
    texts = {"id": row.id, "group": row.group, "criterion": row.criterion, "text": row.text}
    for name, text in texts.items():
        if text is None:
            continue
        if not text.strip():
            return f"{name} is empty: {text!r}"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{name} has half of a surrogate pair, which is no character"
    if row.label < 0:
        return f"label is {row.label}, which is below 0"
    for start, end in row.evidence or ():
        if not 0 <= start < end <= len(row.text):
            return f"evidence has [{start}, {end}], outside the text of {len(row.text)} characters"
    return None


def read_as(model: type[M], part: Any) -> M:
    """Return a part of a JSON document as a model of pydantic.

    Raises:
        UnfitError: It is another; the first thing that is wrong is told.
    """
    try:
        return model.model_validate(part)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise UnfitError(first["msg"][:1].lower() + first["msg"][1:], steps) from error


def each(
    parts: Sequence[T] | Mapping[str, T], place: str, read: Callable[[Any, T, str], Iterable[Item]]
) -> Iterator[Item]:
    """Yield the items of each part of a list or an object; what does not fit is one item, and the rest follow.

    Args:
        parts: The parts.
        place: Where they are: ``dev.json, data``.
        read: Returns a part's items, given its index or key, the part and its place. It raises :class:`UnfitError`.
    """
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        at = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}"
        try:
            yield from read(key, part, at)
        except UnfitError as unfit:
            yield Rejected(at + unfit.at, str(unfit))


def trimmed(text: str, span: Span) -> Span | None:
    """Return a span without the white space at its ends; None where it is nothing else."""
    start, end = span
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    end -= len(inside) - len(inside.rstrip())
    return (start, end) if start < end else None


def joined(text: str, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans and merge those that overlap, or have only white space between them."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and not text[merged[-1][1] : start].strip():
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def drawn(candidates: Sequence[T], count: int | None, name: Callable[[T], Hashable]) -> list[T]:
    """Draw some of the candidates, in their order: those with the smallest hashes of their names, the same every time.

    Args:
        candidates: The candidates.
        count: How many at most; None: all.
        name: Returns a candidate's name, different for each.
    """
    if count is None or count >= len(candidates):
        return list(candidates)
    ranked = sorted(range(len(candidates)), key=lambda index: derive_seed("drawn", ascii(name(candidates[index]))))
    return [candidates[index] for index in sorted(ranked[:count])]


_KEYS: Final = {"squad": {"data"}, "contractnli": {"documents", "labels"}}
_NAMES: Final = {"squad": "SQuAD", "contractnli": "ContractNLI"}
_OTHER_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a table.

    Attributes:
        values: Column to cell.
        number: Line on which it begins, from 1.
        place: File and line, for messages.
    """

    values: dict[str, str]
    number: int
    place: str


_Row: TypeAlias = tuple[int, list[str] | DataError]
"""The line on which a row begins, and its cells, or why it has none."""


def read_json(source: str) -> Any:
    """Read a JSON document.

    Raises:
        DataError: The file is absent, empty, not UTF-8 or not JSON.
    """
    content = existing_file(source, allowed="a JSON file").read_bytes()
    doing = f"reading {source}"
    text = decoded(content, doing).removeprefix("\ufeff")
    if not text.strip():
        raise DataError(doing, "it is empty", "one JSON object")
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        found = f"not JSON: {error.msg}"
        raise DataError(f"{doing}, line {error.lineno}, column {error.colno}", found, "one JSON object") from error
    except ValueError as error:
        raise DataError(doing, first_line(error), "one JSON object") from error


def whole(model: type[M], document: Any, source: str, allowed: str, other: Literal["squad", "contractnli"]) -> M:
    """Return the top level of a JSON document.

    Args:
        model: Of pydantic.
        document: The parsed file.
        source: Its name.
        allowed: What it should be, for the error.
        other: The format that it may be instead.

    Raises:
        DataError: It is of another format.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        is_other = isinstance(document, dict) and _KEYS[other] <= cast(dict[str, Any], document).keys()
        hint = f"is it {_NAMES[other]}? `dryfit import {other}`" if is_other else ""
        raise DataError(f"reading {source}", _top_level(document), allowed, hint) from error


def _top_level(document: Any) -> str:
    """Describe the top level of a JSON document that is of another format."""
    if not isinstance(document, dict):
        return f"it is no object, but of type {type(document).__name__}"
    keys = list(cast(dict[str, Any], document))
    return f"its keys are {few(keys)}" if keys else "it is an object without keys"


def csv_records(source: str, needed: Sequence[str]) -> Iterator[Record | Rejected]:
    """Yield the rows of a CSV file with a header: commas, quotes doubled inside quotes (RFC 4180).

    Args:
        source: The file.
        needed: Columns that the file must have.

    Raises:
        DataError: The file is absent, empty, not UTF-8, without such a column, or its quotes never end.
    """
    with existing_file(source, allowed="a CSV file").open("rb") as file:
        yield from _records(_csv_rows(file, source), source, needed, ",", "a header and rows")


def tsv_records(source: str, needed: Sequence[str], *, header: bool) -> Iterator[Record | Rejected]:
    """Yield the rows of a file with tab-separated cells, one row a line; a quote is an ordinary character.

    GLUE's files are written and read this way (``quoting=csv.QUOTE_NONE`` in its readers).

    Args:
        source: The file.
        needed: Columns that the file must have.
        header: Whether its first line names the columns; else they are called 1, 2, ...

    Raises:
        DataError: The file is absent, empty, or without such a column.
    """
    with existing_file(source, allowed="a TSV file").open("rb") as file:
        allowed = "rows, with tabs between their cells"
        yield from _records(_tsv_rows(file, source), source, needed, "\t", allowed, header=header)


def text_file_lines(source: str, allowed: str) -> list[str]:
    """Return the lines of a text file, without their ends.

    Args:
        source: The file.
        allowed: What it should be, for the error.

    Raises:
        DataError: It is absent or not UTF-8.
    """
    content = existing_file(source, allowed=allowed).read_bytes()
    return decoded(content, f"reading {source}").removeprefix("\ufeff").replace("\r\n", "\n").split("\n")


def base_name(source: str) -> str:
    """Return the file's name without folder and suffix, for the ids of rows that have none."""
    return Path(source).stem


def _csv_rows(file: BinaryIO, source: str) -> Iterator[_Row]:
    reader, begins = csv_reader(file, source), 1
    try:
        for cells in reader:
            yield begins, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        doing = f"reading {source}, the row from line {begins} on"
        raise DataError(doing, f"not CSV: {error}", hint="check its quotes") from error


def _tsv_rows(file: BinaryIO, source: str) -> Iterator[_Row]:
    for number, line in bounded_lines(file, source):
        try:
            text = decoded(line.rstrip(b"\r\n"), f"reading {source}, line {number}")
        except DataError as error:
            yield number, error
            continue
        text = text.removeprefix("\ufeff") if number == 1 else text
        yield number, text.split("\t") if text else []


def _records(
    rows: Iterator[_Row], source: str, needed: Sequence[str], separator: str, allowed: str, *, header: bool = True
) -> Iterator[Record | Rejected]:
    columns: list[str] | None = None
    for number, cells in rows:
        place = f"{source}, line {number}"
        if isinstance(cells, DataError):
            if columns is None:
                raise cells
            yield Rejected(place, cells.found)
            continue
        if columns is None and cells:
            names = cells if header else [str(index) for index in range(1, len(cells) + 1)]
            columns = _header(names, source, needed, separator)
            if header:
                continue
        if columns is None or not cells:
            continue
        if len(cells) != len(columns):
            yield Rejected(place, f"it has {len(cells)} columns, not {len(columns)}")
        else:
            yield Record(dict(zip(columns, cells, strict=True)), number, place)
    if columns is None:
        raise DataError(f"reading {source}", "it is empty", allowed)


def _header(names: list[str], source: str, needed: Sequence[str], separator: str) -> list[str]:
    doing = f"reading {source}"
    absent = [name for name in needed if name not in names]
    for other, words in _OTHER_SEPARATORS.items() if absent else ():
        if other != separator and set(needed) <= set(separator.join(names).split(other)):
            right = _OTHER_SEPARATORS[separator]
            raise DataError(doing, f"its columns are separated by {words}", right, f"save it with {right}")
    if absent:
        raise DataError(doing, f"there is no column {few(map(repr, absent))}", f"its columns: {few(names, most=20)}")
    twice = [name for name in needed if names.count(name) > 1]
    if twice:
        raise DataError(doing, f"column {twice[0]!r} is there twice", "different names")
    return names


# Convert tables to rows by a column map: TSV files in the style of GLUE, and data sets of the Hugging Face hub.
#
# GLUE (Wang et al., "GLUE", ICLR 2019; gluebenchmark.com) has a table for each task: most with a header (RTE:
# ``index, sentence1, sentence2, label``), CoLA without; labels are integers or names.


def table_rows(records: Iterable[Record | Rejected], columns: ColumnMap, prefix: str) -> Iterator[Item]:
    """Convert the rows of a table file, whose cells are text.

    Args:
        records: The file's rows.
        columns: The column of each field.
        prefix: Prefix of row ids, ``PREFIX:LINE``, where no column has them.
    """
    for record in records:
        if isinstance(record, Rejected):
            yield record
        else:
            yield mapped_row(record.values, columns, place=record.place, unnamed=f"{prefix}:{record.number}")


def hub_rows(lines: Iterable[str], columns: ColumnMap, source: str, prefix: str) -> Iterator[Item]:
    """Convert the rows of a hub data set from the lines of the job ROWS: ``{"row", "values"}`` or ``{"row", "error"}``.

    Args:
        lines: The lines.
        columns: The column of each field.
        source: The data set, for messages.
        prefix: Prefix of row ids, ``PREFIX:ROW``, where no column has them.
    """
    for line in lines:
        written = json.loads(line)
        place = f"{source}, row {written['row']}"
        if "error" in written:
            yield Rejected(place, written["error"])
        else:
            yield mapped_row(written["values"], columns, place=place, unnamed=f"{prefix}:{written['row']}")


def mapped_row(values: Mapping[str, Any], columns: ColumnMap, *, place: str, unnamed: str) -> ImportedRow | Rejected:
    """Convert one row of a table.

    Args:
        values: Cell by column; text, or a JSON value.
        columns: The column of each field.
        place: Where the row is, for messages.
        unnamed: Its id, where no column has ids.
    """
    cells = {field: values[column] for field, column in columns.columns.items()}
    try:
        return ImportedRow(
            id=_name(cells, "id") if "id" in cells else unnamed,
            group=_name(cells, "group") if "group" in cells else None,
            criterion=_text(cells, "criterion") if "criterion" in cells else None,
            text=_text(cells, "text"),
            label=_label(cells["label"], columns.labels),
            evidence=_spans(cells["evidence"]) if "evidence" in cells else None,
            place=place,
        )
    except UnfitError as error:
        return Rejected(place, str(error))


def _text(cells: Mapping[str, Any], field: str) -> str:
    value = cells[field]
    if not isinstance(value, str):
        raise UnfitError(f"{field} is of type {type(value).__name__}, not text")
    return value


def _name(cells: Mapping[str, Any], field: str) -> str:
    value = cells[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnfitError(f"{field} is of type {type(value).__name__}, neither text nor an integer")
    return str(value)


def _label(value: Any, labels: tuple[str, ...]) -> int:
    if labels:
        if str(value) not in labels:
            raise UnfitError(f"label is {_shortened(value)}, none of {few(labels, most=12)}")
        return labels.index(str(value))
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnfitError(f"label is {_shortened(value)}, not an integer (names of classes are given with --labels)")
    return value


def _spans(value: Any) -> tuple[Span, ...]:
    if isinstance(value, str):
        with suppress(ValueError):  # refused below
            value = parse_json(value or "[]")
    if not isinstance(value, list):
        raise UnfitError(f"evidence is of type {type(value).__name__}, not a list of [start, end)")
    spans: list[Span] = []
    for span in cast(list[Any], value):
        pair = cast(list[Any], span) if isinstance(span, list) else []
        if len(pair) != 2 or not all(type(end) is int for end in pair):
            raise UnfitError(f"evidence has {_shortened(span)}, not [start, end)")
        spans.append((pair[0], pair[1]))
    return tuple(sorted(spans))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# Import ContractNLI: contracts, hypotheses about them, and the evidence spans that decide each.
#
# Format: Koreeda and Manning, "ContractNLI" (Findings of EMNLP 2021), stanfordnlp.github.io/contract-nli:
# ``{"documents": [{"id", "text", "spans": [[start, end]], "annotation_sets": [{"annotations": {"nda-1": {"choice",
# "spans": [index of a span]}}}]}], "labels": {"nda-1": {"short_description", "hypothesis"}}}``, where choice is
# Entailment, Contradiction or NotMentioned, and only the last has no spans.
#
# A contract is divided into passages, so that each span lies in one passage.


def passages_of(text: str, spans: Sequence[Span], enough_chars: int) -> list[Span]:
    """Return the passages of a text, in order, without the white space at their ends.

    A passage ends before the first span at which it has enough characters, unless an earlier span reaches into that
    span. Text between two spans belongs to the passage before. So each span lies in one passage, and only white space
    in none; a passage is as long as its spans need it to be, and the last one may be short.

    Args:
        text: The text.
        spans: Spans such as sentences, in any order.
        enough_chars: The length from which a passage ends with the next span.
    """
    cuts = [0]
    reach = 0
    for start, end in sorted(spans):
        if start >= reach and start - cuts[-1] >= enough_chars:
            cuts.append(start)
        reach = max(reach, end)
    passages = [trimmed(text, (start, end)) for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [passage for passage in passages if passage is not None]


_NOT_MENTIONED = "NotMentioned"


class _ContractFile(BaseModel):
    documents: list[Any]
    labels: dict[StrictStr, Any]


class _Label(BaseModel):
    hypothesis: StrictStr


class _AnnotationSet(BaseModel):
    annotations: dict[StrictStr, Any]


class _Document(BaseModel):
    id: StrictInt | StrictStr
    text: StrictStr
    spans: list[tuple[StrictInt, StrictInt]]
    annotation_sets: list[_AnnotationSet]


class _Annotation(BaseModel):
    choice: Literal["Entailment", "Contradiction", "NotMentioned"]
    spans: list[StrictInt]


@dataclass(frozen=True, slots=True)
class PassageSettings:
    """How contracts become rows.

    Attributes:
        passage_chars: The length from which a passage ends with the next span.
        negatives: Rows with label 0 for each with label 1, of a contract and a hypothesis; None: all there are.
    """

    passage_chars: int
    negatives: int | None


@dataclass(frozen=True, slots=True)
class _Contract:
    """A contract, divided into passages."""

    name: str
    text: str
    spans: list[Span]
    passages: list[Span]
    path: str


def contractnli_rows(document: Any, source: str, cutting: PassageSettings) -> Iterator[Item]:
    """Yield a row for each hypothesis and passage: label 1 where the passage has evidence that decides the hypothesis.

    Args:
        document: The parsed file.
        source: Its name.
        cutting: How contracts become rows.

    Raises:
        DataError: It is not a ContractNLI file.
    """
    allowed = '{"documents": [contracts], "labels": {hypotheses}}'
    file = whole(_ContractFile, document, source, allowed, "squad")
    hypotheses: dict[str, str] = {}

    def label(key: str, raw: Any, _path: str) -> tuple[Item, ...]:
        hypotheses[key] = read_as(_Label, raw).hypothesis
        return ()

    yield from each(file.labels, f"{source}, labels", label)
    read = partial(_contract_rows, hypotheses, cutting, dict[str, str]())
    yield from each(file.documents, f"{source}, documents", read)


def _contract_rows(
    hypotheses: dict[str, str], cutting: PassageSettings, seen: dict[str, str], _number: int, raw: Any, path: str
) -> Iterator[Item]:
    document = read_as(_Document, raw)
    text, name = document.text, str(document.id)
    for index, (start, end) in enumerate(document.spans):
        if not 0 <= start <= end <= len(text):
            raise UnfitError(f"[{start}, {end}] is outside the text of {len(text)} characters", f".spans[{index}]")
    if not document.annotation_sets:
        raise UnfitError("there is none", ".annotation_sets")
    first = seen.setdefault(name, path)
    if first != path:
        raise UnfitError(f"id {name!r} is there already: {first}")
    for index in range(1, len(document.annotation_sets)):
        yield Rejected(f"{path}.annotation_sets[{index}]", "only the first set of a contract is read")
    contract = _Contract(name, text, document.spans, passages_of(text, document.spans, cutting.passage_chars), path)
    annotations, at = document.annotation_sets[0].annotations, f"{path}.annotation_sets[0].annotations"
    yield from (
        Rejected(f"{at}.{key}", "labels has no such hypothesis") for key in annotations if key not in hypotheses
    )

    def rows(key: str, hypothesis: str, _at: str) -> Iterator[Item]:
        if key not in annotations:
            raise UnfitError("there is no such annotation")
        return _pair_rows(contract, key, hypothesis, _evidence(annotations[key], contract), cutting)

    yield from each(hypotheses, at, rows)


def _evidence(raw: Any, contract: _Contract) -> list[Span]:
    """Return the spans that decide a hypothesis; none where it is not mentioned."""
    annotation = read_as(_Annotation, raw)
    if (annotation.choice == _NOT_MENTIONED) != (not annotation.spans):
        raise UnfitError(f"choice is {annotation.choice}, with {len(annotation.spans)} spans")
    evidence: list[Span] = []
    for index in annotation.spans:
        if not 0 <= index < len(contract.spans):
            raise UnfitError(f"span {index} is none of the contract's {len(contract.spans)}")
        span = trimmed(contract.text, contract.spans[index])
        if span is None:
            raise UnfitError(f"span {index} has nothing but white space")
        evidence.append(span)
    return evidence


def _pair_rows(
    contract: _Contract, key: str, hypothesis: str, evidence: list[Span], cutting: PassageSettings
) -> Iterator[ImportedRow | LeftOut]:
    """Yield rows of one hypothesis: every passage with evidence, and as many without as configured (at least one)."""
    held = [
        [(start - begin, end - begin) for start, end in evidence if begin <= start and end <= stop]
        for begin, stop in contract.passages
    ]
    without = [index for index, spans in enumerate(held) if not spans]
    count = None if cutting.negatives is None else cutting.negatives * max(1, len(held) - len(without))
    chosen = set(drawn(without, count, lambda index: (contract.name, key, index)))
    for index, (begin, stop) in enumerate(contract.passages):
        if not held[index] and index not in chosen:
            continue
        text = contract.text[begin:stop]
        yield ImportedRow(
            id=f"{contract.name}:{key}:{index}",
            group=contract.name,
            criterion=hypothesis,
            text=text,
            label=int(bool(held[index])),
            evidence=joined(text, held[index]),
            place=f"{contract.path}, {key}, passage {index}",
        )
    if len(without) > len(chosen):
        yield LeftOut(len(without) - len(chosen))


# Import ReDSM5: posts, and sentences in them that are evidence for or against a symptom.
#
# Format: Bao, Pérez and Parapar, "ReDSM5: A Reddit Dataset for DSM-5 Depression Detection" (CIKM 2025),
# github.com/eliseobao/redsm5: posts with ``post_id, text``; annotations with ``post_id, sentence_id, sentence_text,
# DSM5_symptom, status, explanation``, where status is 1 (evidence for the symptom) or 0 (an explicit negative). Posts
# may also be given sentence by sentence, as ``post_id, sentence_id, sentence_text``.
#
# Every post is annotated for all symptoms, so a symptom without an annotation is absent from the post.


POST_COLUMNS: Final = ("post_id",)
ANNOTATION_COLUMNS: Final = ("post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status")
_PRESENT: Final = "1"
_ABSENT: Final = "0"


@dataclass(slots=True)
class _Post:
    """A post: its whole text, or its sentences so far."""

    text: str
    place: str
    sentences: dict[str, Span] | None = None

    def add(self, sentence_id: str, sentence: str) -> None:
        """Append a sentence after a space."""
        assert self.sentences is not None
        start = len(self.text) + 1 if self.text else 0
        self.text = f"{self.text} {sentence}" if self.text else sentence
        self.sentences[sentence_id] = (start, start + len(sentence))


@dataclass(slots=True)
class _SymptomNotes:
    """The annotations of a post and a symptom.

    Attributes:
        present: Spans of its evidence.
        absent: Whether an annotation says that the symptom is absent.
        doubtful: Whether an annotation was rejected, so that the label is not known.
    """

    present: list[Span] = field(default_factory=list[Span])
    absent: bool = False
    doubtful: bool = False


def read_criteria(lines: Iterable[str], source: str) -> dict[str, str]:
    """Read the descriptions of symptoms from lines ``SYMPTOM: text`` (or with a tab); ``#`` begins a comment.

    Args:
        lines: Lines of the file.
        source: Its name.

    Raises:
        DataError: A line is of another form, a symptom is there twice, or there is none.
    """
    criteria: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = re.match(r"\s*([^:\t]*[^:\t\s])\s*[:\t]\s*(.*\S)\s*$", line)
        doing = f"reading {source}, line {number}"
        if found is None:
            raise DataError(doing, f"{line[:60]!r} names no symptom", "SYMPTOM: what it is")
        symptom, text = found.groups()
        if symptom in criteria:
            raise DataError(doing, f"{symptom} is there already", "each symptom once")
        criteria[symptom] = text
    if not criteria:
        raise DataError(f"reading {source}", "it names no symptom", "a line for each: SYMPTOM: what it is")
    return criteria


def redsm5_rows(
    posts: Iterable[Record | Rejected],
    annotations: Iterable[Record | Rejected],
    criteria: dict[str, str],
    negatives: int | None,
) -> Iterator[Item]:
    """Yield a row for each post and symptom: label 1 where a sentence is evidence for it, with those sentences.

    Explicit negatives are always rows. Of the symptoms without an annotation, ``negatives`` are drawn for each that the
    post has, and at least for one.

    Args:
        posts: Rows of the file of posts.
        annotations: Rows of the file of annotations.
        criteria: Description of each symptom by its name.
        negatives: See above; None: all of them.

    Raises:
        DataError: The posts have neither text nor sentences.
    """
    reading = _Reading(criteria)
    yield from _rejected(posts, reading.add_post)
    yield from _rejected(annotations, reading.add_annotation)
    for post_id in reading.posts:
        yield from reading.rows(post_id, negatives)


def _rejected(records: Iterable[Record | Rejected], add: Callable[[Record], None]) -> Iterator[Rejected]:
    """Add each record; yield those that do not fit."""
    for record in records:
        try:
            if isinstance(record, Rejected):
                yield record
            else:
                add(record)
        except UnfitError as unfit:
            assert isinstance(record, Record)
            yield Rejected(record.place, str(unfit))


@dataclass(slots=True)
class _Reading:
    """What was read so far.

    Attributes:
        criteria: Description of each symptom by its name.
        posts: By their ids.
        noted: By post and symptom.
        seen: The first annotation of a sentence and a symptom.
    """

    criteria: dict[str, str]
    posts: dict[str, _Post] = field(default_factory=dict[str, _Post])
    noted: dict[tuple[str, str], _SymptomNotes] = field(default_factory=dict[tuple[str, str], _SymptomNotes])
    seen: dict[tuple[str, str, str], Record] = field(default_factory=dict[tuple[str, str, str], Record])

    def add_post(self, record: Record) -> None:
        """Take in a post, or the next sentence of one."""
        post_id = record.values["post_id"]
        if not post_id.strip():
            raise UnfitError("post_id is empty")
        post = self.posts.get(post_id)
        if "text" in record.values:
            if post is not None:
                raise UnfitError(f"post {post_id} is there already: {post.place}")
            self.posts[post_id] = _Post(record.values["text"], record.place)
            return
        if not {"sentence_id", "sentence_text"} <= record.values.keys():
            raise DataError(
                f"reading {record.place}",
                f"the columns are {few(record.values)}",
                "post_id and text, or post_id, sentence_id and sentence_text",
            )
        sentence_id, sentence = record.values["sentence_id"], record.values["sentence_text"].strip()
        if not sentence_id.strip() or not sentence:
            raise UnfitError("sentence_id or sentence_text is empty")
        post = post or self.posts.setdefault(post_id, _Post("", record.place, {}))
        assert post.sentences is not None  # all rows of a file have the same columns
        if sentence_id in post.sentences:
            raise UnfitError(f"sentence {sentence_id} of post {post_id} is there already")
        post.add(sentence_id, sentence)

    def add_annotation(self, record: Record) -> None:
        """Take in an annotation."""
        values = record.values
        post_id, symptom, status = values["post_id"], values["DSM5_symptom"].strip(), values["status"].strip()
        post = self.posts.get(post_id)
        if post is None:
            raise UnfitError(f"there is no post {post_id!r}")
        if symptom not in self.criteria:
            raise UnfitError(f"the criteria have no symptom {symptom!r}: {few(self.criteria, most=12)}")
        pair = self.noted.setdefault((post_id, symptom), _SymptomNotes())
        key = (post_id, values["sentence_id"], symptom)
        first = self.seen.setdefault(key, record)
        if first is not record:
            reason = f"sentence {key[1]} and {symptom} are there already: {first.place}"
            if first.values["status"].strip() == status:
                raise UnfitError(reason)
            pair.doubtful = True
            raise UnfitError(f"{reason}, with another status; {_no_row(post_id, symptom)}")
        span = _located(values["sentence_id"], values["sentence_text"], post)
        if status == _PRESENT and isinstance(span, tuple):
            pair.present.append(span)
        elif status == _ABSENT:
            pair.absent = True  # where it stands does not matter: a row with label 0 has no evidence
        else:
            pair.doubtful = True
            reason = span if isinstance(span, str) else f"status is {status!r}, not 0 or 1"
            raise UnfitError(f"{reason}; {_no_row(post_id, symptom)}")

    def rows(self, post_id: str, negatives: int | None) -> Iterator[ImportedRow | LeftOut]:
        """Yield the rows of a post."""
        post = self.posts[post_id]
        pairs = {symptom: self.noted.get((post_id, symptom), _SymptomNotes()) for symptom in self.criteria}
        pairs = {symptom: pair for symptom, pair in pairs.items() if not pair.doubtful}
        unnoted = [symptom for symptom, pair in pairs.items() if not pair.present and not pair.absent]
        present = sum(bool(pair.present) for pair in pairs.values())
        count = None if negatives is None else negatives * max(1, present)
        chosen = set(drawn(unnoted, count, lambda symptom: (post_id, symptom)))
        for symptom, pair in pairs.items():
            if pair.present or pair.absent or symptom in chosen:
                yield ImportedRow(
                    id=f"{post_id}:{symptom}",
                    group=post_id,
                    criterion=self.criteria[symptom],
                    text=post.text,
                    label=int(bool(pair.present)),
                    evidence=joined(post.text, pair.present),
                    place=f"{post.place}, {symptom}",
                )
        if len(unnoted) > len(chosen):
            yield LeftOut(len(unnoted) - len(chosen))


def _no_row(post_id: str, symptom: str) -> str:
    return f"so there is no row of post {post_id} and {symptom}"


def _located(sentence_id: str, sentence: str, post: _Post) -> Span | str:
    """Find a sentence in its post, or say why that fails.

    White space may differ, as posts were cleaned. Of several occurrences the first is taken, if possible one that is
    not inside of longer words.
    """
    words = sentence.split()
    if not words:
        return "sentence_text is empty"
    if post.sentences is not None:
        span = post.sentences.get(sentence_id)
        if span is None:
            return f"the post has no sentence {sentence_id!r}"
        return span if post.text[slice(*span)].split() == words else f"sentence {sentence_id} of the post is another"
    pattern = r"\s+".join(map(re.escape, words))
    found = re.search(rf"(?<!\w){pattern}(?!\w)", post.text) or re.search(pattern, post.text)
    return found.span() if found is not None else f"sentence {sentence_id} does not stand in the text of its post"


# Import SQuAD 2.0: questions on paragraphs, each with its answers as spans, or without an answer.
#
# Format: Rajpurkar, Jia and Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD" (ACL 2018),
# rajpurkar.github.io/SQuAD-explorer: ``{"version", "data": [{"title", "paragraphs": [{"context", "qas": [{"id",
# "question", "is_impossible", "answers": [{"text", "answer_start"}], "plausible_answers"}]}]}]}``. SQuAD 1.1 is the
# same without ``is_impossible``. ``plausible_answers`` are wrong ones, written down for those who annotate: they are
# not read.


class _SquadFile(BaseModel):
    data: list[Any]


class _Article(BaseModel):
    title: StrictStr = ""
    paragraphs: list[Any]


class _Paragraph(BaseModel):
    context: StrictStr
    qas: list[Any]


class _Answer(BaseModel):
    text: StrictStr
    answer_start: StrictInt


class _Question(BaseModel):
    id: StrictStr
    question: StrictStr
    is_impossible: StrictBool = False
    answers: list[_Answer] = []


def squad_rows(document: Any, source: str) -> Iterator[Item]:
    """Return a row for each question: criterion the question, text its paragraph, label whether it can be answered.

    The evidence is all distinct answers, and the group is the article.

    Args:
        document: The parsed file.
        source: Its name.

    Raises:
        DataError: It is not a SQuAD file.
    """
    articles = whole(_SquadFile, document, source, '{"data": [articles]}', "contractnli").data
    return each(articles, f"{source}, data", _article_rows)


def _article_rows(number: int, raw: Any, path: str) -> Iterator[Item]:
    article = read_as(_Article, raw)
    group = article.title if article.title.strip() else f"article-{number}"
    return each(article.paragraphs, f"{path}.paragraphs", partial(_paragraph_rows, group))


def _paragraph_rows(group: str, _index: int, raw: Any, path: str) -> Iterator[Item]:
    paragraph = read_as(_Paragraph, raw)
    return each(paragraph.qas, f"{path}.qas", partial(_row, group, paragraph.context))


def _row(group: str, context: str, _index: int, raw: Any, path: str) -> Iterator[ImportedRow]:
    question = read_as(_Question, raw)
    if question.is_impossible and question.answers:
        raise UnfitError(f"is_impossible is true, and it has {len(question.answers)} answers")
    if not question.is_impossible and not question.answers:
        raise UnfitError("is_impossible is false or absent, and it has no answer")
    spans: set[Span] = set()
    for index, answer in enumerate(question.answers):
        end = answer.answer_start + len(answer.text)
        if answer.answer_start < 0 or not answer.text or context[answer.answer_start : end] != answer.text:
            raise UnfitError(_misplaced(answer, context), f".answers[{index}]")
        spans.add((answer.answer_start, end))
    yield ImportedRow(
        id=question.id,
        group=group,
        criterion=question.question,
        text=context,
        label=int(not question.is_impossible),
        evidence=tuple(sorted(spans)),
        place=path,
    )


def _misplaced(answer: _Answer, context: str) -> str:
    found = context.find(answer.text) if answer.text else -1
    problem = f"its text of {len(answer.text)} characters does not stand at answer_start {answer.answer_start}"
    where = f"but at {found} (counted in characters)" if found >= 0 else "nor anywhere in the context"
    return f"{problem}, {where}"
