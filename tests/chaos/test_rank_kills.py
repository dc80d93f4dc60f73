"""A study whose trials run on several processes survives the death of any of them, and leaves none behind."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import dryfit
from dryfit.ledger.events import AttemptEnded, AttemptStarted, FailureFacts
from dryfit.settings.errors import FailureKind
from dryfit.settings.trial import Outcome
from study_runs import (
    ends,
    events_of,
    fold,
    kill_now,
    marked_processes,
    resume_to_end,
    run,
    start,
    wait_for,
    write_study,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.slow,
]

SHARDED = "tp = 2"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    write_study(folder, trials=2, execution=SHARDED)
    done = run("tune", folder)
    assert done.returncode == 0, done.stderr
    return folder


def other_rank(folder: Path) -> int | None:
    """The process id of rank 1 of the trial that runs, once it has one and has a checkpoint."""
    if not any((folder / "trials").glob("*/attempt-*/checkpoints/step-*")):
        return None
    started = [event for event in events_of(folder) if isinstance(event, AttemptStarted)]
    try:
        children = psutil.Process(started[-1].pid).children()
    except (IndexError, psutil.NoSuchProcess):
        return None
    return children[0].pid if children else None


def kill_other_rank(folder: Path) -> bool:
    """Whether rank 1 was there to be killed: its trial may have ended meanwhile, and the next one is as good."""
    pid = other_rank(folder)
    with suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def failures(folder: Path) -> list[FailureFacts]:
    """Of the attempts that have ended so far."""
    return [event.failure for event in events_of(folder) if isinstance(event, AttemptEnded) and event.failure]


def test_a_killed_rank_is_one_failure_and_a_killed_study_leaves_no_rank_behind(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "study"
    write_study(folder, trials=2, execution=SHARDED)
    command = start("tune", folder)
    assert wait_for(lambda: kill_other_rank(folder), command)
    assert wait_for(lambda: failures(folder), command)
    assert wait_for(lambda: other_rank(folder), command)
    kill_now(command)
    wait_for(lambda: not marked_processes(folder))
    resume_to_end(folder)
    killed, *others = failures(folder)
    assert killed.kind is FailureKind.COMM and "rank 1" in killed.sentence
    assert {one.kind for one in others} <= {FailureKind.LOST}
    assert ends(folder) == ends(undisturbed)
    assert all(trial.outcome in (Outcome.COMPLETE, Outcome.PRUNED) for trial in fold(folder).trials)


def test_the_best_trial_is_trained_once_more_on_two_processes(undisturbed: Path) -> None:
    done = run("train", undisturbed)
    assert done.returncode == 0, done.stderr
    (model,) = (undisturbed / "final").glob("*/model")
    loaded = dryfit.load(model)
    assert sum(one.numel() for one in loaded.parameters()) > 0
