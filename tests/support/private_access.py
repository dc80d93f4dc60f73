"""Finds private names of other libraries in a module's syntax tree."""

import ast
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

DOCUMENTED: Final = {
    "os._exit": "documented: how a forked child ends without the parent's clean-up",
    "os._Environ": "the type of os.environ, which typing needs and nothing public names",
    "sys._getframe": "documented",
    "_asdict": "documented method of named tuples",
    "_fields": "documented attribute of named tuples",
    "_make": "documented class method of named tuples",
    "_replace": "documented method of named tuples",
}
"""Names with an underscore that are public all the same: dotted ones of a module, bare ones of any object."""

_PRIVATE: Final = re.compile(r"_(?!_)\w*[A-Za-z]\w*|__\w*[^_]_?")
_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """A private name of somebody else.

    Attributes:
        line: Where it stands.
        name: What is written there.
    """

    line: int
    name: str


def is_private(name: str) -> bool:
    """Whether one part of a dotted name begins with an underscore and is no dunder."""
    return _PRIVATE.fullmatch(name) is not None


def class_names(tree: ast.AST) -> set[str]:
    """The private names that the classes of a module define, on themselves or on ``self``."""
    found: set[str] = set()
    for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for inner in ast.walk(made):
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case _:
                    pass
    return set(filter(is_private, found))


def module_names(tree: ast.AST) -> set[str]:
    """The private names that a module itself defines: functions, classes, variables, parameters."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.arg(arg=name):
                found.add(name)
            case _:
                pass
    return set(filter(is_private, found))


def private_accesses(tree: ast.AST, *, inherited: Container[str] = (), foreign: Container[str] = ()) -> list[Access]:
    """Every access to a private name that the module does not define itself.

    Args:
        tree: The module.
        inherited: Private names that classes of ours define anywhere: ``self`` may have them.
        foreign: Private names that are known to be another library's: an object other than ``self`` that has one is
            never ours.
    """
    return sorted(set(_accesses(tree, inherited, foreign)))


def _accesses(tree: ast.AST, inherited: Container[str], foreign: Container[str]) -> Iterator[Access]:
    modules, of_classes = _imported(tree), class_names(tree)
    own = module_names(tree) | of_classes
    texts = _docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Access(node.lineno, one.name) for one in names if _has_private(one.name))
            case ast.ImportFrom(module=module, names=names):
                full = (f"{module or ''}.{one.name}" for one in names)
                yield from (Access(node.lineno, one) for one in full if _has_private(one) and one not in DOCUMENTED)
            case ast.Attribute(attr=name) if is_private(name):
                if not _is_ours(node, own, inherited, foreign, modules):
                    yield Access(node.lineno, ast.unparse(node))
            case ast.Call(keywords=keywords):
                given = [one.arg for one in keywords if one.arg and is_private(one.arg)]
                yield from (Access(node.lineno, f"{name}=") for name in given if name not in own)
            case ast.Constant(value=str(text)) if id(node) not in texts and _DOTTED.fullmatch(text):
                if _has_private(text) and text not in own:
                    yield Access(node.lineno, repr(text))
            case _:
                pass


def _is_ours(
    node: ast.Attribute, own: set[str], inherited: Container[str], foreign: Container[str], modules: dict[str, str]
) -> bool:
    name, root = node.attr, _root(node)
    if name in DOCUMENTED or f"{ast.unparse(node.value)}.{name}" in DOCUMENTED:
        return True
    match node.value:
        case ast.Name(id="self" | "cls"):
            return name in own or name in inherited
        case ast.Call(func=ast.Name(id="super")):
            return False
        case _:
            return name in own and name not in foreign and root not in modules


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _imported(tree: ast.AST) -> dict[str, str]:
    """What each name is that an import binds."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found.update({one.asname or one.name.partition(".")[0]: one.name for one in names})
            case ast.ImportFrom(module=module, names=names):
                found.update({one.asname or one.name: f"{module}.{one.name}" for one in names})
            case _:
                pass
    return found


def _has_private(dotted: str) -> bool:
    return any(map(is_private, dotted.split(".")))


def _docstrings(tree: ast.AST) -> set[int]:
    """The texts that stand alone: docstrings of modules, classes, functions and attributes."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def all_class_names(trees: Iterable[ast.AST]) -> set[str]:
    """:func:`class_names` of several modules."""
    return {name for tree in trees for name in class_names(tree)}
