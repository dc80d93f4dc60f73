"""What a script asks the driver besides torch: by NVML's Python bindings, and by the program ``nvidia-smi``."""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch

from dryfit.gpu.import_hooks import when_imported

_MIB: Final = 2**20
_PROGRAM: Final = "nvidia-smi"
_DRIVER: Final = "580.0"
"""Version of the driver that is told: none is installed, and scripts refuse older ones."""


def install(folder: Path) -> None:
    """Answer for the virtual GPU, for the life of this process.

    Args:
        folder: Where the program is written; its folder comes first in ``PATH``.
    """
    when_imported("pynvml", _answer_nvml)
    program = folder / "bin" / _PROGRAM
    program.parent.mkdir(exist_ok=True)
    answers = Path(__file__).with_name("nvidia_smi.py")
    command = [sys.executable, "-SE", str(answers), json.dumps([*map(_fields, range(torch.cuda.device_count()))])]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])


def _uuid(device: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{device:012d}"


def _fields(device: int) -> dict[str, object]:
    """Return the fields of ``--query-gpu`` that are known of a device."""
    memory = _memory(device)
    return {
        "index": device,
        "name": torch.cuda.get_device_name(device),
        "gpu_name": torch.cuda.get_device_name(device),
        "uuid": _uuid(device),
        "gpu_uuid": _uuid(device),
        "count": torch.cuda.device_count(),
        "driver_version": _DRIVER,
        "compute_cap": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory.total": memory.total // _MIB,
        "memory.free": memory.free // _MIB,
        "memory.used": memory.used // _MIB,
        "utilization.gpu": 0,
        "utilization.memory": 0,
        "temperature.gpu": 0,
        "power.draw": 0.0,
    }


def _memory(device: int, _version: int | None = None) -> SimpleNamespace:
    free, total = torch.cuda.mem_get_info(device)
    return SimpleNamespace(total=total, free=free, used=total - free)


def _answer_nvml(module: Any) -> None:
    """Let functions of NVML speak of the virtual GPU; those that have no answer say that it is not supported."""

    def fail(code: int) -> NoReturn:
        raise module.NVMLError(code)

    def handle(index: int) -> int:
        if not 0 <= index < torch.cuda.device_count():
            fail(module.NVML_ERROR_INVALID_ARGUMENT)
        return index

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlInitWithFlags": lambda _flags: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: _DRIVER,
        "nvmlDeviceGetCount": torch.cuda.device_count,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetHandleByUUID": lambda uuid: handle(int(str(uuid).rpartition("-")[2].rstrip("'"))),
        "nvmlDeviceGetIndex": lambda device: device,
        "nvmlDeviceGetName": torch.cuda.get_device_name,
        "nvmlDeviceGetUUID": _uuid,
        "nvmlDeviceGetMemoryInfo": _memory,
        "nvmlDeviceGetCudaComputeCapability": torch.cuda.get_device_capability,
        "nvmlDeviceGetUtilizationRates": lambda _device: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": lambda _device, _sensor: 0,
        "nvmlDeviceGetPowerUsage": lambda _device: 0,
        "nvmlDeviceGetComputeRunningProcesses": lambda _device: [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda _device: [],
    }
    for name in [
        name for name in vars(module) if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlUnit", "nvmlInit"))
    ]:
        answers.setdefault(name, lambda *_, **__: fail(module.NVML_ERROR_NOT_SUPPORTED))
    for name, function in answers.items():
        if hasattr(module, name):
            setattr(module, name, function)
