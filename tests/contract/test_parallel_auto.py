"""``runtime.parallel = "auto"`` on the CPU, in real processes: as many trials as cores and memory carry, and why."""

from pathlib import Path

import dryfit
import objectives
from dryfit.ledger.events import AttemptPlaced, ParallelSet
from dryfit.processes.node import available_cores
from dryfit.settings.trial import Outcome
from study_runs import events_of, fold, run_here


def test_a_study_of_a_function_finds_out_itself_how_many_run(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    dryfit.tune(
        objective=objectives.quadratic,
        space=objectives.SPACE,
        trials=8,
        folder=folder,
        search={"sampler": "random", "mirror": "none"},
        runtime={"parallel": "auto"},
        execution={"threads": 1, "device": "cpu"},
    )
    state = fold(folder)
    assert state.counts[Outcome.COMPLETE] == 8
    events = events_of(folder)
    told = [event for event in events if isinstance(event, ParallelSet)]
    assert all(0 <= event.parallel <= available_cores() and event.reason for event in told)
    placed = [event for event in events if isinstance(event, AttemptPlaced)]
    assert all(event.device is None for event in placed)
    assert 'parallel = "auto"' in (folder / "frozen.toml").read_text(encoding="utf-8")
    again = run_here("resume", folder, "--trials", "10", "--json")
    assert again.returncode == 0, again.stderr
    assert fold(folder).counts[Outcome.COMPLETE] == 10
