"""Decides for every operator whether it runs for real, or on tensors of a device that is not there."""

import math
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dryfit.gpu import fake_tensors, sparse
from dryfit.gpu.custom_operators import Bodies
from dryfit.gpu.fake_cuda import ASKS_FOR_VALUES, OUT_VARIANTS, StandIns
from dryfit.gpu.host_memory import HostMemory, is_pinned
from dryfit.gpu.kernels import OF_ONE_KERNEL
from dryfit.gpu.private_apis.torch_fakes import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    active_fake_mode,
    dynamic_size,
    in_kernel_of,
)
from dryfit.gpu.private_apis.torch_modes import (
    TRACED_CONVOLUTION,
    is_traced,
    recorded_by_trace,
    schema_of,
    tree_iter,
    tree_map_only,
    without_function_modes,
)
from dryfit.gpu.script_recorder import BETWEEN, LiveAllocations, NoRoomError, Places, ScriptRecorder, runs_in
from dryfit.gpu.values import Conditions, carry, draw, initialised, note_written, odds_of, remember, share, value_of
from dryfit.settings.errors import TraceError

# Views of one fake and writes to it, without torch's way around them.
#
# torch's fake mode remembers what an operator gives by its arguments. A loop over the elements of a tensor has new
# ones each time (``labels[n] = 3``, ``for label in labels``): it goes the longest way, twice for a view, some
# milliseconds each. What these operators give is known without it.


_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.unbind.int,
        _aten.split.Tensor,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.expand.default,
    }
)
_CONVOLUTION_ARGUMENTS = 9
"""Arguments of a convolution; behind them a trace records flags of cuDNN."""
_NUMBERS = frozenset({bool, int, float})
_FILLS = frozenset({_aten.fill_.Scalar, _aten.zero_.default})


def viewed_or_filled(func: Any, args: Any, kwargs: Any, fakes: FakeTensorMode) -> Any:
    """Return what such an operator gives; None: it is another one.

    Args:
        fakes: The mode that made all fakes.
    """
    if kwargs or not args or not isinstance(first := args[0], FakeTensor):
        return None
    if func in _VIEWS and first.layout is torch.strided:
        device = first.device
        with in_kernel_of(fakes):
            seen = func(*args)
        if isinstance(seen, torch.Tensor):
            return FakeTensor(fakes, seen, device)
        return [FakeTensor(fakes, one, device) for one in seen]
    if func in _FILLS or (func is _aten.copy_.default and _is_element(args)):
        return first
    return None


def _is_element(args: Any) -> bool:
    """Whether a number is copied into a number."""
    return len(args) == 2 and not args[0].ndim and isinstance(args[1], torch.Tensor) and not args[1].ndim


# There is no ambient fake mode: an operator whose tensors are all real and whose device is the CPU runs for real, so
# that samplers, tokenizers, collators and metrics work on true values. One that has a fake argument, or asks for a
# CUDA device, runs on fakes.


_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
"""Of a subclass of tensors that leaves operators as they are."""
_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_MANY_ELEMENTS = 1 << 14
_PAGES_BYTES = 1 << 16
_WHOLE = frozenset({torch.int32, torch.int64})
_UNTOUCHED = MAP_PRIVATE | MAP_ANONYMOUS
"""From so many elements on, what a module's constructor allocates on the CPU is a fake."""
_ALLOCATES = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.randn.default,
    }
)
_ATTENTION = _aten.scaled_dot_product_attention.default
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default})
_TAKES_STORAGE = frozenset({_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset})
_DRAWS = _aten.multinomial.default
_COMPARES = frozenset({_aten.equal.default, _aten.allclose.default})
_CHOOSES = frozenset({_DRAWS, _aten.argmax.default, _aten.topk.default})
_GENERATES = "/transformers/generation/"
_SCALER = frozenset({"unscale_", "step"})
_OF_TORCH = frozenset({"aten", "prim", "prims"})
_APART = 2.0**-20
"""By how much two numbers that nobody knows differ: a loop may end where one is as the one before it."""
_ASKS_FOR_KERNELS = "aten::_use_"
"""How questions begin whether a library's kernel is used instead of torch's own; answered with no."""


