"""On a CUDA device: assertions, hung kernels and want of memory are what they are taken for, in real children.

python -m pytest tests/gpu -m gpu
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import trials
from dryfit.processes.child_spec import PRELOAD, ChildExited, ChildLimits, ChildMessage, ChildSpec
from dryfit.processes.failures import classify
from dryfit.settings.errors import FailureKind
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.study_file import Isolation
from dryfit.settings.training_messages import TrainResult
from dryfit.settings.wire import Note, Report, Verdict
from gpu_jobs import WRONG
from runtime_jobs import Harness, until_dead

LIMITS = ChildLimits(start_s=120.0, hang_s=60.0, total_s=None, stop_grace_s=60.0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["assert", "hang", "oom", "context"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A fork server as studies have it, and one thing wrong in its children."""
    (tmp_path / "harness").mkdir()
    with Harness(
        tmp_path / "harness",
        isolation=Isolation.FORKSERVER,
        preload=(*PRELOAD, "gpu_jobs"),
        entry="gpu_jobs:run",
        limits=LIMITS,
        more_environment={WRONG: request.param, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    ) as opened:
        yield opened


def run(harness: Harness, folder: Path, encoder: Path, name: str, **changes: Any) -> ChildExited:
    """One attempt of the trial of ten steps in ``folder``."""
    limits = changes.pop("limits", LIMITS)
    trial = trials.small(folder, encoder=encoder, train={"evals_per_epoch": 5})
    trial.plan = trial.plan.model_copy(update={"device": DeviceKind.CUDA})
    body = trial.request(checkpoint_every_s=1e-9).model_copy(update={"visible_device": "0", **changes})
    harness.supervisor.start(ChildSpec(name, harness.folder / name, body, limits))
    answered = 0
    while True:
        harness.until(lambda event: event.key == name)
        mine = [event for event in harness.events if event.key == name]
        reports = [e.message for e in mine if isinstance(e, ChildMessage) and isinstance(e.message, Report)]
        for report in reports[answered:]:
            harness.supervisor.answer(name, Verdict(n=report.point.n, proceed=True))
        answered = len(reports)
        if isinstance(mine[-1], ChildExited):
            return mine[-1]


@pytest.mark.parametrize("harness", ["assert"], indirect=True)
def test_an_assertion_that_is_met_at_full_speed_is_known_and_its_batch_too(
    harness: Harness, tmp_path: Path, encoder: Path
) -> None:
    first = run(harness, tmp_path / "trial", encoder, "first")
    assert classify(first.evidence, first.result).kind is FailureKind.DEVICE_ASSERT
    assert "at optimizer step 3 of 10" in first.evidence.fault.context
    assert "batch of the split train: 8 row(s): r" in first.evidence.fault.context


@pytest.mark.parametrize("harness", ["assert"], indirect=True)
def test_the_diagnostic_attempt_knows_the_line(harness: Harness, tmp_path: Path, encoder: Path) -> None:
    found = run(harness, tmp_path / "trial", encoder, "slow", diagnostic=True)
    assert classify(found.evidence, found.result).kind is FailureKind.DEVICE_ASSERT
    fault = found.evidence.fault
    # With blocking launches the exception comes out of the very call: the look-up in the embedding.
    assert re.search(r"in embedding\n.*torch\.embedding\(", fault.traceback), fault.traceback
    assert "micro-batch 1 of 1" in fault.context
    assert re.search(r"labels [01] to [01] of 2 classes, token ids \d+ to \d+ of \d+ in the embedding", fault.context)


@pytest.mark.parametrize("harness", ["hang"], indirect=True)
def test_a_hung_kernel_is_killed_with_its_stacks_and_the_device_is_free_again(
    harness: Harness, tmp_path: Path, encoder: Path
) -> None:
    limits = ChildLimits(start_s=120.0, hang_s=20.0, total_s=None, stop_grace_s=60.0)
    found = run(harness, tmp_path / "trial", encoder, "hung", limits=limits)
    assert classify(found.evidence, found.result).kind is FailureKind.HANG
    assert found.evidence.killed_by_us == "hang"
    assert found.evidence.phase == "train"
    assert "sleeping" in found.evidence.stacks or "running" in found.evidence.stacks
    assert "loop.py" in (harness.folder / "hung" / "stacks.txt").read_text()
    torch.ones(1, device="cuda").sum().item()  # in this process: the device answers


@pytest.mark.parametrize("harness", ["oom"], indirect=True)
def test_want_of_memory_is_known_by_its_type(harness: Harness, tmp_path: Path, encoder: Path) -> None:
    found = run(harness, tmp_path / "trial", encoder, "large")
    assert classify(found.evidence, found.result).kind in (FailureKind.OOM_DEVICE, FailureKind.OOM_NEIGHBOUR)
    assert found.evidence.fault.type_names[0] == "torch.OutOfMemoryError"
    assert "at optimizer step 3 of 10" in found.evidence.fault.context


@pytest.mark.parametrize("harness", ["context"], indirect=True)
def test_a_fork_of_the_preloaded_server_makes_its_context_cleanly(
    harness: Harness, tmp_path: Path, encoder: Path
) -> None:
    found = run(harness, tmp_path / "trial", encoder, "clean")
    assert found.result is not None and isinstance(found.result.answer, TrainResult), found.evidence.log_tail
    note = next(e.message for e in harness.events if isinstance(getattr(e, "message", None), Note))
    assert isinstance(note, Note)
    assert note.text == "(False, False) 1024.0 1"
    server = harness.supervisor.server_pid
    assert server is not None
    harness.supervisor.close()
    assert until_dead(server)
