"""Private names of torch that a virtual GPU answers, or that a tensor without values needs to move in its place."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import torch
import torch.profiler
from torch import nn

from dryfit.gpu.private_apis.torch_cuda import guard_of_caller
from dryfit.gpu.private_apis.torch_fakes import FakeTensorMode
from dryfit.gpu.private_apis.torch_tensors import takes_data
from dryfit.settings.errors import TraceError
from dryfit.settings.private_names import PrivateNames, importing

with importing("torch", "choosing kernels for lists of tensors"):
    from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
    from torch.utils._foreach_utils import _foreach_supported_types as _utility_types

_ASKED: Final[Mapping[str, str]] = {
    "_cuda_getDeviceCount": "device_count",
    "_cuda_getArchFlags": "architectures",
    "_cuda_setStream": "set_stream",
    "_cuda_getCurrentStream": "current_stream",
    "_cuda_getDefaultStream": "default_stream",
    "_cuda_getStreamFromExternal": "external_stream",
    "_cuda_emptyCache": "empty_cache",
    "_cuda_memoryStats": "memory_stats",
    "_cuda_resetPeakMemoryStats": "reset_peaks",
    "_cuda_setMemoryFraction": "set_fraction",
    "_cuda_getMemoryFraction": "fraction",
    "_cuda_cudaCachingAllocator_raw_alloc": "allocate",
    "_cuda_cudaCachingAllocator_raw_delete": "free",
    "_cuda_changeCurrentAllocator": "change_allocator",
    "_cuda_memorySnapshot": "memory_snapshot",
    "_cuda_attach_out_of_memory_observer": "attach_observer",
    "_cuda_beginAllocateCurrentThreadToPool": "begin_pool",
    "_cuda_beginAllocateToPool": "begin_pool",
    "_cuda_endAllocateToPool": "end_pool",
    "_cuda_record_memory_history": "record_history",
    "_cuda_record_memory_history_legacy": "record_history",
    "_accelerator_getStream": "accelerator_stream",
    "_accelerator_setStream": "set_accelerator_stream",
    "_accelerator_emptyCache": "empty_cache",
    "_accelerator_getDeviceStats": "memory_stats",
    "_accelerator_resetPeakStats": "reset_peaks",
    "_accelerator_getMemoryInfo": "memory_info",
    "_accelerator_getDeviceCapability": "accelerator_capability",
}
"""What a device is asked, with its name among the answers."""
_DONE: Final = (
    *("_cuda_init", "_cuda_setDevice", "_cuda_synchronize", "_cuda_ipc_collect", "_cuda_sleep"),
    *("_cuda_resetAccumulatedMemoryStats", "_cuda_resetAccumulatedHostMemoryStats", "_cuda_resetPeakHostMemoryStats"),
    "_cuda_setMemoryMetadata",
    *("_cuda_cudaCachingAllocator_enable", "_cuda_set_sync_debug_mode", "_cuda_allocationTraceback"),
    *("_cuda_releasePool", "_host_emptyCache"),
    *("_accelerator_setDeviceIndex", "_accelerator_synchronizeDevice", "_accelerator_emptyHostCache"),
    "_accelerator_resetAccumulatedStats",
)
"""What has happened as soon as it is asked for, or what nobody looks at."""
_CONSTANT: Final[Mapping[str, Any]] = {
    "_cuda_getDevice": 0,
    "_cuda_exchangeDevice": 0,
    "_cuda_maybeExchangeDevice": 0,
    "_cuda_getCurrentRawStream": 0,
    "_cuda_getCurrentBlasHandle": 0,
    "_cuda_getCurrentSolverHandle": 0,
    "_cuda_get_sync_debug_mode": 0,
    "_cuda_canDeviceAccessPeer": True,
    "_cuda_isCurrentStreamCapturing": False,
    "_graph_pool_handle": (0, 0),
    "_cuda_hostMemoryStats": {},
    "_cuda_getMemoryMetadata": "",
    "_cuda_getAllocatorBackend": "native",
    "_cuda_cudaCachingAllocator_is_enabled": True,
    "_cuda_getAllocator": None,
    "_get_accelerator": torch.device("cuda"),
    "_accelerator_getAccelerator": torch.device("cuda"),
    "_accelerator_getDeviceIndex": 0,
    "_accelerator_exchangeDevice": 0,
    "_accelerator_maybeExchangeDevice": 0,
    "_accelerator_isAllocatorInitialized": True,
    "_nccl_version": (2 << 32) + (28 << 16) + 9,
    "_nccl_version_suffix": b"",
}
"""What is answered alike by every virtual device: there is one, and one stream of work that has happened."""
_CLASSES: Final = ("_CudaStreamBase", "_CudaEventBase", "_CUDAGraph", "_MemPool", "_acceleratorGraph")
_STATE: Final = "_cuda_CUDAAllocator_AllocatorState"
"""Inductor imports this class from a build for CUDA (``torch._dynamo.reset``); only a replayed CUDA graph makes one."""
_BOUND: Final = ("torch.cuda.streams", "torch.cuda.graphs", "torch.cuda.memory", "torch.accelerator.graphs")
"""Modules that bind those classes, or functions beside them, when they are imported."""
_LOW_LEVEL: Final = (*_ASKED, *_DONE, *_CONSTANT, *_CLASSES, _STATE, "_scatter", "_gather", "_has_cuda")
_ACTIVITIES: Final = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
_ON_CUDA: Final = ("_initialized", "_exchange_device", "_maybe_exchange_device", "_cudart")

ABSENT: Final = (
    # torch's own functions ask it, and libraries do
    *(f"torch._C.{name}" for name in _LOW_LEVEL),
    # what a rank that is not there would tell
    "torch.distributed.pipelining.stage._derive_grad_metas",
    "torch.distributed.pipelining.stage._StageBackwardMeta",
    "torch.distributed.pipelining.stage.PipelineStage._recv_meta",
    "torch.distributed.pipelining.stage.PipelineStage._stage_meta",
    "torch.distributed.fsdp._optim_utils._convert_state_with_orig_params",
    "torch.distributed.fsdp._optim_utils._OptimStateKey",
    # torch.cuda binds it when it begins to use a device
    "torch.cuda._get_device_properties",
)
"""Only builds for CUDA have them all; elsewhere they are added."""
PRESENT: Final = (
    # torch.cuda asks it before it touches a device
    *(f"torch.cuda.{name}" for name in _ON_CUDA),
    # a profiler that looks for no events of a device
    "torch.autograd.profiler._supported_activities",
    # marks for a profiler that is not there
    "torch.cuda.nvtx._nvtx",
    # moving a parameter without values to another device as the same object; until: torch moves fake parameters
    # in place
    "torch.nn.Module._apply",
    # a process group whose other ranks are not there; until: torch has a fake process group under a public
    # module
    "torch.testing._internal.distributed.fake_pg",
    # ranks that are not there have the same parameters
    "torch.nn.parallel.distributed._verify_param_shape_across_processes",
    "torch.nn.parallel.distributed._sync_module_states",
    # Python code within a backward pass, which torch calls without the mode of functions; until: torch keeps a mode
    # of functions for it
    "torch.autograd._engine_run_backward",
    # optimizers choose kernels for lists by it
    "torch.optim.optimizer._foreach_supported_types",
    # clipping of gradients does
    "torch.utils._foreach_utils._foreach_supported_types",
    # a line search that ends although no value is known; until: LBFGS takes the most evaluations of a search
    "torch.optim.lbfgs._strong_wolfe",
)
EITHER: Final = (
    # stand-ins for collectives of such a group: by the first module, which torch imports by itself, or by the second
    "torch.distributed._meta_registrations",
    "torch.distributed._tools.fake_collectives",
)
NAMES: Final = (*PRESENT, *ABSENT, *EITHER)


def limit_line_search(most: int) -> None:
    """Let a line search of LBFGS make so many evaluations after its first one, at most."""
    module: Any = importlib.import_module("torch.optim.lbfgs")
    original = module._strong_wolfe

    @functools.wraps(original)
    def search(*args: Any, max_ls: int = most, **kwargs: Any) -> Any:
        return original(*args, max_ls=min(max_ls, most), **kwargs)

    module._strong_wolfe = search


def replace_internals(device: Any, classes: Sequence[type]) -> None:
    """Let torch's own functions of CUDA and of accelerators ask a device that is not there.

    Args:
        device: Has an attribute for each answer.
        classes: Bases of streams, events, graphs, memory pools and an accelerator's graphs.
    """
    for name, answer in _ASKED.items():
        setattr(torch._C, name, stand_in(getattr(device, answer)))
    for name in _DONE:
        setattr(torch._C, name, _answering(None))
    for name, value in _CONSTANT.items():
        setattr(torch._C, name, _answering(value))
    for name, made in zip(_CLASSES, classes, strict=True):
        setattr(torch._C, name, made)
    if not hasattr(torch._C, _STATE):
        setattr(torch._C, _STATE, object)
    torch._C._scatter, torch._C._gather = _scatter, _gather  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._has_cuda = torch.cuda._initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = _answering(0), _answering(0)
    torch.cuda._get_device_properties = device.properties  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda._cudart = device.runtime  # pyright: ignore
    torch.cuda.nvtx._nvtx = device.marks  # pyright: ignore[reportPrivateImportUsage]
    torch.autograd.profiler._supported_activities = _answering(_ACTIVITIES)  # pyright: ignore
    for name in _BOUND:
        if name in sys.modules:
            _bind_anew(sys.modules[name])


def _bind_anew(module: ModuleType) -> None:
    """Execute a module of torch once more, and put what it then defines wherever torch has what it defined before."""
    before = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    importlib.reload(module)
    anew = {id(value): getattr(module, name) for name, value in before.items()}
    for other in [one for name, one in sys.modules.items() if name.partition(".")[0] == "torch"]:
        for name, value in list(vars(other).items()):
            if id(value) in anew:
                setattr(other, name, anew[id(value)])


def stand_in(answer: Callable[..., Any], replaced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function of its own that gives an answer; torch's tables know functions by their identity.

    Args:
        answer: Called with the arguments.
        replaced: The function in whose place it is: it gets its signature and refuses what that would.
    """
    signature = None if replaced is None else inspect.signature(replaced)

    def standing(*args: Any, **kwargs: Any) -> Any:
        if signature is not None:
            signature.bind(*args, **kwargs)
        return answer(*args, **kwargs)

    return standing if replaced is None else functools.wraps(replaced)(standing)


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


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


