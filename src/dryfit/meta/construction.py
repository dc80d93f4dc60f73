"""Models built without memory: what a constructor computes is real, what it only allocates is not."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dryfit.gpu.private_apis import transformers_steps
from dryfit.gpu.private_apis.torch_modes import (
    IS_META,
    LOADS_STATE,
    MODES,
    SET_DATA,
    TorchDispatchMode,
    device_constructors,
    function_modes,
    schema_of,
    without_dispatch_modes,
)
from dryfit.gpu.private_apis.torch_modules import MODULES
from dryfit.gpu.private_apis.torch_tensors import TENSORS, storage_key
from dryfit.gpu.slots import SlotKind, is_plain, put, slots
from dryfit.meta.propagation import is_mapped, refuse_real_inputs
from dryfit.meta.tape import UNINITIALISED, Tape, drawing, is_deferred, leaves, mapped, takes, tape_of
from dryfit.settings.errors import LoadError
from dryfit.settings.private_names import require

# Run a constructor's operations, or only record them on the tape.


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


# Build models without memory: computed tensors are real, uninitialised ones are on the meta device.
#
# Inside :func:`on_meta` an uninitialised allocation (``torch.empty`` and its kin: the weights of every layer) gives a
# tensor on the meta device, whatever device the constructor names. Everything else runs as usual: rotary tables,
# position ids and constants hold the constructor's values, and ``.item()``, ``.numpy()`` and branches on values work.
# How each empty tensor would have been initialised is recorded, so that :func:`dryfit.meta.materialise` can do it
# where it may. The two modes are thread-local; nothing of the process changes.


ModuleT = TypeVar("ModuleT", bound=nn.Module)

_CONSTRUCTION = threading.RLock()
_VALUE_READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})


class _Overrides(TorchFunctionMode):
    """Handle what the dispatcher does not show: devices asked for, and values read past it."""

    def __init__(self, recorder: ConstructionRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # from_pretrained, called by a constructor, takes what it replaces for one on meta. Here the values are there.
        if func is torch.empty_like and sys._getframe(1).f_code.co_name == transformers_steps.FORGETS:
            return args[0].detach().clone()
        # load_state_dict, called by a constructor, leaves tensors on meta as they are.
        if func == IS_META and sys._getframe(1).f_code.co_name == LOADS_STATE:
            return False
        if func in device_constructors() and kwargs.get("out") is None:
            return func(*args, **{**kwargs, "device": "cpu"})
        if func in _VALUE_READS and is_deferred(args[0]):
            return func(self.recorder.tape.realise(args[0])[0], *args[1:], **kwargs)
        if func == IS_META and is_deferred(args[0]):
            self._note_initialiser(args[0], sys._getframe(1))
        if func is torch.Tensor.__deepcopy__ and not is_deferred(args[0]):
            with without_dispatch_modes():  # it makes an empty tensor and sets its storage, behind our back
                return func(*args, **kwargs)
        if func == SET_DATA and is_deferred(args[0]) != is_deferred(args[1]):
            args = (args[0], self._like(*args))
        return func(*args, **kwargs)

    def _like(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a value that may become a tensor's data: without memory exactly if the tensor is."""
        if not is_deferred(tensor):
            return self.recorder.tape.realise(value)[0]
        return torch.empty_like(value).copy_(value.detach())

    def _note_initialiser(self, tensor: torch.Tensor, caller: FrameType) -> None:
        """Record an initialiser of torch that asks for ``is_meta`` only to leave such a tensor alone.

        So do ``trunc_normal_``, ``orthogonal_``, ``dirac_`` and ``sparse_`` from torch 2.13 on, and they cannot be
        overridden as the others can. To be removed when they can.
        """
        code = caller.f_code
        if caller.f_globals.get("__name__") != nn.init.__name__:
            return
        arguments = {name: caller.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        function = getattr(nn.init, code.co_name)
        seed: int | torch.Generator | None = None
        if "generator" in arguments:
            seed = arguments.pop("generator") or self.recorder.tape.next_seed()
        if isinstance(seed, torch.Generator):
            state = seed.clone_state()
            with without_dispatch_modes():  # it must go on as if it had drawn
                function(**{**arguments, "tensor": torch.empty_like(tensor, device="cpu"), "generator": seed})
            seed = state
        self.recorder.tape.add(function, (), arguments, [tensor], [], seed)


@contextmanager
def on_meta(*, seed: int = 0) -> Iterator[None]:
    """Build modules without memory in this thread.

    Args:
        seed: For random values of constructors: those computed at once, and those that
            :func:`dryfit.meta.materialise` may be allowed to draw later. The process's own generator is not used.

    Raises:
        LibraryError: torch or transformers do not do what this rests on.
    """
    require("building a model without memory", MODES, MODULES, TENSORS)
    if transformers_steps.is_loaded():
        require("building a model whose constructor may load another", transformers_steps.LOADING)
    tape = Tape(seed)
    around = next((mode for mode in function_modes() if isinstance(mode, _Overrides)), None)
    if around is None:
        recorder = ConstructionRecorder(tape)
        with _Overrides(recorder), recorder:
            yield
        return
    # A second recorder on top of the first would have every step written on both tapes.
    recorder = around.recorder
    outer, recorder.tape = recorder.tape, tape
    try:
        yield
    finally:
        recorder.tape = outer


def build(make: Callable[[], ModuleT], *, seed: int = 0) -> ModuleT:
    """Build a module without memory for its weights.

    Args:
        make: Builds the module: a class, a function, a ``partial``.
        seed: See :func:`on_meta`.

    Returns:
        The module. Weights that its constructor allocates are on the meta device; buffers and plain tensors have their
        values, except those above 64 MiB, which :func:`dryfit.meta.materialise` computes.
    """
    # transformers' own from_config and from_pretrained, called by a constructor, change the default dtype of the
    # process for a while: no two constructions of ours may meet there.
    with _CONSTRUCTION, on_meta(seed=seed):
        module = make()
    _compute_tables(module)
    _own_memory(module)
    refuse_real_inputs(module)
    return module


def meta_init(make: Callable[..., ModuleT], *, seed: int = 0) -> Callable[..., ModuleT]:
    """Wrap a class or function so that it builds modules without memory: ``meta_init(Net)(width=8)``."""

    def built(*args: Any, **kwargs: Any) -> ModuleT:
        return build(lambda: make(*args, **kwargs), seed=seed)

    return built


def _compute_tables(module: nn.Module) -> None:
    """Compute buffers and plain tensors that the constructor filled in place (``torch.empty``, then a loop)."""
    made: dict[int, torch.Tensor] = {}
    tensor_slots = slots(module)
    # Leave parameters and views of them: they become what the parameter becomes.
    weights = {
        storage_key(slot.tensor) for slot in tensor_slots if slot.kind is SlotKind.PARAMETER and is_plain(slot.tensor)
    }
    for slot in tensor_slots:
        tensor = slot.tensor
        if not is_deferred(tensor) or not is_plain(tensor) or storage_key(tensor) in weights:
            continue
        if tensor.nbytes >= DEFERRED_ABOVE_BYTES:
            continue
        tape = tape_of(tensor)
        if tape is None:
            continue
        try:
            put(slot, made.setdefault(id(tensor), tape.realise(tensor)[0]))
        except LoadError:  # never written: the checkpoint may hold it, and materialise says so if it does not
            continue


def _own_memory(module: nn.Module) -> None:
    """Copy tensors in mapped files: a constructor that calls from_pretrained gets such.

    Writing to that file would change the model; truncating it would kill the process.
    """
    for slot in slots(module):
        tensor = slot.tensor
        if is_plain(tensor) and tensor.layout is torch.strided and is_mapped(tensor):
            tensor.data = tensor.data.clone()  # the object stays, and with it ties and other references
