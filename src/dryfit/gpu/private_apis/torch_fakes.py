"""Private names of torch's fake tensors: sizes, types and devices without values."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dryfit.gpu.private_apis.torch_cuda import guard_of_caller
from dryfit.settings.private_names import PrivateNames, importing

with importing("torch", "computing with tensors that have no values"):
    from torch._library.fake_impl import FakeImplCtx
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )
    from torch.nested._internal.nested_int import NestedIntNode

NAMES: Final = (
    # until: torch has fake tensors under a public module
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    # making a view of a fake in a tenth of the time; until: torch does so itself
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    # letting a real tensor become a fake: one to which a weak reference leads cannot take another's place;
    # until: torch.utils.swap_tensors takes tensors with weak references
    "torch._subclasses.fake_tensor.FakeTensorConverter.tensor_memo",
    # giving a size that depends on values to an operator that torch does not know; until: torch.library.get_ctx
    # can be told such sizes
    "torch._library.fake_impl.FakeImplCtx.new_dynamic_size",
    # sizes of jagged nested tensors, which torch names after the tensor of offsets; until: fakes outside of a tracer
    # name them as real tensors do
    "torch._subclasses.fake_tensor.FakeTensor.get_nested_int",
    "torch.nested._internal.nested_int.NestedIntNode",
    # knowing that torch itself computes shapes; until: torch tells which fake mode is active by a public name
    "torch._C._get_dispatch_mode",
    "torch._C._TorchDispatchModeKey",
)


def active_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that is active below all other modes, ours or another's."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # pyright: ignore


def in_kernel_of(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Let operators take fakes for tensors without memory, in the block, and give such tensors."""
    return in_kernel_invocation_manager(mode)


def let_fakes_name_ragged_sizes() -> None:
    """Let the offsets of a jagged nested tensor name its ragged size where no tracer has symbolic sizes for it."""
    of_tracer = FakeTensor.get_nested_int
    numbers = itertools.count(1 << 32)  # torch counts real tensors from nothing
    sizes = WeakTensorKeyDictionary()

    def get_nested_int(self: FakeTensor, *, coeff: Any = 1) -> Any:
        if self.fake_mode.shape_env is not None:
            return of_tracer(self, coeff=coeff)
        if self not in sizes:
            sizes[self] = torch.SymInt(NestedIntNode(next(numbers), 1))
        return sizes[self] * coeff

    FakeTensor.get_nested_int = get_nested_int


def forget(fake: FakeTensor) -> None:
    """Let the mode that made a fake have no reference to it."""
    memo = fake.fake_mode.fake_tensor_converter.tensor_memo
    for key in [key for key, known in memo.items() if known is fake]:
        del memo[key]


@contextmanager
def dynamic_size(size: int) -> Iterator[None]:
    """Give this size to the fakes of custom operators that ask for one, in the block."""

    def new_dynamic_size(_ctx: Any, **_: Any) -> int:
        return size

    with_values = FakeImplCtx.new_dynamic_size
    FakeImplCtx.new_dynamic_size = new_dynamic_size  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        FakeImplCtx.new_dynamic_size = with_values


def _misbehaves() -> str:
    where = "torch._subclasses.fake_tensor"
    with guard_of_caller(), FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(2, 3).t()
        try:
            torch.empty(()).item()
            return f"{where}: item() of a fake tensor raises no DataDependentOutputException"
        except DataDependentOutputException:
            pass
        try:
            made.nonzero()
            return f"{where}: nonzero() of a fake tensor raises no DynamicOutputShapeException"
        except DynamicOutputShapeException:
            pass
    if not isinstance(made, FakeTensor) or (made.shape, made.device.type) != ((3, 2), "cpu"):
        return f"{where}: inside of a FakeTensorMode, tensors are no FakeTensor of their device and shape"
    if not issubclass(UnsupportedFakeTensorException, RuntimeError) or not issubclass(
        UnsupportedOperatorException, RuntimeError
    ):
        return f"{where}: what is unsupported is no RuntimeError"
    return ""


FAKES: Final = PrivateNames("torch", NAMES, _misbehaves)
