"""Functions of torch that go round its dispatcher, and the places where a tensor must stay the same object.

Patched for the life of the process: a :class:`TorchFunctionMode` for constructors that switch dispatch modes off and
for what reads a tensor's memory, ``nn.Parameter`` and what ``nn.Module.to`` does.
"""

import copy
import inspect
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dryfit.gpu import fake_tensors, recurrent
from dryfit.gpu.cuda_api import TypedTensor
from dryfit.gpu.dispatch import VirtualDispatch, assumed
from dryfit.gpu.host_memory import is_pinned
from dryfit.gpu.import_hooks import is_of
from dryfit.gpu.private_apis.torch_fakes import FakeTensor, forget, let_fakes_name_ragged_sizes
from dryfit.gpu.private_apis.torch_modes import SET_DATA, default_device
from dryfit.gpu.private_apis.torch_modules import buffers_of, parameters_of
from dryfit.gpu.private_apis.torch_virtual import apply_to, replace_apply, run_backward_within, stand_in, take_for_plain
from dryfit.gpu.script_recorder import NoRoomError
from dryfit.gpu.values import initialised, note_raw, read_masks, value_of
from dryfit.settings.errors import LibraryError

_MAKES_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.sparse_coo_tensor})
_LEAVES_RAW = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
)
_TORCH_GENERATOR = torch.Generator
_READS_MEMORY = frozenset({torch.Tensor.numpy, torch.Tensor.__array__})
_DENY = frozenset({torch.istft, torch.Tensor.istft, nn.functional.gaussian_nll_loss})
"""Functions that look for values that they cannot take, and fail where there are any."""
_INDEXES = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_OTHERS = {torch.Tensor.new_tensor, torch.Tensor.new, torch.Tensor.type, SET_DATA, nn.functional.ctc_loss}
_CHANGED = frozenset(
    {*_MAKES_FROM_DATA, *_OTHERS, *recurrent.LAYERS, *_DENY, *_INDEXES, *_READS_MEMORY, *_LEAVES_RAW},
)
"""All that is not called as it is: one question in place of ten, for an operator computes its hash anew each time."""


class VirtualFunctions(TorchFunctionMode):
    """Makes tensors from data on the CPU and moves them; reads fakes as known values or zeros.

    Args:
        dispatch: Of the virtual GPU.
    """

    def __init__(self, dispatch: VirtualDispatch) -> None:
        super().__init__()
        self._dispatch = dispatch
        self._dropout_states: dict[torch.device, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func not in _CHANGED:
            return func(*args, **kwargs)
        if func in _MAKES_FROM_DATA:
            device = kwargs.get("device")
            args = (*map(_with_numbers, args[:1]), *args[1:])
            if device is None and args and isinstance(args[0], FakeTensor):
                return func(*args, **kwargs)
            device = default_device() if device is None else device  # torch would give it only below this mode
            if device is not None and _is_cuda(device) and not isinstance(args[0], FakeTensor):
                made = func(*args, **{**kwargs, "device": "cpu"})
                return _leaf(made.detach().to(device), made)
            if kwargs.get("pin_memory"):  # torch would initialise CUDA
                made = func(*args, **{**kwargs, "pin_memory": False})
                return _leaf(made.detach().pin_memory(), made)
        elif func is torch.Tensor.new_tensor and isinstance(args[0], FakeTensor):
            device = kwargs.pop("device", args[0].device)
            made = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})
            return made.to(device)
        elif func is torch.Tensor.new and isinstance(args[0], FakeTensor) and args[0].is_cuda and _is_data(args[1:]):
            return torch.tensor(_with_numbers(args[1]), dtype=args[0].dtype).to(args[0].device)
        elif func is torch.Tensor.type and (named := TypedTensor.named((*args[1:], kwargs.get("dtype"))[0])):
            return args[0].to(torch.device("cuda"), named.dtype)
        elif func in recurrent.LAYERS and isinstance(args[0], FakeTensor) and args[0].is_cuda:
            return recurrent.run(func, args, self._dropout_states, self._dispatch)
        elif func == SET_DATA and type(args[0]) is torch.Tensor and isinstance(args[1], FakeTensor):
            return fake_tensors.set_data(*args)
        elif func is nn.functional.ctc_loss and isinstance(args[0], FakeTensor):  # lengths on the host are read there
            lengths = [one.to(args[0].device) if isinstance(one, torch.Tensor) else one for one in args[2:4]]
            return func(*args[:2], *lengths, *args[4:], **kwargs)
        elif func in _DENY:
            with self._dispatch.denying():
                return func(*args, **kwargs)
        elif func in _INDEXES and isinstance(args[0], FakeTensor) and args[0].is_cuda:
            return func(args[0], _index(args[1]), *args[2:])
        elif func in _READS_MEMORY:
            if isinstance(args[0], FakeTensor):
                return func(_real(args[0]), *args[1:], **kwargs)
            initialised(args[0])  # numpy may write to it
        elif func in _LEAVES_RAW:
            note_raw(made := func(*args, **kwargs))
            return made
        return func(*args, **kwargs)


