"""What this machine has, by the driver's own tool and by what a child has found."""

import os
import subprocess
from pathlib import Path

import pytest

import plan_jobs
from dryfit.processes import node as devices
from dryfit.processes.node import DeviceFacts, LocalNode, first_gpu, gpu_count, local_facts, processor
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from nvml import ScriptedDevices
from quiet_children import QuietChildren


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


def test_each_gpu_is_what_the_tool_says_and_nonsense_is_not_known(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = smi("0, GPU-a, NVIDIA X, 24564, 500, 8.9\n1, GPU-b, NVIDIA Y, [N/A], [N/A], [N/A]\n2, GPU-c, Z, 1, 9, 8.0")
    known = DeviceSpec(name="NVIDIA X", capacity_bytes=24064 * 2**20, capability=(8, 9))
    assert local_facts().devices == (
        DeviceFacts("0", "GPU-a", known),
        DeviceFacts("1", "GPU-b"),
        DeviceFacts("2", "GPU-c"),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert local_facts().devices == (DeviceFacts("GPU-a", "GPU-a", known),)
    tool.write_text("#!/bin/sh\nprintf '0, GPU-a, \\377\\376, 24564, 500, 8.9\\n\\377\\n'\n")
    (device,) = local_facts().devices
    assert device.spec is not None and device.spec.capacity_bytes == known.capacity_bytes, "bytes that are no text"


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


def test_without_a_child_the_tool_says_which_devices_there_are(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("0\n1\n2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    facts = LocalNode(QuietChildren()).facts
    assert facts.devices == (DeviceFacts("2"), DeviceFacts("0"))
    assert facts.cores >= 1 and facts.host_bytes > 2**20


def test_what_a_child_has_found_goes_to_the_names_that_trials_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    spec = DeviceSpec(name="made up", capacity_bytes=7)
    found = plan_jobs.resolved().model_copy(
        update={"device": DeviceKind.CUDA, "device_count": 2, "device_uuids": ("a", "b"), "device_spec": spec}
    )
    assert local_facts(found).devices == (DeviceFacts("3", "a", spec), DeviceFacts("1", "b", spec))
    unnamed = found.model_copy(update={"device_uuids": ()})
    assert [(device.name, device.uuid) for device in local_facts(unnamed).devices] == [("3", ""), ("1", "")]
    other = DeviceSpec(name="another model", capacity_bytes=9)
    mixed = found.model_copy(update={"device_specs": (other, spec)})
    assert [device.spec for device in local_facts(mixed).devices] == [other, spec]
    assert local_facts(plan_jobs.resolved()).devices == (), "on the CPU there are none to use"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monitor = ScriptedDevices()
    node = LocalNode(QuietChildren(), monitor)
    node.learn(found)
    assert [device.name for device in node.facts.devices] == ["0", "1"]
    assert monitor.uuids == {"0": "a", "1": "b"}


@pytest.mark.parametrize(
    ("text", "name", "has"),
    [
        ("processor\t: 0\nmodel name\t: A B\nflags\t\t: fpu sse2 avx512f avx512_bf16\n", "A B", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", "", True),
        ("Features\t: fp asimd bf16 i8mm\n", "", True),
        ("flags\t\t: fpu sse2 avx512f\n", "", False),
        ("model name\t: the avx512_bf16\nflags\t\t: fpu\n", "the avx512_bf16", False),
        ("", "", False),
    ],
)
def test_which_processor_has_bf16(text: str, name: str, has: bool, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert processor(file) == (name, has)
    assert processor(tmp_path / "none") == ("", False)
