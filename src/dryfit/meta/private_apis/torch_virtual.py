"""Private names of torch that a virtual GPU answers, or that a tensor without values needs to move in its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.cuda.random
from torch import nn

from dryfit.core.errors import TraceError
from dryfit.core.private_names import PrivateName, PrivateNames, importing
from dryfit.meta.private_apis.torch_cuda import guard_of_caller
from dryfit.meta.private_apis.torch_fakes import FakeTensorMode
from dryfit.meta.private_apis.torch_tensors import takes_data

with importing("torch", "a process group whose other ranks are not there"):
    from torch.testing._internal.distributed.fake_pg import FakeStore
with importing("torch", "choosing kernels for lists of tensors"):
    from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
    from torch.utils._foreach_utils import _foreach_supported_types as _utility_types

_NEVER: Final = "never: an answer in the place of a device's"
_ON_CUDA: Final = (
    "_lazy_init",
    "_lazy_call",
    "_is_compiled",
    "_exchange_device",
    "_maybe_exchange_device",
)
_LOW_LEVEL: Final = (
    "_cuda_getCurrentRawStream",
    "_cuda_getDeviceCount",
    "_cuda_getDevice",
    "_cuda_setDevice",
    "_cuda_exchangeDevice",
    "_cuda_maybeExchangeDevice",
    "_cuda_isCurrentStreamCapturing",
    "_cuda_synchronize",
    "_cuda_emptyCache",
    "_cuda_init",
    "_cuda_setMemoryMetadata",
    "_cuda_record_memory_history",
    "_cuda_memorySnapshot",
    "_host_emptyCache",
    "_scatter",
    "_gather",
)

ABSENT: Final = tuple(
    PrivateName(f"torch._C.{name}", "libraries look it up when they are imported", _NEVER) for name in _LOW_LEVEL
)
"""Only builds for CUDA have them; elsewhere they are added."""
PRESENT: Final = (
    *(PrivateName(f"torch.cuda.{name}", "torch.cuda asks it before it touches a device", _NEVER) for name in _ON_CUDA),
    PrivateName(
        "torch.nn.Module._apply",
        "moving a parameter without values to another device as the same object",
        "torch moves fake parameters in place",
    ),
    PrivateName(
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "a process group whose other ranks are not there",
        "torch has a fake process group under a public module",
    ),
    PrivateName("torch._C._get_accelerator", "sharding looks for the device there", _NEVER),
    PrivateName(
        "torch.nn.parallel.distributed._verify_param_shape_across_processes",
        "ranks that are not there have the same parameters",
        _NEVER,
    ),
    PrivateName("torch.nn.parallel.distributed._sync_module_states", "the same", _NEVER),
    PrivateName("torch.optim.optimizer._foreach_supported_types", "optimizers choose kernels for lists by it", _NEVER),
    PrivateName("torch.utils._foreach_utils._foreach_supported_types", "clipping of gradients does", _NEVER),
)
NAMES: Final = (*PRESENT, *ABSENT)


def replace_internals(devices: int, release_cached: Callable[[], None]) -> None:
    """Let torch's own functions of CUDA answer for a device that is not there.

    Args:
        devices: How many there are.
        release_cached: Called where cached memory is given back.
    """
    answers: Mapping[str, Callable[..., Any]] = {
        "_lazy_call": lambda call, **_: call(),
        "_is_compiled": lambda: True,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_emptyCache": release_cached,
        "_lazy_init": nothing,
        "_cuda_init": nothing,
        "_cuda_setDevice": nothing,
        "_cuda_synchronize": nothing,
        "_host_emptyCache": nothing,
        "_cuda_setMemoryMetadata": nothing,
        "_cuda_record_memory_history": nothing,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_scatter": _scatter,
        "_gather": _gather,
        "_exchange_device": _first,
        "_maybe_exchange_device": _first,
        "_cuda_getCurrentRawStream": _first,
        "_cuda_getDevice": _first,
        "_cuda_exchangeDevice": _first,
        "_cuda_maybeExchangeDevice": _first,
    }
    for names, where in ((_ON_CUDA, torch.cuda), (_LOW_LEVEL, torch._C)):
        for name in names:
            setattr(where, name, answers[name])


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever is given."""


def _first(*_: Any, **__: Any) -> int:
    return 0


def _scatter(tensor: torch.Tensor, devices: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """What ``nn.DataParallel`` does with a batch: on one device it moves there whole.

    Raises:
        TraceError: There are several devices, each of which would get a replica of the model.
    """
    if len(devices) > 1:
        doing, problem = "rehearsing nn.DataParallel", f"it copies the model to {len(devices)} devices at each step"
        raise TraceError(doing, problem, hint="DistributedDataParallel, a process for each device, can be rehearsed")
    return (tensor.to(torch.device("cuda", devices[0])),)


def _gather(tensors: Sequence[torch.Tensor], _dim: int, device: int | None, *_: Any) -> torch.Tensor:
    """What it does with the gradients of a batch: those of one device are all, and go where the batch was."""
    return tensors[0].cpu() if device == -1 else tensors[0]


def apply_to(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Move a module in its own way; recurrent ones do more than others."""
    module._apply(fn)


def replace_apply(apply: Callable[..., nn.Module]) -> None:
    """Let ``nn.Module.to``, ``.half``, ``.cuda`` ... go through this function."""
    nn.Module._apply = apply


def fake_store() -> Any:
    """Return the store of a process group whose other ranks are not there; it also makes the backend ``fake`` known."""
    return FakeStore()


def take_for_plain(kind: type[torch.Tensor]) -> None:
    """Let optimizers and gradient clipping take tensors of a class for plain ones, for which they have list kernels."""
    for types in (_optimizer_types, _utility_types):
        if kind not in types:
            types.append(kind)  # pyright: ignore[reportArgumentType]


def replace_accelerator(device: torch.device) -> None:
    """Let torch's sharding take this device for its own."""
    torch._C._get_accelerator = lambda *_: device  # pyright: ignore[reportAttributeAccessIssue]


def replace_parameter_checks(module: Any) -> None:
    """Let DistributedDataParallel take it that all ranks have the same parameters."""
    module._verify_param_shape_across_processes = nothing
    module._sync_module_states = nothing


def _misbehaves() -> str:
    with guard_of_caller(), FakeTensorMode():
        here, there = torch.empty(2), torch.empty(2, device="cpu")
    if not takes_data(here, there):
        return "a fake tensor does not take the data of another one"
    return ""


VIRTUAL: Final = PrivateNames("torch", PRESENT, _misbehaves)
