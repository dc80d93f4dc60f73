"""Finds private names of other libraries in a module's syntax tree."""

import ast
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final

DOCUMENTED: Final = {
    "os._exit": "documented: how a forked child ends without the parent's clean-up",
    "os._Environ": "the type of os.environ, which typing needs and nothing public names",
    "sys._current_frames": "documented",
    "sys._getframe": "documented",
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

    Seen are imports, attributes, keywords of calls and of patterns, and texts that are a dotted name: those given to
    ``getattr``, ``patch``, ``vars(x)[...]`` or ``import_module`` are among them.

    Args:
        tree: The module.
        inherited: Private names that classes of ours define anywhere: ``self`` may have them.
        foreign: Private names that are known to be another library's: an object other than ``self`` that has one is
            never ours.
    """
    return sorted(set(_accesses(tree, inherited, foreign)))


def _accesses(tree: ast.AST, inherited: Container[str], foreign: Container[str]) -> Iterator[Access]:
    imported, aliases = _imported(tree), _aliases(tree)
    own = module_names(tree) | class_names(tree)
    alone = _docstrings(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=found):
                names = [one.name for one in found if has_private(one.name)]
            case ast.ImportFrom(module=module, names=found):
                names = [full for one in found if has_private(full := f"{module or ''}.{one.name}")]
            case ast.Attribute(attr=name) if is_private(name):
                if not _is_ours(node, own, inherited, foreign, imported):
                    names = [_dotted(node, aliases)]
            case ast.keyword(arg=str(name)) if is_private(name) and name not in own:
                names = [f"{name}="]
            case ast.MatchClass(kwd_attrs=given):
                names = [f"{name}=" for name in given if is_private(name) and name not in own]
            case ast.Constant(value=str(text)) if id(node) not in alone:
                name = text.strip(".")  # a part of an f-string may begin or end with a dot
                if _DOTTED.fullmatch(name) and has_private(name) and name not in own:
                    names = [repr(text)]
            case _:
                pass
        yield from (Access(getattr(node, "lineno", 0), name) for name in names if name.strip("'") not in DOCUMENTED)


def _is_ours(
    node: ast.Attribute, own: set[str], inherited: Container[str], foreign: Container[str], imported: set[str]
) -> bool:
    name = node.attr
    if name in DOCUMENTED:
        return True
    match node.value:
        case ast.Name(id="self" | "cls"):
            return name in own or name in inherited
        case ast.Call(func=ast.Name(id="super")):
            return False
        case _:
            return name in own and name not in foreign and _root(node) not in imported


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.Attribute, aliases: dict[str, str]) -> str:
    """An attribute as it is written; a variable that stands for a dotted name, as that name."""
    written, root = ast.unparse(node), _root(node)
    return aliases[root] + written.removeprefix(root) if root in aliases else written


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What variables stand for that are given a dotted name: ``_aten = torch.ops.aten``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value) if _root(value):
                found[name] = ast.unparse(value)
            case _:
                pass
    return found


def _imported(tree: ast.AST) -> set[str]:
    """The names that imports bind."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {one.asname or one.name.partition(".")[0] for one in names}
            case _:
                pass
    return found


def has_private(dotted: str) -> bool:
    """Whether a part of a dotted name is private."""
    return bool(private_parts(dotted))


def private_parts(dotted: str) -> set[str]:
    """The parts of a text that are private names."""
    return set(filter(is_private, re.findall(r"\w+", dotted)))


def _docstrings(tree: ast.AST) -> set[int]:
    """The texts that stand alone: docstrings of modules, classes, functions and attributes."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}
