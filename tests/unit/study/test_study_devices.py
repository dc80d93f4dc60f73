"""The GPUs of trials that call a function of the user's own: counted without torch."""

import os
import subprocess
from pathlib import Path

import pytest

from dryfit.core.errors import MachineError
from dryfit.core.plan import DeviceKind
from dryfit.study import devices
from dryfit.study.devices import devices_without_torch, first_gpu, gpu_count


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for the driver's tool."""

    def make(said: str, status: int = 0) -> Path:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<END\n{said}\nEND\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tool

    return make


def test_counting(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("0\n1\n2")
    assert gpu_count(None) == 3
    assert gpu_count("2,0") == 2
    assert gpu_count("GPU-a,GPU-b,GPU-c,GPU-d") == 3
    assert gpu_count("") == gpu_count(" ") == 0
    smi("No devices were found")
    assert gpu_count(None) == 0
    smi("0", status=9)
    assert gpu_count(None) == 0
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_count(None) == 0


def test_a_driver_that_hangs_holds_nobody(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a tool that cannot be killed, as one stuck in the kernel."""
    monkeypatch.setattr(devices, "_SMI_TIMEOUT_S", 0.1)
    monkeypatch.setattr(devices, "_SMI_END_S", 0.1)
    smi("").write_text("#!/bin/sh\nexec sleep 60\n")
    kill, spared = subprocess.Popen.kill, []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: spared.append(process))
    assert gpu_count(None) == 0
    assert first_gpu(None) is None
    assert len(spared) == 2 and all(process.poll() is None for process in spared)
    for process in spared:
        kill(process)
        process.wait()
        process.stdout.close()


def test_where_trials_run() -> None:
    assert devices_without_torch("auto", 0) == (DeviceKind.CPU, 1)
    assert devices_without_torch("auto", 2) == (DeviceKind.CUDA, 2)
    assert devices_without_torch("cpu", 2) == (DeviceKind.CPU, 1)
    assert devices_without_torch("cuda", 1) == (DeviceKind.CUDA, 1)
    with pytest.raises(MachineError, match="nvidia-smi finds no GPU"):
        devices_without_torch("cuda", 0)
