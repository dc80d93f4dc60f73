"""What source files import, compared with what a pyproject.toml declares."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BY_NAME = ("import_module", "import_offline", "find_spec")
"""Functions that import a module, or look for one, by a text."""


@dataclass(frozen=True, slots=True)
class Import:
    """A package that a source file imports.

    ``guarded``: the import may fail, because the file catches its ImportError, or only looks whether the package is
    there.
    ``only_text``: a text in a file that imports by name, which may be a package's or not.
    """

    package: str
    place: str
    guarded: bool
    only_text: bool = False


def imports(place: str, source: str) -> list[Import]:
    """List the packages that a source file imports: anywhere in it, by a statement or by ``import_module("name")``.

    In a file that imports by name, every other text that could be a package's name is listed too, as such.
    """
    tree = ast.parse(source)
    caught = {
        id(inner)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Try) and any(_names_import_errors(handler.type) for handler in node.handlers))
        or (isinstance(node, ast.With) and any(_suppresses(item.context_expr) for item in node.items))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = [
        Import(name.partition(".")[0], f"{place}:{getattr(node, 'lineno', 0)}", looks or id(node) in caught, text)
        for node, name, looks, text in _names(tree)
    ]
    return [item for item in found if item.package not in sys.stdlib_module_names]


def _names(tree: ast.Module) -> Iterator[tuple[ast.AST, str, bool, bool]]:
    """Yield what is imported: where, its name, whether the package is only looked for, whether it is only a text."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in BY_NAME]
    looks = {id(node.args[0]): _called(node) == "find_spec" for node in calls if node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, False, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node, node.module, False, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and calls and _is_module(node.value):
            yield node, node.value, looks.get(id(node), False), id(node) not in looks


def _is_module(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", text) is not None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _suppresses(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and _called(expression) == "suppress" and _names_import_errors(expression)


def _names_import_errors(expression: ast.expr | None) -> bool:
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)} if expression else set()
    return bool(names & {"ImportError", "ModuleNotFoundError"})


def normal(distribution: str) -> str:
    """Return a distribution's name as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", distribution, maxsplit=1)[0]).lower()


@dataclass(frozen=True, slots=True)
class Declared:
    """The distributions a project always has, and those of its extras."""

    always: frozenset[str]
    extras: frozenset[str]


def declared(pyproject: Mapping[str, Any], *, without: Iterable[str] = ("dev",), met: Iterable[str] = ()) -> Declared:
    """Read the dependencies and extras of a project.

    Args:
        pyproject: Its file.
        without: Extras that are not for users.
        met: Extras whose absence is met for all source files together, so that each may import them as they are.
    """
    project = pyproject["project"]
    own = normal(project.get("name", ""))
    extras = {
        key: {normal(name) for name in names} - {own}
        for key, names in project.get("optional-dependencies", {}).items()
        if key not in without
    }
    always = {normal(name) for name in project["dependencies"]}
    return Declared(
        always=frozenset(always.union(*(extras[key] for key in met))),
        extras=frozenset(name for key, names in extras.items() if key not in met for name in names),
    )


def undeclared(found: Iterable[Import], known: Declared, homes: Mapping[str, list[str]]) -> list[str]:
    """List the imports of packages that are not declared, or that only an extra brings and whose absence is not met.

    Args:
        found: The imports of all source files.
        known: What the project declares.
        homes: The distributions of each package, as ``importlib.metadata.packages_distributions`` has them.
    """
    wrong: list[str] = []
    for item in found:
        owners = _owners(item, homes)
        if item.only_text or owners & known.always or (item.guarded and owners & known.extras):
            continue
        trouble = "only an extra brings it, and nothing meets its absence" if owners & known.extras else "not declared"
        wrong.append(f"{item.place} imports {item.package}: {trouble}")
    return wrong


def _owners(item: Import, homes: Mapping[str, list[str]]) -> set[str]:
    """Return the distributions a package may come from; one that is not installed is named like the package."""
    return {normal(name) for name in homes.get(item.package, [item.package])}


def unused(found: Iterable[Import], known: Declared, homes: Mapping[str, list[str]]) -> set[str]:
    """Return the declared distributions of which no source file imports anything."""
    return set(known.always | known.extras).difference(*(_owners(item, homes) for item in found))