def _of_script(func: Any, types: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return what torch would call by itself, of an operator as TorchScript calls it: numbers for tensors, flags."""
    if not types and args and type(args[0]) in _NUMBERS:
        wanted = schema_of(func).arguments
        args = tuple(
            torch.tensor(one) if type(one) in _NUMBERS and isinstance(argument.type, torch.TensorType) else one
            for one, argument in zip(args, wanted, strict=False)
        )
    return (_aten.convolution.default, args[:_CONVOLUTION_ARGUMENTS]) if func is TRACED_CONVOLUTION else (func, args)


def _of_inference(args: Any) -> bool:
    """Whether an operator runs in inference mode, or behind it on a tensor that was made there."""
    return torch.is_inference_mode_enabled() or any(
        isinstance(one, torch.Tensor) and one.is_inference() for one in args
    )


def _rows(args: Any) -> int:
    """Return the number of rows of an operator's first tensor: boxes that are kept, entries that are found."""
    first = next((one for one in tree_iter(args) if isinstance(one, torch.Tensor) and one.ndim), None)
    return 1 if first is None else first.shape[0]


class NoStandInError(NotImplementedError):
    """Nobody knows what an operator gives or takes without a device."""


class _UnknownValueError(RuntimeError):
    """The code of a custom operator asks for a value that nobody knows."""


def _refuse(what: str) -> NoReturn:
    raise _UnknownValueError(what)


_READS_ONE = {_aten._local_scalar_dense.default, _aten.item.default}
"""Operators that give a tensor's one value; the second within the code of a custom operator."""
_ASKS_FOR_INFRA = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
"""Whether a mode that says nothing else is one under which torch compiles nothing."""


class VirtualDispatch(ScriptRecorder):
    """The mode through which every operator of the process goes.

    Args:
        allocations: Of the device.
        places: Finds the running line.
        devices: Number of CUDA devices that the script sees.
        capability: Their compute capability.
    """

    def __init__(self, allocations: LiveAllocations, places: Places, devices: int, capability: tuple[int, int]) -> None:
        super().__init__(allocations, places, capability=capability)
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes_host = False
        """Whether large tensors that are made on the CPU are fakes wherever that happens."""
        self.holds_state: list[str] = []
        """Folders of libraries whose large tensors on the host are weights, gradients and states: fakes."""
        self.host = HostMemory()
        """Tensors without values of the host."""
        self.is_bad_fork = False
        """Whether this process was forked from one that had used the device, and so must not use it."""
        self._devices = devices
        self._denies = False
        self._primitive: set[Any] = {getattr(_aten, name).default for name in OF_ONE_KERNEL}
        self._is_wrapped = False
        """Operators that are made of no others."""
        self._lock = threading.RLock()  # fakes are made under one mode, which counts how often it was entered
        self.stand_ins = StandIns()
        self.conditions = Conditions(lambda: allocations.allocator.allocated_bytes)
        self._numbers = 0
        self.on_no_room: Any = None
        """Called with a :class:`NoRoomError`; returns the error that the script gets."""
        self.on_unknown: Any = lambda _what: None
        """Called with a text where a value was asked for that nobody knows."""
        self.without_formula: set[Any] = set()
        """Operators of whose kernels nobody knows the scratch memory."""
        self.on_note: Any = lambda _text: None
        """Called with a remark on the whole run."""
        self.on_untimed: Any = lambda _why: None
        """Called with why a product's time is not known."""
        self.functions: TorchFunctionMode | None = None
        """The mode of functions that belongs to this one."""
        self.attention: Any = None
        """What takes the place of attention on the device."""
        self.bodies = Bodies()
        """Python functions behind operators of other libraries."""
        self.listeners: list[Any] = []
        """Each is called with function, arguments and result of an operator on the device, after it."""
        self._has_sparse = False

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Record what an operator allocated; of an unknown kernel also scratch memory, which may be nothing."""
        super().note(func, args, out)
        if func in self.without_formula:
            tensors = [one for one in tree_iter((args, out)) if isinstance(one, torch.Tensor) and one.is_cuda]
            self.allocations.may_fuse = True
            try:
                self.note_scratch(self.allocations, func, (sum(one.nbytes for one in tensors),))
            finally:
                self.allocations.may_fuse = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch may compile where this mode is active, which then sees the graphs that run."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """The same question, as torch 2.8 asks."""
        return _ASKS_FOR_INFRA

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, for real or on fakes."""
        if func is _DEVICE:  # two of three calls are this question
            return args[0].fake_device
        kwargs = kwargs or {}
        if is_traced():
            return self._traced(func, types, args, kwargs)
        func, args = _of_script(func, types, args)
        has_fake = False
        for one in types:
            if issubclass(one, FakeTensor):
                has_fake = True
            elif one.__torch_dispatch__ is not _NO_DISPATCH:
                if self.functions is None or issubclass(one, DTensor):
                    return NotImplemented  # a wrapper: its local operators come back here
                with self, self.functions, self._within_wrapper():  # torch would call constructors past its modes
                    return one.__torch_dispatch__(func, types, args, kwargs)
        if has_fake and self._is_foreign(args):
            return func(*args, **kwargs)
        if func not in self._primitive and (self._is_wrapped or _of_inference(args)):
            # Elsewhere torch takes an operator apart before it comes here (``item``, ``linear``, ``to``).
            with self:
                routed = func is _ATTENTION and _is_on_cuda(args, None)
                out = self.attention(*args, **kwargs) if routed else func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            self._primitive.add(func)
        if kwargs.get("pin_memory"):  # of the host alone, and there is no device to pin it for
            return self.host.pin(self._allocated(func, types, args, {**kwargs, "pin_memory": False}))
        if func is _aten.is_pinned.default:
            return is_pinned(args[0])
        device = kwargs.get("device")
        if not has_fake:
            if device is None or device.type == "cpu":
                if (
                    func in _ALLOCATES
                    and math.prod(args[0]) >= _MANY_ELEMENTS
                    and (self.fakes_host or _in_constructor() or self._holds_state())
                ):
                    with self._lock:
                        out = self._run(func, types, args, kwargs)
                    self.host.note(out)
                    return out
                out = func(*args, **kwargs)
                note_written(func, args, kwargs)
                return out
            if device.type != "cuda" or active_fake_mode() is not None:  # torch itself computes a shape
                return func(*args, **kwargs)
        if device is not None and device.type == "cuda" and (device.index or 0) >= self._devices:
            raise torch.AcceleratorError(
                "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
            )
        if self.is_bad_fork and _is_on_cuda(args, device):
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        with self._lock:
            return self._on_device(func, types, args, kwargs, device)

    @contextmanager
    def _within_wrapper(self) -> Iterator[None]:
        """Take operators apart, in the block: a tensor around others gives theirs whole (``linear`` of nested ones)."""
        before, self._is_wrapped = self._is_wrapped, True
        try:
            yield
        finally:
            self._is_wrapped = before

    def _traced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that ``torch.jit.trace`` does not record: instead of a convolution, what that calls."""
        is_recorded = func is _aten.convolution.default
        with recorded_by_trace(is_recorded=is_recorded):
            if not is_recorded:
                return self.__torch_dispatch__(func, types, args, kwargs)
            cudnn = torch.backends.cudnn
            flags = cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.allow_tf32
            with self.on_device():
                return TRACED_CONVOLUTION(*args, *flags)

    def _allocated(self, func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return memory of the host for weights, states or activations, which are many numbers, or for data."""
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if func in _ALLOCATES and dtype.is_floating_point and math.prod(args[0]) >= _MANY_ELEMENTS:
            with self._lock:
                return self._run(func, types, args, kwargs)
        return self.__torch_dispatch__(func, types, args, kwargs)

    def _holds_state(self) -> bool:
        """Whether a library of :attr:`holds_state` is running: the deepest code outside of torch is its own."""
        if not self.holds_state:
            return False
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
        return next((file for file in files if not file.startswith(BETWEEN)), "").startswith(tuple(self.holds_state))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Let operators go through this mode in the block, where torch has switched it off."""
        with self, self.functions or nullcontext():
            yield

    @contextmanager
    def denying(self) -> Iterator[None]:
        """Take conditions on values that nobody knows as false, in the block."""
        before, self._denies = self._denies, True
        try:
            yield
        finally:
            self._denies = before

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
        """Return a fake without a known value."""
        with self.fakes:
            made = torch.empty(shape, dtype=dtype, device=device)
        self.note(_aten.empty.memory_format, (shape,), made)
        self.host.note(made)
        return made

    def faked(self, real: torch.Tensor) -> torch.Tensor:
        """Return a fake on the CPU in the place of a real tensor; it knows small values."""
        with self._lock, self.fakes:
            made = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype)
        share(made, real.detach())
        self.host.note(made)
        return made

    def note_resized(self, storage: Any) -> None:
        """Record that a storage has another size, of the device or of the host."""
        super().note_resized(storage)
        self.host.resized(storage)

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        if func in _READS_ONE:
            return self._item(args)
        to_host = func in _COPIES and device is not None and device.type == "cpu" and args[0].device.type == "cuda"
        if to_host and not (args[0].numel() >= _MANY_ELEMENTS and self._holds_state()):
            return _to_host(args[0], kwargs)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            value = value_of(args[1])
            initialised(args[0])
            return args[0].fill_(odds_of(args[1])) if value is None else args[0].copy_(value)
        body = self._body(func, args)
        if body is None and (found := self.by_own_code(func, args, kwargs)) is not None:
            return found[0]
        out = None
        try:
            if body is None:
                with without_function_modes():
                    out = self._run(func, types, args, kwargs)
        except (RuntimeError, TraceError) as error:
            if not _has_no_fake(error):
                raise
            body = self.bodies.body(func, instead_of_fake=False)
            if body is None:
                raise self._no_stand_in(func) from error
        if body is not None and self.functions is not None:
            with self, self.functions:  # what the body allocates and launches is noted by itself
                return body(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            self._has_sparse = True
            if sparse.is_made_of_parts(func):  # its memory is that of its indices and values
                return out
            body = sparse.maker_of(func)
            if body is None or self.functions is None:
                raise self._no_stand_in(func)
            with self, self.functions:
                return body(*args, **kwargs)
        with without_function_modes():
            self._told(func, args, kwargs, out)
        return out

    def by_own_code(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Run the Python code of a custom operator, which a fake would hide: what it allocates meanwhile is noted.

        Returns:
            The operator's output; None where it has no such code, or code that cannot do without a device.
        """
        body = self.bodies.tried(func)
        if body is None or self.functions is None:
            return None
        before, self.on_unknown = self.on_unknown, _refuse
        try:
            with self, self.functions, fake_tensors.without_addresses():
                return (body(*args, **kwargs),)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  # code for a device may fail in any way without one
            self.bodies.fails(func)
            return None
        finally:
            self.on_unknown = before

    def _told(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an operator of the device gave, and tell those who listen."""
        try:
            self.note(func, args, out)
        except NoRoomError as error:
            raise self.on_no_room(error) from None
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            self.host.note(leaf)
        carry(func, args, kwargs, out)
        if func in _CHOOSES:
            self._draw(func, args, out)
        if func is _aten.convolution.default and torch.backends.cudnn.benchmark:
            self.on_unknown("what cuDNN's algorithms take while it times them (torch.backends.cudnn.benchmark)")
        for listener in self.listeners:
            listener(func, args, kwargs, out)

    def _body(self, func: Any, args: Any) -> Any:
        """Return the Python function that runs in the place of an operator's fake; None: none does."""
        body = self.bodies.body(func, instead_of_fake=True)
        if body is None and (self._has_sparse or func in _COPIES):
            try:
                body = sparse.body_of(func, args)
            except LookupError as error:
                raise self._no_stand_in(func) from error
            if body is not None and sparse.multiplies(func):
                self.on_untimed("products with a sparse matrix depend on where its elements are")
        return body

    def _draw(self, func: Any, args: Any, out: Any) -> None:
        """Let tokens be known that are drawn at random, or by the library that generates text."""
        chosen = out[1] if isinstance(out, tuple) else out
        if value_of(chosen) is not None:
            return
        generates = _GENERATES in self.places.now().source
        if generates:
            self.on_note("which tokens a model chooses is not known: each generated sequence is as long as it may be")
        if generates or func is _DRAWS:
            draw(chosen, args[0])

    def _no_stand_in(self, func: Any) -> NoStandInError:
        name = func.name()
        self.on_unknown(f"{func} cannot run without a device: it has no stand-in; dryfit.register({name!r}) adds one")
        return NoStandInError(f"{func} has no stand-in")

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = viewed_or_filled(func, args, kwargs, self.fakes)
        if out is not None:
            return out
        given = tuple(self._in_place_of(one) for one in args)
        options = {name: self._in_place_of(one) for name, one in kwargs.items()}
        try:
            out = options["out"] if func in OUT_VARIANTS else self._answered(func, given)
            if out is None:
                self.fakes.cache_enabled = func not in _TAKES_STORAGE  # it would keep the storage alive
                out = self.fakes.dispatch(func, types, given, options)
        except ASKS_FOR_VALUES as error:
            if func is fake_tensors.PACKS and (lengths := value_of(args[1])) is not None:
                return fake_tensors.packed(args, lengths)
            known = self._computed(func, args, kwargs)
            if known is not None:
                return known
            if func is _aten.index.Tensor:
                return self.fakes.dispatch(func, types, (args[0], self._positions(args[1])), kwargs)
            if func in _COMPARES:
                return self.stand_ins.answer(func, args, error) and self._condition()
            self.stand_ins.took_least = False
            if isinstance(error, DynamicOutputShapeException) and func.namespace not in _OF_TORCH:
                with dynamic_size(self.stand_ins.rows(_rows(args))):
                    out = self.fakes.dispatch(func, types, given, options)
            else:
                with self.fakes:
                    out = self.stand_ins.answer(func, args, error)
            if func is not _aten._local_scalar_dense.default and not self.stand_ins.took_least:
                self.on_unknown(f"{func}: its size depends on values; the largest was taken")
        except NotImplementedError:  # torch has no fake of it, and so asked for the device itself
            if func.name().startswith(_ASKS_FOR_KERNELS):
                return False
            if schema_of(func).is_mutable or not _is_on_cuda(args, kwargs.get("device")):
                raise
            out = self._as_on_the_host(func, types, given, options)
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None
        return out

    def _answered(self, func: Any, args: Any) -> Any:
        """Return what an operator gives of which torch has no fake; None: it has one, or we have none either."""
        if not self.stand_ins.replaces(func, args):
            return None
        with self.fakes:
            return self.stand_ins.answer(func, args)

    def _as_on_the_host(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator gives by the shapes of the CPU's kernel, which torch runs on zeros."""
        device = next(one.device for one in tree_iter(args) if isinstance(one, FakeTensor) and one.is_cuda)
        self.on_unknown(f"{func}: scratch memory of its kernel, at most what it reads and writes, as is assumed")
        self.without_formula.add(func)
        options = {**kwargs, "device": _CPU} if kwargs.get("device") is not None else kwargs
        with self.fakes:
            made = self.fakes.dispatch(func, types, _moved(args, _CPU), _moved(options, _CPU))
            return _moved(made, device)

    def _in_place_of(self, argument: Any) -> Any:
        """Return a fake in the place of a real tensor: with one, the fake mode would compute on its values."""
        if isinstance(argument, torch.Tensor):
            if isinstance(argument, FakeTensor):
                return argument
            with self.fakes:
                return torch.empty_strided(
                    argument.size(), argument.stride(), dtype=argument.dtype, device=argument.device
                )
        if isinstance(argument, list | tuple) and any(isinstance(one, torch.Tensor) for one in argument):
            return type(argument)([self._in_place_of(one) for one in argument])
        return argument

    def _positions(self, indices: Any) -> list[torch.Tensor | None]:
        """Return positions in the place of masks, as the kernel of indexing makes them; all, where nobody knows."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            value = value_of(index)
            if value is None:
                self.on_unknown("a mask's values decide a size; it was taken as true everywhere")
            count = self.stand_ins.rows(index.numel()) if value is None else int(value.count_nonzero())
            positions = self.empty((count, index.ndim), torch.int64, index.device)
            if value is not None:
                remember(positions, value.nonzero())
            with self.fakes:
                found += positions.unbind(1)
        return found

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operator whose size depends on values gives where all values are known."""
        values = [value_of(one) if isinstance(one, torch.Tensor) else one for one in args]
        device = next((one.device for one in args if isinstance(one, FakeTensor)), None)
        if device is None or any(value is None and one is not None for value, one in zip(values, args, strict=True)):
            return None
        if any(isinstance(one, list | tuple) and any(isinstance(t, FakeTensor) for t in one) for one in args):
            return None

        def on_device(real: torch.Tensor) -> torch.Tensor:
            with self.fakes:
                made = torch.empty(real.shape, dtype=real.dtype, device=device)
            remember(made, real)
            return made

        return tree_map_only(torch.Tensor, on_device, func(*values, **kwargs))

    def _item(self, args: Any) -> bool | int | float:
        value = value_of(args[0])
        if value is not None:
            return value.item()
        if self.on_unknown is _refuse:
            _refuse("the value of a tensor")
        if args[0].dtype is torch.bool:
            return self._condition()
        # GradScaler asks for the number of infinite gradients: with one it would leave the step out.
        self._numbers += 1
        self.stand_ins.number = 0 if runs_in(_SCALER, "grad_scaler.py") else 1 + self._numbers * _APART
        return self.stand_ins.item(args)

    def _condition(self) -> bool:
        """Answer a condition on values that nobody knows, and say how."""
        if self._denies:
            return False
        truth, what = self.conditions.answer()
        self.on_unknown(what)
        return truth

    def _is_foreign(self, args: Any) -> bool:
        """Whether a fake belongs to a fake mode that is not ours."""
        for leaf in args:
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode is not self.fakes
            if isinstance(leaf, list | tuple):
                for one in leaf:
                    if isinstance(one, FakeTensor):
                        return one.fake_mode is not self.fakes
        return False


def _has_no_fake(error: Exception) -> bool:
    """Whether an error says that an operator cannot run on fakes; of custom operators torch says it in words."""
    kinds = (NotImplementedError, UnsupportedOperatorException, TraceError)
    return isinstance(error, kinds) or "no fake impl registered" in str(error)


def _moved(given: Any, device: torch.device) -> Any:
    """Return new fakes of the same shapes on a device, in the fake mode that is active."""

    def moved(one: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)

    return tree_map_only(torch.Tensor, moved, given)


def _is_on_cuda(args: Any, device: torch.device | None) -> bool:
    tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor)]
    return (device is not None and device.type == "cuda") or any(one.device.type == "cuda" for one in tensors)


def _to_host(source: torch.Tensor, kwargs: Any) -> torch.Tensor:
    """Return a real tensor: known values, or what is taken for unknown ones."""
    dtype = kwargs.get("dtype") or source.dtype
    value = value_of(source)
    return value.to(dtype, copy=True) if value is not None else assumed(source, dtype)


def assumed(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a real tensor on the CPU in the place of one whose values nobody knows.

    Zeros, whose pages are not there before they are touched; a few positions or counts are 1, as ``item()`` has them:
    scripts divide by them. A few probabilities sum up to 1 (:func:`~dryfit.gpu.values.odds_of`).
    """
    shape = source.shape
    if odds := odds_of(source):
        return torch.full(shape, odds, dtype=dtype)
    elements = shape.numel()
    size_bytes = elements * dtype.itemsize
    if not elements or (dtype in _WHOLE and size_bytes < _PAGES_BYTES):
        return torch.ones(shape, dtype=dtype)
    pages = bytearray(size_bytes) if size_bytes < _PAGES_BYTES else mmap(-1, size_bytes, _UNTOUCHED)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def _in_constructor() -> bool:
    """Whether a module is being made: an ``__init__`` of a module, or torch's own initialisers, is running."""
    running = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)) if frame.f_code.co_name == "__init__")
    return any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in running)


@torch.ops.higher_order.out_dtype.py_impl(VirtualDispatch)
def _in_other_type(mode: VirtualDispatch, func: Any, dtype: torch.dtype, *args: torch.Tensor) -> torch.Tensor:
    """Run an operator whose result has another type than its arguments: torchao's products of 8-bit numbers."""
    with mode:
        if func is _aten.mm.default and dtype is torch.int32 and {one.dtype for one in args} == {torch.int8}:
            return _aten._int_mm.default(*args)
        return func(*(one.to(dtype) for one in args))
