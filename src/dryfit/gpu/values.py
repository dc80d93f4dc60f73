"""Values that fake tensors carry along, and answers to conditions on values that nobody knows."""

import ast
import dis
import linecache
import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from dryfit.gpu.import_hooks import when_imported
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_modes import schema_of
from dryfit.settings.version import PACKAGE_FOLDER

# Values that fake tensors carry along: of small tensors, and of token ids and masks.
#
# Libraries send sizes to the device, gather them and read them back; models ask whether a mask hides anything. Such
# tensors are made from values that are known, so the values go with them through copies, views, arithmetic and
# changes in place, until something unknown is written to their memory.
#
# They lie in memory of the host, which the fake's storage refers to: every view of that storage shows them, and a
# tensor that is written by one of them changes all. What was allocated and not yet written to is known of no tensor.


MOST_NUMBERS = 1 << 17
"""Elements of a floating-point tensor whose values are carried along: the boxes of a batch of images, several times."""
MOST_INTEGERS = 1 << 20
"""Elements of a tensor of integers or booleans whose values are carried along."""

_aten = torch.ops.aten
_UNINITIALIZED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_RESIZES = frozenset({_aten.resize_.default, _aten.resize_as_.default})
_SETS = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_FILLS = frozenset({_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default})
_FILLS_LIKE = frozenset({_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default})
"""They take size and type of a tensor whose values do not matter; the others its type alone."""
_KEEPS_VALUE = _aten._amp_update_scale_.default
_PLACE = (math.sqrt(5) - 1) / 2
"""Where in a vocabulary a token is drawn: special ones are its first or its last, and so are those of several beams."""
_RANDOM = torch.Tag.nondeterministic_seeded
_INTEGERS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    _aten.randint.default: lambda high, *_: (0, high),
    _aten.randint.generator: lambda high, *_: (0, high),
    _aten.randint.low: lambda low, high, *_: (low, high),
    _aten.randint.low_generator: lambda low, high, *_: (low, high),
    _aten.randint_like.default: lambda _, high: (0, high),
    _aten.randint_like.low_dtype: lambda _, low, high: (low, high),
}
"""The first integer that an operator draws, and the one after its last."""
_PERMUTATIONS = frozenset({_aten.randperm.default, _aten.randperm.generator})
_draws = torch.Generator()
"""Draws in the place of the device's generator; the script's generators are not moved."""
_FALSE_OF_NUMBERS = frozenset({_aten.isnan.default, _aten.isinf.default})
_COMPARES = {_aten.eq.Tensor: True, _aten.ne.Tensor: False, _aten.ne.Scalar: True, _aten.eq.Scalar: False}
"""What ``isfinite``, ``isnan`` and ``isinf`` are made of, and the answer where a value is a finite number."""
_CONVERTS = _aten._to_copy.default
_QUANTIFIES = frozenset({_aten.any.default, _aten.all.default, _aten.max.default})
_OF_MASKS = frozenset({_CONVERTS, *_QUANTIFIES})
_NEGATES = frozenset({_aten.bitwise_not.default, _aten.logical_not.default})
_JOINS = frozenset({_aten.mul.Tensor, _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.logical_or.default})
_COUNTS = frozenset({_aten.sum.dim_IntList, _aten.count_nonzero.dim_IntList})
"""Counts of a mask along dimensions: where nobody knows the mask, all of its positions are taken."""
_IS_LESS = _aten.lt.Scalar
_ODDS: dict[Any, Callable[..., float]] = {
    _aten._softmax.default: lambda scores, dim, *_: 1 / max(1, scores.shape[dim] if scores.dim() else 1),
    _aten.sigmoid.default: lambda _: 0.5,
    _CONVERTS: lambda odds, *_: odds_of(odds),
    _aten.clone.default: lambda odds, *_: odds_of(odds),
}
"""Operators that give probabilities, with the number that stands for each of them where nobody knows the scores."""
_SETTLED_BY = {
    _aten.bitwise_and.Tensor: False,
    _aten.bitwise_and.Scalar: False,
    _aten.logical_and.default: False,
    _aten.bitwise_or.Tensor: True,
    _aten.logical_or.default: True,
}
"""The truth value that settles an operator, whatever its other operand is."""


