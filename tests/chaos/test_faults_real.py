"""Every fault is made for real; the study says what it was and what was done, and ends with the trials asked for."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import breaking
import dryfit
from breaking import ALWAYS
from chaos import carriers
from dryfit.documents.story import story_lines
from dryfit.ledger.events import AttemptEnded, SessionOpened
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.state import TrialState
from dryfit.processes import failures
from dryfit.processes.attempt import MOST_BYTES
from dryfit.processes.helpers import marker_of
from dryfit.settings.errors import ExitStatus, FailureKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE, MARKER_VARIABLE, STACKS_FILE
from dryfit.study.functions import story as told
from dryfit.study.next_step import End
from fenced import in_own_mounts, memory_group
from runtime_jobs import alive
from study_runs import (
    DEADLINE_S,
    command,
    events_of,
    fold,
    marked_processes,
    run,
    summary_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

SUPPORT = str(Path(breaking.__file__).parent)
KILLED, CRASHED = FailureKind.KILLED, FailureKind.NATIVE_CRASH


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What time must heal is healed at once here."""
    monkeypatch.setattr(failures, "_DELAY_MAX_S", 0.05)


def tune(folder: Path, *points: Mapping[str, Any], function: Any = breaking.breaks, **tables: Any) -> dryfit.TuneResult:
    """A study of exactly these points, one trial each."""
    names = list(points[0])
    space = {name: list(dict.fromkeys(point[name] for point in points)) for name in names}
    return dryfit.tune(
        objective=function,
        space=space,
        trials=len(points),
        folder=folder,
        search={"sampler": "random", "mirror": "none", "enqueue": [dict(point) for point in points]},
        runtime={"parallel": 3, "max_failed_in_a_row": 100, **tables.pop("runtime", {})},
        **tables,
    )


def faults(*cases: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"fault": fault, "times": times} for fault, times in cases]


def assert_ended(folder: Path, trials: int) -> list[TrialState]:
    """Exactly the trials asked for, none running, no process left."""
    counts = summary_of(folder)["trials"]
    assert (counts["total"], counts["running"]) == (trials, 0)
    state = fold(folder)
    assert state.open_trials == [] and state.counted == trials
    assert marked_processes(folder) == []
    assert not list(folder.glob("trials/**/checkpoints"))
    return state.trials


def story_of(folder: Path, trial: TrialState) -> str:
    return "\n".join(story_lines(told(folder, trial.number)))


def followed(trial: TrialState) -> list[tuple[FailureKind, str]]:
    """Kind and action of each attempt that failed."""
    return [(one.failure.kind, one.failure.action.value) for one in trial.attempts if one.failure is not None]


def assert_story(folder: Path, trial: TrialState, said: str) -> None:
    """The story says of every failed attempt what it was, what was done, and where its log is."""
    story = story_of(folder, trial)
    assert said in story
    for attempt in trial.attempts:
        assert str(StudyLayout(folder).trial(trial.number).attempt(attempt.number) / LOG_FILE) in story
        if attempt.failure is not None:
            assert f"attempt {attempt.number}: {attempt.failure.kind}: {attempt.failure.sentence}" in story


# ---- faults that are the trial's own

