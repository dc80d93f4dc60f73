"""Rehearsals of one command fork from one process: each is as from nothing, and none leaves anything to the next."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dryfit.processes import rehearsal_process, rehearsal_stem
from dryfit.processes.rehearsal_process import RehearsalSurroundings, run_rehearsal
from dryfit.processes.rehearsal_stem import RehearsalStem, shared_imports
from dryfit.settings.devices import parse_device
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
act, *rest = sys.argv[1:]
print("begins", act, os.environ.get("LEFT"), __name__, rest, flush=True)
os.environ["LEFT"] = "something"
import torch
torch.manual_seed(7)
if act == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "leaves":
    os._exit(5)
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(5):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    if act == "fails":
        raise ValueError("by itself")
    optimizer.step()
"""
OF_THE_PROCESS = ("rehearsal_s", "host_peak_bytes", "notes")


class Rehearsed:
    """Answers and output of a script."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.folder = folder
        self.said = b""

    def __call__(self, *arguments: str, device: str = "24GiB", **request: Any) -> RehearsalAnswer:
        self.said = b""
        made = RehearsalRequest(
            script=str(self.folder / "train.py"),
            arguments=arguments,
            device=parse_device(device),
            scratch_dir="",
            answer_file="",
            **request,
        )
        return run_rehearsal(made, RehearsalSurroundings(dict(os.environ), folder=self.folder), self._add)

    def _add(self, output: bytes) -> None:
        self.said += output


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RehearsalStem]:
    """The processes that were forked from."""
    made: list[RehearsalStem] = []

    class Counted(RehearsalStem):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("dryfit.processes.rehearsal_process.RehearsalStem", Counted)
    return made


def facts(answer: RehearsalAnswer) -> dict[str, Any]:
    found = answer.model_dump(mode="json", exclude=OF_THE_PROCESS)
    # In /tmp itself other processes write: the log of these tests, which grew there meanwhile, was counted once.
    found["muted"] = [one for one in found["muted"] if one["where"] != tempfile.gettempdir()]
    return found


def test_each_is_as_from_nothing(tmp_path: Path, started: list[RehearsalStem]) -> None:
    rehearsed = Rehearsed(tmp_path)
    alone = {device: facts(rehearsed("trains", "a b", device=device)) for device in ("24GiB", "h100-80")}
    assert not started
    with shared_imports():
        for device in ("24GiB", "h100-80", "24GiB"):
            assert facts(rehearsed("trains", "a b", device=device)) == alone[device]
            assert b"begins trains None __main__ ['a b']" in rehearsed.said
        failed = rehearsed("fails")
        assert failed.end == "failed" and "ValueError: by itself" in failed.traceback
        (stem,) = started
        assert stem.is_alive
    assert not stem.is_alive and rehearsal_stem.stem_for("any", lambda: stem) is None


def test_a_script_that_dies_takes_nobody_with_it(tmp_path: Path, started: list[RehearsalStem]) -> None:
    rehearsed = Rehearsed(tmp_path)
    with shared_imports():
        assert rehearsed("dies").killed_by == "SIGKILL"
        left = rehearsed("leaves")
        assert left.end == "failed" and "exit status 5" in left.traceback
        assert rehearsed("trains").ran
        assert len(started) == 1
        os.kill(started[0]._process.pid, signal.SIGKILL)
        started[0]._process.wait()
        assert rehearsed("trains").ran and len(started) == 2


def test_a_rehearsal_over_its_limit_ends_alone(
    tmp_path: Path, started: list[RehearsalStem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dryfit.processes.rehearsal_process._LIMIT_EXTRA_S", 0.0)
    rehearsed = Rehearsed(tmp_path)
    with shared_imports():
        late = rehearsed("trains", timeout_s=0.001)
        assert not late.ran and "no answer within" in late.reasons[0]
        assert not started[0].is_alive
        monkeypatch.undo()
        assert rehearsed("trains").ran
    names = [Path("/proc", one, "cmdline") for one in os.listdir("/proc") if one.isdigit()]
    running = [one.read_bytes() for one in names if one.exists()]
    assert not any(str(tmp_path).encode() in one for one in running)


def test_imports_ahead_write_nothing_and_a_broken_torch_is_told_as_ever(
    tmp_path: Path, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed, temporary = Rehearsed(tmp_path), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with shared_imports():
        assert rehearsed("trains").ran
        assert not [one for one in os.listdir(temporary) if "inductor" in one]
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcuda is gone')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    alone = rehearsed("trains")
    assert "OSError: libcuda is gone" in alone.reasons[0]
    with shared_imports():
        for _ in range(2):
            assert rehearsed("trains").reasons == alone.reasons


def test_who_interrupts_what_has_not_begun_need_not_wait(tmp_path: Path) -> None:
    asked: list[None] = []

    def is_over() -> bool:
        asked.append(None)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return False

    reads, writes = os.pipe()
    end = rehearsal_process._followed(reads, is_over, tmp_path / "nothing", lambda _: None, 1e9)
    os.close(reads)
    os.close(writes)
    assert end.is_interrupted and not end.has_ended
