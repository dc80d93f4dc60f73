"""Operators that scripts and libraries define in Python: their own code runs on the device's tensors.

A body of ``torch.library.triton_op`` is made of torch's operators and launches of Triton kernels, so it always runs
itself, and what it allocates meanwhile is counted. That of a ``custom_op`` may call anything: it is tried, and where it
cannot do without a device or asks for values, the operator's fake says what it gives.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from dryfit.settings.errors import ConfigError

_DECORATORS: Final = {"custom_op": False, "triton_op": True}
"""Functions of ``torch.library``, and whether the body runs although there is a fake of the operator."""


_OWN: dict[str, Callable[..., Any]] = {}
OWN_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {}
"""By module, functions of packages that are not there."""


def register(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Say what an operator, or a function of a package that is not installed here, gives on a virtual GPU.

    ::

        @dryfit.register("mylib::scale")
        def scale(x, factor):
            return torch.empty_like(x)

    What the function allocates with torch is counted, also what it drops: scratch memory. A function with gradients
    is the ``apply`` of a ``torch.autograd.Function``.

    Args:
        name: ``library::operator`` as torch knows it, or ``package.module.function``.
        function: Called in its place with the same arguments; None: return what decorates one.

    Raises:
        ConfigError: The name is neither.
    """
    if function is None:
        return lambda decorated: register(name, decorated)
    library, _, operator = name.partition("::")
    module, _, part = name.rpartition(".")
    if library and operator:
        _OWN[name] = function
    elif module and part and "::" not in name:
        OWN_FUNCTIONS.setdefault(module, {})[part] = function
    else:
        raise ConfigError("registering what an operator gives", repr(name), "library::operator, or module.function")
    return function


class Bodies:
    """The Python functions behind operators, by name: ``library::operator``."""

    def __init__(self) -> None:
        self._sure: dict[str, Callable[..., Any]] = {}
        self._last: dict[str, Callable[..., Any]] = {}
        self._failed: set[str] = set()

    def install(self) -> None:
        """Learn of every operator that is defined from now on."""
        torch.library.wrap_triton = _unwrapped  # a traced launch is for compilers
        for name, is_sure in _DECORATORS.items():
            decorator = getattr(torch.library, name, None)
            if decorator is not None:
                setattr(torch.library, name, self._watched(decorator, self._sure if is_sure else self._last))

    def body(self, func: Any, *, instead_of_fake: bool) -> Callable[..., Any] | None:
        """Return what runs in an operator's place: whatever else there is, or because there is nothing else."""
        if func.name() in _OWN:
            return _OWN[func.name()]
        return (self._sure if instead_of_fake else self._last).get(func.name())

    def tried(self, func: Any) -> Callable[..., Any] | None:
        """Return the body of an operator that is tried before its fake."""
        name = func.name()
        return None if name in _OWN or name in self._failed else self._last.get(name)

    def fails(self, func: Any) -> None:
        """Note that an operator's body cannot do without a device: its fake, if there is one, runs from now on."""
        self._failed.add(func.name())

    def _watched(self, decorator: Callable[..., Any], bodies: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
        @wraps(decorator)
        def define(name: str, fn: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
            def decorate(body: Callable[..., Any]) -> Any:
                if kwargs.get("device_types") is None or "cuda" in kwargs["device_types"]:
                    bodies[name] = body
                return decorator(name, body, **kwargs)

            return decorate if fn is None else decorate(fn)

        return define


def _unwrapped(triton_kernel: Any, /) -> Any:
    return triton_kernel