def know_fake_groups() -> None:
    """Make the backend ``fake`` known, whose process groups have one rank that is there."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        importlib.import_module("torch.distributed._tools.fake_collectives")


def expect_gradients(stages: Any) -> None:
    """Let a stage of a pipeline know what gradients it gets as soon as it knows its outputs: the next would tell it."""
    if hasattr(stages, "_derive_grad_metas"):  # before torch 2.13 nothing is told

        def told(self: Any, _stage: int) -> Any:
            return stages._StageBackwardMeta(backward_metas=stages._derive_grad_metas(self._stage_meta.outputs))

        stages.PipelineStage._recv_meta = told


def expect_states(fsdp: Any) -> None:
    """Let FSDP gather the optimizer's state of all parameters: other ranks would tell those of which none is here.

    Args:
        fsdp: The module ``torch.distributed.fsdp``.
    """
    module = fsdp._optim_utils
    convert = module._convert_state_with_orig_params

    @functools.wraps(convert)
    def complete(keys: list[Any], key_of: Any, parts: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        told = {name for key in keys for name in key.unflat_param_names}
        others = [
            module._OptimStateKey((name,), True)
            for name, part in parts.items()
            if name not in told and part.param_requires_grad[part.param_indices[name]]
        ]
        return convert([*keys, *others], key_of, parts, *args, **kwargs)

    module._convert_state_with_orig_params = complete


def take_for_plain(kind: type[torch.Tensor]) -> None:
    """Let optimizers and gradient clipping take tensors of a class for plain ones, for which they have list kernels."""
    for types in (_optimizer_types, _utility_types):
        if kind not in types:
            types.append(kind)  # pyright: ignore[reportArgumentType]


def run_backward_within(enter: Callable[[], AbstractContextManager[object]]) -> None:
    """Let the code of backward passes run inside of a context.

    Args:
        enter: Makes the context, when a pass begins.
    """
    run = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_inside  # pyright: ignore[reportPrivateImportUsage]


def replace_parameter_checks(module: Any) -> None:
    """Let DistributedDataParallel take it that all ranks have the same parameters."""
    module._verify_param_shape_across_processes = _answering(None)
    module._sync_module_states = _answering(None)


def _misbehaves() -> str:
    with guard_of_caller(), FakeTensorMode():
        here, there = torch.empty(2), torch.empty(2, device="cpu")
    if not takes_data(here, there):
        return "a fake tensor does not take the data of another one"
    return ""


VIRTUAL: Final = PrivateNames("torch", PRESENT, _misbehaves)
