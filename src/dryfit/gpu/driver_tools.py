"""What a script asks the driver besides torch, by the program ``nvidia-smi``."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dryfit.gpu.muting import PROCESSES
from dryfit.settings.devices import DeviceSpec, driver_name

_MIB: Final = 2**20
_PROGRAM: Final = "nvidia-smi"
_DRIVER: Final = "580.0"
"""Version of the driver that is told: none is installed, and scripts refuse older ones."""


def install(folder: Path, spec: DeviceSpec, count: int, used_bytes: int, on_asked: Callable[[str], None]) -> None:
    """Answer for the virtual GPU, for the life of this process.

    Args:
        folder: Where the program is written; its folder comes first in ``PATH``.
        spec: Of each device.
        count: How many of them there are.
        used_bytes: What a context takes.
        on_asked: Called with a text where the script starts the program.
    """
    program = folder / "bin" / _PROGRAM
    program.parent.mkdir(exist_ok=True)
    fields = [_fields(number, spec, count, used_bytes) for number in range(count)]
    command = [sys.executable, "-SE", str(Path(__file__).with_name("nvidia_smi.py")), json.dumps(fields)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])

    def noted(event: str, args: tuple[Any, ...]) -> None:
        if event in PROCESSES and _PROGRAM in str(args):
            on_asked(_PROGRAM)

    sys.addaudithook(noted)


def _fields(number: int, spec: DeviceSpec, count: int, used_bytes: int) -> dict[str, object]:
    """Return the fields of ``--query-gpu`` that are known of a device."""
    name, uuid = driver_name(spec.name), f"GPU-00000000-0000-0000-0000-{number:012d}"
    return {
        "index": number,
        **dict.fromkeys(("name", "gpu_name"), name),
        **dict.fromkeys(("uuid", "gpu_uuid"), uuid),
        "count": count,
        "driver_version": _DRIVER,
        "compute_cap": ".".join(map(str, spec.capability)),
        "memory.total": spec.capacity_bytes // _MIB,
        "memory.free": (spec.capacity_bytes - used_bytes) // _MIB,
        "memory.used": used_bytes // _MIB,
        **dict.fromkeys(("utilization.gpu", "utilization.memory", "temperature.gpu", "power.draw"), 0),
    }
