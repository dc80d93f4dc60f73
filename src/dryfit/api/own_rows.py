"""Begin a study of the user's own rows, or of a training script."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.diagnostics import ScriptArgumentsRequest
from dryfit.core.jobs.train import RowsRequest
from dryfit.core.settings.choices import DEFAULT_TASK, BuiltInTask
from dryfit.core.settings.tables import HUB_PREFIX
from dryfit.core.settings.task_facts import facts_of, reads
from dryfit.core.wire import write_text_atomic
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
