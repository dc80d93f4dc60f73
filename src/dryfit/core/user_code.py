"""Import of a user's own functions and classes by name."""

import ast
import hashlib
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dryfit.core.errors import ChangedError, ConfigError, DryfitError
from dryfit.core.settings.functions import FunctionName
from dryfit.core.text.script_command import CommandTemplate
from dryfit.core.text.words import did_you_mean


@dataclass(frozen=True, slots=True)
class Search:
    """Where to import from, and the error if something is missing.

    Attributes:
        doing: What is being done, for the error.
        error: The class of the error.
        paths: Folders to import from, beside installed packages.
        hint: What to do if a module is missing.
    """

    doing: str
    error: type[DryfitError]
    paths: Sequence[str]
    hint: str

    def module(self, name: str) -> ModuleType:
        """Import a module.

        Raises:
            DryfitError: There is none. Errors of the module itself are passed on.
        """
        self.add_paths()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            if missing != name and not name.startswith(f"{missing}."):
                raise
            allowed = f"installed modules, and those in {self.listed}" if self.paths else "installed modules"
            raise self.error(self.doing, f"there is no module {missing}", allowed, self.hint) from error

    def add_paths(self) -> None:
        """Add the paths to the import path of this process."""
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        importlib.invalidate_caches()  # a fork server may have cached the folders

    def named(self, module: ModuleType, place: str, qualname: str) -> object:
        """Return the object with a qualified name in a module.

        Raises:
            DryfitError: There is none.
        """
        value: object = module
        for part in qualname.split("."):
            if not hasattr(value, part):
                hint = did_you_mean(part, dir(value), "define it outside of functions and `if` blocks")
                raise self.error(self.doing, f"{place} has no {qualname}", "a name defined there", hint)
            value = getattr(value, part)
        return value

    @property
    def listed(self) -> str:
        """The paths, in words."""
        return ", ".join(self.paths) or "no folder"


def imported(name: FunctionName, doing: str) -> object:
    """Import a class or function from the folder before its name, or from the installed modules.

    Args:
        name: With the folder of its file or module, unless it is installed.
        doing: What is being done, for the errors.

    Raises:
        ConfigError: There is no such module, file or name, or another module has the file's name. Errors of the module
            itself are passed on.
    """
    if name.in_script and not Path(name.place).is_file():
        raise ConfigError(doing, f"there is no file {name.place}", "a .py file, or package.module:name")
    hint = "its folder is searched where the study file lies, in the current folder, and among installed packages"
    search = Search(doing, ConfigError, [name.folder] if name.folder else [], hint)
    module = search.module(name.module)
    if name.folder and not _is_there(Path(module.__file__ or ""), Path(name.folder, *name.module.split("."))):
        problem = f"{name.module} is already the module in {module.__file__}, and not the one in {name.folder}"
        raise ConfigError(doing, problem, "a name that no other module has", "rename the file")
    return search.named(module, name.place, name.qualname)


def _is_there(file: Path, place: Path) -> bool:
    """Return whether a module's file is the one that its name points to."""
    wanted = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return any(one.is_file() and one.samefile(file) for one in wanted)


def source_hash(file: Path | None) -> str:
    """Return the hash of a source file; of no bytes if there is none."""
    source = file.read_bytes() if file is not None and file.is_file() else b""
    return hashlib.sha256(source).hexdigest()[:16]


def demand_unchanged(file: str, known: str) -> None:
    """Refuse to import the user's code where its file was edited since the session looked at it.

    Args:
        file: The file; empty: there is none.
        known: Its hash at that time.

    Raises:
        ChangedError: The file is another one.
    """
    if file and source_hash(Path(file)) != known:
        raise ChangedError(
            f"importing {file} for a trial",
            "it was edited since the study was started or resumed",
            "the code that the trials before it have run",
            "put it back; or keep it, and `dryfit resume` goes on with it and says so",
        )


def source_file(defined: object) -> Path | None:
    """Return the file that defines a function or a class; None if unknown."""
    unwrapped = inspect.unwrap(defined) if callable(defined) else defined
    try:
        return Path(inspect.getsourcefile(unwrapped) or "")  # pyright: ignore[reportArgumentType]  # refused below
    except TypeError:
        return None


def script_file(command: str, folder: Path) -> Path | None:
    """Return the file of a script's command; of a module one below the folder, None if it is not there."""
    parsed = CommandTemplate.parse(command)
    if not parsed.is_module:
        return folder / parsed.target
    place = folder.joinpath(*parsed.target.split("."))
    found = (file for file in (place.with_name(f"{place.name}.py"), place / "__main__.py") if file.is_file())
    return next(found, None)


def script_imports(command: str, folder: Path) -> frozenset[str]:
    """Return the top-level modules that a script's own file imports; none where it cannot be read or has an error."""
    file = script_file(command, folder)
    try:
        tree = ast.parse(file.read_bytes() if file is not None else b"")
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return frozenset(names)