def _leaf(moved: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return moved.requires_grad_() if made.requires_grad else moved


def _with_numbers(data: Any) -> Any:
    """Return data with numbers in the place of fakes in it, which a constructor would read without asking any mode."""
    if isinstance(data, list | tuple):
        return [_with_numbers(one) if isinstance(one, list | tuple) else _number(one) for one in data]
    return data


def _is_data(given: tuple[Any, ...]) -> bool:
    """Whether what is given to ``Tensor.new`` is data, and no size."""
    if len(given) != 1 or isinstance(given[0], torch.Size):
        return False
    return isinstance(given[0], list | tuple) or is_of(given[0], "numpy", "ndarray")


def _number(one: Any) -> Any:
    return one.item() if isinstance(one, FakeTensor) and one.numel() == 1 else one


def _index(given: Any) -> Any:
    """Return an index with tensors in the place of lists of numbers, which torch itself would put on the device."""
    if isinstance(given, tuple):
        return tuple(map(_index, given))
    if isinstance(given, list | range) and _is_numbers(given):
        return torch.tensor(given, dtype=None if given else torch.int64)
    return given


def _is_numbers(given: Any) -> bool:
    if isinstance(given, list | range):
        return all(map(_is_numbers, given))
    return isinstance(given, int) or is_of(given, "numpy", "integer", "bool_")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor in a fake's place; as torch does, only of one on the CPU that needs no gradient.

    Raises:
        TypeError: It is on a CUDA device.
        RuntimeError: It needs a gradient.
    """
    if tensor.device.type == "cuda":
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    value = value_of(tensor)
    return value if value is not None else assumed(tensor, tensor.dtype)


def install(dispatch: VirtualDispatch) -> None:
    """Make every parameter a fake from its beginning, and let it stay the same object wherever it is moved."""
    make = nn.Parameter.__new__

    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if type(data) in (torch.Tensor, nn.Parameter) and data.device.type == "cpu":
            data = dispatch.faked(data)
        return make(cls, data, requires_grad)

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Move a module as ``nn.Module.to`` does; torch would swap fakes, which fails where anything refers to one."""
        if recurse:
            for module in self.children():
                apply_to(module, fn)
        for key, parameter in parameters_of(self).items():
            if parameter is None or fake_tensors.moved(parameter, fn):
                continue
            if not _move(parameter, fn, dispatch):
                parameters_of(self)[key] = nn.Parameter(fn(parameter.detach()), parameter.requires_grad)
        for key, buffer in buffers_of(self).items():
            if buffer is not None and not fake_tensors.moved(buffer, fn):
                buffers_of(self)[key] = fn(buffer)
        return self

    resize = torch.UntypedStorage.resize_

    def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        before = self.nbytes()
        resize(self, size)
        try:
            dispatch.note_resized(self)
        except NoRoomError as error:
            resize(self, before)
            raise dispatch.on_no_room(error) from None
        return self

    torch.UntypedStorage.resize_ = resize_storage
    torch.utils.swap_tensors = _swapping(torch.utils.swap_tensors)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _backward(getattr(torch.autograd, name), dispatch))
    for name in ("trace", "trace_module"):
        setattr(torch.jit, name, _unchecked(getattr(torch.jit, name)))
    run_backward_within(lambda: dispatch.functions or nullcontext())
    nn.Parameter.__new__ = new_parameter  # pyright: ignore[reportAttributeAccessIssue]
    replace_apply(apply)
    take_for_plain(FakeTensor)
    read_masks()
    fake_tensors.install_late_tensors()
    let_fakes_name_ragged_sizes()
    recurrent.install()
    FakeTensor.tolist = _to_list
    FakeTensor.__deepcopy__ = _deep_copy
    FakeTensor.__format__ = _format
    torch.Tensor.pin_memory = _pinning(dispatch)  # pyright: ignore[reportAttributeAccessIssue]
    torch.Generator = _Generator  # pyright: ignore[reportAttributeAccessIssue]


