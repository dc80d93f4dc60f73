"""Memory that a device takes besides tensors (CUDA context, workspaces), and how reliable the numbers are.

Measured values come from a calibration file; without one, the table below holds the larger end of what is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.settings.device_reach import has_nvlink
from dryfit.settings.devices import known_name
from dryfit.settings.files import read_model, write_model
from dryfit.settings.memory_terms import Calibration, Confidence, DeviceKind, DeviceSpec
from dryfit.settings.records import Message
from dryfit.settings.version import minor_version

CALIBRATION_FILE = "calibration.json"

_MIB = 2**20
_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_WORKSPACE_BYTES_LARGE = 4096 * 1024 * 8
_LARGE_WORKSPACE_MAJORS = (9, 10, 12)
"""Compute capabilities for which cuBLAS gets the larger workspace (torch: aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_EAGER_CONTEXT_BYTES = 1343 * _MIB
"""V100, all kernels loaded at the start: transformers' guide to training on one GPU."""

_LAZY_CONTEXT_BYTES: dict[int, int] = {7: 480 * _MIB, 8: 550 * _MIB, 9: 767 * _MIB, 10: 750 * _MIB, 12: 650 * _MIB}
"""CUDA context, kernels and library handles by major capability; kernels are loaded when first called (torch >= 1.13).

Published for the context alone: 274 MiB (pytorch#86509), about 300 and 400 MiB (pytorch#107667, #109888), 426 MiB on
an RTX 6000 Ada with CUDA 13 (unsloth-zoo#1053). The rest is an allowance for cuBLAS, attention and optimizer kernels;
larger devices have larger contexts. That of 9 is what an H200 took after a training
(torch 2.11, CUDA 13.0); the others were not measured: calibration replaces them.
"""

_CONNECTION_BYTES = 12 * _MIB
"""Buffers of one direction between two ranks in one channel of NCCL.

The receiver's have 0.5 MiB (LL), 4.7 MiB (LL128) and 4 MiB (simple; ``NCCL_BUFFSIZE``), the sender's 2 MiB or the
simple ones, each in pages of 2 MiB: ``computeBuffSizes`` (src/init.cc), ``p2pSendSetup`` and ``p2pRecvSetup``
(src/transport/p2p.cc).
"""

_NVLINK_CHANNELS, _OTHER_CHANNELS = 24, 4
"""Channels of a communicator: 12 links of an A100 or 18 of an H100, of which 12 are used, twice over; rings over PCIe
find one or two paths (``ncclTopoCompute``, ``ncclTopoPostset``)."""

_SHARED_BYTES = 256 * _MIB
"""What NCCL shares among sends and receives over NVLink: 32 channels, 16 steps of 512 KiB (src/transport/net.cc)."""

_CPU_PROCESS_BYTES = 521 * _MIB
"""Resident size of a training process with torch 2.13, transformers and the Trainer imported, after one tiny step
(measured on Linux, x86-64). Most of it is shared with the fork server."""


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Memory that a device takes besides tensors.

    Attributes:
        overhead_bytes: Outside of the caching allocator: context, kernels, library handles, NCCL's buffers.
        workspace_bytes: What cuBLAS takes through the allocator for each thread that multiplies matrices.
        error_p95: 95th percentile of the relative error of peak allocated, where it was measured.
        nccl_bytes: NCCL's buffers, a part of the overhead.
    """

    overhead_bytes: int
    workspace_bytes: int
    confidence: Confidence
    error_p95: float | None = None
    nccl_bytes: int = 0

    def communicating(self, device: DeviceSpec, ranks: int, communicators: int) -> "DeviceConstants":
        """Return the constants with the buffers of so many communicators."""
        takes = ranks > 1 and device.kind is DeviceKind.CUDA
        size = communicators * communicator_bytes(device, ranks) if takes else 0
        return replace(self, overhead_bytes=self.overhead_bytes - self.nccl_bytes + size, nccl_bytes=size)


def communicator_bytes(device: DeviceSpec, ranks: int) -> int:
    """Return what a communicator of NCCL takes on each device of one machine: the larger end of what it may.

    In a channel's ring and tree two ranks are connected in both directions, a rank between two others with each. Over
    NVLink this is 544 MiB for two ranks and 832 MiB for more. Measured on four A100: 544 MiB for two, and 688 MiB for
    more by the rank at the end of the tree, which has three connections (NVIDIA/nccl#964). NVLink SHARP of an H100
    takes another 32 MiB a rank (``ncclNvlsBufferSetup``) and newer versions connect what is used alone.
    """
    nvlink = has_nvlink(known_name(device))
    channels = _NVLINK_CHANNELS if nvlink else _OTHER_CHANNELS
    return channels * _CONNECTION_BYTES * min(ranks - 1, 2) + (_SHARED_BYTES if nvlink else 0)


class Calibrations(Message):
    """The calibration file."""

    devices: tuple[Calibration, ...] = ()


def read_calibrations(folder: Path) -> tuple[Calibration, ...]:
    """Return the calibrations of this user's machines; none where the file is absent or of another version."""
    try:
        stored = read_model(folder / CALIBRATION_FILE, Calibrations)
    except ValueError:
        return ()
    return stored.devices if stored else ()


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Add a measurement to the file, in place of an earlier one of the same device and minor version of torch."""
    folder.mkdir(parents=True, exist_ok=True)
    others = tuple(other for other in read_calibrations(folder) if not _same_device(other, calibration))
    write_model(folder / CALIBRATION_FILE, Calibrations(devices=(*others, calibration)))


def device_constants(
    device: DeviceSpec, torch_version: str, calibrations: Sequence[Calibration] = ()
) -> DeviceConstants:
    """Return the constants of a device.

    Args:
        device: The device planned for.
        torch_version: The version that will run.
        calibrations: Preferred are those of the same device and minor version of torch, then the one with the largest
            context among those of the same compute capability.
    """
    if device.kind is DeviceKind.CPU:
        return DeviceConstants(_CPU_PROCESS_BYTES, 0, Confidence.UNCALIBRATED)
    same = [
        calibration
        for calibration in calibrations
        if calibration.device_name == device.name and minor_version(calibration.torch) == minor_version(torch_version)
    ]
    family = [calibration for calibration in calibrations if calibration.capability == device.capability]
    for candidates, confidence in ((same, Confidence.CALIBRATED), (family, Confidence.FAMILY)):
        if candidates:
            worst = max(candidates, key=lambda calibration: calibration.context_bytes)
            return DeviceConstants(worst.context_bytes, worst.workspace_bytes, confidence, worst.error_p95)
    return DeviceConstants(
        _LAZY_CONTEXT_BYTES.get(device.capability[0], _EAGER_CONTEXT_BYTES),
        _WORKSPACE_BYTES_LARGE if device.capability[0] in _LARGE_WORKSPACE_MAJORS else _WORKSPACE_BYTES,
        Confidence.UNCALIBRATED,
    )


def margin_bytes(kind: DeviceKind, min_cap_bytes: int) -> int:
    """Return the bytes kept free beyond the plan, for what no plan sees."""
    share, least_bytes = (0.05, 64 * _MIB) if kind is DeviceKind.CPU else (0.02, 300 * _MIB)
    return max(int(min_cap_bytes * share), least_bytes)


def _same_device(one: Calibration, other: Calibration) -> bool:
    return one.device_name == other.device_name and minor_version(one.torch) == minor_version(other.torch)


@dataclass(frozen=True, slots=True)
class Processors:
    """The multiprocessors of a device, by which some kernels choose their scratch memory."""

    count: int
    threads: int
    """Most threads of one."""


def processors_of(capability: tuple[int, int]) -> Processors:
    """Return the multiprocessors of the largest common device of a compute capability."""
    return _PROCESSORS.get(capability, Processors(100, 2048 if capability[1] == 0 else 1536))


_PROCESSORS = {
    (7, 5): Processors(40, 1024),
    (8, 0): Processors(108, 2048),
    (8, 6): Processors(82, 1536),
    (8, 9): Processors(128, 1536),
    (9, 0): Processors(132, 2048),
    (10, 0): Processors(148, 2048),
    (12, 0): Processors(170, 1536),
}
