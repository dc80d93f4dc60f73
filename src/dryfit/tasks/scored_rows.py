"""Rows of a split as a model answered them, in files of JSON lines."""

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dryfit.settings.errors import FileError
from dryfit.settings.files import read_bounded, write_bytes_atomic
from dryfit.settings.wire import parse_json

# One row of a split with a model's answer and the correct one.


CLASS: Final = "class"
"""Part of an answer: a class, or with several to a row the list of them."""
SPAN: Final = "span"
"""Part of an answer: ``[start, end)`` in characters, or None; the truth is the list of all right spans."""
TEXT: Final = "text"
"""Part of an answer: generated text."""

NUMBER: Final = "number"
"""Part of an answer: the number that a regression says."""

LOSS_TERMS: Final = "loss_terms"
"""Name in :attr:`ScoredRow.values` of how many terms (windows, tokens) the row's ``loss`` is the sum of; absent: 1."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row of a split with a model's answer.

    Attributes:
        id: The row's own.
        truth: What is right, by part (:data:`CLASS`, :data:`SPAN`, :data:`TEXT`,
            :data:`NUMBER`); of JSON values.
        answer: What the model said, by the same parts; a part may be missing where it was not asked.
        p: Probability of each class; empty where the task has none.
        values: Numbers of this row whose mean over rows is a metric, by the metric's name; ``loss`` is a sum of
            :data:`LOSS_TERMS`.
    """

    id: str
    truth: Mapping[str, Any]
    answer: Mapping[str, Any]
    p: tuple[float, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict[str, float])


def joined(row: ScoredRow, other: ScoredRow) -> ScoredRow:
    """Return a row with the parts and values of both; probabilities are the first's."""
    return ScoredRow(
        row.id, {**row.truth, **other.truth}, {**row.answer, **other.answer}, row.p, {**row.values, **other.values}
    )


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A row's facts beside its answer: group and criterion.

    Attributes:
        group: Rows of one group depend on one another: they are drawn together.
        criterion: The question about the text; None where there is none.
    """

    group: str
    criterion: str | None = None


def known_facts(facts: Mapping[str, RowFacts], name: str) -> RowFacts | None:
    """Return the facts of a scored row by its id; of one of two prompts, ``r7 (evidence)``, those of the row itself."""
    return facts[name] if name in facts else facts.get(name.rpartition(" (")[0])


# Files of scored rows: JSON lines, compressed, bounded in rows and bytes, and read back as nothing else than that.


MOST_ROWS: Final = 5_000
"""Rows of a trial's file: an interval from so many is narrow."""
MOST_BYTES: Final = 16 << 20
"""Bytes of a file's lines before they are compressed."""
FACTS_FILE: Final = "rows.facts.gz"
"""Name of the file with the groups and criteria of a study's rows."""
_ENDING: Final = ".jsonl.gz"
_VERSION: Final = 1
_MOST_TEXT: Final = 500


@dataclass(frozen=True, slots=True)
class RowFile:
    """The rows of a file.

    Attributes:
        split: Which rows they are: ``validation``, ``test``, ``fold-1``.
        of: Rows of the split; more than those kept where it is large.
        metrics: Of the whole split.
        rows: Those of :func:`kept`.
    """

    split: str
    of: int
    metrics: Mapping[str, float]
    rows: tuple[ScoredRow, ...] = field(repr=False)


def kept(ids: Sequence[str], most: int = MOST_ROWS) -> list[int]:
    """Return which rows of a split are kept: those whose ids have the smallest hashes, so that all trials' agree."""
    ranked = sorted(range(len(ids)), key=lambda at: hashlib.blake2b(ids[at].encode(errors="replace")).digest())
    return sorted(ranked[:most])


