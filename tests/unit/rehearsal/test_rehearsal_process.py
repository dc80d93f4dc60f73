"""The process of a rehearsal: whatever it does, an answer comes, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from dryfit.core.errors import ChildError
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.rehearsal import RehearsalAnswer, RehearsalRequest, ScriptEnd
from dryfit.core.settings.execution import DeviceSpec
from dryfit.runtime.rehearsal.rehearsal_process import RehearsalSurroundings, run_rehearsal

DEVICE = DeviceSpec(name="rtx4090", capacity_bytes=24 * 2**30)
SUPPORT = str(Path(__file__).parents[2] / "support")


def surroundings(**variables: str) -> RehearsalSurroundings:
    return RehearsalSurroundings({**os.environ, **variables}, import_paths=(SUPPORT,), module="rehearsal_stand_in")


def request(*arguments: str, timeout_s: float = 60.0) -> RehearsalRequest:
    return RehearsalRequest(
        script="train.py", arguments=arguments, device=DEVICE, timeout_s=timeout_s, scratch_dir="", answer_file=""
    )


def ran(*arguments: str, **variables: str) -> tuple[RehearsalAnswer, str]:
    output: list[bytes] = []
    answer = run_rehearsal(request(*arguments), surroundings(**variables), output.append)
    return answer, b"".join(output).decode()


def test_the_answer_and_the_output_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answer, output = ran("fits", "4", HF_TOKEN="hf_secret_token")
    assert (answer.verdict, answer.end) == (VerdictKind.FITS, ScriptEnd.STOPPED)
    assert "environment True None" in output  # no GPU is to be seen
    assert "on stderr hf_secret_token True ''" in output  # the user's own token, a folder for files, no input
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_is_an_answer() -> None:
    answer, output = ran("abort", HF_TOKEN="hf_secret_token")
    assert (answer.verdict, answer.end, answer.ran) == (VerdictKind.UNKNOWN, ScriptEnd.FAILED, False)
    assert answer.reasons == ("the process of the rehearsal was ended by signal SIGABRT",)
    assert "terminate called without an active exception" in answer.traceback
    assert "hf_secret_token" in output
    assert "hf_secret_token" not in answer.model_dump_json()


@pytest.mark.parametrize(("act", "said"), [("kill", "signal SIGKILL"), ("exit", "status 3, and without an answer")])
def test_each_end_without_an_answer_is_said(act: str, said: str) -> None:
    answer, _ = ran(act)
    assert not answer.ran
    assert said in answer.reasons[0]


def test_a_file_that_is_no_answer_is_an_error() -> None:
    with pytest.raises(ChildError, match="it is no answer"):
        ran("garbage")


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dryfit.runtime.rehearsal.rehearsal_process._LIMIT_EXTRA_S", 2.0)
    answer = run_rehearsal(request("hang", str(tmp_path / "pid"), timeout_s=1.0), surroundings(), lambda _: None)
    assert (answer.end, answer.reasons) == (ScriptEnd.NO_STEP, ("no answer within 4 s",))
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_workers_that_are_left_are_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    answer, _ = ran("leave", str(tmp_path / "pid"))
    assert answer.ran
    assert time.monotonic() - began_s < 30
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_the_process_too(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_rehearsal_process as here
here.run_rehearsal(here.request("hang", sys.argv[1]), here.surroundings(), lambda _: None)
"""
    mark = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", code, str(mark)], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()
        process.wait()
    assert not psutil.pid_exists(int(mark.read_text()))
