"""Import of data sets in other formats as JSON rows."""

import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TextIO, Unpack

from pydantic import Field

from dryfit.settings.errors import ConfigError, DataError, MachineError
from dryfit.settings.files import sync_path
from dryfit.settings.splits import SPLITS, TEST, SplitRule, split_groups
from dryfit.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX
from dryfit.settings.text import sendable
from dryfit.settings.training_messages import RowsRequest
from dryfit.settings.wire import Message, Progress, Wire
from dryfit.study.child_jobs import run_alone
from dryfit.study.import_formats import (
    ANNOTATION_COLUMNS,
    POST_COLUMNS,
    ImportedRow,
    Item,
    LeftOut,
    PassageSettings,
    Rejected,
    base_name,
    contractnli_rows,
    csv_records,
    fault_of,
    hub_rows,
    read_criteria,
    read_json,
    redsm5_rows,
    squad_rows,
    table_rows,
    text_file_lines,
    tsv_records,
)
from dryfit.study.import_options import Format, ImportOptions, check_options, column_map, negatives_of, split_rule

# Write imported rows, split by group, and the rejected parts beside them: streamed, and complete or not at all.
#
# Rows go to a temporary file as they are read, so that memory grows only with their ids and groups. They are split by
# reading that file once more when all groups are known.


_SUFFIX: Final = ".jsonl"
_OTHER_KINDS: Final = (".json", ".csv", ".tsv", ".parquet", ".txt")
_MOST_NOTES: Final = 20
_NOT_SPLIT: Final = ""
"""Stands for the name of a split where rows are not split."""


class WrittenFile(Wire):
    """A file of rows.

    Attributes:
        file: Its path.
        rows: Its rows.
        groups: Number of their groups; a row without one is a group.
        labels: Rows of each label.
    """

    file: str
    rows: int
    groups: int
    labels: dict[int, int]


class ImportSummary(Wire):
    """The result of an import.

    Attributes:
        format: The format of the sources.
        sources: The sources as they were given.
        files: The files that were written.
        rejected: How many parts did not fit: each has a line in ``rejected_file``.
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
        """Number of rows written."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True)
class ImportTarget:
    """The files of an import.

    Attributes:
        folder: The folder of all files.
        files: A file for each split, or one for all rows.
        rejected: The file for the parts that did not fit.
    """

    folder: Path
    files: Mapping[str, Path]
    rejected: Path

    @property
    def is_folder(self) -> bool:
        """Whether rows are split."""
        return _NOT_SPLIT not in self.files

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Every file that an import may write; files of an earlier import would be mixed with them."""
        return (*self.files.values(), self.rejected)


def target_of(out: Path | str) -> ImportTarget:
    """Return the target meant by a ``.jsonl`` file, or a folder for the splits.

    Raises:
        ConfigError: It is a file of another kind, or a folder where a file is meant.
    """
    path = Path(out).expanduser().absolute()
    doing = f"writing rows to {out}"
    if path.suffix == _SUFFIX:
        if path.is_dir():
            raise ConfigError(doing, "it is a folder", "a file that ends in .jsonl, or a folder of another name")
        return ImportTarget(path.parent, {_NOT_SPLIT: path}, path.with_suffix(f".rejected{_SUFFIX}"))
    if path.is_file() or (path.suffix in _OTHER_KINDS and not path.is_dir()):
        raise ConfigError(doing, f"a file of kind {path.suffix!r}", "a file that ends in .jsonl, or a folder")
    return ImportTarget(path, {name: path / f"{name}{_SUFFIX}" for name in SPLITS}, path / f"rejected{_SUFFIX}")


def refuse_taken(target: ImportTarget) -> None:
    """Refuse to overwrite files.

    Raises:
        ConfigError: One of them exists.
    """
    taken = [str(path) for path in target.all_files if path.exists()]
    if taken:
        raise ConfigError(
            "writing rows", f"{', '.join(taken)} is there already", "new files", "give another --out, or --force"
        )


@dataclass(slots=True)
class _Tally:
    """Counts of the items so far."""

    places: dict[str, str] = field(default_factory=dict[str, str])
    groups: Counter[str] = field(default_factory=Counter[str])
    first_rejected: str = ""
    rejections: int = 0
    left_out: int = 0


def write_rows(
    items: Iterable[Item], target: ImportTarget, rule: SplitRule, on_note: Callable[[str], None]
) -> tuple[tuple[WrittenFile, ...], int, int]:
    """Write the items of a reader.

    Args:
        items: The items.
        target: The target; existing files are replaced.
        rule: How rows are split, where the target is a folder.
        on_note: Called with a line for each of the first parts that do not fit.

    Returns:
        The files of rows, how many parts were rejected, how many rows were left out.

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
            none_fits = f"no row fits, {tally.rejections} do not: {tally.first_rejected}"
            found = none_fits if tally.rejections else "there is no row"
            raise DataError(f"importing to {target.folder}", found, "at least one row")
        if target.is_folder:
            hint = "change --validation and --test, or import to a file"
            of_group = split_groups(tally.groups, rule, doing="splitting by group", hint=hint)
            names = [name for name in SPLITS if name != TEST or rule.test > 0]
        else:
            of_group = dict.fromkeys(tally.groups, _NOT_SPLIT)
            names = [_NOT_SPLIT]
        ready = {name: beside(name or "all") for name in names}
        counts = _split(spool, ready, of_group)
        moves = {ready[name]: target.files[name] for name in names}
        if tally.rejections:
            moves[rejected] = target.rejected
        _move_in(moves, target)
    if tally.rejections > _MOST_NOTES:
        on_note(f"{tally.rejections - _MOST_NOTES} more do not fit: {target.rejected}")
    written = tuple(_written(target.files[name], counts[name]) for name in names)
    return written, tally.rejections, tally.left_out


