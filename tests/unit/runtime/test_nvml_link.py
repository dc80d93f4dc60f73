"""NVML asked through a process of its own: the same answers, and a driver that hangs or crashes holds nobody."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dryfit.processes.gpus import GpuProcess, GpuState, NvmlLink, ProcessOwner
from dryfit.processes.helpers import carries_marker
from dryfit.settings.wire import MARKER_VARIABLE
from nvml import GIB, Driver

MIB = 2**20
PATIENT_S = 120.0
"""No answer takes that long, on however busy a machine."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver.install(tmp_path / "driver", monkeypatch)


class Asked:
    """A link, and what it noted."""

    def __init__(self, folder: Path, answer_s: float = PATIENT_S) -> None:
        self.notes: list[str] = []
        self.log = folder / "nvml.txt"
        self.link = NvmlLink("mine", self.log, self.notes.append, answer_s)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    found = Asked(tmp_path)
    yield found
    found.link.close()


def gone(pid: int) -> bool:
    """Whether a process has ended, within a minute."""
    for _ in range(6000):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_answers_come_through_as_they_are(driver: Driver, asked: Asked) -> None:
    ours = subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER_VARIABLE: "mine"})
    try:
        driver.set({ours.pid: 300 * MIB, os.getpid(): 100 * MIB, 2**22 + 7: None})
        assert asked.link.pid is None, "nobody has asked yet"
        asked.link.mark_own(2**22 + 7)
        expected = (
            GpuProcess(ours.pid, 300 * MIB, ProcessOwner.OURS),
            GpuProcess(os.getpid(), 100 * MIB, ProcessOwner.OTHER),
            GpuProcess(2**22 + 7, None, ProcessOwner.GONE),
        )
        assert asked.link.look("0") == GpuState(GIB, 400 * MIB, expected, memory_errors=0)
        assert asked.link.look("7") is None
        assert asked.link.xids("0") == ()
        asked.link.set_uuids({"7": "a"})
        seen = asked.link.look("7")
        assert seen is not None and seen.total_bytes == GIB
    finally:
        ours.kill()
        ours.wait()
    assert asked.notes == [] and asked.log.read_text() == ""


def test_the_process_is_the_studys_own_and_ends_with_the_link(driver: Driver, asked: Asked) -> None:
    assert asked.link.look("0") is not None
    pid = asked.link.pid
    assert pid is not None and carries_marker(pid, "mine"), "a sweep would find it"
    os.kill(pid, signal.SIGTERM)  # as a batch system may send to every process of a job
    assert asked.link.look("0") is not None
    asked.link.close()
    assert gone(pid)
    assert (asked.link.look("0"), asked.link.xids("0"), driver.looks) == (None, (), 2)
    assert asked.notes == []


def test_a_driver_that_hangs_is_asked_once_and_told_of_once(driver: Driver, tmp_path: Path) -> None:
    driver.mark("hangs")
    found = Asked(tmp_path, answer_s=3.0)
    assert found.link.look("0") is None
    assert found.link.pid is not None and gone(found.link.pid)
    assert (found.link.look("0"), found.link.look("1"), found.link.xids("0")) == (None, None, ())
    assert driver.looks <= 1
    (note,) = found.notes
    assert note.startswith("the GPU driver (NVML) has not answered for 3 s: this session goes on without what it tells")
    assert "nvidia-smi" in note
    found.link.close()


def test_a_driver_that_takes_its_process_along_is_told_of_once(driver: Driver, asked: Asked) -> None:
    assert asked.link.look("0") is not None
    driver.mark("dies")
    assert (asked.link.look("0"), asked.link.look("0"), asked.link.xids("0")) == (None, None, ())
    (note,) = asked.notes
    assert "cannot be asked (its process died" in note and str(asked.log) in note


def test_an_error_in_the_process_is_in_its_log(driver: Driver, asked: Asked) -> None:
    driver.set({1: "much"})  # type: ignore[dict-item]
    assert asked.link.look("0") is None
    assert len(asked.notes) == 1
    assert "TypeError" in asked.log.read_text()


def test_without_room_for_a_process_the_session_goes_on(driver: Driver, asked: Asked) -> None:
    shutil.rmtree(asked.log.parent)
    assert asked.link.look("0") is None
    (note,) = asked.notes
    assert "No such file" in note and asked.link.pid is None


CONTROL = """
import sys, time
from pathlib import Path
from dryfit.processes.gpus import NvmlLink
link = NvmlLink("mine", Path(sys.argv[1]), print, 120.0)
assert link.look("0") is not None
print(link.pid, flush=True)
Path(sys.argv[2]).touch()
link.look("0")
"""


def test_it_dies_with_the_control_process_even_while_it_hangs(driver: Driver, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "nvml.txt"), str(driver.folder / "hangs")]
    control = subprocess.Popen([sys.executable, "-c", CONTROL, *arguments], stdout=subprocess.PIPE, text=True)
    assert control.stdout is not None
    with control.stdout:
        pid = int(control.stdout.readline())
    while driver.looks < 2:
        assert control.poll() is None
        time.sleep(0.01)
    control.kill()
    control.wait()
    assert gone(pid)
