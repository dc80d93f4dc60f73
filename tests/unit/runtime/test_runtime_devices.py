"""What NVML says of devices, through a stand-in for its module: names, whose memory it is, errors, no driver at all."""

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

from dryfit.processes.evidence import EvidenceCollector
from dryfit.processes.failure_texts import lost_devices
from dryfit.processes.gpus import FALLEN_OFF, GpuMonitor, GpuProcess, GpuState, NvmlLink, NvmlMonitor, ProcessOwner
from dryfit.processes.helpers import carries_marker, lives
from dryfit.settings.errors import Evidence
from dryfit.settings.wire import MARKER_VARIABLE
from nvml import GIB, Board, Driver, FakeNvml, ScriptedDevices

OURS, OTHER = 11, 12


def devices(nvml: FakeNvml, *, ours: tuple[int, ...] = (OURS,), alive: tuple[int, ...] = (OURS, OTHER)) -> NvmlMonitor:
    return NvmlMonitor("marker", nvml, is_ours=lambda pid, marker: pid in ours, lives=lambda pid: pid in alive)


def test_a_look_says_how_much_and_whose() -> None:
    board = Board("GPU-a", processes={OURS: 3 * GIB, OTHER: 5 * GIB}, extra=GIB)
    look = devices(FakeNvml(board)).look("0")
    assert (look.total_bytes, look.used_bytes) == (24 * GIB - GIB // 2, 9 * GIB)
    assert {one.pid: one.owner for one in look.processes} == {OURS: ProcessOwner.OURS, OTHER: ProcessOwner.OTHER}
    assert look.neighbour_bytes(3 * GIB, ours=True) == 6 * GIB
    assert (look.unaccounted_bytes, look.memory_errors, look.owners_known) == (GIB, 0, True)


def test_an_older_driver_counts_what_it_keeps_as_used() -> None:
    look = devices(FakeNvml(Board("GPU-a"), old=True, errors=None)).look("0")
    assert (look.total_bytes, look.used_bytes, look.memory_errors) == (24 * GIB, GIB // 2, None)
    assert look.free_bytes == 24 * GIB - GIB // 2


def test_every_way_to_name_a_device() -> None:
    part = Board("MIG-1234-x", total=5 * GIB)
    whole = Board("GPU-abcd-2", parts=[part])
    part.parent = whole
    found = devices(FakeNvml(Board("GPU-abce-1", total=8 * GIB), whole))
    totals = {name: (look.total_bytes if (look := found.look(name)) else None) for name in (
        "0", "1", "7", "GPU-abcd-2", "GPU-abce", "GPU-abc", "MIG-1234-x", "MIG-none", ""
    )}  # fmt: skip
    half = GIB // 2
    assert totals == {
        "0": 8 * GIB - half,
        "1": 24 * GIB - half,
        "7": None,
        "GPU-abcd-2": 24 * GIB - half,
        "GPU-abce": 8 * GIB - half,
        "GPU-abc": None,
        "MIG-1234-x": 5 * GIB - half,
        "MIG-none": None,
        "": None,
    }


def test_cuda_may_count_devices_in_another_order() -> None:
    nvml = FakeNvml(Board("GPU-slow", total=8 * GIB), Board("GPU-fast", total=80 * GIB))
    found = devices(nvml)
    found.set_uuids({"0": "fast", "1": "slow"})
    first, second = found.look("0"), found.look("1")
    assert (first.total_bytes, second.total_bytes) == (80 * GIB - GIB // 2, 8 * GIB - GIB // 2)


def test_memory_of_ours_that_is_gone_is_told_from_a_neighbours() -> None:
    board = Board("GPU-a", processes={OURS: 3 * GIB, OTHER: GIB, 99: GIB})
    ours, alive = [OURS], [OURS, OTHER]
    found = NvmlMonitor("m", FakeNvml(board), is_ours=lambda pid, _: pid in ours, lives=lambda pid: pid in alive)
    assert found.look("0") is not None
    ours.clear()
    alive.remove(OURS)
    look = found.look("0")
    assert {one.pid: one.owner for one in look.processes} == {
        OURS: ProcessOwner.GONE,
        OTHER: ProcessOwner.OTHER,
        99: ProcessOwner.HIDDEN,
    }
    assert look.held_bytes(ProcessOwner.GONE) == 3 * GIB
    alive.append(OURS)  # its number was given to somebody else
    again = found.look("0")
    assert again is not None and again.held_bytes(ProcessOwner.GONE) == 0


def test_a_process_that_never_was_looked_at_is_known_by_its_own_word() -> None:
    found = devices(FakeNvml(Board("GPU-a", processes={77: GIB})), alive=())
    found.mark_own(77)
    look = found.look("0")
    assert look is not None and look.held_bytes(ProcessOwner.GONE) == GIB


def test_where_nobody_owners_known_it_is_ours_is_as_planned() -> None:
    blind = GpuState(24 * GIB, 9 * GIB)
    assert blind.neighbour_bytes(6 * GIB, ours=True) == 3 * GIB
    assert blind.neighbour_bytes(0, ours=False) == 9 * GIB
    hidden = GpuState(24 * GIB, 9 * GIB, (GpuProcess(5, 9 * GIB, ProcessOwner.HIDDEN),))
    assert hidden.neighbour_bytes(6 * GIB, ours=True) == 3 * GIB
    starting = GpuState(24 * GIB, 9 * GIB, (GpuProcess(5, 9 * GIB, ProcessOwner.OTHER),))
    assert starting.neighbour_bytes(6 * GIB, ours=True) == 9 * GIB


def test_xids_are_kept_by_device_and_mig_parts_hear_of_their_whole() -> None:
    part = Board("MIG-p")
    first, second = Board("GPU-a", parts=[part]), Board("GPU-b")
    part.parent = first
    nvml = FakeNvml(first, second)
    found = devices(nvml)
    assert found.xids("MIG-p") == found.xids("1") == ()
    nvml.events += [(first, 31), (second, 48), (first, 43)]
    assert found.xids("MIG-p") == (31, 43)
    assert found.xids("1") == (48,)
    assert nvml.registered == [first, second]


def test_a_lost_device_says_so_once() -> None:
    board = Board("GPU-a")
    found = devices(FakeNvml(board))
    assert found.look("0") is not None
    board.lost = True
    assert found.look("0") is None and found.look("0") is None
    assert found.xids("0") == (FALLEN_OFF,)


def test_no_driver_is_no_error() -> None:
    nvml = FakeNvml(Board("GPU-a"), driver=False)
    found = devices(nvml)
    assert (found.look("0"), found.xids("0")) == (None, ())
    found.close()
    assert nvml.shutdowns == 0
    assert (GpuMonitor().look("0"), GpuMonitor().xids("0")) == (None, ())


def test_nvml_is_loaded_at_the_first_look_and_let_go() -> None:
    nvml = FakeNvml(Board("GPU-a"))
    found = devices(nvml)
    assert nvml.inits == 0
    found.look("0")
    found.look("0")
    found.close()
    assert (nvml.inits, nvml.shutdowns) == (1, 1)
    assert found.look("0") is None


def test_the_real_library_where_there_is_no_driver() -> None:
    """In a process of its own: as every study does it, on this machine."""
    code = (
        "from dryfit.processes.gpus import NvmlMonitor\n"
        "found = NvmlMonitor('m')\n"
        "print(found.look('GPU-none'), found.xids('GPU-none')); found.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("None ()", 0), done.stderr


def test_ours_are_known_by_their_marker() -> None:
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER_VARIABLE: "mine"})
    try:
        while not carries_marker(child.pid, "mine"):  # for a moment after it began, the kernel shows no environment
            assert child.poll() is None
        assert lives(child.pid)
        assert not carries_marker(child.pid, "yours")
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(child.pid), "a zombie does not live"
        child.wait()
    assert not lives(child.pid)


# ---- what is seen around a child's end


def test_the_surroundings_of_a_child_that_ends(tmp_path: Path) -> None:
    seen = ScriptedDevices(reported={"0": [13]})
    seen.set("0", 24 * GIB, (OURS, 2 * GIB, ProcessOwner.OURS), (OTHER, 5 * GIB, ProcessOwner.OTHER), extra=GIB)
    around = EvidenceCollector(seen, tmp_path, tmp_path / "nowhere")
    around.placed("one", "0", 7 * GIB)
    around.placed("two", "0", 3 * GIB)
    seen.reported["0"].append(79)
    found = around.probe("one", Evidence(exit_code=1, peak_bytes=6))
    assert (found.exit_code, found.peak_bytes) == (1, 6)
    assert (found.device, found.planned_bytes, found.xids) == ("0", 7 * GIB, (79,))
    assert (found.device_total_bytes, found.device_free_bytes) == (24 * GIB, 16 * GIB)
    assert found.neighbour_bytes == 6 * GIB
    assert found.shm_free_bytes is None and found.disk_free_bytes
    assert around.probe("one", Evidence()).device is None, "an attempt ends once"


def test_the_surroundings_of_a_child_with_several_devices(tmp_path: Path) -> None:
    seen = ScriptedDevices(reported={"0": [13], "1": [], "2": []})
    seen.set("0", 24 * GIB, (OURS, 2 * GIB, ProcessOwner.OURS), (OTHER, GIB, ProcessOwner.OTHER))
    seen.set("1", 40 * GIB, (OURS, 2 * GIB, ProcessOwner.OURS), (OTHER, 30 * GIB, ProcessOwner.OTHER))
    around = EvidenceCollector(seen, tmp_path, tmp_path / "nowhere")
    for device in ("0", "1", "2"):
        around.placed("one", device, 7 * GIB)
    around.placed("two", "1", 3 * GIB)
    seen.reported["1"].append(79)
    seen.reported["2"] += [31, 43]
    found = around.probe("one", Evidence(exit_code=1))
    assert (found.device, found.planned_bytes) == ("0,1,2", 7 * GIB)
    assert (found.xids, found.xid_devices) == ((79, 31, 43), ("1", "2", "2"))
    # 24 - 1 GiB are more than 40 - 30: what the trial could have had of its second device is told.
    assert (found.device_total_bytes, found.device_free_bytes) == (40 * GIB, 8 * GIB)
    assert found.neighbour_bytes == 30 * GIB
    assert lost_devices(found, "here/0,here/1,here/2") == ("here/1",)
    assert lost_devices(Evidence(xids=(31,), xid_devices=("2",)), "0,2") == ("0", "2"), "nobody knows which"
    assert lost_devices(Evidence(), "0") == ("0",)
    assert around.probe("two", Evidence()).device == "1"


@pytest.mark.parametrize("seen", [GpuMonitor(), ScriptedDevices()])
def test_where_nothing_is_known_nothing_is_said(tmp_path: Path, seen: GpuMonitor | ScriptedDevices) -> None:
    around = EvidenceCollector(seen, tmp_path)
    around.placed("one", "0", None)
    found = around.probe("one", Evidence())
    assert (found.device, found.device_free_bytes, found.neighbour_bytes, found.xids) == ("0", None, None, ())
    assert around.probe("plan", Evidence()).device is None


# ---- NVML asked through a process of its own: the same answers, and a driver that hangs or crashes holds nobody

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