def _fitting(
    items: Iterable[Item], tally: _Tally, faults: TextIO, on_note: Callable[[str], None]
) -> Iterator[ImportedRow]:
    """Yield the rows that a study would accept; count and write down all else."""
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
            note = sendable(f"{rejected.place}: {rejected.reason}")
            tally.first_rejected = tally.first_rejected or note
            if tally.rejections <= _MOST_NOTES:
                on_note(note)


def _refused(row: ImportedRow, tally: _Tally) -> Rejected | None:
    fault = fault_of(row)
    if fault is None and row.id in tally.places:
        fault = f"id {row.id!r} is there already: {tally.places[row.id]}"
    return Rejected(row.place, fault) if fault is not None else None


def _group_of(row_id: str, group: str | None) -> str:
    """Return the row's group; a row without one is a group of its own, as in a study."""
    return row_id if group is None else group


@dataclass(slots=True)
class _Counts:
    rows: int = 0
    groups: set[str] = field(default_factory=set[str])
    labels: Counter[int] = field(default_factory=Counter[int])


def _split(spool: Path, ready: Mapping[str, Path], of_group: Mapping[str, str]) -> dict[str, _Counts]:
    """Copy each row to the file of its split, durably."""
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


def _move_in(moves: Mapping[Path, Path], target: ImportTarget) -> None:
    """Move files to their places.

    Files of an earlier import are removed first: a kill between two renames must not leave one of its splits beside a
    new one, which may share groups.
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
def _temporary(target: ImportTarget) -> Generator[Callable[[str], Path]]:
    """Give names of temporary files in the target's folder, removed at the end as is a new folder without files."""
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


_PASSAGE_CHARS: Final = 900
OnNote = Callable[[str], None]


