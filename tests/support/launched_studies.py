"""Studies whose agents an engine starts on this machine, and what must be true of them whatever has become of those."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from agents import end, write_study
from dryfit.ledger.events import NodeJoined, NodeLost, TrialFinished
from dryfit.settings.errors import ExitStatus
from dryfit.settings.trial import Outcome
from slurm_cluster import processes_with, wait_until
from study_runs import DEADLINE_S, ends, events_of, fold, marked_processes, run, start

TRIALS = 20
LONGEST_S = 120.0


class LaunchedStudy:
    """A study whose last trial ends only when the test lets it.

    Args:
        folder: For its folder.
        hold: The file ``HELD_BY``, which holds its last trial.
    """

    def __init__(self, folder: Path, hold: Path) -> None:
        self.folder = held_study(folder / "study", lease_s=6)
        self._hold = hold
        self._hold.touch()
        self._control: subprocess.Popen[str] | None = None

    def words(self, launch: str) -> list[str]:
        """The command line that runs it."""
        return ["tune", str(self.folder), "--nodes", launch, "--set", "nodes.host=127.0.0.1"]

    def tune(self, launch: str) -> None:
        """Start it, and wait until a trial has ended."""
        self._control = start(*self.words(launch))
        self.wait_for_trials(1)

    def resume(self) -> None:
        """Start it again."""
        self._control = start("resume", self.folder)

    def finished(self) -> int:
        """How many trials have ended."""
        ledger = self.folder / "ledger.jsonl"
        return ledger.read_bytes().count(b'"trial_finished"') if ledger.exists() else 0

    def wait_for_trials(self, count: int) -> None:
        """Wait until so many trials have ended."""
        self._wait(lambda: self.finished() >= count, f"{count} trials do not end")

    def joins(self) -> int:
        """How many times a node has joined."""
        return sum(isinstance(event, NodeJoined) for event in events_of(self.folder))

    def losses(self) -> list[str]:
        """Why nodes were lost."""
        return [event.why for event in events_of(self.folder) if isinstance(event, NodeLost)]

    def wait_for_joins(self, count: int) -> None:
        """Wait until nodes have joined so many times."""
        self._wait(lambda: self.joins() >= count, f"{count} agents do not join")

    def wait_for_losses(self, count: int) -> None:
        """Wait until so many nodes were lost."""
        self._wait(lambda: len(self.losses()) >= count, f"{count} nodes are not missed")

    def _wait(self, happened: Callable[[], bool], otherwise: str) -> None:
        """Wait until something has happened, for a minute or so, and as long as the study goes on."""
        control = self._control

        def settled() -> bool:
            return happened() or (control is not None and control.poll() is not None)

        wait_until(settled, otherwise, LONGEST_S)
        assert happened(), f"{otherwise}, and the study is over"

    def ends_as(self, alone: Path) -> None:
        """Let it end: every trial once, with the values of the undisturbed study; nothing runs any more."""
        self._hold.unlink()
        _, said = self._control.communicate(timeout=DEADLINE_S)
        assert self._control.returncode == ExitStatus.DONE, said
        assert [(one.params, one.value) for one in ends(self.folder)] == [
            (one.params, one.value) for one in ends(alone)
        ]
        finished = [event.number for event in events_of(self.folder) if isinstance(event, TrialFinished)]
        assert sorted(finished) == list(range(TRIALS))
        assert {trial.outcome for trial in fold(self.folder).trials} == {Outcome.COMPLETE}
        wait_until(lambda: not marked_processes(self.folder), "children are left")
        wait_until(lambda: not processes_with(str(self.folder)), "processes are left")

    def close(self) -> None:
        """End what a test that has failed has left."""
        if self._control is not None:
            end(self._control)
        self._hold.unlink(missing_ok=True)


def held_study(folder: Path, *, lease_s: float | None) -> Path:
    """A study of the function ``held``; with a lease it runs nothing itself."""
    write_study(folder, trials=TRIALS, parallel=4 if lease_s is not None else 1, lease_s=lease_s)
    file = folder / "study.toml"
    text = file.read_text(encoding="utf-8").replace("objectives:stepwise", "objectives:held")
    file.write_text(text.replace("hang_timeout_s = 60", "hang_timeout_s = 600"), encoding="utf-8")
    return folder


def alone_study(folder: Path) -> Path:
    """The same study at one slot, without agents, at its end."""
    done = run("tune", held_study(folder, lease_s=None))
    assert done.returncode == ExitStatus.DONE, done.stderr
    return folder
