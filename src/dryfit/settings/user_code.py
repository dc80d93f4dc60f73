"""The user's own functions and scripts: their names, their import, and a script's command."""

import ast
import hashlib
import importlib
import inspect
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from dryfit.settings.errors import ChangedError, ConfigError, DryfitError
from dryfit.settings.older_python import Self
from dryfit.settings.text import did_you_mean

# Names of a user's own functions and classes, by which another process finds them.


NAME_PATTERN: Final = r"^.+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""What a name looks like in a study file: ``package.module:name`` or ``file.py:name``."""

_SCRIPT_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function or class: the module or file that defines it, and its qualified name.

    Attributes:
        place: A module's dotted name, or a file ending in ``.py``; its folder may precede it.
        qualname: Its qualified name there.
    """

    place: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName":
        """Parse ``place:qualname``."""
        place, _, qualname = text.rpartition(":")
        return cls(place, qualname)

    @property
    def in_script(self) -> bool:
        """Whether the place is a file."""
        return self.place.endswith(_SCRIPT_SUFFIX)

    @property
    def folder(self) -> str:
        """The folder before the place; empty if there is none."""
        return str(Path(self.place).parent) if "/" in self.place else ""

    @property
    def module(self) -> str:
        """The module to import from that folder."""
        return Path(self.place).name.removesuffix(_SCRIPT_SUFFIX)

    @property
    def short(self) -> str:
        """The name without the folder."""
        return f"{Path(self.place).name}:{self.qualname}"

    def within(self, folders: Iterable[Path]) -> Self:
        """Return the name with the first of the folders that has its file, or its module's top package.

        A name that has a folder already, or that is in none of them, stays as it is.
        """
        if self.folder:
            return self
        top = self.place if self.in_script else self.place.partition(".")[0]
        for folder in folders:
            there = (folder / top).is_file() if self.in_script else _has_module(folder, top)
            if there:
                return replace(self, place=str(folder / self.place))
        return self

    def __str__(self) -> str:
        return f"{self.place}:{self.qualname}"


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}{_SCRIPT_SUFFIX}").is_file() or (folder / name / "__init__.py").is_file()


# The command of a study's script: its words, their placeholders, and the values that a trial inserts.


FOLDER: Final = "folder"
OF_THE_TRIAL: Final = frozenset({FOLDER, "seed", "number"})
"""Placeholders that no space has."""

OUTPUT_OPTIONS: Final = ("--output_dir", "--output-dir")
"""Options whose value is always the trial's folder."""

_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_INTERPRETERS: Final = re.compile(r"^(?:.*/)?python[0-9.]*$")
_LAUNCHERS: Final = ("torchrun", "accelerate", "deepspeed", "mpirun", "bash", "sh")

Value = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class CommandTemplate:
    """A script, or a module, with its arguments.

    Attributes:
        target: The script's path, or the module's name.
        is_module: It is run as by ``python -m``.
        words: The arguments, with placeholders such as ``{lr}``. Other braces are text.
    """

    target: str
    is_module: bool
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a command as a shell would split it; ``python`` before the script is left out.

        Raises:
            ValueError: It names no script, or a launcher that starts processes of its own.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {error}") from error
        if words and _INTERPRETERS.match(words[0]):
            words = words[1:]
        module = words[:1] == ["-m"]
        words = words[1:] if module else words
        if not words:
            raise ValueError("names no script")
        if words[0] in _LAUNCHERS:
            raise ValueError(f"begins with {words[0]}, which starts processes of its own")
        if not module and not words[0].endswith(".py"):
            raise ValueError(f"begins with {words[0]!r}, which is no Python script")
        return cls(words[0], module, tuple(words[1:]))

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders in the arguments."""
        return frozenset(name for word in self.words for name in _PLACEHOLDER.findall(word))

    @property
    def names_output(self) -> bool:
        """Whether the arguments name an output folder, which each trial replaces by its own."""
        return any(word.partition("=")[0] in OUTPUT_OPTIONS for word in self.words)

    def options(self) -> dict[str, str]:
        """Return the option that each searched placeholder is the value of, by the placeholder's name.

        One in a positional argument, or among several values, has none.
        """
        found: dict[str, str] = {}
        for before, word in zip(("", *self.words), self.words, strict=False):
            option, equals, _ = word.partition("=")
            given = option if equals and _is_option(option) else before if _is_option(before) else ""
            if given and "=" not in before:
                found |= dict.fromkeys(_PLACEHOLDER.findall(word), given)
        return {name: option for name, option in found.items() if name not in OF_THE_TRIAL}

    def arguments(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the arguments of one trial.

        Args:
            values: By the names of placeholders, those of :data:`OF_THE_TRIAL` among them. A word with one that is
                absent here, or None, is left out, with the option before it; so is a word that becomes empty.
        """
        return tuple(self._filled(values))

    def _filled(self, values: Mapping[str, Value]) -> Iterator[str]:
        held = ""  # an option whose value may be missing
        for word in self.words:
            names = _PLACEHOLDER.findall(word)
            missing = any(values.get(name) is None for name in names)
            if held:
                if missing and not _is_option(word):
                    held = ""
                    continue
                yield held
            taken, held = held, ""
            if taken in OUTPUT_OPTIONS and not _is_option(word):
                yield str(values[FOLDER])
                continue
            option, equals, _ = word.partition("=")
            if equals and option in OUTPUT_OPTIONS:
                yield f"{option}={values[FOLDER]}"
            elif missing:
                continue
            elif _is_option(word) and not names:
                held = word
            elif filled := _PLACEHOLDER.sub(lambda match: shown(values[match[1]]), word):
                yield filled
            elif not names:
                yield word
        if held:
            yield held


def shown(value: Value) -> str:
    """Format a value for a command line."""
    return repr(value) if isinstance(value, float) else str(value)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


# Import of a user's own functions and classes by name.


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


def imported_function(name: FunctionName, doing: str, wanted: str) -> Callable[..., object]:
    """Import a function; see :func:`imported`.

    Args:
        name: As of :func:`imported`.
        doing: What is being done, for the errors.
        wanted: Which functions can be used, for the errors.

    Raises:
        ConfigError: There is none, its module raises an error, or it is no function.
    """
    try:
        function = imported(name, doing)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(doing, raised(error), "a module that can be imported") from error
    if not callable(function):
        raise ConfigError(doing, f"it is a {type(function).__name__}", wanted)
    return function


def check_call(function: Callable[..., object], doing: str, wanted: str, /, *args: object, **named: object) -> None:
    """Refuse a function that does not take the arguments with which it will be called.

    Raises:
        ConfigError: It does not.
    """
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as error:
        raise ConfigError(doing, f"it takes {inspect.signature(function)}: {error}", wanted) from error
    except ValueError:  # a built-in that does not tell
        pass


def raised(error: BaseException, file: Path | None = None) -> str:
    """Return what was raised, and the last line of the function's own file that was on the way; None: of any file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file] or frames
    return f"it raised {type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno})"


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
