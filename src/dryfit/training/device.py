"""Set up a trial's device before its first allocation, and measure the memory used in the end."""

import gc
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from dryfit.gpu.allocator_settings import ALLOCATOR_VARIABLES
from dryfit.gpu.private_apis.torch_cuda import ALLOCATOR, set_allocator
from dryfit.processes.process import peak_rss_bytes
from dryfit.settings.choices import Precision
from dryfit.settings.devices import TF32_CAPABILITY
from dryfit.settings.errors import ConfigError, MachineError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.memory_terms import Allocator, DeviceKind
from dryfit.settings.private_names import require
from dryfit.settings.text import gib

ALLOCATOR_TEXTS = {Allocator.EXPANDABLE: "expandable_segments:True", Allocator.NATIVE: "expandable_segments:False"}
"""Settings of the device's allocator in the form of ``PYTORCH_ALLOC_CONF``."""

CONTEXT_BYTES = 512 << 20
"""What a CUDA context is taken to be where it cannot be measured."""

_MOST_CONTEXT_BYTES = 2 << 30
_DEVICE = 0  # a trial sees one device


@dataclass(frozen=True, slots=True)
class Prepared:
    """A device that was set up.

    Attributes:
        allocator_bytes: Most that the caching allocator may take; None: no limit.
        notes: Remarks for the user.
    """

    allocator_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedMemory:
    """The most memory a process has had: of its device by the allocator's count, or of the host."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


def prepare_device(plan: ExecutionPlan, environment: Mapping[str, str], *, fraction: float | None = None) -> Prepared:
    """Choose the allocator's segments and limit its memory; to be called before the first allocation.

    The limit of a trial counts all it takes of its device; the allocator's own limit leaves out the context, which is
    measured here and taken off. (Kernels that are loaded later make it larger by some MiB.)

    Args:
        plan: The trial's.
        environment: Variables of this process: an allocator that is configured there is left as it is.
        fraction: The share of its device that the allocator of a trial beside others may take; None: all.

    Raises:
        ConfigError: The limit is no larger than the context.
    """
    limit_bytes = plan.memory_limit_bytes
    if plan.device is not DeviceKind.CUDA:
        note = "execution.memory_limit bound the planner alone: memory of the CPU has no limit of its own"
        return Prepared(notes=() if limit_bytes is None else (note,))
    notes: list[str] = []
    name = next((name for name in ALLOCATOR_VARIABLES if environment.get(name)), None)
    if name is None:
        require("choosing the segments of the device's allocator", ALLOCATOR)
        set_allocator(ALLOCATOR_TEXTS[plan.allocator])
    else:
        notes.append(f"{name}={environment[name]} is kept: execution.allocator ({plan.allocator}) was not applied")
    if limit_bytes is None and fraction is None:
        return Prepared(notes=tuple(notes))
    total_bytes = torch.cuda.get_device_properties(_DEVICE).total_memory
    allocator_bytes = int(fraction * total_bytes) if fraction is not None else total_bytes
    if limit_bytes is not None:
        allocator_bytes = min(allocator_bytes, _without_context(limit_bytes, notes))
    torch.cuda.set_per_process_memory_fraction(min(1.0, allocator_bytes / total_bytes), _DEVICE)
    return Prepared(allocator_bytes=allocator_bytes, notes=tuple(notes))


def _without_context(limit_bytes: int, notes: list[str]) -> int:
    """Return what a limit leaves to the allocator, without the CUDA context."""
    context_bytes = _context_bytes()
    if context_bytes is None:
        context_bytes = CONTEXT_BYTES
        notes.append(f"NVML is not to be had: the CUDA context is taken to be {gib(context_bytes)}")
    allocator_bytes = limit_bytes - context_bytes
    if allocator_bytes <= 0:
        raise ConfigError(
            f"limiting the trial to {gib(limit_bytes)} of its device",
            f"its CUDA context alone takes {gib(context_bytes)}",
            allowed="execution.memory_limit well above that",
        )
    return allocator_bytes


def find_device(wish: str) -> tuple[DeviceKind, int]:
    """Return where trials run, and on how many devices.

    Args:
        wish: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        MachineError: CUDA is asked for and not there.
    """
    if wish == "cpu":
        return DeviceKind.CPU, 1
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return DeviceKind.CUDA, count
    if wish == "cuda":
        raise MachineError(
            'looking for execution.device = "cuda"',
            f"torch {torch.__version__} finds no CUDA device",
            allowed="a machine with a CUDA device and a CUDA build of torch",
            hint='set execution.device = "auto" to train on the CPU',
        )
    return DeviceKind.CPU, 1


def check_precisions(precisions: Collection[str], device: DeviceKind) -> None:
    """Refuse number formats the device cannot train in.

    Raises:
        ConfigError: fp16 or tf32 without CUDA, or bf16 or tf32 on a device without it.
    """
    on_cuda = device is DeviceKind.CUDA
    for wanted in (Precision.FP16, Precision.TF32):
        if wanted in precisions and not on_cuda:
            allowed = '"fp32" or "bf16" on the CPU'
            raise ConfigError(f'checking train.precision = "{wanted}"', "it needs a CUDA device", allowed)
    for wanted, there in (
        (Precision.BF16, torch.cuda.is_bf16_supported),
        (Precision.TF32, lambda: torch.cuda.get_device_capability(_DEVICE) >= TF32_CAPABILITY),
    ):
        if wanted in precisions and on_cuda and not there():
            name = torch.cuda.get_device_name(_DEVICE)
            found = f"{name} has no {wanted}"
            raise ConfigError(f'checking train.precision = "{wanted}"', found, allowed='"fp32" or "fp16"')


def observed_memory(device: DeviceKind) -> ObservedMemory:
    """Read the peaks of this process."""
    if device is DeviceKind.CUDA:
        return ObservedMemory(
            allocated_bytes=torch.cuda.max_memory_allocated(_DEVICE),
            reserved_bytes=torch.cuda.max_memory_reserved(_DEVICE),
        )
    return ObservedMemory(rss_bytes=peak_rss_bytes())


def taken_of_device(device: DeviceKind) -> int | None:
    """Return the bytes the allocator holds of the device now; None on the CPU. The host counts them: no wait."""
    return torch.cuda.memory_reserved(_DEVICE) if device is DeviceKind.CUDA else None


def release_memory(device: DeviceKind) -> None:
    """Give back what a fold's model and optimizer held; the Trainer and its callbacks refer to each other."""
    gc.collect()
    if device is DeviceKind.CUDA:
        torch.cuda.empty_cache()


def _context_bytes() -> int | None:
    """Make the context and return the bytes it takes; None where they cannot be measured.

    Another process that allocates in the same moment is counted too, up to a bound.
    """
    try:
        before_bytes = torch.cuda.device_memory_used(_DEVICE)
        torch.cuda.mem_get_info(_DEVICE)
        after_bytes = torch.cuda.device_memory_used(_DEVICE)
    except (RuntimeError, ModuleNotFoundError, *_nvml_errors()):
        return None
    return min(max(0, after_bytes - before_bytes), _MOST_CONTEXT_BYTES)


def _nvml_errors() -> tuple[type[Exception], ...]:
    """Return NVML's errors, where torch has imported its bindings; they are no dependency."""
    bindings = sys.modules.get("pynvml")
    return () if bindings is None else (bindings.NVMLError,)
