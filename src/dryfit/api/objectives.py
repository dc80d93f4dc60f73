"""Turn a user's own function into a study: its importable name and the equivalent study file."""

import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias, cast

from dryfit.config.load import LoadedStudy, load_document
from dryfit.core.errors import ConfigError, ObjectiveError
from dryfit.core.settings.choices import FUNCTION_TASK, TRAINER_METRIC, TRAINER_TASK
from dryfit.core.settings.functions import FunctionName
from dryfit.core.wire import MARKER_VARIABLE
from dryfit.store.layout import StudyLayout

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
    _refuse_in_trial()
    name, paths = _name_and_paths(objective, _OBJECTIVE)
    plain = _plain_tables(tables, "objective", name)
    wanted = "minimize" if direction is None else direction
    goals = {_GOAL: wanted} if isinstance(wanted, str) else dict(wanted)
    own = {"function": str(name), "goals": list(goals), "directions": [str(goal) for goal in goals.values()]}
    document = {
        **plain,
        "study": {"name": _study_name(objective), **plain["study"], "task": FUNCTION_TASK.value},
        "objective": {**plain["objective"], **own, "paths": paths},
    }
    return _loaded(document, name, _study_name(objective), folder=folder, overrides=overrides)


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
    _refuse_in_trial()
    name, paths = _name_and_paths(make, _TRAINER)
    plain = _plain_tables(tables, "trainer", name)
    if isinstance(direction, Mapping):
        found = f"direction is {dict(direction)!r}"
        raise ConfigError(f"reading the arguments of dryfit.tune({name})", found, '"minimize" or "maximize"')
    goal = {"metric": metric or TRAINER_METRIC} | ({} if direction is None else {"direction": str(direction)})
    document = {
        **plain,
        "study": {"name": _study_name(make), **goal, **plain["study"], "task": TRAINER_TASK.value},
        "trainer": {**plain["trainer"], "make": str(name), "paths": paths},
    }
    return _loaded(document, name, _study_name(make), folder=folder, overrides=overrides)


def _refuse_in_trial() -> None:
    if MARKER_VARIABLE in os.environ:
        raise ObjectiveError(
            "starting a study",
            "this process is itself a trial of one, and importing its script has come to dryfit.tune again",
            hint='write `if __name__ == "__main__":` above the call of dryfit.tune',
        )


def _name_and_paths(function: Callable[..., object], role: "Role") -> tuple[FunctionName, list[str]]:
    name, first_path = function_name(function, role)
    return name, [first_path, *caller_paths()] if first_path else caller_paths()


def _plain_tables(tables: Mapping[str, Any], own: str, name: FunctionName) -> dict[str, Any]:
    doing = f"reading the arguments of dryfit.tune({name})"
    plain = {table: _plain(value, table, doing) for table, value in tables.items()}
    for table in ("study", own):
        if not isinstance(plain.setdefault(table, {}), dict):
            raise ConfigError(doing, f"{table} is {plain[table]!r}", "a table of keys")
    return plain


def _loaded(
    document: Mapping[str, Any], name: FunctionName, short: str, *, folder: Path | str | None, overrides: Sequence[str]
) -> tuple[LoadedStudy, StudyLayout]:
    loaded = load_document(dict(document), Path(f"dryfit.tune({name})"), overrides)
    place = Path(folder) if folder is not None else Path(f"{short}-study")
    return loaded, StudyLayout(place.resolve())


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