def write_rows(folder: Path, split: str, rows: Sequence[ScoredRow], metrics: Mapping[str, float]) -> None:
    """Write a split's rows by one rename; of many, those that :func:`kept` chooses and the bytes allow.

    Args:
        folder: Made if absent.
        split: Names the file, and which rows these are.
        rows: All rows of the split.
        metrics: Of all of them.
    """
    lines = [_line(rows[at]) for at in kept([row.id for row in rows])]
    while len(lines) > 1 and sum(map(len, lines)) > MOST_BYTES:
        ids = [rows[at].id for at in kept([row.id for row in rows], len(lines) // 2)]
        lines = [_line(row) for row in rows if row.id in set(ids)]
    plain = {name: _plain(value) for name, value in metrics.items()}
    head = {"v": _VERSION, "split": split, "of": len(rows), "metrics": plain}
    text = "".join([json.dumps(head) + "\n", *lines])
    folder.mkdir(parents=True, exist_ok=True)
    # Without the time in its head, equal rows make equal files.
    write_bytes_atomic(folder / f"{split}{_ENDING}", gzip.compress(text.encode(), compresslevel=6, mtime=0))


def row_files(folder: Path) -> list[Path]:
    """Return the files of scored rows in a folder, by name."""
    return sorted(folder.glob(f"*{_ENDING}"))


def read_rows(path: Path) -> RowFile:
    """Read a file of scored rows.

    Raises:
        FileError: It is none, or larger than any that is written.
        OSError: It cannot be read.
    """
    head, *lines = list(_objects(path))
    try:
        if head["v"] != _VERSION:
            raise FileError(f"reading {path}", f"it is of version {head['v']}", f"version {_VERSION}")
        rows = tuple(map(_row, lines))
        if len({len(row.p) for row in rows}) > 1:
            raise ValueError("rows have different numbers of classes")
        metrics = {str(name): math.nan if value is None else float(value) for name, value in head["metrics"].items()}
        return RowFile(str(head["split"]), int(head["of"]), metrics, rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_ours(path, f"{type(error).__name__}: {error}") from error


def _row(line: Mapping[str, Any]) -> ScoredRow:
    """Return the row of a line.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It is none.
    """
    truth, answer, p = dict(line["truth"]), dict(line["answer"]), tuple(map(float, line.get("p", ())))
    if truth.keys() != answer.keys():
        raise ValueError("a row is answered in other parts than it has")
    for part in (truth, answer) if p else ():
        labels = part[CLASS] if isinstance(part[CLASS], list) else [part[CLASS]]
        if not all(isinstance(label, int) and 0 <= label < len(p) for label in labels):
            raise ValueError("a row has a class without a probability")
    values = {str(name): math.nan if value is None else float(value) for name, value in line.get("values", {}).items()}
    return ScoredRow(str(line["id"]), truth, answer, p, values)


def write_facts(path: Path, facts: Mapping[str, RowFacts]) -> None:
    """Write the facts of rows by their ids, by one rename; criteria are cut after 500 characters."""
    lines = [
        json.dumps({"id": name, "group": one.group, "criterion": one.criterion and one.criterion[:_MOST_TEXT]}) + "\n"
        for name, one in facts.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, gzip.compress("".join(lines).encode(), compresslevel=6, mtime=0))


def read_facts(path: Path) -> dict[str, RowFacts]:
    """Read the facts of rows by their ids.

    Raises:
        FileError: It is no such file.
        OSError: It cannot be read.
    """
    try:
        return {str(one["id"]): RowFacts(str(one["group"]), one["criterion"]) for one in _objects(path)}
    except (KeyError, TypeError) as error:
        raise _not_ours(path, f"{type(error).__name__}: {error}") from error


def _line(row: ScoredRow) -> str:
    said: dict[str, Any] = {"id": row.id, "truth": _short(row.truth), "answer": _short(row.answer)}
    if row.p:
        said["p"] = [float(f"{p:.9g}") for p in row.p]  # as many digits as tell any two numbers of fp32 apart
    if row.values:
        said["values"] = {name: _plain(value) for name, value in row.values.items()}
    return json.dumps(said) + "\n"


def _short(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[:_MOST_TEXT] if isinstance(part, str) else part for name, part in parts.items()}


def _plain(value: float) -> float | None:
    """Return a number as JSON has it; None for those it lacks."""
    return float(value) if math.isfinite(value) else None


def _objects(path: Path) -> Iterator[Mapping[str, Any]]:
    most = MOST_BYTES + (1 << 20)
    inflate = zlib.decompressobj(wbits=31)
    try:
        data = inflate.decompress(read_bounded(path, most), most)
    except zlib.error as error:
        raise _not_ours(path, str(error)) from error
    if not inflate.eof:
        raise _not_ours(path, "it is cut short" if not inflate.unconsumed_tail else f"it holds more than {most} bytes")
    yield from _parsed(path, data.splitlines())


def _parsed(path: Path, lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    empty = True
    for number, line in enumerate(lines, start=1):
        empty = False
        try:
            yield parse_json(line.decode())
        except ValueError as error:
            raise _not_ours(path, f"line {number}: {error}") from error
    if empty:
        raise _not_ours(path, "it is empty")


def _not_ours(path: Path, found: str) -> FileError:
    return FileError(f"reading {path}", found, "a file of scored rows", hint="remove it; nothing else depends on it")
