"""Answer conditions on values that nobody knows, so that a script goes on, and its loops end.

The statement that asks decides: what guards an ``assert``, a ``raise`` or an exit lets it pass, what would only
leave a function, a loop or one round of it stays there, and anything else is true. A condition that comes again and
again at one place is answered the other way once, since a loop may wait for it.
"""

import ast
import dis
import linecache
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from dryfit.core.version import PACKAGE_FOLDER

PATIENCE = 100
"""Times that a condition is asked at one place before it is answered the other way."""
_TORCH = str(Path(torch.__file__).parent)
_BETWEEN = (f"{PACKAGE_FOLDER}/", *(f"{_TORCH}/{part}" for part in ("_", "overrides.py", "utils/_")))
"""Files whose code runs between the one that asks and us."""
_EXITS = frozenset({"exit", "quit", "abort"})
_ASSERTS = frozenset({"LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"})
_KEEPS_TRUTH = frozenset(
    {"CACHE", "COPY", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "TO_BOOL"}
    | {f"STORE_{kind}" for kind in ("DEREF", "FAST", "GLOBAL", "NAME")}
)
"""Instructions between a truth value and the jump that it decides."""
_Where = Callable[[dis.Instruction], bool | None]


class Conditions:
    """Answers the conditions of one script."""

    def __init__(self) -> None:
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def answer(self) -> tuple[bool, str]:
        """Return the answer to the condition that the running code asks, and what is to be said of it."""
        frame: FrameType = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
            frame = frame.f_back
        asked = (frame.f_code, frame.f_lasti)
        truth, ends = _reply(*asked)
        if ends:
            return truth, "a condition on values would end the script; it was answered so that the script goes on"
        self._times[asked] += 1
        if self._times[asked] % PATIENCE == 0:
            return not truth, f"a condition on values, asked {PATIENCE} times; once it was taken as {_said(not truth)}"
        return truth, f"a condition on values; it was taken as {_said(truth)}"


def _said(truth: bool) -> str:
    return str(truth).lower()


@cache
def _reply(code: CodeType, offset: int) -> tuple[bool, bool]:
    """Return the answer for an instruction that asks for a truth value, and whether the other would end the script."""
    instructions = list(dis.get_instructions(code))
    at = bisect_right(instructions, offset, key=lambda one: one.offset) - 1
    path = _path_to(_tree(code.co_filename), instructions[at])
    match path[-1] if path else None:
        case ast.Assert() as statement:
            wanted, ends, where = True, True, _where_of_assert(statement)
        case ast.If() as statement:
            body, other = statement.body, statement.orelse
            following = _following(path)
            leaves = _leaves(body)
            ends = _ends(body) or _ends(other) or (_ends(following) and (leaves or _leaves(other)))
            if not ends and leaves == _leaves(other):
                return True, False
            wanted = not _ends(body) and (_ends(other) or leaves == _ends(following))
            where = _where_of_if(statement, path, following)
        case _:
            return True, False
    asks = instructions[at]
    begin = at if _jumps_if(asks) or asks.opname in ("UNARY_NOT", "TO_BOOL") else at + 1
    negates = asks.opname == "CONTAINS_OP" and asks.arg == 1  # ``not in``
    lands = {truth: _lands(instructions, begin, truth != negates, where) for truth in (True, False)}
    sure = [truth for truth in lands if lands[truth] == {wanted}]
    possible = [truth for truth in lands if wanted in lands[truth]]
    return (sure or possible or [True])[0], ends


