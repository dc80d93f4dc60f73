"""Run a constructor's operations, or only record them on the tape."""

from typing import Any

import torch

from dryfit.meta.construction.drawing import drawing, takes
from dryfit.meta.construction.tape import UNINITIALISED, Tape, is_deferred, leaves, mapped
from dryfit.meta.private_apis.torch_modes import TorchDispatchMode, schema_of

DEFERRED_ABOVE_BYTES = 64 << 20
"""Results of this size and more are computed when they are needed, not when the constructor runs."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
# These change values alone: no run on meta is needed.
_ONLY_VALUES = frozenset({_aten.fill_.Scalar, _aten.normal_.default, _aten.uniform_.default, _aten.zero_.default})


class ConstructionRecorder(TorchDispatchMode):
    """Send uninitialised allocations of this thread to the meta device and record what happens to them.

    Args:
        tape: Takes the records.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        written = _written(func, args, kwargs)
        deferred = [leaf for leaf in leaves((args, kwargs)) if is_deferred(leaf)]
        if any(not is_deferred(tensor) for tensor in written):
            return self._for_real(func, args, kwargs)
        if not deferred and func not in UNINITIALISED and not _may_be_large(func):
            return self._for_real(func, args, kwargs)
        try:
            result = written[0] if func in _ONLY_VALUES else self._on_meta(func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # it looks at values, or meta does not know it
            if not written:
                return self._for_real(func, args, kwargs)
            result = written[0] if len(written) == 1 else tuple(written)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        if not deferred and not self._defers(func, results):
            return self._for_real(func, args, kwargs)
        self._record(func, args, kwargs, written, results)
        return result

    @staticmethod
    def _defers(func: Any, results: list[torch.Tensor]) -> bool:
        size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in results)
        return size_bytes > 0 if func in UNINITIALISED else size_bytes >= DEFERRED_ABOVE_BYTES

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        func, kwargs, seed = self._seeded(func, _placed(func, kwargs, _CPU))
        if isinstance(seed, torch.Generator):
            # A generator of the constructor's own: it must go on as if it had drawn.
            state = seed.clone_state()
            scratch = [torch.empty_like(t, device=_CPU) if is_deferred(t) else t for t in args]
            func(*scratch, **kwargs)
            kwargs, seed = {**kwargs, "generator": None}, state
        elif seed is not None:
            kwargs = {**kwargs, "generator": None}
        self.tape.add(func, args, kwargs, written, results, seed)

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the CPU, with deferred arguments computed."""
        args, kwargs = mapped(lambda leaf: self.tape.realise(leaf)[0] if is_deferred(leaf) else leaf, (args, kwargs))
        func, kwargs, seed = self._seeded(func, _placed(func, kwargs, _CPU))
        if isinstance(seed, int):
            kwargs = {**kwargs, "generator": torch.Generator().manual_seed(seed)}
        return func(*args, **kwargs)

    @staticmethod
    def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            raise NotImplementedError
        args, kwargs = mapped(_without_data, (args, kwargs))
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        return func(*args, **_placed(func, kwargs, _META))

    def _seeded(self, func: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], int | torch.Generator | None]:
        """Give a random operation its own seed: the process's generator is neither read nor advanced."""
        if kwargs.get("generator") is not None:
            return func, kwargs, kwargs["generator"]
        drawn = drawing(func, kwargs)
        return (func, kwargs, None) if drawn is None else (drawn, kwargs, self.tape.next_seed())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place."""
    if not schema_of(func).is_mutable:
        return []
    tensors: list[torch.Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def _may_be_large(func: Any) -> bool:
    """Whether an operation makes new memory; views, changes in place and reads of a value do not."""
    schema = schema_of(func)
    makes = any(str(result.type).endswith(("Tensor", "Tensor[]")) for result in schema.returns)
    return makes and not schema.is_mutable and not func.is_view


def _placed(func: Any, kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return keyword arguments with our device in place of the one asked for."""
    if not takes(func, "device"):
        return kwargs
    kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return {**kept, "device": device}


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or is_deferred(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
