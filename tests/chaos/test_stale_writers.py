"""A process that was taken for dead goes on while its trial does, or after it: it changes nothing."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import dryfit
from dryfit.ledger.events import AttemptPlaced, AttemptStarted, CheckpointMade, Event
from dryfit.ledger.folder import StudyLayout, TrialLayout
from dryfit.ledger.ledger import Ledger
from dryfit.processes import supervisor
from dryfit.processes.child_spec import SupervisorSettings
from dryfit.processes.supervisor import Supervisor
from dryfit.settings.errors import FailureKind
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import RESULT_FILE
from dryfit.study import session
from study_runs import DEADLINE_S, ends, fold, objective_study, run, write_study

RUNTIME = "verdict_timeout_s = 0.5"
SEARCH = 'sampler = "random"\npruner = "none"'
TRIALS = 2
_append = Ledger.append


def files_of(trial: TrialLayout) -> dict[str, bytes]:
    """All that the trial has of its own: what lies in its folder, but for those of its attempts."""
    return {
        str(path.relative_to(trial.folder)): path.read_bytes()
        for path in trial.folder.rglob("*")
        if path.is_file() and not path.relative_to(trial.folder).parts[0].startswith("attempt-")
    }


class StaleWriter:
    """Stops the first process of trial 0 behind its first checkpoint, lets it be given up, and wakes it later.

    Args:
        layout: The study's.
        wakes: Whether it is woken at an event.
        waits: Whether nothing else happens until it has ended.
    """

    def __init__(self, layout: StudyLayout, wakes: Callable[[Event], bool], *, waits: bool) -> None:
        self.pid: int | None = None
        self.supervisor: Supervisor | None = None
        self.awake = False
        self._layout = layout
        self._wakes = wakes
        self._waits = waits
        self._stopped = False

    def make(self, settings: SupervisorSettings) -> Supervisor:
        """Make the supervisor, and remember it."""
        self.supervisor = Supervisor(settings)
        return self.supervisor

    def append(self, ledger: Ledger, event: Event) -> Event:
        """Write an event, then stop the process or wake it: nothing follows from the event before."""
        written = _append(ledger, event)
        self._seen(written)
        return written

    def _seen(self, event: Event) -> None:
        if isinstance(event, AttemptStarted) and (event.number, event.attempt) == (0, 1):
            self.pid = event.pid
        if isinstance(event, CheckpointMade) and (event.number, event.attempt) == (0, 1) and not self._stopped:
            assert self.pid is not None and self.supervisor is not None
            self._stopped = True
            os.kill(self.pid, signal.SIGSTOP)
            self.supervisor.kill("trial-0-1", "hang")
        if self._stopped and not self.awake and self._wakes(event):
            self._wake()

    def _wake(self) -> None:
        assert self.pid is not None
        self.awake = True
        before = self._now() if self._waits else None
        os.kill(self.pid, signal.SIGCONT)
        if before is not None:
            self.end()
            assert self._now() == before

    def _now(self) -> tuple[bytes, dict[str, bytes]]:
        return self._layout.ledger.read_bytes(), files_of(self._layout.trial(0))

    def end(self) -> None:
        """Wait until the process has ended by itself."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._lives() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not self._lives()

    def _lives(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False


def while_the_second_attempt_writes(event: Event) -> bool:
    return isinstance(event, CheckpointMade) and (event.number, event.attempt) == (0, 2)


def after_the_trial(event: Event) -> bool:
    return isinstance(event, AttemptPlaced) and event.number == 1


def functions(folder: Path) -> Path:
    folder.mkdir()
    study = objective_study(
        "stubborn", study=f"trials = {TRIALS}\nseed = 5", search=SEARCH + '\nmirror = "none"', runtime=RUNTIME
    )
    (folder / "study.toml").write_text(study, encoding="utf-8")
    return folder


def encoders(folder: Path) -> Path:
    write_study(folder, trials=TRIALS, search=SEARCH, runtime=f'keep = "all"\n{RUNTIME}')
    return folder


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("study", [functions, encoders])
@pytest.mark.parametrize(
    ("wakes", "waits"), [(while_the_second_attempt_writes, False), (after_the_trial, True)], ids=["beside", "after"]
)
def test_a_process_that_was_given_up_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    study: Callable[[Path], Path],
    wakes: Callable[[Event], bool],
    waits: bool,
) -> None:
    folder, undisturbed = (study(tmp_path / name) for name in ("study", "undisturbed"))
    assert run("tune", undisturbed, "--quiet").returncode == 0
    stale, kill = StaleWriter(StudyLayout(folder), wakes, waits=waits), supervisor.kill_session
    monkeypatch.setattr(Ledger, "append", lambda ledger, event: stale.append(ledger, event))
    monkeypatch.setattr(session, "Supervisor", stale.make)
    monkeypatch.setattr(supervisor, "kill_session", lambda pid, marker: pid == stale.pid or kill(pid, marker))
    monkeypatch.setattr(supervisor, "_UNKILLABLE_S", 0.0)
    # The end of the session would end it too.
    monkeypatch.setattr(Supervisor, "close", _after(stale.end, Supervisor.close))
    done = dryfit.tune(folder)
    assert done.status == 0 and stale.awake
    trial = StudyLayout(folder).trial(0)
    assert (trial.attempt(1) / RESULT_FILE).is_file(), "it came to its end, and wrote what it had"
    assert ends(folder) == ends(undisturbed)
    attempts = fold(folder).trials[0].attempts
    assert [one.failure.kind if one.failure else None for one in attempts] == [FailureKind.HANG, None]
    assert [one.outcome for one in fold(folder).trials] == [Outcome.COMPLETE] * TRIALS
    have, want = files_of(trial), files_of(StudyLayout(undisturbed).trial(0))
    assert have.keys() == want.keys() and ("best/model.safetensors" in want) == (study is encoders)
    here, there = str(folder).encode(), str(undisturbed).encode()
    for name, content in want.items():
        assert name == "load.json" or have[name] == content.replace(there, here), name  # that one says how long it took
    assert run("resume", folder, "--quiet", "--trials", str(TRIALS + 1)).returncode == 0
    assert files_of(trial) == have
    assert not list(folder.glob("trials/**/checkpoints")) and not list(folder.glob("trials/*/attempt-*/best"))


def _after(first: Callable[[], None], close: Callable[[Supervisor], None]) -> Callable[[Supervisor], None]:
    def closed(self: Supervisor) -> None:
        first()
        close(self)

    return closed
