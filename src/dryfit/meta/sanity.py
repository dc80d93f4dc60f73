"""Detect a process with a changed torch: replaced functions, or a default type or device that was not reset.

Loading a model swaps functions of the whole process for a while: `torch.nn.Module.register_parameter`, the default
dtype, `PreTrainedModel.tie_weights`, `torch.linspace`, `torch.nn.init`. Where two loads overlap, or one is interrupted,
the swap stays, and every model built later is wrong: without memory, untied, in another dtype. Nothing reports it.
"""

import sys
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn

from dryfit.settings.errors import PoisonedError

_METHODS = {
    "torch.nn.modules.module": ("Module.register_parameter", "Module.register_buffer", "Module.__setattr__"),
    "transformers.modeling_utils": ("PreTrainedModel.tie_weights", "PreTrainedModel.init_weights"),
}
"""Methods that loading code is known to swap, by the module that defines them."""

# transformers swaps initialisers in the modules that use them as well: transformers/initialization.py.
_INITIALISERS = tuple(name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_"))
_BUILTIN = "linspace"


def check_process(doing: str) -> None:
    """Refuse to go on in a process whose torch was changed. Takes about a millisecond.

    Args:
        doing: First part of the error message.

    Raises:
        PoisonedError: Something was changed.
    """
    changes = list(_changes())
    if changes:
        raise PoisonedError(
            doing,
            "; ".join(changes),
            allowed="torch and transformers as they were imported",
            hint="it is tried again in a new process; if it comes back, code that comes with the model does it",
        )


def _changes() -> Iterator[str]:
    """Describe each change."""
    if torch.get_default_dtype() is not torch.float32:
        yield f"the default dtype is {torch.get_default_dtype()}"
    if torch.get_default_device() != torch.device("cpu"):
        yield f"the default device is {torch.get_default_device()}"
    if not torch.is_grad_enabled():
        yield "gradients are switched off"
    for module_name, names in _METHODS.items():
        module = sys.modules.get(module_name)
        for name in names if module is not None else ():
            owner, _, method = name.partition(".")
            yield from _foreign(module_name, name, vars(getattr(module, owner)).get(method))
    for name in _INITIALISERS:
        yield from _foreign(nn.init.__name__, name, getattr(nn.init, name, None))
    if not isinstance(getattr(torch, _BUILTIN), BuiltinFunctionType):
        yield f"torch.{_BUILTIN} is {_origin(getattr(torch, _BUILTIN))}"
    yield from _fresh_module()


def _foreign(module: str, name: str, function: Any) -> Iterator[str]:
    """Describe a function that was not defined under this name in this module."""
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) != (module, name):
        yield f"{module}.{name} is {_origin(function)}"


def _origin(function: Any) -> str:
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    name = getattr(function, "__qualname__", repr(function))
    return f"{getattr(function, '__module__', '?')}.{name}{place}"


def _fresh_module() -> Iterator[str]:
    """Describe what is wrong with a module built now; the process's random generator does not advance."""
    with torch.random.fork_rng(devices=()):
        weight = nn.Linear(1, 1).weight
    if weight.is_meta:
        yield "a new torch.nn.Linear has no memory (it is on meta)"
    elif (weight.dtype, weight.device.type) != (torch.float32, "cpu"):
        yield f"a new torch.nn.Linear is {weight.dtype} on {weight.device}"
