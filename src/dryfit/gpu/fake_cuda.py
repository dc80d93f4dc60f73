"""Fake CUDA tensors: operators run as on a device, but allocate nothing."""

import ctypes
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.cuda.amp.common

from dryfit.gpu.kernels import route_attention
from dryfit.gpu.private_apis.torch_cuda import (
    CUDA,
    CUDA_HOOKS,
    HEADER_SLOTS,
    LAZY,
    TABLE_SLOTS,
    fuse_nothing,
    guard_table,
    has_idle_guard,
    set_idle_guard,
)
from dryfit.gpu.private_apis.torch_fakes import (
    FAKES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from dryfit.gpu.private_apis.torch_modes import TorchDispatchMode
from dryfit.gpu.private_apis.torch_operators import OPERATORS
from dryfit.gpu.private_apis.torch_recording import RECORDING
from dryfit.settings.errors import TraceError
from dryfit.settings.private_names import TESTED, require

# Answer operators that ask fake tensors for values: with those under which a model takes most memory.


_aten = torch.ops.aten
ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises where an operator needs its values."""
_OURS = ("/dryfit/", "/torch/")


class StandIns(TorchDispatchMode):
    """Answer with the value, or the size, under which a model takes most memory.

    Enter it between the fake mode and the recorder. ``item()`` gives :attr:`number` (or True); operators whose
    output size depends on values give the largest output.

    Attributes:
        number: The value that ``item()`` gives.
        smallest_sizes: Whether such an output has one row instead of all.
        sized_by_values: Whether there was one.
        unbounded: Outputs of which nobody knows the largest either, as reasons why a need is not known; None: they are
            refused.
        took_least: Whether the last answer is such an output.
    """

    number: float = 1
    smallest_sizes: bool = False
    sized_by_values: bool = False
    unbounded: dict[str, None] | None = None
    took_least: bool = False

    def rows(self, most: int) -> int:
        """How many rows an output has whose size depends on values."""
        self.sized_by_values = True
        return min(1, most) if self.smallest_sizes else most

    def least_rows(self, func: Any, least: int) -> int | None:
        """How many rows an output has at least, whose size any values may decide; None: it is refused."""
        if self.unbounded is None:
            return None
        self.took_least, place = True, _caller().partition(" (")[0]
        self.unbounded[f"values decide how much {func} gives at {place}; the least was taken"] = None
        return least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; where it needs values, or has no fake, answer in its place."""
        if self.replaces(func, args):
            return self.answer(func, args)
        try:
            return func(*args, **(kwargs or {}))
        except ASKS_FOR_VALUES as error:
            return self.answer(func, args, error)

    def replaces(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether torch has no fake of an operator, or none for these arguments."""
        return func in _WITHOUT_FAKE and not (func is _GROUPED_MM and args[0].dtype is torch.bfloat16)

    def answer(self, func: Any, args: tuple[Any, ...], error: Exception | None = None) -> Any:
        """Answer an operator that asked for values, or of which torch has no fake.

        Args:
            func: The operator.
            args: Its arguments.
            error: What the fake raised.

        Raises:
            TraceError: No answer is known.
        """
        find = _ANSWERS.get(func)
        answer = None if find is None else find(self, args)
        if answer is None:
            raise TraceError(
                "tracing the model",
                f"{func} depends on the values of its inputs, called at {_caller()}",
                hint="its memory cannot be known without running it",
            ) from error
        return answer

    def item(self, args: tuple[Any, ...]) -> bool | int | float:
        """A number of the tensor's kind."""
        dtype = args[0].dtype
        if dtype is torch.bool:
            return True
        return float(self.number) if dtype.is_floating_point else int(self.number)

    def nonzero(self, args: tuple[Any, ...]) -> torch.Tensor:
        """Every entry counts."""
        tensor = args[0]
        return tensor.new_empty((self.rows(tensor.numel()), tensor.ndim), dtype=torch.int64)

    def masked_select(self, args: tuple[Any, ...]) -> torch.Tensor:
        """Every entry is selected."""
        return args[0].new_empty((self.rows(torch.broadcast_shapes(args[0].shape, args[1].shape).numel()),))

    def unique(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """No value is there twice."""
        tensor = args[0]
        inverse, counts = (*args[2:], False, False)[:2]
        rows = self.rows(tensor.numel())
        return (
            tensor.new_empty((rows,)),
            tensor.new_empty(tensor.shape if inverse else (0,), dtype=torch.int64),
            tensor.new_empty((rows if counts else 0,), dtype=torch.int64),
        )

    def unique_run(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """No value, or row along a dimension, follows one like it."""
        inverse, counts, dim = (*args[1:], *(False, False, None)[len(args) - 1 :])
        if dim is None:
            return self.unique((args[0], True, inverse, counts))
        return self._each_row(args[0], dim, bool(inverse), bool(counts))

    def unique_rows(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """No row along a dimension is there twice."""
        return self._each_row(*args[:2], *(*args[3:], False, False)[:2])

    def _each_row(self, tensor: torch.Tensor, dim: int, inverse: bool, counts: bool) -> tuple[torch.Tensor, ...]:
        shape = list(tensor.shape)
        shape[dim] = rows = self.rows(tensor.shape[dim])
        sizes = (tensor.shape[dim] if inverse else 0, rows if counts else 0)
        return tensor.new_empty(shape), *(tensor.new_empty((size,), dtype=torch.int64) for size in sizes)

    def lstsq(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Solutions are the first rows of a copy of the right sides; CUDA's driver gives no rank (``gels``)."""
        left, right = args[:2]
        rows, columns = left.shape[-2:]
        vectors = right.ndim == 1 or (left.ndim - 1 == right.ndim and right.shape == left.shape[:-1])
        sides = right.unsqueeze(-1) if vectors else right
        batch = torch.broadcast_shapes(left.shape[:-2], sides.shape[:-2])
        found = right.new_empty((*batch, max(rows, columns), sides.shape[-1])).narrow(-2, 0, columns)
        left_over = right.new_empty((*batch, sides.shape[-1]) if rows > columns else (0,))
        nothing = right.new_empty((0,))
        return found.squeeze(-1) if vectors else found, left_over, nothing.to(torch.int64), nothing

    def bincount(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """As many bins as are asked for; nobody knows how many there are otherwise."""
        weights, bins = (*args[1:], *(None, 0)[len(args) - 1 :])
        bins = bins or self.least_rows(_aten.bincount, min(1, args[0].numel()))
        dtype = torch.int64 if weights is None else torch.float64
        return None if bins is None else args[0].new_empty((bins,), dtype=dtype)

    def repeat_interleave(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The place of each entry, as often as it says itself, which nobody knows."""
        rows = self.least_rows(_aten.repeat_interleave, args[0].numel())
        return None if rows is None else args[0].new_empty((rows,))

    def ctc_loss(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss of each sequence, and of each of its frames the states between all its labels (``LossCTC.cu``)."""
        log_p_TBC, labels, _, lengths = args[:4]
        frames, batch = log_p_TBC.shape[:2]
        longest = labels.shape[-1] if isinstance(lengths, torch.Tensor) else max(lengths, default=0)
        return log_p_TBC.new_empty((batch,)), log_p_TBC.new_empty((batch, frames, 2 * longest + 1))

    def gradient(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The gradient of the inputs, which come second: of normalised ones, or all labels' odds in all frames."""
        return torch.empty_like(args[1])

    def batch_statistics(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of each channel, of this rank or of all (``Normalization.cu``)."""
        inputs = args[0]
        dtype = torch.float32 if inputs.itemsize < torch.float32.itemsize else inputs.dtype
        return inputs.new_empty((inputs.shape[1],), dtype=dtype), inputs.new_empty((inputs.shape[1],), dtype=dtype)

    def batch_normalized(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The input normalized by statistics of all ranks."""
        return torch.empty_like(args[0])

    def batch_sums(self, args: tuple[Any, ...]) -> tuple[torch.Tensor | None, ...]:
        """Two sums over a gradient for each channel, and the gradients of weight and bias, where each is asked for."""
        _, inputs, mean, _, weight, of_input, of_weight, of_bias = args
        sums = [mean.new_empty((inputs.shape[1],)) if of_input else None for _ in range(2)]
        like = mean if weight is None else weight
        return *sums, *(like.new_empty((inputs.shape[1],)) if asked else None for asked in (of_weight, of_bias))

    def grouped_mm(self, args: tuple[Any, ...]) -> torch.Tensor:
        """Products of experts; torch's fake knows those of bf16 alone, its kernel all (``GroupedBlas.cpp``)."""
        left, right = args[:2]
        match left.ndim, right.ndim:
            case 2, 2:
                size = [args[2].shape[0], left.shape[0], right.shape[1]]
            case 2, _:
                size = [left.shape[0], right.shape[2]]
            case _, 2:
                size = [left.shape[1], right.shape[1]]
            case _:
                size = [left.shape[0], left.shape[1], right.shape[2]]
        dtype: torch.dtype = (args[4] if len(args) > 4 else None) or left.dtype
        aligned = 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
        row = -(-size[-1] // aligned) * aligned
        strides = [row, 1] if len(size) == 2 else [size[1] * row, row, 1]
        return torch.empty_strided(size, strides, dtype=dtype, device=left.device)

    def product(self, args: tuple[Any, ...]) -> torch.Tensor:
        """A product with a type of its own; some versions of torch decompose it as one without."""
        left, right, dtype = args[-3:]
        return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=dtype)

    def equal(self, args: tuple[Any, ...]) -> bool:
        """Two tensors of one shape are equal."""
        return args[0].shape == args[1].shape

    def allclose(self, _args: tuple[Any, ...]) -> bool:
        """Two tensors are close to each other."""
        return True


OUT_VARIANTS = frozenset({_aten.addmm.dtype_out, _aten.baddbmm.dtype_out})
"""Those of :meth:`StandIns.product`: they give what they are given as ``out``."""
_GROUPED_MM = _aten._grouped_mm.default
_WITHOUT_FAKE: dict[Any, Any] = {
    _GROUPED_MM: StandIns.grouped_mm,
    _aten.addmm.dtype: StandIns.product,
    _aten.baddbmm.dtype: StandIns.product,
    _aten._ctc_loss.default: StandIns.ctc_loss,
    _aten._ctc_loss.Tensor: StandIns.ctc_loss,
    _aten._ctc_loss_backward.default: StandIns.gradient,
    _aten._ctc_loss_backward.Tensor: StandIns.gradient,
    _aten.batch_norm_stats.default: StandIns.batch_statistics,
    _aten.batch_norm_gather_stats.default: StandIns.batch_statistics,
    _aten.batch_norm_gather_stats_with_counts.default: StandIns.batch_statistics,
    _aten.batch_norm_elemt.default: StandIns.batch_normalized,
    _aten.batch_norm_backward_reduce.default: StandIns.batch_sums,
    _aten.batch_norm_backward_elemt.default: StandIns.gradient,
}
_ANSWERS: dict[Any, Any] = {
    **_WITHOUT_FAKE,
    _aten._local_scalar_dense.default: StandIns.item,
    _aten.nonzero.default: StandIns.nonzero,
    _aten.masked_select.default: StandIns.masked_select,
    _aten._unique2.default: StandIns.unique,
    _aten.unique_consecutive.default: StandIns.unique_run,
    _aten.unique_dim.default: StandIns.unique_rows,
    _aten.linalg_lstsq.default: StandIns.lstsq,
    _aten.bincount.default: StandIns.bincount,
    _aten.repeat_interleave.Tensor: StandIns.repeat_interleave,
    _aten.equal.default: StandIns.equal,
    _aten.allclose.default: StandIns.allclose,
}


def _caller() -> str:
    """File and line of the model's code that runs now."""
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in _OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


# ``FakeTensorMode`` alone is not enough. On a CPU build of torch it has no guard for CUDA devices, autograd asserts
# that the accelerator is CUDA, and autocast switches itself off. On a CUDA build without a visible device only the last
# two are missing. All are answered here by replacing what torch asks:
#
# * a device guard for CUDA: the one that does nothing, which torch itself puts in the place of one that counts no
#   device;
# * two questions of autograd to the object of CUDA hooks ("is CUDA built", "does device i have a context"), through a
#   private copy of its table of virtual functions (Itanium ABI, so Linux and macOS; tested on Linux x86-64 only);
# * the availability gates of autocast;
# * TorchScript's fuser, which on a CUDA build would compile kernels for the device.
#
# All of it is private to torch and changes the process for good: use it in a child that does nothing else;
# :func:`why_not` tries it with a small training step.
#
# To be removed when torch can fake a device that is absent (pytorch issues 113441 and 122081 ask for parts of it).


_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
_DOING = "preparing fake CUDA tensors"


class FakeDevice:
    """A device whose tensors are fakes: sizes, types and lifetimes are real, memory is not.

    Args:
        kind: ``cuda`` or ``cpu``.
        capability: Compute capability of the CUDA device; it decides the attention kernel.

    Raises:
        TraceError: This build of torch cannot do it.
        LibraryError: torch's fake tensors or operators are not those that dryfit knows.
    """

    def __init__(self, kind: str, *, capability: tuple[int, int] = (8, 0)) -> None:
        require(_DOING, FAKES, RECORDING, OPERATORS)
        reason = why_not() if kind == "cuda" else ""
        if reason:
            raise TraceError(_DOING, reason, hint=f"dryfit was tested with torch{TESTED['torch']} on Linux x86-64")
        self.kind = kind
        self._capability = capability
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make new tensors fakes inside the block; fakes of an earlier block may be used in it."""
        threads = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)  # there is no thread for a device that is not there
        try:
            with self._mode, route_attention(self.kind, self._capability):
                yield
        finally:
            torch.autograd.set_multithreading_enabled(threads)


@cache
def why_not() -> str:
    """Return why fake CUDA tensors cannot be used here; empty where they can. Patches torch on its first call."""
    if torch.cuda.is_available():
        return "a CUDA device is visible: tracing would create a context on it"
    if not has_idle_guard() and (signal_name := _ended_by()):
        return f"torch {torch.__version__}: its self-test on fake CUDA tensors was ended by {signal_name}"
    try:
        _patch()
        return _self_test()
    except (OSError, AttributeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        return f"torch {torch.__version__}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _ended_by() -> str:
    """Try it all in a copy of this process and return the signal that ended it: an abort is no exception."""
    copy = os.fork()
    if copy == 0:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            _patch()
            _self_test()
        finally:
            os._exit(0)
    _, status = os.waitpid(copy, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""


def _patch() -> None:
    libraries = Path(torch.__file__).parent / "lib"
    # Autograd's own copy of the hooks lives in the library for the CPU, on every build.
    hooks_of = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))[CUDA_HOOKS]
    _register_cuda_guard()
    _patch_hooks(hooks_of)
    fuse_nothing()
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = wraps(torch.cuda.is_bf16_supported)(lambda including_emulation=True: True)


def _register_cuda_guard() -> None:
    """Give CUDA the device guard that torch gives it where CUDA's own counts no device, as that of lazy tensors does.

    A guard that is written in Python ends the process where a Python exception leaves a backward pass.
    """
    table = guard_table()
    if torch.version.cuda is None:
        if table[CUDA] is not None:
            return
        table[CUDA] = table[LAZY]  # counts no device
    before = table[CUDA]
    set_idle_guard(table)
    if table[CUDA] == before:
        raise ValueError("torch put no guard in the place of CUDA's")


def _patch_hooks(hooks_of: Any) -> None:
    """Make torch's CUDA hooks say that CUDA is built and every device has a context."""
    hooks_of.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(hooks_of())
    if hooks.value is None:
        raise ValueError("the CUDA hooks object has no table of functions")
    word = ctypes.sizeof(ctypes.c_void_p)
    old = hooks.value - HEADER_SLOTS * word  # with the offset to top and the type information before the functions
    size = (TABLE_SLOTS + HEADER_SLOTS) * word
    table = (ctypes.c_void_p * (TABLE_SLOTS + HEADER_SLOTS)).from_buffer_copy(ctypes.string_at(old, size))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _hooks: True)
    yes_of = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda _hooks, _index: True)
    table[HEADER_SLOTS + _IS_BUILT] = ctypes.cast(yes, ctypes.c_void_p).value
    table[HEADER_SLOTS + _HAS_PRIMARY_CONTEXT] = ctypes.cast(yes_of, ctypes.c_void_p).value
    hooks.value = ctypes.addressof(table) + HEADER_SLOTS * word
    for kept in (yes, yes_of, table):
        # torch may ask while Python shuts down: the answers must outlive it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _self_test() -> str:
    """Train one step of two layers and attend once; empty if everything is as on a real device."""
    torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode(), torch.autocast("cuda", dtype=torch.bfloat16):
        input_ND = torch.empty(4, 8, device="cuda")
        weight_DD = torch.empty(8, 8, device="cuda", requires_grad=True)
        product_ND = input_ND @ weight_DD
        if product_ND.dtype != torch.bfloat16:
            return f"torch {torch.__version__}: autocast gave {product_ND.dtype}, not bfloat16"
        dropped_ND = torch.nn.functional.dropout(product_ND, 0.1)
        if type(dropped_ND.grad_fn).__name__ != "NativeDropoutBackward0":
            return f"torch {torch.__version__}: dropout is not the fused one of CUDA"
        dropped_ND.float().sum().backward()
    gradient = weight_DD.grad
    if gradient is None or gradient.device.type != "cuda" or gradient.dtype != torch.float32:
        return f"torch {torch.__version__}: the backward pass gave no fp32 gradient on CUDA"
    with FakeTensorMode(), route_attention("cuda", (8, 0)):
        query = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    if type(attended.grad_fn).__name__ != "ScaledDotProductFlashAttentionBackward0":
        return f"torch {torch.__version__}: attention is not the kernel that was put in its place"
    return ""
