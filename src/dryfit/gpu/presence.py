"""Packages that this machine lacks and a machine with a GPU may have: when one is taken to be there.

Only where the script could not go on without it (an import that nothing guards), where something asked for it by name,
or where the user gave it. An import within ``try: ... except ImportError``, and a look whether the package is there,
find this machine as it is.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from linecache import getlines
from pathlib import Path
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any, Final

import torch

from dryfit.gpu.custom_operators import OWN_FUNCTIONS

_TORCH: Final = str(Path(torch.__file__).parent)
_MACHINERY: Final = ("<frozen importlib", str(Path(importlib.__file__).parent), __file__)
_PROBES: Final = ("<frozen importlib.util>", str(Path(importlib.__file__).parent / "util.py"))
_OF_CUDA: Final = frozenset({"triton"})
"""What a torch for CUDA requires, and one for the CPU does not."""
_LOOK_FOR_ALL: Final = frozenset({"torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes"})
_IMPORT_ERRORS: Final = frozenset({"ImportError", "ModuleNotFoundError"})
_ALL_ERRORS: Final = _IMPORT_ERRORS | {"Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class StandIn:
    """What stands in for a package.

    Attributes:
        version: That it says it has.
        source: Where what it takes is written down: the package's files, with their version.
        modules: Makes its modules, by full name, with what is in them.
        distribution: Its name in a registry.
        is_open: Whether whatever else is asked of it is a placeholder: nothing computes with it.
        is_timed: Whether the arithmetic of its functions counts.
    """

    version: str
    source: str
    modules: Callable[[], Mapping[str, Mapping[str, Any]]]
    distribution: str
    is_open: bool = False
    is_timed: bool = True


class Presence(MetaPathFinder, Loader):
    """Finds stand-ins for packages, after everybody else has found none.

    Args:
        rows: By package.
        on_assumed: Called with package and reason where one is taken to be there.
        on_lacking: Called with a package that torch for CUDA brings where code looks for it, and goes on without it.
    """

    def __init__(
        self,
        rows: Mapping[str, StandIn],
        on_assumed: Callable[[str, str], None],
        on_lacking: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._rows = rows
        self._on_assumed, self._on_lacking = on_assumed, on_lacking
        self._modules: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        self._given: dict[str, StandIn] = {}
        self._looking = False

    def _row(self, package: str) -> StandIn | None:
        """Return what stands in for a package; with functions of the user's own, those too."""
        row = self._rows.get(package)
        own = {name: functions for name, functions in OWN_FUNCTIONS.items() if name.partition(".")[0] == package}
        if not own:
            return row
        row = row or StandIn("0", "own rows", lambda: {package: {}}, package)
        known = row.modules()
        merged = {name: {**known.get(name, {}), **own.get(name, {})} for name in (*known, *own)}
        return replace(row, modules=lambda: merged)

    def install(self) -> None:
        """Be asked from now on."""
        sys.meta_path.append(self)

    def give(self, package: str, why: str) -> bool:
        """Let a package be there from now on; whether it is a stand-in, because it is not installed."""
        if package in self._modules:
            return True
        self._looking = True
        try:
            if package in sys.modules or _is_installed(package):
                return False
        finally:
            self._looking = False
        row = self._row(package)
        assert row is not None
        self._given[package] = row
        self._modules[package] = row.modules()
        self._on_assumed(package, f"{row.distribution} {row.version} ({why}): counted by {row.source}")
        return True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a stand-in's spec; None: there is none, or this machine is to be seen as it is."""
        package = fullname.partition(".")[0]
        row = self._row(package)
        if row is None or self._looking or (package in sys.modules and package not in self._modules):
            return None
        if package not in self._modules:
            if fullname != package or _is_guarded(sys._getframe(1)):
                if fullname in _OF_CUDA and _is_looked_for(sys._getframe(1)):
                    self._on_lacking(fullname)
                return None
            self.give(package, "an import without a guard")
        if fullname not in self._modules[package] and not row.is_open:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, empty."""
        is_open = self._given[spec.name.partition(".")[0]].is_open
        return OpenModule(spec.name) if is_open else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the parts of a module, then fill it."""
        name = module.__name__
        package = name.partition(".")[0]
        if name == package:
            vars(module)["__version__"] = self._given[package].version
        for part in self._modules[package]:
            if part.rpartition(".")[0] == name:
                importlib.import_module(part)
        vars(module).update(self._modules[package].get(name, {}))

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Yield what stands in for the distributions that are asked for."""
        asked = getattr(context, "name", None)
        for package, row in self._given.items():
            if asked is None or _plain(asked) in (_plain(package), _plain(row.distribution)):
                yield _Distribution(package, row)


class _Distribution(Distribution):
    def __init__(self, package: str, row: StandIn) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {row.distribution}\nVersion: {row.version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: Any) -> str | None:
        """Return the text of a file of the distribution; None: it has none of this name."""
        return self._files.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        """Return where a file would be; no file is anywhere."""
        return Path(path)


class Placeholder:
    """What may be named, called, indexed and compared, and does nothing."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Placeholder(name)
        vars(self)[name] = made
        return made

    def __call__(self, *args: Any, **_: Any) -> Any:
        """Leave alone what it decorates; else return the placeholder itself."""
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getitem__(self, _: Any) -> Any:
        """Return the placeholder itself."""
        return self

    def __or__(self, _: Any) -> Any:
        """Return the placeholder itself: one of several types."""
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self.__name__}, which stands in>"