def remember(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Let the memory of a fake hold a value, if it is small enough and all that the memory has room for."""
    storage: Any = fake.untyped_storage()
    storage.dryfit_truth = None
    size_bytes = storage.nbytes()
    if not _is_small(value) or fake.numel() * fake.itemsize != size_bytes:
        storage.dryfit_holds = None
        return
    storage.dryfit_holds = torch.UntypedStorage(size_bytes)
    _seen_by(fake, storage.dryfit_holds).copy_(value)


def share(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake stand for a real tensor of its strides: what becomes known of one is known of the other."""
    storage: Any = fake.untyped_storage()
    memory = real.untyped_storage()
    if _is_small(real) and memory.nbytes() == storage.nbytes():
        storage.dryfit_holds = memory
    elif (value := value_of(real)) is not None:
        remember(fake, value)


def forget(written: Any) -> None:
    """Let nothing be known of the memory of a fake, or of several, any more."""
    if isinstance(written, FakeTensor):
        storage: Any = written.untyped_storage()
        for known in ("dryfit_holds", "dryfit_truth", "dryfit_odds"):
            if getattr(storage, known, None) is not None:
                setattr(storage, known, None)
    elif isinstance(written, list | tuple):
        for one in written:
            forget(one)


def value_of(tensor: Any) -> torch.Tensor | None:
    """Return the value that a fake's memory holds, or a real tensor itself; None where it is not known."""
    if not isinstance(tensor, FakeTensor):
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        return None if is_plain and _is_raw(tensor.untyped_storage()) else tensor
    storage = tensor.untyped_storage()
    memory = getattr(storage, "dryfit_holds", None)
    if memory is None or memory.nbytes() != storage.nbytes() or _is_raw(memory):
        return None
    return _seen_by(tensor, memory)


def odds_of(tensor: torch.Tensor) -> float:
    """Return the number that scripts on the host read in the place of each unknown value of a fake.

    Probabilities are all alike and sum up to 1, as samplers and metrics demand; anything else is 0. The device knows
    none of them: which odds are larger stays unknown.
    """
    return getattr(tensor.untyped_storage(), "dryfit_odds", None) or 0.0


def initialised(real: torch.Tensor) -> None:
    """Let a real tensor count as written to."""
    if real.layout is torch.strided and _is_raw(storage := real.untyped_storage()):
        storage.dryfit_raw = False  # pyright: ignore[reportAttributeAccessIssue]


def note_raw(made: torch.Tensor) -> None:
    """Note that a tensor which Python code asked for has memory that nobody has written to; C++ writes unseen."""
    if type(made) is torch.Tensor and made.numel():
        made.untyped_storage().dryfit_raw = True  # pyright: ignore[reportAttributeAccessIssue]


def note_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note which real memory an operator wrote to."""
    for one in _written_by(func, args, kwargs):
        for real in one if isinstance(one, list | tuple) else (one,):
            if isinstance(real, torch.Tensor):
                initialised(real)


def _is_raw(memory: Any) -> bool:
    return getattr(memory, "dryfit_raw", False)


def _is_small(value: torch.Tensor) -> bool:
    return not value.is_complex() and value.numel() <= (MOST_NUMBERS if value.is_floating_point() else MOST_INTEGERS)


def _seen_by(fake: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory as a fake's type, shape and strides show it."""
    seen = torch.empty(0, dtype=fake.dtype, device="cpu")
    return seen.set_(memory, fake.storage_offset(), fake.shape, fake.stride())  # pyright: ignore[reportArgumentType]


def read_masks() -> None:
    """Let transformers read masks and positions whose values are known, as on a device that has them.

    The library takes every fake for a traced tensor, whose values it must not ask for, and then builds a mask that
    a run leaves out (causal attention without padding).
    """

    def change(module: Any) -> None:
        is_traced = module.is_tracing

        def is_tracing(tensor: Any = None) -> bool:
            if isinstance(tensor, FakeTensor):
                return value_of(tensor) is None or is_traced()
            return is_traced(tensor)

        module.is_tracing = is_tracing

    when_imported("transformers.masking_utils", change)


def draw(chosen: torch.Tensor, odds: torch.Tensor) -> None:
    """Let a fake of chosen tokens carry some, whose odds nobody knows.

    None of them is a special token, so that a generated sequence does not end before its longest length.

    Args:
        chosen: Their positions in the last dimension of the odds, ``(..., tokens)``, or ``(...)`` for one.
        odds: ``(..., vocabulary)``.
    """
    several = chosen.dim() == odds.dim()
    count, vocabulary = chosen.shape[-1] if several else 1, odds.shape[-1]
    found = (int(vocabulary * _PLACE) + torch.arange(count)) % max(vocabulary, 1)
    remember(chosen, (found if several else found[0]).expand(chosen.shape).clone())


def carry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Compute an operator on known values too, where all of its inputs are known, and remember the result.

    ``out`` is what the operator gave for the fakes.
    """
    if schema_of(func).is_mutable:
        if not _carry_in_place(func, args, kwargs, out):
            for one in _written_by(func, args, kwargs):
                forget(one)
        return
    if _RANDOM in func.tags:
        _draw_integers(func, args, out)
        return
    if func.is_view or func in _UNINITIALIZED:
        return
    if out.__class__ is FakeTensor and (out.dtype is torch.bool or func in _OF_MASKS) and _carry_truth(func, args, out):
        return
    outs = list(out) if isinstance(out, list | tuple) else [out]
    if not outs or any(type(one) is not FakeTensor or not _is_small(one) for one in outs):
        return
    if func in _FILLS or func in _FILLS_LIKE:
        args = (torch.empty(outs[0].shape if func in _FILLS_LIKE else (), dtype=args[0].dtype), *args[1:])
    value = _computed(func, args, kwargs)
    if value is None:
        _answer(func, args, outs[0])
        return
    for one, its in zip(outs, [value] if isinstance(value, torch.Tensor) else value, strict=True):
        if its.shape == one.shape and its.dtype == one.dtype:
            remember(one, its)


def _draw_integers(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Remember integers that an operator may well have drawn: made-up token ids and labels, an order of rows."""
    if type(out) is not FakeTensor or not _is_small(out):
        return
    if func in _PERMUTATIONS:
        remember(out, torch.randperm(out.numel(), generator=_draws).to(out.dtype))
    elif func in _INTEGERS and not out.is_floating_point():
        low, high = _INTEGERS[func](*args)
        remember(out, torch.randint(low, high, out.shape, generator=_draws, dtype=out.dtype))


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what an operator writes to."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in _written(func)]


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes to."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator gives for known values; None where not all are known, or it cannot run on them."""
    known = _known_argument(args)
    options = {name: _known_argument(argument) for name, argument in kwargs.items() if name != "pin_memory"}
    if known is _UNKNOWN or any(value is _UNKNOWN for value in options.values()):
        return None
    try:
        return func(*known, **options)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None  # an operator of CUDA alone, or one that fails: the fake says the rest


def _answer(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
    """Remember what does not depend on the values that nobody knows; numbers are finite, as in training that works."""
    if func in _FALSE_OF_NUMBERS:
        remember(out, torch.zeros(out.shape, dtype=out.dtype))
    elif func in _COMPARES and _is_of_finite(args):
        remember(out, torch.full(out.shape, _COMPARES[func], dtype=out.dtype))
    elif func in _ODDS and out.is_floating_point():
        storage: Any = out.untyped_storage()
        storage.dryfit_odds = _ODDS[func](*args)
    elif func in _COUNTS and out.numel() > 1 and args[0].dtype is torch.bool:
        remember(out, torch.full(out.shape, args[0].numel() // out.numel(), dtype=out.dtype))
    elif func is _IS_LESS and out.numel() == 1 and args[1] == 0:
        remember(out, torch.zeros(out.shape, dtype=out.dtype))  # as one, for which a single number is taken
    elif func in _SETTLED_BY and out.dtype is torch.bool:
        truth = _SETTLED_BY[func]
        known = (torch.as_tensor(value) for one in args if (value := value_of(one)) is not None)
        if any(bool((one == truth).all()) for one in known):
            remember(out, torch.full(out.shape, truth))


def _carry_truth(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """Remember of a mask of many elements that all are true, or all false, and of a question to one; whether it could.

    Only masks of numbers that are finite: whether gradients hold an infinity is asked so.
    """
    truth: bool | None = None
    if func in _QUANTIFIES:
        truth = _truth_of(args[0])
    elif _is_small(out):
        return False
    elif func is _CONVERTS:
        truth = _truth_of(args[0])
    elif func in _FALSE_OF_NUMBERS:
        truth = False
    elif func in _COMPARES and _is_of_finite(args):
        truth = _COMPARES[func]
    elif func in _NEGATES and (negated := _truth_of(args[0])) is not None:
        truth = not negated
    elif func in _JOINS and _truth_of(args[0]) is _truth_of(args[1]):
        truth = _truth_of(args[0])
    if truth is None:
        return False
    if func in _QUANTIFIES:
        remember(out, torch.full(out.shape, truth, dtype=out.dtype))
    else:
        storage: Any = out.untyped_storage()
        storage.dryfit_truth = truth
    return True


def _truth_of(mask: Any) -> bool | None:
    """Return what all elements of a mask, or of numbers made of one, are; None where that is not known."""
    if not isinstance(mask, FakeTensor):
        return None
    truth = getattr(mask.untyped_storage(), "dryfit_truth", None)
    if truth is None and mask.dtype is torch.bool and (value := value_of(mask)) is not None:
        some, every = bool(value.any()), bool(value.all())
        truth = every if some == every else None
    return truth


def _is_of_finite(args: tuple[Any, ...]) -> bool:
    """Whether a tensor is compared with itself or with infinity."""
    return args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))


def _carry_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Change a known value as the fake was changed; whether it could."""
    if type(out) is not FakeTensor or out is not args[0] or _RANDOM in func.tags or func in _RESIZES:
        return False
    if value_of(out) is not None:
        return func is _KEEPS_VALUE or _computed(func, args, kwargs) is not None
    source = value_of(args[1]) if len(args) > 1 else 0
    if func not in _SETS or source is None:
        return False
    remember(out, torch.as_tensor(source, device="cpu").expand(out.shape))
    return True


class _Unknown:
    pass


_UNKNOWN = _Unknown()


def _known_argument(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        value = value_of(argument)
        return _UNKNOWN if value is None else value
    if isinstance(argument, list | tuple):
        values = [_known_argument(one) for one in argument]
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else type(argument)(values)
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return argument


# Answer conditions on values that nobody knows, so that a script goes on, and its loops end.
#
# The statement that asks decides: what guards an ``assert``, a ``raise`` or an exit lets it pass, what would only
# leave a function, a loop or one round of it stays there, ``while`` goes on, and anything else is true. A condition
# that comes again and again at one place is answered the other way once, since a loop may wait for it. A ``while`` that
# keeps memory for a backward pass in each round is left after a few: its memory is that of its rounds, and nobody knows
# how many they are. A ``while`` whose rounds keep nothing is left after some: the others take no more memory.


PATIENCE = 100
"""Times that a condition is asked at one place before it is answered the other way."""
ROUNDS = 3
"""Rounds of a loop that are followed where each keeps memory."""
STEADY_ROUNDS = 10
"""Rounds of a loop that are followed where none keeps memory."""
_KEEPS = 1 << 20
"""Bytes more in each round: not the numbers of a list."""
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
    """Answers the conditions of one script.

    Attributes:
        open: Loops that were left though each round keeps memory, as reasons why the script's need is not known.
    """

    def __init__(self, held_bytes: Callable[[], int] = lambda: 0) -> None:
        self._times: Counter[tuple[CodeType, int]] = Counter()
        self._held_bytes = held_bytes
        self._held: defaultdict[ast.While, dict[tuple[CodeType, int], deque[int]]] = defaultdict(dict)
        """Memory held at the beginning of the last rounds of each loop, by the condition that asks."""

        self._left: dict[ast.While, tuple[str, frozenset[tuple[CodeType, int]]]] = {}
        """Loops that are being left: why, and the conditions of the test that have been answered so."""

        self.open: dict[str, None] = {}

    def answer(self) -> tuple[bool, str]:
        """Return the answer to the condition that the running code asks, and what is to be said of it."""
        frame: FrameType = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
            frame = frame.f_back
        asked = (frame.f_code, frame.f_lasti)
        truth, ends = _reply(*asked)
        if ends:
            return truth, "a condition on values would end the script; it was answered so that the script goes on"
        if why := self._why_left(asked, f"{frame.f_code.co_filename}:{frame.f_lineno}"):
            return not truth, why
        self._times[asked] += 1
        if self._times[asked] % PATIENCE == 0:
            return not truth, f"a condition on values, asked {PATIENCE} times; once it was taken as {_said(not truth)}"
        return truth, f"a condition on values; it was taken as {_said(truth)}"

    def _why_left(self, asked: tuple[CodeType, int], place: str) -> str:
        """Return why a ``while`` is left now; empty: it goes on, or none asks."""
        loop, begins = _loop_of(*asked)
        if loop is None:
            return ""
        if begins:
            self._held.pop(loop, None)
            self._left.pop(loop, None)
            return ""
        why, others = self._left.pop(loop, ("", frozenset()))
        if why and asked not in others:  # the test of the same round asks more than one
            self._left[loop] = why, others | {asked}
            return why
        held = self._held[loop].setdefault(asked, deque(maxlen=STEADY_ROUNDS))
        held.append(self._held_bytes())
        last = [*held][-ROUNDS:]
        if torch.is_grad_enabled() and len(last) == ROUNDS and all(b - a >= _KEEPS for a, b in pairwise(last)):
            self.open[f"values end the loop at {place}, and each round keeps memory: {ROUNDS} were followed"] = None
            why = f"a loop on values, each round of which keeps memory; it was left after {ROUNDS}"
        elif len(held) == STEADY_ROUNDS and max(held) - min(held) < _KEEPS:
            why = f"a loop on values, no round of which keeps memory; it was left after {STEADY_ROUNDS}"
        else:
            return ""
        del self._held[loop]
        self._left[loop] = why, frozenset({asked})
        return why


def _said(truth: bool) -> str:
    return str(truth).lower()


@cache
def _loop_of(code: CodeType, offset: int) -> tuple[ast.While | None, bool]:
    """Return the ``while`` in whose test an instruction stands, and whether that is the test before the first round."""
    instructions, at = _at(code, offset)
    path = _path_to(_tree(code.co_filename), instructions[at])
    if not path or not isinstance(path[-1], ast.While):
        return None, False
    loop = path[-1]
    body = next((number for number, one in enumerate(instructions) if _holds(loop.body, one)), 0)
    again = any(_holds(loop.test, one) for one in instructions[body:])  # Python before 3.14 has the test twice
    return loop, at < body and again


def _at(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int]:
    """Return the instructions of a code, and which of them is at an offset."""
    instructions = list(dis.get_instructions(code))
    return instructions, bisect_right(instructions, offset, key=lambda one: one.offset) - 1


@cache
def _reply(code: CodeType, offset: int) -> tuple[bool, bool]:
    """Return the answer for an instruction that asks for a truth value, and whether the other would end the script."""
    instructions, at = _at(code, offset)
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
        case ast.While() as statement:
            wanted, ends, where = True, False, _where_of_while(statement)
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


def _positions(instruction: dis.Instruction) -> Any:
    """Return where in its source an instruction stands; None: Python before 3.11 does not tell."""
    return getattr(instruction, "positions", None)


def _holds(node: Any, instruction: dis.Instruction) -> bool:
    """Whether an instruction belongs to a node, or to one of several."""
    if isinstance(node, list):
        return any(_holds(one, instruction) for one in node)
    if isinstance(node, ast.match_case):
        return _holds(node.body, instruction)
    at = _positions(instruction)
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


def _where_of_while(statement: ast.While) -> _Where:
    """Return what says of an instruction whether another round begins there; None: not yet known."""

    def where(one: dis.Instruction) -> bool | None:
        if _holds(statement.body, one):
            return True
        inside = _holds(statement, one) and not _holds(statement.orelse, one)
        return None if inside and not _returns(one) else False

    return where


def _where_of_if(statement: ast.If, path: Sequence[ast.AST], following: list[ast.stmt]) -> _Where:
    """Return what says of an instruction whether the test has been true there; None: not yet known."""
    loop = next((one for one in reversed(path) if isinstance(one, ast.For | ast.While)), None)
    blocks = [one for one in path if isinstance(one, ast.With | ast.AsyncWith)]  # their ends stand in their heads

    def where(one: dis.Instruction) -> bool | None:
        if _holds(statement.body, one) or _holds(statement.orelse, one):
            return _holds(statement.body, one)
        in_head = any(_holds(around, one) and not _holds(around.body, one) for around in blocks)
        at = _positions(one)
        if not _returns(one) and (in_head or _holds(statement, one) or at is None or None in at):
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
