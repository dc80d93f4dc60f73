"""The process of a rehearsal: whatever it does, an answer comes, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dryfit.processes.rehearsal_process import RehearsalSurroundings, run_rehearsal
from dryfit.processes.wall import claimed_folder
from dryfit.settings.choices import Wall
from dryfit.settings.errors import ChildError
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer, RehearsalRequest, ScriptEnd

DEVICE = DeviceSpec(name="rtx4090", capacity_bytes=24 * 2**30)
SUPPORT = str(Path(__file__).parents[2] / "support")


def surroundings(**variables: str) -> RehearsalSurroundings:
    return RehearsalSurroundings({**os.environ, **variables}, import_paths=(SUPPORT,), module="rehearsal_stand_in")


def request(*arguments: str, timeout_s: float = 60.0, wall: Wall | None = None) -> RehearsalRequest:
    places = {"scratch_dir": "", "answer_file": ""}
    return RehearsalRequest(
        script="train.py", arguments=arguments, device=DEVICE, timeout_s=timeout_s, wall=wall, **places
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


@pytest.fixture
def sleeps() -> Iterator[str]:
    """How long the programs of a script sleep: no other process sleeps so long."""
    seconds = f"{1000 + os.getpid() / 1e7:.7f}"
    yield seconds
    for process in asleep(seconds):
        process.kill()


def asleep(word: str) -> list[psutil.Process]:
    """The processes that sleep so long; of a path, those that were started with it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(one.startswith(word) for one in process.cmdline()):
                found.append(process)
    return found


def all_gone(word: str) -> bool:
    """Whether none of them is left, soon: the kernel ends them one after the other."""
    return not psutil.wait_procs(asleep(word), timeout=60)[1]


@pytest.mark.parametrize("wall", Wall)
def test_a_process_that_hangs_is_ended(wall: Wall, sleeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dryfit.processes.rehearsal_process._LIMIT_EXTRA_S", 2.0)
    answer = run_rehearsal(request("hang", sleeps, timeout_s=1.0, wall=wall), surroundings(), lambda _: None)
    assert (answer.end, answer.reasons) == (ScriptEnd.NO_STEP, ("no answer within 4 s",))
    assert all_gone(sleeps)


@pytest.mark.parametrize("wall", Wall)
def test_workers_that_are_left_are_ended(wall: Wall, sleeps: str) -> None:
    answer = run_rehearsal(request("leave", sleeps, wall=wall), surroundings(), lambda _: None)
    assert answer.ran
    assert not asleep(sleeps)


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]


@pytest.mark.each_value
@pytest.mark.parametrize("wall", Wall)
@pytest.mark.parametrize("number", ENDS)
def test_a_signal_to_the_command_leaves_nothing(
    number: signal.Signals, wall: Wall, sleeps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {SUPPORT!r}]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in its background ignore two of them
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT): signal.signal(number, signal.SIG_DFL)
import test_rehearsal_process as here
asked = here.request("hang", sys.argv[1], wall=here.Wall(sys.argv[2]))
here.run_rehearsal(asked, here.surroundings(), lambda data: (sys.stdout.buffer.write(data), sys.stdout.flush()))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code, sleeps, wall]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        try:
            while process.stdout.readline() != b"ready\n":
                assert process.poll() is None
            while len(asleep(sleeps)) < 3:  # the last one is on its way
                assert process.poll() is None
            process.send_signal(number)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == (-number if number is not signal.SIGINT else process.returncode or None)
    assert all_gone(sleeps)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    while True:  # that of a process that was killed is removed by the next one, once it has let go of its files
        with claimed_folder() as folder:
            if list(tmp_path.iterdir()) == [folder]:
                break
