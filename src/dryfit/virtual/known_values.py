"""Values that fake tensors carry along: of small tensors, and of token ids and masks.

Libraries send sizes to the device, gather them and read them back; models ask whether a mask hides anything. Such
tensors are made from values that are known, so the values go with them through copies, views and arithmetic, until
something in place or unknown touches them (seen by the version counter of the fake).
"""

import math
from typing import Any

import torch

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_modes import schema_of
from dryfit.meta.private_apis.torch_virtual import version_of

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
_RANDOM = torch.Tag.nondeterministic_seeded
_FALSE_OF_NUMBERS = frozenset({_aten.isnan.default, _aten.isinf.default})
_COMPARES = {_aten.eq.Tensor: True, _aten.ne.Scalar: True, _aten.eq.Scalar: False}
"""What ``isfinite`` is made of, and its answer where a value is a finite number."""


def remember(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Let a fake carry the value of a real CPU tensor, if it is small enough."""
    _remember(fake, value, 0)


def _remember(fake: Any, value: torch.Tensor, changes: int) -> None:
    """As :func:`remember`, where the version counter is about to change so many times."""
    small = value.numel() <= (MOST_NUMBERS if value.dtype.is_floating_point else MOST_INTEGERS)
    if small and not fake.is_inference():  # inference tensors have no version counter
        fake.dryfit_known = (value, version_of(fake) + changes)


def value_of(tensor: Any) -> torch.Tensor | None:
    """Return the value that a fake carries, or a real tensor itself; None where it is not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    known = getattr(tensor, "dryfit_known", None)
    return known[0] if known is not None and known[1] == version_of(tensor) else None


def carry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Compute an operator on known values too, where all of its inputs are known, and remember the result.

    ``out`` is what the operator gave for the fakes.
    """
    if isinstance(out, list | tuple):
        outs = [one for one in out if type(one) is FakeTensor]
        if len(outs) != len(out):
            return
    elif type(out) is FakeTensor:
        outs = [out]
    else:
        return
    if any(one.numel() > (MOST_NUMBERS if one.dtype.is_floating_point else MOST_INTEGERS) for one in outs):
        return
    if func in _UNINITIALIZED or _RANDOM in func.tags:
        return
    if schema_of(func).is_mutable:
        _carry_in_place(func, args, out)
        return
    known: list[Any] = []
    for argument in args:
        value = _known_argument(argument)
        if value is _UNKNOWN:
            _assume_finite(func, args, outs[0])
            return
        known.append(value)
    options = {}
    for name, argument in kwargs.items():
        value = _known_argument(argument)
        if value is _UNKNOWN:
            return
        options[name] = value
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    options.pop("pin_memory", None)
    try:
        value = func(*known, **options)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return  # an operator of CUDA alone, or one that fails: the fake says the rest
    for one, its in zip(outs, [value] if isinstance(value, torch.Tensor) else value, strict=True):
        if its.shape == one.shape and its.dtype == one.dtype:
            remember(one, its)


def _assume_finite(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
    """Values that nobody knows are taken to be finite numbers, as in training that works."""
    if func in _FALSE_OF_NUMBERS:
        remember(out, torch.zeros(out.shape, dtype=out.dtype))
    elif func in _COMPARES and (args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))):
        remember(out, torch.full(out.shape, _COMPARES[func], dtype=out.dtype))


def _carry_in_place(func: Any, args: tuple[Any, ...], out: Any) -> None:
    if func is _KEEPS_VALUE and (value := value_of(out)) is not None:
        _remember(out, value, 1)
    elif func in _SETS and out is args[0]:
        source = value_of(args[1]) if len(args) > 1 else 0
        if source is not None and out.numel() <= MOST_NUMBERS:
            _remember(out, torch.empty(out.shape, dtype=out.dtype).copy_(torch.as_tensor(source)), 1)


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
