"""Writes rows as files of a study, and what did not fit beside them: streamed, and complete or not at all.

Rows go to a temporary file as they are read, so that memory grows only with their ids and groups. Where they are split,
that file is read once more when all groups are known.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from pydantic import Field

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.settings.splits import SPLITS, TEST, SplitRule, split_groups
from dryfit.core.text.words import sendable
from dryfit.core.wire import Wire, sync_path
from dryfit.importers.items import ImportedRow, Item, LeftOut, Rejected, fault_of
from dryfit.importers.options import Format

_SUFFIX: Final = ".jsonl"
_OTHER_KINDS: Final = (".json", ".csv", ".tsv", ".parquet", ".txt")
_MOST_NOTES: Final = 20
_UNDIVIDED: Final = ""
"""In the place of a split's name, where rows are not split."""


class WrittenFile(Wire):
    """A file of rows.

    Attributes:
        file: Its path.
        rows: Its rows.
        groups: Their groups; a row without one is a group.
        labels: Rows of each label.
    """

    file: str
    rows: int
    groups: int
    labels: dict[int, int]


class ImportSummary(Wire):
    """What an import did.

    Attributes:
        format: Of the sources.
        sources: As they were given.
        files: What was written.
        rejected: What did not fit: each has a line in ``rejected_file``.
        rejected_file: None where everything fits.
        left_out: Rows with label 0 that ``negatives`` did not ask for.
    """

    format: Format
    sources: tuple[str, ...]
    files: tuple[WrittenFile, ...]
    rejected: int
    rejected_file: str | None
    left_out: int = Field(ge=0)

    @property
    def rows(self) -> int:
        """All that were written."""
        return sum(one.rows for one in self.files)


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go.

    Attributes:
        folder: Of all files.
        files: By split; or one, for all rows.
        rejected: What did not fit.
    """

    folder: Path
    files: Mapping[str, Path]
    rejected: Path

    @property
    def is_folder(self) -> bool:
        """Whether rows are split."""
        return _UNDIVIDED not in self.files

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Every file that an import into it may write; those of an earlier one would be mixed with its own."""
        return (*self.files.values(), self.rejected)


def target_of(out: Path | str) -> Target:
    """A ``.jsonl`` file, or a folder for the splits.

    Raises:
        ConfigError: A file of another kind, or a folder where a file is meant.
    """
    path = Path(out).expanduser().absolute()
    doing = f"writing rows to {out}"
    if path.suffix == _SUFFIX:
        if path.is_dir():
            raise ConfigError(doing, "it is a folder", "a file that ends in .jsonl, or a folder of another name")
        return Target(path.parent, {_UNDIVIDED: path}, path.with_suffix(f".rejected{_SUFFIX}"))
    if path.is_file() or (path.suffix in _OTHER_KINDS and not path.is_dir()):
        raise ConfigError(doing, f"a file of kind {path.suffix!r}", "a file that ends in .jsonl, or a folder")
    return Target(path, {name: path / f"{name}{_SUFFIX}" for name in SPLITS}, path / f"rejected{_SUFFIX}")


def refuse_taken(target: Target) -> None:
    """Refuse to write over files that are there.

    Raises:
        ConfigError: One is.
    """
    taken = [str(path) for path in target.all_files if path.exists()]
    if taken:
        raise ConfigError(
            "writing rows", f"{', '.join(taken)} is there already", "new files", "give another --out, or --force"
        )


@dataclass(slots=True)
class _Tally:
    """What was seen so far."""

    places: dict[str, str] = field(default_factory=dict[str, str])
    groups: Counter[str] = field(default_factory=Counter[str])
    first_rejected: str = ""
    rejections: int = 0
    left_out: int = 0


