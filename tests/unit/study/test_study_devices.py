"""What of a machine trials get; the GPUs of a function of the user's own, counted without torch."""

import os
import subprocess
from pathlib import Path

import pytest

import instant
import plan_jobs
from dryfit.core.errors import MachineError
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.execution import DeviceKind
from dryfit.study.resources import trial_devices as devices
from dryfit.study.resources.trial_devices import choose_device, devices_without_torch, first_gpu, gpu_count, parallelism


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


def found(device: DeviceKind, count: int) -> ResolveResult:
    return plan_jobs.resolved().model_copy(update={"device": device, "device_count": count})


@pytest.mark.parametrize(
    ("device", "cores", "execution", "most", "reason"),
    [
        (DeviceKind.CPU, 16, {}, 4, "16 core(s), 4 for each trial"),
        (DeviceKind.CPU, 16, {"tp": 2}, 2, "16 core(s), 4 for each of a trial's 2 processes"),
        (DeviceKind.CPU, 16, {"dp": 8}, 1, "16 core(s), 4 for each of a trial's 8 processes"),
        (DeviceKind.CPU, 16, {"tp": 2, "threads": 1, "loader_workers": 1}, 4, "16 core(s), 2 for each of a trial's 2"),
        (DeviceKind.CUDA, 2, {}, 8, "2 core(s), 2 for each trial"),
        (DeviceKind.CUDA, 2, {"tp": 3}, 2, "2 core(s), 2 for each of a trial's 3 processes"),
        (DeviceKind.CUDA, 32, {"tp": 4}, 4, "32 core(s), 2 for each of a trial's 4 processes"),
    ],
)
def test_how_many_trials_the_cores_and_devices_allow(
    device: DeviceKind, cores: int, execution: dict[str, int], most: int, reason: str
) -> None:
    config = instant.config(execution=execution, runtime={"parallel": "auto"})
    allowed = parallelism(config, found(device, 8), cores)
    assert allowed.most == most and allowed.reason.startswith(reason)
    fixed = instant.config(execution=execution, runtime={"parallel": 3})
    assert parallelism(fixed, found(device, 8), cores).most == 3, "trials are asked for, not processes"


def test_a_group_is_chosen_as_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e")
    there = found(DeviceKind.CUDA, 5)
    assert choose_device(there, (), processes=1) == "GPU-a"
    assert choose_device(there, ["GPU-a", None], processes=1) == "GPU-b"
    assert choose_device(there, (), processes=2) == "GPU-a,GPU-b"
    assert choose_device(there, ["GPU-a,GPU-b"], processes=2) == "GPU-c,GPU-d"
    assert choose_device(there, ["GPU-a,GPU-b", "GPU-c,GPU-d"], processes=2) == "GPU-a,GPU-b"
    with pytest.raises(MachineError, match="each of a trial's 6 processes"):
        choose_device(there, (), processes=6)
    assert choose_device(found(DeviceKind.CPU, 1), (), processes=6) is None
