"""What a rehearsal runs: a script, a module or a function, found and started as Python itself would."""

import ast
import importlib.util
import os
import runpy
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dryfit.settings.rehearsal_messages import RehearsalRequest
from dryfit.settings.user_code import FunctionName, imported


def own_code(request: RehearsalRequest) -> str:
    """Return the file of what is run, whose lines are the user's own wherever it lies; empty where there is none.

    Of a console script (``bin/litgpt``), which only calls a package, it is the package's folder. The packages above a
    module are imported for it.
    """
    if request.function:
        name = FunctionName.parse(request.function)
        return os.path.realpath(name.place) if name.in_script else _origin(name.place)
    if request.module:
        return _origin(request.module)
    script = _script(request)
    return _called_package(script) or str(script)


def _script(request: RehearsalRequest) -> Path:
    """Return the file of a script as Python names it: absolute, links as they are."""
    script = Path(os.path.abspath(str(request.script)))
    return script / "__main__.py" if script.is_dir() else script


def _called_package(script: Path) -> str:
    """Return the folder of the package whose function a console script calls; empty where it is a script of its own."""
    if script.parent != Path(sysconfig.get_path("scripts")) and script.parent.name not in ("bin", "Scripts"):
        return ""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    called = [one.module for one in body if isinstance(one, ast.ImportFrom) and one.module and not one.level]
    if len(called) != 1 or not isinstance(body[-1], ast.If):
        return ""
    found = importlib.util.find_spec(called[0].partition(".")[0])
    folders = found.submodule_search_locations if found is not None else None
    return f"{next(iter(folders))}{os.sep}" if folders else ""


def started(request: RehearsalRequest) -> Callable[[], object]:
    """Return what runs a script, module or function, with ``sys.argv`` and ``sys.path`` as Python sets them.

    The function's module is imported here.

    Raises:
        ConfigError: There is no such function.
    """
    if request.function:
        function = imported(FunctionName.parse(request.function), f"importing {request.function} to rehearse it")
        assert callable(function)
        return partial(function, **request.parameters)
    if request.module:
        module = request.module
        sys.argv = [module, *request.arguments]
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    script = str(request.script)
    sys.argv = [script, *request.arguments]
    if not Path(script).is_dir():  # runpy adds a folder by itself
        sys.path.insert(0, str(Path(script).resolve().parent))
    file = os.path.abspath(script)  # as Python does: a script may leave the folder that it was started in
    return lambda: runpy.run_path(file, run_name="__main__")


def add_working_folder(request: RehearsalRequest) -> None:
    """Let modules be found in the working folder where ``python -m`` would find them: this process began without it."""
    if request.module:
        sys.path.insert(0, str(Path.cwd()))


def _origin(module: str) -> str:
    """Return the file of a module; of a package that is run, of its ``__main__``."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__") or spec
    except ImportError:
        return ""  # running it says why
    return spec.origin or "" if spec is not None else ""
