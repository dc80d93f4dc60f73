"""Finding a function by its name, in a process that did not define it."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from dryfit.core.errors import ObjectiveError
from dryfit.core.functions import FunctionName
from dryfit.core.settings import ObjectiveSettings

_SCRIPT_MODULE = "__mp_main__"
"""What multiprocessing calls a script that is imported by its children: whoever knows that name need not know us."""


def import_function(objective: ObjectiveSettings) -> Callable[[object], object]:
    """Import the function of a study; a script is run without its ``if __name__ == "__main__"`` block.

    Raises:
        ObjectiveError: There is no such module, file or name, or it cannot be called with a trial alone.
    """
    name = FunctionName.parse(objective.function)
    doing = f"importing {name}"
    sys.path[:0] = [path for path in objective.paths if path not in sys.path]
    importlib.invalidate_caches()  # a fork server has listed folders earlier
    try:
        module = _run_script(name.place, objective.paths) if name.in_script else importlib.import_module(name.place)
    except ModuleNotFoundError as error:
        missing = error.name or name.place
        if missing != name.place and not name.place.startswith(f"{missing}."):
            raise
        raise ObjectiveError(
            doing,
            f"there is no module {missing}",
            f"installed modules, and those in {_listed(objective.paths)}",
            "add its folder to objective.paths",
        ) from error
    found: object = module
    for part in name.qualname.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"did you mean {near[0]}?" if near else "define it outside of functions and `if` blocks"
            raise ObjectiveError(doing, f"{name.place} has no {name.qualname}", "a name defined there", hint)
        found = getattr(found, part)
    check_callable(found, doing)
    return found  # pyright: ignore[reportReturnType]  # check_callable has looked


def check_callable(function: object, doing: str) -> None:
    """Refuse what cannot be called with a trial and nothing else.

    Raises:
        ObjectiveError: Says what it is instead.
    """
    if not callable(function) or isinstance(function, type):
        found = f"it is a {type(function).__name__}" if not isinstance(function, type) else "it is a class"
        raise ObjectiveError(doing, found, "a function that takes a trial and returns a number")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in that does not tell
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ObjectiveError(
            doing,
            f"it takes {signature}: {error}",
            "a function of one argument, the trial",
            "def objective(trial): ...",
        ) from error


def source_file(function: Callable[[object], object]) -> Path | None:
    """The file that a function is defined in; None where nobody knows."""
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except TypeError:
        return None


def _run_script(place: str, paths: Sequence[str]) -> ModuleType:
    for folder in paths:
        file = Path(folder) / place
        if file.is_file():
            break
    else:
        raise ObjectiveError(
            f"looking for {place}",
            "there is no such file",
            f"a file in {_listed(paths)}",
            "add its folder to objective.paths",
        )
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, file)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # as of any script: multiprocessing then hands on the file, not a name nobody can import
    # Under both names: what the function pickles for processes of its own says __main__.
    sys.modules[_SCRIPT_MODULE] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) or "no folder"
