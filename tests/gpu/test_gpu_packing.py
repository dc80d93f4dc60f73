"""On a CUDA device: trials share it within their fences, neighbours are seen, and a killed process gives all back.

python -m pytest tests/gpu -m gpu
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dryfit.processes.gpus import GpuState, NvmlMonitor, ProcessOwner
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import MARKER_VARIABLE
from dryfit.training.resolve import device_specs
from study_runs import ends, fold, run, write_study

MIB = 2**20
HOLD = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(size_bytes: int, marker: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds memory of the first device."""
    environment = {**os.environ, MARKER_VARIABLE: marker}
    words = [sys.executable, "-c", HOLD, str(size_bytes)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def devices() -> Iterator[NvmlMonitor]:
    found = NvmlMonitor("mine")
    found.set_uuids({"0": str(torch.cuda.get_device_properties(0).uuid)})
    yield found
    found.close()


def look(devices: NvmlMonitor) -> GpuState:
    found = devices.look("0")
    assert found is not None, "there is a driver, so something is known"
    return found


def test_nvml_and_torch_mean_the_same_device(devices: NvmlMonitor) -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    assert abs(look(devices).total_bytes - total_bytes) <= 0.01 * total_bytes


def test_a_neighbour_is_seen_and_told_from_ours(devices: NvmlMonitor) -> None:
    before = look(devices).neighbour_bytes(0, ours=False)
    with holder(512 * MIB, "somebody else"):
        assert look(devices).neighbour_bytes(0, ours=False) - before >= 512 * MIB
    with holder(512 * MIB, "mine"):
        seen = look(devices)
        if not seen.held_bytes(ProcessOwner.OURS):
            pytest.skip("the driver lists no processes here, as in some containers")
        assert seen.neighbour_bytes(0, ours=True) - before < 256 * MIB


def test_a_killed_process_gives_its_memory_back(devices: NvmlMonitor) -> None:
    before = look(devices).used_bytes
    with holder(1024 * MIB, "mine") as process:
        look(devices)
        process.kill()
        process.wait()
        deadline_s = time.monotonic() + 60
        while (left := look(devices)).used_bytes > before + 64 * MIB and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert left.used_bytes <= before + 64 * MIB
        assert left.held_bytes(ProcessOwner.GONE) == 0


def test_several_trials_share_a_card_within_their_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_study(tmp_path / "study", trials=6, search='sampler = "random"', runtime='parallel = "auto"')
    done = run("tune", tmp_path / "study", "--set", "execution.device=cuda")
    assert done.returncode == 0, done.stderr
    state = fold(tmp_path / "study")
    assert state.counts[Outcome.COMPLETE] == 6
    assert state.sessions[-1].set_aside == {}
    for trial in state.trials:
        (attempt,) = trial.attempts
        assert attempt.needs_bytes is not None and trial.observed is not None
        assert (trial.observed.reserved_bytes or 0) <= attempt.needs_bytes


# ---- On a CUDA device: what is planned for is the device that is there


def test_the_device_that_is_there() -> None:
    spec = device_specs(torch.cuda.device_count())[0]
    _, total_bytes = torch.cuda.mem_get_info(0)
    assert spec.name == torch.cuda.get_device_name(0)
    assert spec.capacity_bytes == total_bytes
    assert spec.capability == torch.cuda.get_device_capability(0)


def test_a_study_plans_every_trial_and_observes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_study(tmp_path / "study", trials=3, search='sampler = "random"')
    done = run("tune", tmp_path / "study", "--set", "execution.device=cuda")
    assert done.returncode == 0, done.stderr
    for trial in fold(tmp_path / "study").trials:
        assert trial.plan.answer.verdict is VerdictKind.FITS, trial.plan.answer.reasons
        assert trial.plan.answer.device.name == torch.cuda.get_device_name(0)
        assert trial.observed is not None and trial.observed.allocated_bytes
    assert "largest observed / planned" in run("show", tmp_path / "study").stdout


def test_what_the_limit_forbids_is_refused_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limits = "max_refused_in_a_row = 2"
    write_study(tmp_path / "study", execution='memory_limit = "64MiB"\ndevice = "cuda"', runtime=limits)
    done = run("tune", tmp_path / "study")
    assert done.returncode == 1, done.stderr
    assert "the last 2 trials were refused: none fits" in done.stderr
    assert not any(trial.attempts for trial in fold(tmp_path / "study").trials)


# ---- On a CUDA device: children of the fork server make their contexts cleanly, in every precision, side by side


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_trials_side_by_side_on_one_card(tmp_path: Path, precision: str) -> None:
    write_study(tmp_path / "study", trials=4, search='sampler = "random"', runtime="parallel = 2")
    done = run("tune", tmp_path / "study", "--set", f"train.precision={precision}", "--set", "execution.device=cuda")
    assert done.returncode == 0, done.stderr
    state = fold(tmp_path / "study")
    assert state.counts[Outcome.COMPLETE] == 4
    assert state.resolved.device == "cuda"
    assert all(attempt.device == "here/0" for trial in state.trials for attempt in trial.attempts)
    assert all(len(trial.attempts) == 1 for trial in state.trials)


def test_a_repeated_study_repeats_its_parameters(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / name, trials=2, search='sampler = "random"')
        assert run("tune", tmp_path / name, "--set", "execution.device=cuda").returncode == 0
    first, second = ends(tmp_path / "one"), ends(tmp_path / "two")
    assert [end.params for end in first] == [end.params for end in second]
    for one, two in zip(first, second, strict=True):
        assert one.value == pytest.approx(two.value, abs=0.2)