ONCE, TWICE = ["retry"], ["retry", "give_up"]
OWN: dict[tuple[str, int], tuple[FailureKind, list[str], Outcome, str]] = {
    ("SIGKILL", 1): (KILLED, ONCE, Outcome.COMPLETE, "killed from outside (SIGKILL)"),
    ("SIGTERM", 1): (FailureKind.PREEMPTED, ONCE, Outcome.COMPLETE, "stopped by a SIGTERM from outside"),
    ("SIGSEGV", 1): (CRASHED, ONCE, Outcome.COMPLETE, "native code crashed (SIGSEGV)"),
    ("SIGSEGV", ALWAYS): (CRASHED, TWICE, Outcome.FAILED, "native code crashed (SIGSEGV)"),
    ("SIGABRT", 1): (CRASHED, ONCE, Outcome.COMPLETE, "native code crashed (SIGABRT)"),
    ("left", ALWAYS): (FailureKind.USER_CODE, ["give_up"], Outcome.FAILED, "it ended its own process (exit status 0)"),
    ("sys.exit", ALWAYS): (FailureKind.USER_CODE, ["give_up"], Outcome.FAILED, "SystemExit: 0"),
    ("half a checkpoint", 1): (KILLED, ONCE, Outcome.COMPLETE, "checkpoint at step 1"),
    ("host memory", 1): (FailureKind.OOM_HOST, ["lighter"], Outcome.COMPLETE, "the machine's memory did not suffice"),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], TrialState]]:
    """A study in which every trial breaks its process, each in another way."""
    folder = tmp_path_factory.mktemp("own") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_DELAY_MAX_S", 0.05)
        result = tune(folder, *faults(*OWN), runtime={"retries": 10})
    assert result.end is End.DONE
    trials = assert_ended(folder, len(OWN))
    return folder, {(str(trial.params["fault"]), int(trial.params["times"])): trial for trial in trials}


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_fault_has_its_kind_its_action_and_its_sentence(
    own: tuple[Path, dict[tuple[str, int], TrialState]], case: tuple[str, int]
) -> None:
    folder, trials = own
    kind, actions, outcome, said = OWN[case]
    trial = trials[case]
    assert (trial.outcome, followed(trial)) == (outcome, [(kind, action) for action in actions]), trial.reason
    assert_story(folder, trial, said)


def test_a_crash_leaves_its_stack_and_a_half_written_checkpoint_is_not_gone_on_from(
    own: tuple[Path, dict[tuple[str, int], TrialState]],
) -> None:
    folder, trials = own
    crashed = trials["SIGABRT", 1]
    stacks = StudyLayout(folder).trial(crashed.number).attempt(1) / STACKS_FILE
    assert "breaking.py" in stacks.read_text(encoding="utf-8")
    assert trials["half a checkpoint", 1].value == 1.5
    assert trials["SIGKILL", 1].value == 0.5


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_with_its_stacks_and_tried_once_more(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    cases = faults(("stopped", 1), ("stuck", 1), ("stuck", ALWAYS))
    assert tune(folder, *cases, runtime={"hang_timeout_s": 5.0}).end is End.DONE
    stopped, stuck, always = assert_ended(folder, 3)
    for trial in (stopped, stuck):
        assert (trial.outcome, followed(trial)) == (Outcome.COMPLETE, [(FailureKind.HANG, "retry")])
    assert (always.outcome, [action for _, action in followed(always)]) == (Outcome.FAILED, TWICE)
    for trial, where in ((stopped, "stopped: gave no stack"), (stuck, "_stuck_in_native_code")):
        assert_story(folder, trial, "gave no sign of life")
        failure = trial.attempts[0].failure
        assert failure is not None and where in failure.detail
    stacks = StudyLayout(folder).trial(stuck.number).attempt(1) / STACKS_FILE
    assert "_stuck_in_native_code" in stacks.read_text(encoding="utf-8")


@pytest.mark.parametrize("mebibytes", [192, pytest.param(1024, marks=pytest.mark.nightly)])
def test_a_process_that_prints_without_end_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int
) -> None:
    monkeypatch.setenv("TALK_MIB", str(mebibytes))
    folder = tmp_path / "study"
    tune(folder, *faults(("talks", 1)))
    (trial,) = assert_ended(folder, 1)
    assert trial.outcome is Outcome.COMPLETE, trial.reason
    log = StudyLayout(folder).trial(0).attempt(1) / LOG_FILE
    text = log.read_bytes()
    assert len(text) < MOST_BYTES
    assert text.startswith(b"dryfit objective child") and b"bytes of this log are left out here" in text
    assert text.endswith(b"the last line\n")


# ---- memory and disks that end, each in a fence of its own