def write_rows(
    items: Iterable[Item], target: Target, rule: SplitRule, on_note: Callable[[str], None]
) -> tuple[tuple[WrittenFile, ...], int, int]:
    """Write what a reader yields.

    Args:
        items: From a reader.
        target: Where; files that are there are replaced.
        rule: How rows are divided, where the target is a folder.
        on_note: Hears of the first things that do not fit.

    Returns:
        The files of rows, how much was rejected, how many rows were left out.

    Raises:
        DataError: No row fits, or a split would have no group.
    """
    tally = _Tally()
    with _temporary(target) as beside:
        spool, rejected = beside("rows"), beside("rejected")
        with spool.open("w", encoding="utf-8") as rows, rejected.open("w", encoding="utf-8") as faults:
            for row in _fitting(items, tally, faults, on_note):
                rows.write(row.as_json() + "\n")
        if not tally.places:
            told = f"no row fits, {tally.rejections} do not: {tally.first_rejected}"
            found = told if tally.rejections else "there is no row"
            raise DataError(f"importing to {target.folder}", found, "at least one row")
        if target.is_folder:
            hint = "change --validation and --test, or import to a file"
            of_group = split_groups(tally.groups, rule, doing="splitting by group", hint=hint)
            names = [name for name in SPLITS if name != TEST or rule.test > 0]
        else:
            of_group = dict.fromkeys(tally.groups, _UNDIVIDED)
            names = [_UNDIVIDED]
        ready = {name: beside(name or "all") for name in names}
        counts = _divide(spool, ready, of_group)
        moves = {ready[name]: target.files[name] for name in names}
        if tally.rejections:
            moves[rejected] = target.rejected
        _put(moves, target)
    if tally.rejections > _MOST_NOTES:
        on_note(f"{tally.rejections - _MOST_NOTES} more do not fit: {target.rejected}")
    written = tuple(_written(target.files[name], counts[name]) for name in names)
    return written, tally.rejections, tally.left_out


def _fitting(
    items: Iterable[Item], tally: _Tally, faults: TextIO, on_note: Callable[[str], None]
) -> Iterator[ImportedRow]:
    """The rows that a study would take; all else is counted, and written down."""
    for item in items:
        if isinstance(item, LeftOut):
            tally.left_out += item.rows
            continue
        rejected = item if isinstance(item, Rejected) else _refused(item, tally)
        if isinstance(item, ImportedRow) and rejected is None:
            tally.places[item.id] = item.place
            tally.groups[_group_of(item.id, item.group)] += 1
            yield item
        elif rejected is not None:
            tally.rejections += 1
            faults.write(json.dumps({"place": rejected.place, "error": rejected.reason}) + "\n")
            told = sendable(f"{rejected.place}: {rejected.reason}")
            tally.first_rejected = tally.first_rejected or told
            if tally.rejections <= _MOST_NOTES:
                on_note(told)


def _refused(row: ImportedRow, tally: _Tally) -> Rejected | None:
    fault = fault_of(row)
    if fault is None and row.id in tally.places:
        fault = f"id {row.id!r} is there already: {tally.places[row.id]}"
    return Rejected(row.place, fault) if fault is not None else None


def _group_of(row_id: str, group: str | None) -> str:
    """A row without a group is one by itself, as a study has it."""
    return row_id if group is None else group


@dataclass(slots=True)
class _Counts:
    rows: int = 0
    groups: set[str] = field(default_factory=set[str])
    labels: Counter[int] = field(default_factory=Counter[int])


def _divide(spool: Path, ready: Mapping[str, Path], of_group: Mapping[str, str]) -> dict[str, _Counts]:
    """Copy each row to the file of its split; lines of a file are durable when this returns."""
    counts = {name: _Counts() for name in ready}
    with ExitStack() as stack:
        lines = stack.enter_context(spool.open("r", encoding="utf-8", newline="\n"))
        files = {name: stack.enter_context(path.open("w", encoding="utf-8")) for name, path in ready.items()}
        for line in lines:
            row = json.loads(line)
            group = _group_of(row["id"], row.get("group"))
            name = of_group[group]
            files[name].write(line)
            counts[name].rows += 1
            counts[name].groups.add(group)
            counts[name].labels[row["label"]] += 1
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return counts


def _put(moves: Mapping[Path, Path], target: Target) -> None:
    """Put files in their places.

    Those of an earlier import go first: a kill between two renames must not leave one split of it beside another of
    this one, which may share groups.
    """
    for path in target.all_files:
        path.unlink(missing_ok=True)
    for source, place in moves.items():
        source.replace(place)
    sync_path(target.folder)


def _written(path: Path, counts: _Counts) -> WrittenFile:
    return WrittenFile(
        file=str(path), rows=counts.rows, groups=len(counts.groups), labels=dict(sorted(counts.labels.items()))
    )


@contextmanager
def _temporary(target: Target) -> Generator[Callable[[str], Path]]:
    """Names for files in the target's folder that do not outlive this block; nor does a new folder without files."""
    is_new = not target.folder.exists()
    target.folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []

    def beside(name: str) -> Path:
        made.append(target.folder / f".import-{name}.{os.getpid()}.tmp")
        return made[-1]

    try:
        yield beside
    finally:
        for path in made:
            path.unlink(missing_ok=True)
        if is_new and not any(target.folder.iterdir()):
            target.folder.rmdir()