def _swapping(swap: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Let fakes change places as real tensors do: their mode refers to them weakly, which torch refuses."""

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        for tensor in (t1, t2):
            if isinstance(tensor, FakeTensor):
                forget(tensor)
        swap(t1, t2)

    return swap_tensors


def _unchecked(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return a trace that is not run again to compare its results, whose values nobody knows."""
    signature = inspect.signature(trace)

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["check_trace"] = False
        return trace(*given.args, **given.kwargs)

    return stand_in(traced, trace)


def _backward(run: Callable[..., Any], dispatch: VirtualDispatch) -> Callable[..., Any]:
    """Return a backward pass whose frees are counted to it."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        with dispatch.backward_pass():
            return run(*args, **kwargs)

    return counted


def follow_compiling(
    dispatch: VirtualDispatch,
    on_graph: Callable[[], None],
    on_failure: Callable[[Exception], None],
    on_kernel: Callable[[str, list[torch.Tensor]], None],
) -> None:
    """Let ``torch.compile`` make graphs that run on the virtual GPU; where this torch cannot, run as it is.

    Args:
        dispatch: Of the virtual GPU.
        on_graph: Called with each graph.
        on_failure: Called where something runs as it is.
        on_kernel: Called with name and tensors of each kernel of compiled code.
    """
    compile_ = torch.compile
    was_asked: list[bool] = []

    def follow(*args: Any, **kwargs: Any) -> Any:
        if not was_asked:
            was_asked.append(True)
            try:
                from dryfit.gpu.compiling import install_compiler

                install_compiler(
                    dispatch, lambda mode: isinstance(mode, VirtualFunctions), on_graph, on_failure, on_kernel
                )
            except LibraryError as error:
                torch.compiler.set_stance("force_eager")
                on_failure(error)
        call = nn.Module.__call__
        nn.Module.__call__ = inspect.unwrap(call)  # what is compiled keeps it
        try:
            return compile_(*args, **kwargs)
        finally:
            nn.Module.__call__ = call

    torch.compile = follow


def follow_threads(enter: Callable[[], AbstractContextManager[object]]) -> None:
    """Let each thread that is started from now on run inside of a context: torch's modes belong to one thread.

    Args:
        enter: Makes the context, in the new thread.
    """
    start = threading.Thread.start

    def start_inside(self: threading.Thread) -> None:
        run = self.run

        def run_inside() -> None:
            with enter():
                run()

        self.run = run_inside
        start(self)

    threading.Thread.start = start_inside


def mark_forks(forked: Callable[[], None]) -> None:
    """Call a function in each process that is forked from this one.

    Args:
        forked: Called in the new process, before anything else runs there.
    """
    os.register_at_fork(after_in_child=forked)


def _move(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor], dispatch: VirtualDispatch) -> bool:
    """Move a parameter and its gradient in their places; whether it could."""
    gradient, parameter.grad = parameter.grad, None  # no gradient may be elsewhere than its parameter
    with torch.no_grad():
        for tensor in (parameter, gradient):
            if tensor is None:
                continue
            moved = fn(tensor)
            if type(moved) is torch.Tensor and isinstance(tensor, FakeTensor):  # back on the CPU
                moved = dispatch.faked(moved)
            if moved is not tensor and not become(tensor, moved):
                return False
    parameter.grad = gradient
    return True


def _deep_copy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy a fake as torch copies a tensor, but not the mode that it belongs to.

    Raises:
        RuntimeError: Autograd made it; as torch does.
    """
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        made: Any = self.detach().clone()
    if isinstance(self, nn.Parameter):  # of a parameter torch copies neither attributes nor gradient
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad)
        return made
    made.requires_grad_(self.requires_grad)
    memo[id(self)] = made
    for name, value in vars(self).items():
        if name not in vars(made):
            setattr(made, name, copy.deepcopy(value, memo))
    if self.grad is not None:
        made.grad = copy.deepcopy(self.grad, memo)
    return made


def _pinning(dispatch: VirtualDispatch) -> Callable[..., torch.Tensor]:
    """Return ``Tensor.pin_memory`` of a machine that has the device."""

    def pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Copy a tensor of the host to pinned memory, unless the tensor is there.

        Raises:
            RuntimeError: The tensor is on the device; as torch does.
        """
        if is_pinned(self):
            return self
        if self.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return dispatch.host.pin(self.detach().clone())

    return pin_memory


def _to_list(self: torch.Tensor) -> Any:
    return _real(self.detach().cpu()).tolist()


def _format(self: torch.Tensor, format_spec: str) -> str:
    return (self.item() if self.dim() == 0 else str(self)).__format__(format_spec)


class _Generator(_TORCH_GENERATOR):
    """A generator of random numbers; what it draws for a device that is not there, nobody sees."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        make: Any = super().__new__
        return make(cls, "cpu" if _is_cuda(device) else device)


def become(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Let a fake have the data, device and type of another one; whether it could."""
    if not isinstance(tensor, FakeTensor) or not isinstance(other, FakeTensor):
        return False
    if other.device.type == "meta" != tensor.device.type:  # torch makes a new parameter there, too
        return False
    tensor.data = other
    tensor.fake_device = other.fake_device
    return True
