"""Items that the reader of a format yields: rows, rejected parts and left-out rows; with helpers for spans."""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from dryfit.core.seeds import derive_seed

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
