"""The fence around a trial's device memory, against a device that only counts."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionPlan
from dryfit.settings.memory_terms import Allocator, DeviceKind
from dryfit.training import device
from dryfit.training.device import CONTEXT_BYTES, observed_memory, prepare_device

GIB = 2**30
MIB = 2**20


class CountingCuda:
    """A device on which others use some memory and whose context has a size."""

    def __init__(self, *, context: int, others: int = 3 * GIB, total: int = 24 * GIB, error: Any = None) -> None:
        self.context, self.others, self.total, self.error = context, others, total, error
        self.made = False
        self.fractions: list[float] = []

    def device_memory_used(self, device: Any = None) -> int:
        if self.error is not None:
            raise self.error
        return self.others + (self.context if self.made else 0)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self.made = True
        return self.total - self.device_memory_used(), self.total

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self.fractions.append(fraction)


def plan(**changes: Any) -> ExecutionPlan:
    known = {"device": DeviceKind.CUDA, "effective_batch": 1, "micro_batch": 1, "accumulation": 1}
    return ExecutionPlan(**(known | changes))


def prepare(
    cuda: CountingCuda, environment: dict[str, str] | None = None, *, fraction: float | None = None, **changes: Any
):
    settings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "set_allocator", settings.append)
        for name in ("device_memory_used", "mem_get_info", "get_device_properties", "set_per_process_memory_fraction"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        done = prepare_device(plan(**changes), environment or {}, fraction=fraction)
    return done, settings


@pytest.mark.parametrize(("allocator", "value"), [(Allocator.EXPANDABLE, "True"), (Allocator.NATIVE, "False")])
def test_the_allocator_is_as_planned(allocator: Allocator, value: str) -> None:
    cuda = CountingCuda(context=400 * MIB)
    done, settings = prepare(cuda, allocator=allocator)
    assert settings == [f"expandable_segments:{value}"]
    assert (done.allocator_bytes, done.notes, cuda.fractions, cuda.made) == (None, (), [], False)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_configured_by_hand_is_left_alone(name: str) -> None:
    done, settings = prepare(CountingCuda(context=0), {name: "max_split_size_mb:64"})
    assert settings == []
    assert done.notes == (f"{name}=max_split_size_mb:64 is kept: execution.allocator (expandable) was not applied",)


def test_the_limit_counts_the_context_and_nobody_else() -> None:
    cuda = CountingCuda(context=400 * MIB, others=9 * GIB)
    done, _ = prepare(cuda, memory_limit_bytes=14 * GIB)
    assert done.allocator_bytes == 14 * GIB - 400 * MIB
    assert cuda.fractions == [pytest.approx(done.allocator_bytes / (24 * GIB), rel=1e-15)]
    assert int(cuda.fractions[0] * cuda.total) in range(done.allocator_bytes - 1, done.allocator_bytes + 1)


def test_a_limit_above_the_device_is_no_error() -> None:
    cuda = CountingCuda(context=400 * MIB)
    prepare(cuda, memory_limit_bytes=80 * GIB)
    assert cuda.fractions == [1.0]


class NvmlGone(Exception):
    """As pynvml's errors: of no class of the standard library."""


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), RuntimeError("no driver"), NvmlGone()])
def test_a_context_that_cannot_be_measured_is_assumed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NvmlGone))  # type: ignore[arg-type]
    done, _ = prepare(CountingCuda(context=0, error=error), memory_limit_bytes=4 * GIB)
    assert done.allocator_bytes == 4 * GIB - CONTEXT_BYTES
    assert done.notes == ("NVML is not to be had: the CUDA context is taken to be 512 MiB",)


@pytest.mark.parametrize(("others_grow_by", "taken"), [(7 * GIB, 2 * GIB), (-GIB, 0)])
def test_what_others_do_meanwhile_is_bounded(others_grow_by: int, taken: int) -> None:
    done, _ = prepare(CountingCuda(context=others_grow_by), memory_limit_bytes=14 * GIB)
    assert done.allocator_bytes == 14 * GIB - taken


def test_a_limit_below_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="its CUDA context alone takes 400 MiB"):
        prepare(CountingCuda(context=400 * MIB), memory_limit_bytes=300 * MIB)


def test_a_trial_beside_others_keeps_to_its_share() -> None:
    cuda = CountingCuda(context=400 * MIB)
    done, _ = prepare(cuda, fraction=0.25)
    assert (done.allocator_bytes, cuda.fractions) == (6 * GIB, [0.25])
    assert not cuda.made, "the share is the allocator's own: the context need not be measured"


@pytest.mark.parametrize(("fraction", "limit", "allocator"), [(0.25, 14 * GIB, 6 * GIB), (0.9, 4 * GIB, 3 * GIB)])
def test_the_tighter_of_share_and_limit_holds(fraction: float, limit: int, allocator: int) -> None:
    done, _ = prepare(CountingCuda(context=GIB), fraction=fraction, memory_limit_bytes=limit)
    assert done.allocator_bytes == allocator


def test_on_the_cpu_nothing_is_touched() -> None:
    cuda = CountingCuda(context=0)
    done, settings = prepare(cuda, device=DeviceKind.CPU, memory_limit_bytes=GIB)
    assert (settings, cuda.fractions, cuda.made) == ([], [], False)
    assert done.notes == ("execution.memory_limit bound the planner alone: memory of the CPU has no limit of its own",)
    assert prepare(cuda, device=DeviceKind.CPU)[0].notes == ()


@pytest.mark.slow
def test_torch_takes_the_setting_after_its_import() -> None:
    """In a process of its own: it cannot be taken back."""
    code = (
        "import torch\n"
        "from dryfit.settings.memory_terms import DeviceKind\n"
        "from dryfit.settings.execution import ExecutionPlan\n"
        "from dryfit.training.device import prepare_device\n"
        "plan = ExecutionPlan(device=DeviceKind.CUDA, effective_batch=1, micro_batch=1, accumulation=1)\n"
        "prepare_device(plan, {})\n"
        "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "expandable_segments:True", done.stderr


@pytest.mark.slow
def test_the_peak_of_this_process() -> None:
    before = observed_memory(DeviceKind.CPU)
    assert before.rss_bytes is not None
    assert (before.allocated_bytes, before.reserved_bytes) == (None, None)
    held = torch.ones(before.rss_bytes // 4 + 25 * MIB)
    after = observed_memory(DeviceKind.CPU)
    assert after.rss_bytes is not None
    assert after.rss_bytes >= held.nbytes
