"""The script of a command: found, described without running it, and run as Python itself would."""

import os
import platform
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from types import CodeType

from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.train import ImportResult
from dryfit.core.text.script_command import CommandTemplate
from dryfit.core.user_code import script_file, script_imports, source_hash

_OURS = ("dryfit", "torch", "transformers")
_TORCH = re.compile(r"torch\b")


def described(command: str, folder: Path) -> ImportResult:
    """Return the file of a script, with its hash and the versions of what it imports; nothing of it is run.

    Raises:
        ObjectiveError: It is not there, or Python cannot read it.
    """
    file = script_file(command, folder)
    if file is not None:
        _compiled(file, folder)
    elif not folder.is_dir():
        raise ObjectiveError(f"looking for the script of {command!r}", f"there is no folder {folder}", "a folder")
    modules = {*script_imports(command, folder), *_OURS}
    versions, owners = {"python": platform.python_version()}, packages_distributions()
    for package in sorted({owner for name in modules for owner in owners.get(name, ())}):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return ImportResult(source_file=str(file or ""), source_hash=source_hash(file), versions=versions)


def may_use_torch(command: str, folder: Path) -> bool:
    """Whether a script may train with PyTorch, by what its own file imports: torch, a package that can need it, or
    modules of the user's own, of which nothing is known. Of a module that is run nothing is known either.
    """
    if script_file(command, folder) is None:
        return True
    owners = packages_distributions()
    for name in script_imports(command, folder) - sys.stdlib_module_names - {"dryfit"}:
        packages = owners.get(name, ())
        if not packages or any(_TORCH.match(need) for one in packages for need in (one, *(requires(one) or ()))):
            return True
    return False


def _compiled(file: Path, folder: Path) -> CodeType:
    doing = f"looking at the script {file}"
    try:
        return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ObjectiveError(
            doing, "there is no such file", f"a Python script, by its path from {folder}", "see script.folder"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise ObjectiveError(doing, f"Python cannot read it: {error}", "a Python script") from error


def run_script(command: CommandTemplate, folder: Path, words: Sequence[str]) -> None:
    """Run a script in this process, in its folder, with ``sys.argv`` and ``sys.path`` as Python sets them.

    What it leaves in its namespace is let go of, so that files which it has not closed are written.
    """
    os.chdir(folder)
    sys.argv = [command.target, *words]
    if command.is_module:
        sys.path.insert(0, str(folder))
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    script = folder / command.target
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
