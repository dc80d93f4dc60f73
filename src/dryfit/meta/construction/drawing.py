"""Make random operations draw from our generator: the process's own is neither read nor advanced."""

from typing import Any

import torch

from dryfit.meta.private_apis.torch_modes import TorchDispatchMode, schema_of

_aten = torch.ops.aten
# Factories that draw from the global generator, and their overloads that take one.
_WITH_GENERATOR = {
    _aten.rand.default: _aten.rand.generator,
    _aten.randn.default: _aten.randn.generator,
    _aten.randint.default: _aten.randint.generator,
    _aten.randint.low: _aten.randint.low_generator,
    _aten.randperm.default: _aten.randperm.generator,
}


def takes(func: Any, name: str) -> bool:
    """Whether an operation has an argument of that name."""
    return any(argument.name == name for argument in schema_of(func).arguments)


def drawing(func: Any, kwargs: dict[str, Any]) -> Any | None:
    """Return the overload that takes a generator; None for an operation that does not draw from the global one."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return None
    func = _WITH_GENERATOR.get(func, func)
    return func if takes(func, "generator") else None


class Draws(TorchDispatchMode):
    """Give one generator to all random operations of this thread that name none.

    Args:
        generator: What they draw from.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = drawing(func, kwargs)
        return func(*args, **kwargs) if drawn is None else drawn(*args, **{**kwargs, "generator": self._generator})
