"""Import data sets in other formats as JSON rows."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Unpack

from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.train import RowsRequest
from dryfit.core.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX
from dryfit.core.wire import Message, Progress
from dryfit.importers.columns import hub_rows, table_rows
from dryfit.importers.contractnli import PassageSettings, contractnli_rows
from dryfit.importers.files import base_name, csv_records, read_json, text_file_lines, tsv_records
from dryfit.importers.items import Item
from dryfit.importers.options import (
    Format,
    ImportOptions,
    check_options,
    column_map,
    negatives_of,
    split_rule,
)
from dryfit.importers.redsm5 import ANNOTATION_COLUMNS, POST_COLUMNS, read_criteria, redsm5_rows
from dryfit.importers.squad import squad_rows
from dryfit.importers.writing import ImportSummary, refuse_taken, target_of, write_rows
from dryfit.study.loop.child_jobs import run_alone

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
        options: See :class:`dryfit.importers.options.ImportOptions`.

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