@cache
def _tree(file: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _path_to(tree: ast.AST | None, instruction: dis.Instruction) -> list[ast.AST]:
    """Return the statements around an instruction and what they are parts of, the outermost first."""
    path: list[ast.AST] = []
    while tree is not None:
        path.append(tree)
        inner = (one for one in ast.iter_child_nodes(tree) if not isinstance(one, ast.expr))
        tree = next((one for one in inner if _holds(one, instruction)), None)
    return path


def _holds(node: Any, instruction: dis.Instruction) -> bool:
    """Whether an instruction belongs to a node, or to one of several."""
    if isinstance(node, list):
        return any(_holds(one, instruction) for one in node)
    if isinstance(node, ast.match_case):
        return _holds(node.body, instruction)
    at = instruction.positions
    if at is None or None in at or not hasattr(node, "lineno"):
        return False
    begins, ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return begins <= (at.lineno, at.col_offset) and (at.end_lineno, at.end_col_offset) <= ends


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end in an exception or an exit."""
    match body[-1] if body else None:
        case ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name.lstrip("_") in _EXITS
        case _:
            return False


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether statements do no more than leave: those that do more have found what was looked for."""
    return len(body) == 1 and isinstance(body[0], ast.Return | ast.Break | ast.Continue)


def _following(path: Sequence[ast.AST]) -> list[ast.stmt]:
    """Return the statement that runs where the last one of a path does nothing; none where a function ends."""
    for outer, inner in zip(path[-2::-1], path[:0:-1], strict=True):
        for _, block in ast.iter_fields(outer):
            if isinstance(block, list) and inner in block[:-1]:
                return [block[block.index(inner) + 1]]
        if isinstance(outer, ast.For | ast.While) and outer.orelse:
            return outer.orelse[:1]
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    return []


def _where_of_assert(statement: ast.Assert) -> _Where:
    """Return what says of an instruction whether the assertion has passed there, or has not; None: not yet known."""

    def where(one: dis.Instruction) -> bool | None:
        if one.opname in _ASSERTS:
            return False
        return None if _holds(statement, one) and not _returns(one) else True

    return where


def _where_of_if(statement: ast.If, path: Sequence[ast.AST], following: list[ast.stmt]) -> _Where:
    """Return what says of an instruction whether the test has been true there; None: not yet known."""
    loop = next((one for one in reversed(path) if isinstance(one, ast.For | ast.While)), None)
    blocks = [one for one in path if isinstance(one, ast.With | ast.AsyncWith)]  # their ends stand in their heads

    def where(one: dis.Instruction) -> bool | None:
        if _holds(statement.body, one) or _holds(statement.orelse, one):
            return _holds(statement.body, one)
        in_head = any(_holds(around, one) and not _holds(around.body, one) for around in blocks)
        if not _returns(one) and (in_head or _holds(statement, one) or one.positions is None or None in one.positions):
            return None
        match statement.body[0]:  # either may be no more than a jump
            case ast.Break():
                return not _holds(loop, one)
            case ast.Continue():
                return not _holds(following, one)
            case _:
                return False

    return where


def _returns(instruction: dis.Instruction) -> bool:
    """Whether a function ends here; where nothing says so, its last statement does."""
    return instruction.opname.startswith("RETURN_")


def _jumps_if(instruction: dis.Instruction) -> bool:
    return "IF_TRUE" in instruction.opname or "IF_FALSE" in instruction.opname


def _lands(instructions: list[dis.Instruction], begin: int, truth: bool, where: _Where) -> set[bool]:
    """Return where a truth value may lead: both, if others decide as well.

    Args:
        begin: The instruction that decides by the value, or comes after the one that asks for it.
    """
    number_of = {one.offset: number for number, one in enumerate(instructions)}
    found: set[bool] = set()
    left: list[tuple[int, bool | None]] = [(begin, truth)]
    seen: set[tuple[int, bool | None]] = set()
    while left:
        at, known = left.pop()
        if (at, known) in seen or at >= len(instructions):
            continue
        seen.add((at, known))
        one = instructions[at]
        place = where(one)
        if place is not None:
            found.add(place)
        elif _jumps_if(one):
            jumps = {True, False} if known is None else {known == ("TRUE" in one.opname)}
            left += [(number_of[one.argval] if jump else at + 1, None) for jump in jumps]
        elif one.opname.startswith("JUMP_"):
            left.append((number_of[one.argval], known))
        elif one.opname == "UNARY_NOT" and known is not None:
            left.append((at + 1, not known))
        else:
            left.append((at + 1, known if one.opname in _KEEPS_TRUTH else None))
    return found
