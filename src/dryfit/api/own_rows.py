"""Begin a study of the user's own rows."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.train import RowsRequest
from dryfit.core.settings.choices import DEFAULT_TASK, BuiltInTask
from dryfit.core.settings.tables import HUB_PREFIX
from dryfit.core.settings.task_facts import facts_of, reads
from dryfit.starter.columns import check_separator
from dryfit.starter.own_rows import own_rows, reference
from dryfit.starter.roles import ROLES
from dryfit.starter.template import check_own, init_own
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
    needs |= {"evidence"} if facts_of(task).spans else set[str]()
    with TemporaryDirectory(prefix="dryfit-rows-") as temporary:
        copied = Path(temporary) / "rows.jsonl"
        run_alone(f"reading {text}", RowsRequest(source=source, columns=(), out=str(copied)))
        own = own_rows(copied, source, reference(source, target), given, needs=frozenset(needs))
    for line in own.found:
        on_note(line)
    return init_own(target, own, task=task, force=force, preset=preset)