class OpenModule(ModuleType):
    """A module that has a placeholder for whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        made = vars(self)[name] = Placeholder(name)
        return made


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _is_installed(package: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(package) is not None
    return False


def _is_looked_for(frame: FrameType | None) -> bool:
    """Whether code looks for a package that may choose by it: libraries below look for every package that they know."""
    frames = (one for one, _ in walk_stack(frame))
    asks = (one for one in frames if not one.f_code.co_filename.startswith((*_MACHINERY, *_PROBES)))
    names = (str(one.f_globals.get("__name__")) for one in asks)
    first = next((name for name in names if not name.startswith("transformers.utils.")), "torch")
    return first.partition(".")[0] not in _LOOK_FOR_ALL


def _is_guarded(frame: FrameType | None) -> bool:
    """Whether the import that runs is one without which the code goes on.

    The statement that imports is guarded by any handler that catches what would be raised and does not raise itself;
    statements of functions above it only by one that names import errors.
    """
    caught, importer = _ALL_ERRORS, False
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _PROBES and not importer:
            return True
        if not code.co_filename.startswith(_MACHINERY):
            if code.co_filename.startswith(_TORCH) and not importer:
                return True
            importer = True
            if any(_catches(node, caught) for node in _statements(code.co_filename, frame.f_lineno)):
                return True
            if code.co_name != "<module>":
                caught = _IMPORT_ERRORS
        frame = frame.f_back
    return not importer


@cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _statements(file: str, line: int) -> Iterator[ast.AST]:
    """Yield the statements whose body has a line of a file."""
    tree = _tree(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Try | ast.With) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            yield node


def _catches(node: ast.AST, errors: Iterable[str]) -> bool:
    """Whether a ``try``, or ``with suppress(...)``, goes on where an error of these is raised in it."""
    if isinstance(node, ast.Try):
        return any(
            (handler.type is None or not _names(handler.type).isdisjoint(errors))
            and not isinstance(handler.body[-1], ast.Raise)
            for handler in node.handlers
            if handler.type is not None or "Exception" in errors
        )
    calls = [one.context_expr for one in node.items] if isinstance(node, ast.With) else []
    return any("suppress" in _names(one) and not _names(one).isdisjoint(errors) for one in calls)


def _names(node: ast.AST) -> set[str]:
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
