"""Answer operators that ask fake tensors for values: with those under which a model takes most memory."""

import traceback
from typing import Any

import torch

from dryfit.core.errors import TraceError
from dryfit.meta.private_apis.torch_fakes import DataDependentOutputException, DynamicOutputShapeException
from dryfit.meta.private_apis.torch_modes import TorchDispatchMode

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
    """

    number: float = 1

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
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)

    def masked_select(self, args: tuple[Any, ...]) -> torch.Tensor:
        """Every entry is selected."""
        return args[0].new_empty((torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),))

    def unique(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """No value is there twice."""
        tensor = args[0]
        inverse, counts = (*args[2:], False, False)[:2]
        return (
            tensor.new_empty((tensor.numel(),)),
            tensor.new_empty(tensor.shape if inverse else (0,), dtype=torch.int64),
            tensor.new_empty((tensor.numel() if counts else 0,), dtype=torch.int64),
        )

    def bincount(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """As many bins as are asked for; nobody knows how many there are otherwise."""
        weights, bins = (*args[1:], *(None, 0)[len(args) - 1 :])
        return args[0].new_empty((bins,), dtype=torch.int64 if weights is None else torch.float64) if bins else None

    def ctc_loss(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss of each sequence, and of each of its frames the states between all its labels (``LossCTC.cu``)."""
        log_p_TBC, labels, _, lengths = args[:4]
        frames, batch = log_p_TBC.shape[:2]
        longest = labels.shape[-1] if isinstance(lengths, torch.Tensor) else max(lengths, default=0)
        return log_p_TBC.new_empty((batch,)), log_p_TBC.new_empty((batch, frames, 2 * longest + 1))

    def ctc_loss_backward(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The gradient of the probabilities of all labels in all frames."""
        return torch.empty_like(args[1])

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
    _aten._ctc_loss_backward.default: StandIns.ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: StandIns.ctc_loss_backward,
}
_ANSWERS: dict[Any, Any] = {
    **_WITHOUT_FAKE,
    _aten._local_scalar_dense.default: StandIns.item,
    _aten.nonzero.default: StandIns.nonzero,
    _aten.masked_select.default: StandIns.masked_select,
    _aten._unique2.default: StandIns.unique,
    _aten.bincount.default: StandIns.bincount,
    _aten.equal.default: StandIns.equal,
    _aten.allclose.default: StandIns.allclose,
}


def _caller() -> str:
    """File and line of the model's code that runs now."""
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in _OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"
