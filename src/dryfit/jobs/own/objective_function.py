"""Import a study's function by its name, in a process that did not define it."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

from dryfit.core.errors import ObjectiveError
from dryfit.core.settings.functions import FunctionName
from dryfit.core.settings.objective_table import CalledCode
from dryfit.core.user_code import Search

_SCRIPT_MODULE = "__mp_main__"
"""What multiprocessing calls a script that is imported by its children: whoever knows that name need not know us."""


_WANTED: Final = {
    "objective": ("a function that takes a trial and returns a number", "def objective(trial): ..."),
    "trainer": ("a function that takes a trial and returns a Trainer", "def make_trainer(trial): ..."),
}
"""By the table of a study file: what the function there is, and an example."""


def import_function(objective: CalledCode, table: str = "objective") -> Callable[[object], object]:
    """Import the function of a study; a script is run without its ``if __name__ == "__main__"`` block.

    Args:
        objective: The function.
        table: The table of the study file that names it.

    Raises:
        ObjectiveError: There is no such module, file or name, or it cannot be called with a trial alone.
    """
    name = FunctionName.parse(objective.function)
    doing = f"importing {name}"
    search = Search(doing, ObjectiveError, objective.paths, f"add its folder to {table}.paths")
    search.add_paths()
    module = _run_script(name.place, search) if name.in_script else search.module(name.place)
    function = search.named(module, name.place, name.qualname)
    check_callable(function, doing, table)
    return function  # pyright: ignore[reportReturnType]  # check_callable has looked


def check_callable(function: object, doing: str, table: str = "objective") -> None:
    """Refuse what cannot be called with a trial and nothing else.

    Raises:
        ObjectiveError: Says what it is instead.
    """
    wanted, example = _WANTED[table]
    if not callable(function) or isinstance(function, type):
        kind = f"it is a {type(function).__name__}" if not isinstance(function, type) else "it is a class"
        raise ObjectiveError(doing, kind, wanted)
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
            example,
        ) from error


def _run_script(place: str, search: Search) -> ModuleType:
    for folder in search.paths:
        file = Path(folder) / place
        if file.is_file():
            break
    else:
        raise ObjectiveError(
            f"looking for {place}",
            "there is no such file",
            f"a file in {search.listed}",
            search.hint,
        )
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, file)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # as of any script: multiprocessing then hands on the file, not a name nobody can import
    # Under both names: what the function pickles for processes of its own says __main__.
    sys.modules[_SCRIPT_MODULE] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
