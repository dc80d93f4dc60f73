"""Studies of the user's own functions and rows."""

import inspect
import os
import re
import shlex
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias, cast

from dryfit.ledger.folder import StudyLayout
from dryfit.settings.check_messages import ScriptArgumentsRequest
from dryfit.settings.choices import DEFAULT_TASK, FUNCTION_TASK, TRAINER_METRIC, TRAINER_TASK, BuiltInTask
from dryfit.settings.errors import ConfigError, ObjectiveError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.study_file_reading import LoadedStudy, load_document
from dryfit.settings.tables import HUB_PREFIX
from dryfit.settings.task_facts import facts_of, reads
from dryfit.settings.training_messages import RowsRequest
from dryfit.settings.user_code import FunctionName
from dryfit.settings.wire import MARKER_VARIABLE
from dryfit.study.child_jobs import run_alone
from dryfit.study.own_data import ROLES, check_separator, own_rows, reference
from dryfit.study.template import STUDY_FILE, check_own, init_own, script_toml, study_name

# Turn a user's own function into a study: its importable name and the equivalent study file.


Objective: TypeAlias = Callable[[Any], float | Sequence[float] | None]
"""Takes a ``dryfit.Trial`` and returns its value or values; None for a trial that was told to stop."""

MakeTrainer: TypeAlias = Callable[[Any], Any]
"""Takes a ``dryfit.Trial`` and returns a ``transformers.Trainer`` that was not trained yet."""

_MAIN: Final = "__main__"
_IMPORTABLE: Final = "a function defined at the top of a module, or of a script that lies in a file"
_GOAL: Final = "value"


def objective_study(
    objective: Objective,
    tables: Mapping[str, Any],
    *,
    direction: str | Mapping[str, str] | None,
    folder: Path | str | None,
    overrides: Sequence[str],
) -> tuple[LoadedStudy, StudyLayout]:
    """Return the study that optimises a function, as if it were loaded from a study file.

    Args:
        objective: The function.
        tables: Tables of the study file, ``space`` among them.
        direction: As in :func:`dryfit.tune`.
        folder: As in :func:`dryfit.tune`.
        overrides: ``key=value`` pairs.

    Raises:
        ObjectiveError: Another process cannot import the function.
        ConfigError: A key or a value is wrong.
    """
    wanted = "minimize" if direction is None else direction
    goals = {_GOAL: wanted} if isinstance(wanted, str) else dict(wanted)
    own = {"goals": list(goals), "directions": [str(goal) for goal in goals.values()]}
    return _study_of(objective, FUNCTION_TASK, tables, {"objective": own}, folder=folder, overrides=overrides)


def trainer_study(
    make: MakeTrainer,
    tables: Mapping[str, Any],
    *,
    metric: str | None,
    direction: str | Mapping[str, str] | None,
    folder: Path | str | None,
    overrides: Sequence[str],
) -> tuple[LoadedStudy, StudyLayout]:
    """Return the study that trains what a function makes, as if it were loaded from a study file.

    Args:
        make: The function.
        tables: Tables of the study file, ``space`` among them.
        metric: As in :func:`dryfit.tune`.
        direction: As in :func:`dryfit.tune`.
        folder: As in :func:`dryfit.tune`.
        overrides: ``key=value`` pairs.

    Raises:
        ObjectiveError: Another process cannot import the function.
        ConfigError: A key or a value is wrong.
    """
    if isinstance(direction, Mapping):
        name, _ = function_name(make, _TRAINER)
        found = f"direction is {dict(direction)!r}"
        raise ConfigError(f"reading the arguments of dryfit.tune({name})", found, '"minimize" or "maximize"')
    goal = {"metric": metric or TRAINER_METRIC} | ({} if direction is None else {"direction": str(direction)})
    return _study_of(make, TRAINER_TASK, tables, {"study": goal}, folder=folder, overrides=overrides)


def _refuse_in_trial() -> None:
    if MARKER_VARIABLE in os.environ:
        raise ObjectiveError(
            "starting a study",
            "this process is itself a trial of one, and importing its script has come to dryfit.tune again",
            hint='write `if __name__ == "__main__":` above the call of dryfit.tune',
        )


def _study_of(
    function: Callable[..., object],
    task: BuiltInTask,
    tables: Mapping[str, Any],
    keys: Mapping[str, Mapping[str, Any]],
    *,
    folder: Path | str | None,
    overrides: Sequence[str],
) -> tuple[LoadedStudy, StudyLayout]:
    """Return the study of a function; its arguments are tables of a study file, and so are further keys."""
    _refuse_in_trial()
    name, first_path = function_name(function, _ROLES[task])
    doing, short, own = f"reading the arguments of dryfit.tune({name})", _study_name(function), task.value
    plain = {table: _plain(value, table, doing) for table, value in tables.items()}
    for table in ("study", own):
        if not isinstance(plain.setdefault(table, {}), dict):
            raise ConfigError(doing, f"{table} is {plain[table]!r}", "a table of keys")
    plain["study"] = {"name": short, **keys.get("study", {}), **plain["study"], "task": own}
    place = {_NAMED_BY[task]: str(name), "paths": [*filter(None, [first_path]), *caller_paths()]}
    plain[own] |= {**keys.get(own, {}), **place}
    loaded = load_document(plain, Path(f"dryfit.tune({name})"), overrides)
    return loaded, StudyLayout(Path(folder if folder is not None else f"{short}-study").resolve())