def import_rows(
    form: Format | str,
    *sources: Path | str,
    out: Path | str,
    force: bool = False,
    on_note: OnNote = lambda _: None,
    **options: Unpack[ImportOptions],
) -> ImportSummary:
    """Import a data set of another format as JSON rows; see docs/importing.md.

    What does not fit gives no row: it is counted and has a line in the summary's ``rejected_file``. Files appear when
    they are complete, or not at all.

    Args:
        form: ``contractnli``, ``squad``, ``redsm5``, ``glue`` or ``hub``.
        sources: For ``redsm5`` the posts and the annotations, for ``hub`` a name, else one file.
        out: A ``.jsonl`` file for all rows, or a folder: rows are split by group into its train, validation and test,
            as a study splits ``data.file``.
        force: Write over files that are there.
        on_note: Called with a line for each of the first twenty things that do not fit.
        options: See :class:`dryfit.study.import_formats.ImportOptions`.

    Raises:
        ConfigError: There is no such format, an option does not belong to this format, or a file is there already.
        DataError: A source is absent or of another format, or no row of it fits.
        MachineError: A file cannot be read or written.
        ChildError: The process that reads a data set of the hub ended without an answer.
    """
    if form not in set(Format):
        raise ConfigError("importing rows", f"there is no format {form!r}", ", ".join(Format))
    form = Format(form)
    names = tuple(map(str, sources))
    target = target_of(out)
    check_options(form, names, options, into_folder=target.is_folder)
    if not force:
        refuse_taken(target)
    rule = split_rule(options)
    try:
        with _items(form, names, options, on_note) as items:
            files, rejected, left_out = write_rows(items, target, rule, on_note)
    except OSError as error:
        hint = "look at the path, its rights and the disk"
        raise MachineError(f"importing {form} to {out}", str(error), hint=hint) from error
    return ImportSummary(
        format=form,
        sources=names,
        files=files,
        rejected=rejected,
        rejected_file=str(target.rejected) if rejected else None,
        left_out=left_out,
    )


@contextmanager
def _items(
    form: Format, sources: tuple[str, ...], options: ImportOptions, on_note: OnNote
) -> Generator[Iterator[Item]]:
    """Open the sources and yield the items that the format's reader yields."""
    source = sources[0]
    match form:
        case Format.CONTRACTNLI:
            passage_chars = options.get("passage_chars", _PASSAGE_CHARS)
            if passage_chars < 1:
                raise ConfigError("cutting contracts", f"passage_chars is {passage_chars}", "1 or more")
            cutting = PassageSettings(passage_chars, negatives_of(options, default=1))
            yield contractnli_rows(read_json(source), source, cutting)
        case Format.SQUAD:
            yield squad_rows(read_json(source), source)
        case Format.REDSM5:
            yield _redsm5(source, sources[1], options)
        case Format.GLUE:
            columns = column_map(options)
            header = options.get("header", True)
            records = tsv_records(source, tuple(columns.columns.values()), header=header)
            yield table_rows(records, columns, base_name(source))
        case Format.HUB:
            with _hub(source, options, on_note) as items:
                yield items


def _redsm5(posts: str, annotations: str, options: ImportOptions) -> Iterator[Item]:
    if "criteria" not in options:
        raise ConfigError(
            "importing redsm5",
            "no criteria given",
            "a file with lines SYMPTOM: what it is",
            "give --criteria FILE",
        )
    name = str(options["criteria"])
    return redsm5_rows(
        csv_records(posts, POST_COLUMNS),
        csv_records(annotations, ANNOTATION_COLUMNS),
        read_criteria(text_file_lines(name, "a text file with a line for each symptom"), name),
        negatives_of(options, default=None),
    )


@contextmanager
def _hub(source: str, options: ImportOptions, on_note: OnNote) -> Generator[Iterator[Item]]:
    """Yield the rows of a data set of the hub, read in a child process, as the library for it is heavy."""
    columns = column_map(options)
    name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    local = Path(name).expanduser()
    full = HUB_PREFIX + (str(local.absolute()) if local.is_dir() else name) + (f":{split}" if split else "")
    with TemporaryDirectory(prefix="dryfit-rows-") as folder:
        copied = Path(folder) / "rows.jsonl"
        wanted = tuple(dict.fromkeys(columns.columns.values()))
        request = RowsRequest(source=full, columns=wanted, out=str(copied))
        run_alone(f"reading {source}", request, lambda message: _pass_on(message, on_note))
        prefix = f"{Path(name).name}:{split.partition(':')[0] or HUB_DEFAULT_SPLIT}"
        with copied.open(encoding="utf-8", newline="\n") as lines:
            yield hub_rows(lines, columns, source, prefix)


def _pass_on(message: Message, on_note: OnNote) -> None:
    if isinstance(message, Progress):
        on_note(f"{message.step} rows read")