def study_file(folder: Path, fault: str, *, trials: int = 2, more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = f"""
[study]
task = "objective"
trials = {trials}
[objective]
function = "breaking:breaks"
paths = ["{SUPPORT}"]
[space]
fault = ["{fault}"]
times = [1]
[search]
sampler = "random"
mirror = "none"
{more}
"""
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder / "study.toml"


def shell(*words: str | Path) -> str:
    return shlex.join(command(*words))


@pytest.mark.parametrize("fault", ["full disk", pytest.param("over quota", marks=pytest.mark.nightly)])
def test_no_room_on_the_disk_pauses_the_study(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "study"
    result = tune(folder, *faults((fault, 1)))
    assert (result.end, result.status) == (End.PAUSED, ExitStatus.STOPPED)
    assert marked_processes(folder) == []
    assert dryfit.resume(folder).end is End.DONE
    (trial,) = assert_ended(folder, 1)
    assert (trial.outcome, followed(trial)) == (Outcome.COMPLETE, [(FailureKind.DISK_FULL, "pause")])
    assert_story(folder, trial, "no space left on the disk or quota reached")


@pytest.mark.slow
def test_a_disk_that_is_really_full_pauses_the_study_and_loses_nothing(tmp_path: Path) -> None:
    file, disk, after = (
        study_file(tmp_path / "begin", "fills its disk", trials=1),
        tmp_path / "disk",
        tmp_path / "after",
    )
    disk.mkdir()
    done = in_own_mounts(f"""
        mount -t tmpfs -o size=2m tmpfs {disk}
        cp {file} {disk}
        set +e
        {shell("tune", disk, "--quiet")}
        echo "first $?"
        mount -o remount,size=64m {disk}
        {shell("resume", disk, "--quiet")}
        echo "second $?"
        mkdir {after} && cp -R {disk}/study.toml {disk}/*.jsonl {disk}/frozen.toml {disk}/trials {after}
    """)
    ended = [line for line in done.stdout.splitlines() if line.startswith(("first", "second"))]
    assert ended == ["first 3", "second 0"], done.stdout + done.stderr
    (trial,) = assert_ended(after, 1)
    assert trial.outcome is Outcome.COMPLETE
    # Where not even the ledger could be written, the attempt has no end in it: the next run finds it lost.
    assert followed(trial) in ([(FailureKind.DISK_FULL, "pause")], [(FailureKind.LOST, "retry")])


def test_shared_memory_that_is_full_is_told_and_tried_again_with_less(tmp_path: Path) -> None:
    folder = study_file(tmp_path / "study", "full shared memory").parent
    done = in_own_mounts(f"mount -t tmpfs -o size=1m tmpfs /dev/shm; {shell('tune', folder, '--quiet')}")
    assert done.returncode == 0, done.stderr
    for trial in assert_ended(folder, 2):
        assert (trial.outcome, followed(trial)) == (Outcome.COMPLETE, [(FailureKind.SHM_FULL, "lighter")])
        assert_story(folder, trial, "/dev/shm")


@pytest.mark.slow
def test_what_the_kernel_kills_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    folder = study_file(tmp_path / "study", "takes memory", more="[runtime]\nretries = 3").parent
    with memory_group(400 * 2**20) as group:
        script = f'echo $$ > "{group}/cgroup.procs" && exec {shell("tune", folder, "--quiet")}'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
    for trial in assert_ended(folder, 2):
        assert (trial.outcome, followed(trial)) == (Outcome.COMPLETE, [(FailureKind.OOM_HOST, "lighter")])
        assert_story(folder, trial, "killed for want of memory")


# ---- what a machine with a GPU would say, in its own words

NO_MEMORY, NATIVE = FailureKind.OOM_DEVICE, FailureKind.NATIVE_CRASH
SAID: dict[tuple[str, int], tuple[FailureKind, list[str], Outcome]] = {
    ("out of memory", ALWAYS): (NO_MEMORY, ["give_up"], Outcome.FAILED),
    ("out of memory, outside of the allocator", ALWAYS): (NO_MEMORY, ["give_up"], Outcome.FAILED),
    ("cublas has no memory", ALWAYS): (NO_MEMORY, ["give_up"], Outcome.FAILED),
    ("device-side assert", ALWAYS): (FailureKind.DEVICE_ASSERT, ["diagnose", "give_up"], Outcome.FAILED),
    ("illegal access", 1): (NATIVE, ["retry"], Outcome.COMPLETE),
    ("ECC", 1): (FailureKind.DEVICE_LOST, ["elsewhere"], Outcome.COMPLETE),
    ("fallen off the bus", 1): (NATIVE, ["retry"], Outcome.COMPLETE),
    ("NCCL", 1): (FailureKind.COMM, ["retry"], Outcome.COMPLETE),
    ("meta", 1): (FailureKind.POISONED, ["retry"], Outcome.COMPLETE),
}


@pytest.mark.slow
def test_what_a_gpu_would_say_has_its_kind_and_its_action(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    points = [{"error": error, "times": times} for error, times in SAID]
    assert tune(folder, *points, function=breaking.told, overrides=('objective.preload=["torch"]',)).end is End.DONE
    trials = assert_ended(folder, len(SAID))
    for trial, (case, (kind, actions, outcome)) in zip(trials, SAID.items(), strict=True):
        assert trial.params["error"] == case[0]
        assert (trial.outcome, followed(trial)) == (outcome, [(kind, action) for action in actions]), trial.reason
        assert_story(folder, trial, str(kind))


# ---- clocks, and processes that are not the study's


class ClockJump:
    """Sets the machine's clock, as this process sees it, when the first attempt has ended."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self._patch = patch
        self._seconds = seconds
        self.jumped = False

    def on_open(self, layout: StudyLayout) -> None:
        """No clock is set yet."""

    def on_event(self, event: Any, state: Any) -> None:
        """Jump once."""
        if isinstance(event, AttemptEnded) and not self.jumped:
            self.jumped = True
            real = time.time
            self._patch.setattr(time, "time", lambda: real() + self._seconds)

    def on_message(self, number: int, message: Any) -> None:
        """Nothing to set."""

    def on_note(self, text: str) -> None:
        """Nothing to set."""


@pytest.mark.parametrize("seconds", [-86_400.0, pytest.param(86_400.0, marks=pytest.mark.nightly)])
def test_a_clock_that_is_set_makes_nobody_wait_and_uses_no_time_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    folder, jump = tmp_path / "study", ClockJump(monkeypatch, seconds)
    cases = faults(("host memory", 1), ("SIGKILL", 1), ("SIGSEGV", 1))
    result = tune(folder, *cases, study={"max_hours": 1.0}, runtime={"parallel": 1}, observers=[jump])
    assert jump.jumped and result.end is End.DONE
    assert [trial.outcome for trial in assert_ended(folder, 3)] == [Outcome.COMPLETE] * 3
    stamps = [event.at for event in events_of(folder)]
    assert stamps == sorted(stamps) and stamps[-1] - stamps[0] < 3600
    # The next run sees the new time, and goes on all the same.
    state = fold(folder)
    assert 0 <= state.wall_s < 3600
    assert dryfit.resume(folder, trials=4).end is End.DONE


def test_what_a_trial_leaves_running_ends_with_it_and_with_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAMILY_FILE", str(tmp_path / "family.json"))
    folder = tmp_path / "study"
    tune(folder, *faults(("has a family", 1)))
    (trial,) = assert_ended(folder, 1)
    assert trial.outcome is Outcome.COMPLETE, trial.reason
    family = json.loads((tmp_path / "family.json").read_text())
    assert len(family) == 3 and not any(alive(pid) for pid in family)


@pytest.mark.slow
def test_orphans_of_an_earlier_run_are_ended_and_strangers_are_not(tmp_path: Path) -> None:
    folder = study_file(tmp_path / "study", "SIGKILL").parent
    assert run("tune", folder, "--quiet").returncode == 0
    created = fold(folder).created
    marker = marker_of(created.id, folder)
    fields = {
        "orphan": marker,
        "of a copy": marker_of(created.id, tmp_path),
        "of another study": f"{marker}0",
        "nobody's": None,
    }
    environment = {name: value for name, value in os.environ.items() if name != MARKER_VARIABLE}
    sleepers = {
        name: subprocess.Popen(breaking.SLEEP, env=environment | ({MARKER_VARIABLE: mark} if mark else {}))
        for name, mark in fields.items()
    }
    try:
        assert [one.pid for one in carriers(MARKER_VARIABLE, marker)] == [sleepers["orphan"].pid]
        assert run("resume", folder, "--quiet", "--trials", "3").returncode == 0
        assert {name: one.poll() is None for name, one in sleepers.items()} == {
            "orphan": False,
            "of a copy": True,
            "of another study": True,
            "nobody's": True,
        }
    finally:
        for one in sleepers.values():
            one.kill()
            one.wait()
    last = [event for event in events_of(folder) if isinstance(event, SessionOpened)][-1]
    assert "ended 1 process(es) that an earlier run left behind" in last.notes
    assert_ended(folder, 3)
