"""Values that fake tensors carry along: of small tensors, and of token ids and masks.

Libraries send sizes to the device, gather them and read them back; models ask whether a mask hides anything. Such
tensors are made from values that are known, so the values go with them through copies, views, arithmetic and changes in
place, until something unknown is written to their memory.
"""

import math
from functools import cache
from typing import Any

import torch

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import schema_of
from dryfit.virtual.import_hooks import when_imported

MOST_NUMBERS = 1_000
"""Elements of a floating-point tensor whose values are carried along."""
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
_SETS = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_KEEPS_VALUE = _aten._amp_update_scale_.default
_PLACE = (math.sqrt(5) - 1) / 2
"""Where in a vocabulary a token is drawn: special ones are its first or its last, and so are those of several beams."""
_RANDOM = torch.Tag.nondeterministic_seeded
_FALSE_OF_NUMBERS = frozenset({_aten.isnan.default, _aten.isinf.default})
_COMPARES = {_aten.eq.Tensor: True, _aten.ne.Scalar: True, _aten.eq.Scalar: False}
"""What ``isfinite`` is made of, and its answer where a value is a finite number."""
_SETTLED_BY = {
    _aten.bitwise_and.Tensor: False,
    _aten.bitwise_and.Scalar: False,
    _aten.logical_and.default: False,
    _aten.bitwise_or.Tensor: True,
    _aten.logical_or.default: True,
}
"""The truth value that settles an operator, whatever its other operand is."""


class _Contents:
    """What a piece of memory holds, as far as it is known: tensors remember it with their values.

    A piece of memory has one at most. The values of tensors that remember it share memory as the fakes do, so that a
    change of one is seen in all.
    """


def remember(fake: Any, value: torch.Tensor) -> None:
    """Let a fake carry the value of a real CPU tensor, if it is small enough; of its memory no more is known then."""
    contents = fake.untyped_storage().dryfit_contents = _Contents()
    _remember(fake, value, contents)


def _remember(fake: Any, value: torch.Tensor, contents: _Contents) -> None:
    if value.numel() <= (MOST_NUMBERS if value.dtype.is_floating_point else MOST_INTEGERS):
        fake.dryfit_known = (value, contents)


def _contents_of(fake: Any) -> _Contents | None:
    """Return what is known of a fake's memory; None where its value is not known."""
    known = getattr(fake, "dryfit_known", None)
    return known[1] if known is not None and known[1] is _of_storage(fake) else None


def _of_storage(fake: torch.Tensor) -> _Contents | None:
    return getattr(fake.untyped_storage(), "dryfit_contents", None)


def forget(written: Any) -> None:
    """Let nothing be known of the memory of a fake, or of several, any more."""
    if isinstance(written, FakeTensor):
        if _of_storage(written) is not None:
            storage: Any = written.untyped_storage()
            storage.dryfit_contents = None
    elif isinstance(written, list | tuple):
        for one in written:
            forget(one)


def value_of(tensor: Any) -> torch.Tensor | None:
    """Return the value that a fake carries, or a real tensor itself; None where it is not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    fake: Any = tensor
    return None if _contents_of(fake) is None else fake.dryfit_known[0]


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
            for position, name in _written(func):
                forget(args[position] if position < len(args) else kwargs.get(name))
        return
    outs = list(out) if isinstance(out, list | tuple) else [out]
    if not outs or any(type(one) is not FakeTensor for one in outs):
        return
    if any(one.numel() > (MOST_NUMBERS if one.dtype.is_floating_point else MOST_INTEGERS) for one in outs):
        return
    if func in _UNINITIALIZED or _RANDOM in func.tags:
        return
    value = _computed(func, args, kwargs)
    if value is None:
        _answer(func, args, outs[0])
        return
    contents = _contents_of(args[0]) if func.is_view else None
    for one, its in zip(outs, [value] if isinstance(value, torch.Tensor) else value, strict=True):
        if its.shape != one.shape or its.dtype != one.dtype:
            continue
        if contents is None:
            remember(one, its)
        else:
            _remember(one, its, contents)


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
    elif func in _COMPARES and (args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))):
        remember(out, torch.full(out.shape, _COMPARES[func], dtype=out.dtype))
    elif func in _SETTLED_BY and out.dtype is torch.bool:
        truth = _SETTLED_BY[func]
        known = (torch.as_tensor(value) for one in args if (value := value_of(one)) is not None)
        if any(bool((one == truth).all()) for one in known):
            remember(out, torch.full(out.shape, truth))


def _carry_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Change a known value as the fake was changed; whether it could."""
    if type(out) is not FakeTensor or out is not args[0] or _RANDOM in func.tags:
        return False
    if _contents_of(out) is not None:
        return func is _KEEPS_VALUE or _computed(func, args, kwargs) is not None
    source = value_of(args[1]) if len(args) > 1 else 0
    if func not in _SETS or source is None or out.numel() > MOST_NUMBERS:
        return False
    remember(out, torch.empty(out.shape, dtype=out.dtype).copy_(torch.as_tensor(source)))
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