@dataclass(frozen=True, slots=True)
class Role:
    """What a function is for, in messages, and an example of one."""

    noun: str
    example: str


_OWN_FILE: Final = (
    "write it into a file of its own, and import it from there; in a notebook a cell that begins with "
    "`%%writefile objective.py` does so"
)
_OBJECTIVE: Final = Role("the objective", "def objective(trial): ...")
_TRAINER: Final = Role("the function that makes a Trainer", "def make_trainer(trial): ...")
_ROLES: Final = {FUNCTION_TASK: _OBJECTIVE, TRAINER_TASK: _TRAINER}
_NAMED_BY: Final = {FUNCTION_TASK: "function", TRAINER_TASK: "make"}
"""The key of a study file that names the function."""


def function_name(objective: Callable[..., object], role: Role = _OBJECTIVE) -> tuple[FunctionName, str]:
    """Return the name under which another process can import a function, and the folder of its script if it is in one.

    Raises:
        ObjectiveError: It cannot be imported.
    """
    if not isinstance(objective, FunctionType):
        bound = inspect.ismethod(objective)
        found = "a bound method" if bound else f"a {type(objective).__name__}"
        hint = "write a function that makes the object and calls it" if bound else f"write `{role.example}`"
        raise ObjectiveError(f"taking {role.noun}", f"it is {found}", _IMPORTABLE, hint)
    qualname = objective.__qualname__
    doing = f"taking {role.noun} {qualname}"
    if "<lambda>" in qualname:
        raise ObjectiveError(doing, "it is a lambda", _IMPORTABLE, f"give it a name: {role.example}")
    if "<locals>" in qualname:
        hint = "move it to the top, and hand over what it took from around it in another way, as a file"
        raise ObjectiveError(doing, "it is defined inside a function", _IMPORTABLE, hint)
    module = sys.modules.get(objective.__module__)
    if module is None or _found_in(module, qualname) is not objective:
        found = f"{objective.__module__}.{qualname} is something else than the function that was given"
        raise ObjectiveError(doing, found, _IMPORTABLE, "let the name at the top of the module be the function given")
    if objective.__module__ != _MAIN:
        return FunctionName(objective.__module__, qualname), ""
    return _in_main(module, qualname, doing)


def _in_main(module: ModuleType, qualname: str, doing: str) -> tuple[FunctionName, str]:
    if module.__spec__ is not None:  # python -m package.module
        return FunctionName(module.__spec__.name, qualname), ""
    file = getattr(module, "__file__", None)
    script = Path(os.path.abspath(file)) if isinstance(file, str) else None
    if script is None or script.suffix != ".py" or not script.is_file():
        found = "it is defined in a notebook or an interactive session, which no other process can import"
        raise ObjectiveError(doing, found, _IMPORTABLE, _OWN_FILE)
    return FunctionName(script.name, qualname), str(script.parent)


def _found_in(module: ModuleType, qualname: str) -> object:
    owner: object = module
    for part in qualname.split("."):
        owner = getattr(owner, part, None)
    return owner


def caller_paths() -> list[str]:
    """Return the import folders of this process that a new one would lack: all but Python's own and site-packages."""
    python = sysconfig.get_paths()
    own = {Path(path).resolve() for path in (*python.values(), *site.getsitepackages(), site.getusersitepackages())}
    standard = Path(python["stdlib"]).resolve()
    paths: dict[str, None] = {}
    for entry in sys.path:
        path = Path(entry).resolve()
        if path.is_dir() and path not in own and path.parent != standard:
            paths[os.path.abspath(entry)] = None
    return list(paths)


def _study_name(objective: Callable[..., object]) -> str:
    name = objective.__qualname__.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:100] or "objective"


def _plain(value: object, place: str, doing: str) -> Any:
    """Convert values of Python and NumPy to what TOML can hold.

    Raises:
        ConfigError: A value is of a kind that a study file cannot hold.
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): _plain(item, f"{place}.{key}", doing) for key, item in items if item is not None}
    if isinstance(value, list | tuple | range):
        return [_plain(item, place, doing) for item in cast("Sequence[object]", value)]
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        doing, f"{place} has {value!r} ({type(value).__name__})", "numbers, text, booleans, lists and tables"
    )


# Begin a study of the user's own rows, or of a training script.


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
            is not clear which column is meant (:class:`~dryfit.study.own_data.AmbiguousError`). Nothing is written
            then.
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
