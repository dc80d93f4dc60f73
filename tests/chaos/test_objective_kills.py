"""A study of the user's own function survives any kill: exactly the trials asked for, the same values, no orphans."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

import objectives
from dryfit.core.trial import Outcome
from dryfit.store.events import TrialFinished
from study_runs import ends, events_of, fold, kill_now, marked_processes, run, start, wait_for

SUPPORT = str(Path(objectives.__file__).parent)
STUDY = f"""
[study]
task = "objective"
trials = {{trials}}
seed = 5

[objective]
function = "objectives:stepwise"
paths = ["{SUPPORT}"]

[space]
x = {{{{low = -3.0, high = 3.0}}}}

[search]
sampler = "random"
mirror = "none"

[runtime]
parallel = 2
retries = 100
"""


def write(folder: Path, trials: int) -> Path:
    folder.mkdir()
    (folder / "study.toml").write_text(STUDY.format(trials=trials), encoding="utf-8")
    return folder


def progressed(folder: Path) -> list[int]:
    """Children that run and have reached a checkpoint of their own."""
    running = [trial.attempts[-1] for trial in fold(folder).trials if trial.outcome is None and trial.attempts]
    return [one.pid for one in running if one.pid is not None and not one.ended and one.checkpoint_step is not None]


def parent_of(pid: int) -> int | None:
    """The fork server that made a child; None where the child is gone, or nobody's."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[1])
        return parent if "dryfit.runtime.forkserver" in Path(f"/proc/{parent}/cmdline").read_text() else None
    return None


def storm(folder: Path, draw: random.Random, trials: int, *, control_kills: int, child_kills: int) -> list[str]:
    """Run a study to its end; kill children, the fork server and the control process meanwhile."""
    plan = ["control"] * control_kills + ["server"] + ["child"] * child_kills
    draw.shuffle(plan)
    done: list[str] = []
    process = start("tune", folder, "--quiet")
    for victim in plan:
        chosen: int | None = None
        while chosen is None:
            if not wait_for(lambda: (folder / "ledger.jsonl").exists() and progressed(folder), process):
                break
            time.sleep(draw.uniform(0.0, 0.05))
            chosen = draw.choice(progressed(folder) or [None])
            if victim == "server" and chosen is not None:
                chosen = parent_of(chosen)
        if chosen is None:
            break
        if victim == "control":
            kill_now(process)
            process = start("resume", folder, "--quiet")
        else:
            with suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
        done.append(victim)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return done


@pytest.mark.parametrize(
    ("seed", "trials", "control_kills", "child_kills"),
    [(0, 30, 3, 10), pytest.param(1, 120, 12, 60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_a_storm_of_kills_changes_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, trials: int, control_kills: int, child_kills: int
) -> None:
    print(f"storm of seed {seed}")
    undisturbed, folder = write(tmp_path / "undisturbed", trials), write(tmp_path / "study", trials)
    assert run("tune", undisturbed, "--quiet").returncode == 0
    monkeypatch.setenv("STEP_PAUSE_S", "0.02")
    done = storm(folder, random.Random(seed), trials, control_kills=control_kills, child_kills=child_kills)
    print(f"killed: {done}")
    assert set(done) == {"control", "child", "server"}
    assert len(done) >= (control_kills + child_kills) // 2
    assert ends(folder) == ends(undisturbed)
    state = fold(folder)
    assert [trial.outcome for trial in state.trials] == [Outcome.COMPLETE] * trials
    assert max(len(trial.attempts) for trial in state.trials) > 1
    finished = [event.number for event in events_of(folder) if isinstance(event, TrialFinished)]
    assert sorted(finished) == list(range(trials))
    assert marked_processes(folder) == []
    assert not list(folder.glob("trials/*/checkpoints"))
