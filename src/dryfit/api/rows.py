"""Begin a study of the user's own rows or of a training script, and import data sets in other formats as JSON rows."""

import os
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Unpack

from dryfit.core.errors import ConfigError, MachineError
from dryfit.core.jobs.diagnostics import ScriptArgumentsRequest
from dryfit.core.jobs.train import RowsRequest
from dryfit.core.settings.choices import DEFAULT_TASK, BuiltInTask
from dryfit.core.settings.tables import HUB_DEFAULT_SPLIT, HUB_PREFIX
from dryfit.core.settings.task_facts import facts_of, reads
from dryfit.core.wire import Message, Progress, write_text_atomic
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
from dryfit.starter.columns import check_separator
from dryfit.starter.own_rows import own_rows, reference
from dryfit.starter.roles import ROLES
from dryfit.starter.script_study import script_toml
from dryfit.starter.template import STUDY_FILE, check_own, init_own, study_name
from dryfit.study.loop.child_jobs import run_alone

OnNote = Callable[[str], None]


def init_rows(
    folder: Path | str,
    data: Path | str,
    *,
    columns: Mapping[str, str] | None = None,
    task: BuiltInTask | None = None,
    force: bool = False,
    preset: str | None = None,
    on_note: OnNote = lambda _: None,
) -> Path:
    """Write a ``study.toml`` of your own rows into ``folder``; the rows stay where they are.

    Columns, classes, a length and a split by group are found in the rows; see docs/data.md.

    Args:
        folder: The target; made if absent.
        data: A ``.csv``, ``.jsonl`` or ``.parquet`` file, or ``hub:NAME:SPLIT``.
        columns: Which column is the ``text``, ``label``, ``criterion`` or ``group``, where that is not to be found.
        task: What the model learns; None: classes.
        force: Replace a study file that is there.
        preset: A study file that comes with dryfit, as ``dryfit init --help`` lists them; None: the starter's own.
        on_note: Called with each line of what was found.

    Returns:
        The study file.

    Raises:
        ConfigError: A file is already there, and ``force`` is not set; there is no such column, preset or task; or it
            is not clear which column is meant (:class:`~dryfit.starter.roles.AmbiguousError`). Nothing is written then.
        DataError: The rows cannot be read, or are none that can be learned from.
    """
    target, task = Path(folder), task or DEFAULT_TASK
    given = dict(columns or {})
    if unknown := given.keys() - set(ROLES):
        raise ConfigError("looking for columns", f"{min(unknown)!r} is no kind of column", ", ".join(ROLES))
    check_own(target, task=task, force=force, preset=preset)
    text = str(data)
    source = text if text.startswith(HUB_PREFIX) else os.path.abspath(Path(text).expanduser())
    check_separator(source)
    needs = {"label"} if reads(task, "data.label") else set[str]()
    needs |= {"number"} if facts_of(task).numbers else set[str]()
    needs |= {"evidence"} if facts_of(task).spans else set[str]()
    needs |= {"criterion"} if "joint" in facts_of(task).tables else set[str]()  # a model of its own reads it
    with TemporaryDirectory(prefix="dryfit-rows-") as temporary:
        copied = Path(temporary) / "rows.jsonl"
        run_alone(f"reading {text}", RowsRequest(source=source, columns=(), out=str(copied)))
        own = own_rows(copied, source, reference(source, target), given, needs=frozenset(needs))
    for line in own.found:
        on_note(line)
    return init_own(target, own, task=task, force=force, preset=preset)


def init_script(folder: Path | str, script: str, arguments: Sequence[str] = (), *, force: bool = False) -> Path:
    """Write a ``study.toml`` of a training script into ``folder``, with the arguments that can be searched.

    The script is run, in a process of its own and in the current folder, up to where it parses its command line:
    nothing is trained. It stays where it is.

    Args:
        folder: The target; made if absent.
        script: Its path from the current folder.
        arguments: What it is run with; the values of arguments that are searched give way to placeholders.
        force: Replace a study file that is there.

    Returns:
        The study file.

    Raises:
        ConfigError: The study file is there, and ``force`` is not set; or no argument can be searched.
        ObjectiveError: There is no such script, its parser refuses the arguments, or it asks no parser.
    """
    target, work = Path(folder), Path.cwd()
    file = target / STUDY_FILE
    if file.exists() and not force:
        raise ConfigError(
            f"writing a study of {script}", f"{file} exists", "a new folder", "another folder, or --force"
        )
    if not script.endswith(".py"):
        raise ConfigError(f"writing a study of {script}", "it is no Python script", "a file that ends with .py")
    command = shlex.join([script, *arguments])
    found = run_alone(f"reading the arguments of {script}", ScriptArgumentsRequest(command=command, folder=str(work)))
    text = script_toml(
        study_name(target), shlex.quote(script), arguments, os.path.relpath(work, target.resolve()), found
    )
    target.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, text)
    return file


_PASSAGE_CHARS: Final = 900


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
