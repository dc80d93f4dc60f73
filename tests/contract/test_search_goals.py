"""A study with several goals, in real processes: from the child's validations to the Pareto front that is printed."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dryfit.ledger.replay import StudyState
from dryfit.settings.trial import Outcome
from study_runs import fold, run_here, write_study

POINT = {"optim.lr": 5e-3, "head.pooling": "max"}
SEARCH = """sampler = "nsga2"
population_size = 2
[[search.enqueue]]
optim.lr = 5e-3
"head.pooling" = "max"
"""


@dataclass(frozen=True)
class Tuned:
    """A study that has run to its end."""

    folder: Path
    done: subprocess.CompletedProcess[str]
    state: StudyState


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("goals") / "study"
    write_study(folder, trials=4, study='also = ["loss", "accuracy"]', search=SEARCH)
    done = run_here("tune", folder, "--json", "--set", "search.mirror=journal", "--set", "train.epochs=1")
    assert done.returncode == 0, done.stderr
    return Tuned(folder, done, fold(folder))


def beaten(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether ``other`` beats ``one``; f1_macro and accuracy are to be large, the loss small."""
    pairs = [(one[0], other[0]), (-one[1], -other[1]), (one[2], other[2])]
    return all(theirs >= mine for mine, theirs in pairs) and any(theirs > mine for mine, theirs in pairs)


def test_every_goal_is_that_of_the_best_validation(tuned: Tuned) -> None:
    assert [goal.name for goal in tuned.state.created.goals] == ["f1_macro", "loss", "accuracy"]
    assert [trial.outcome for trial in tuned.state.trials] == [Outcome.COMPLETE] * 4
    for trial in tuned.state.trials:
        assert trial.best is not None
        point = trial.reports[trial.best]
        assert trial.values == tuple(point.metrics[name] for name in ("f1_macro", "loss", "accuracy"))
        assert point.value == max(report.value for report in trial.reports)


def test_known_points_are_the_first_trials(tuned: Tuned) -> None:
    defaults, point, *rest = tuned.state.trials
    assert defaults.enqueued["optim.lr"] == 5e-5
    assert point.enqueued == POINT
    assert point.params.items() >= POINT.items()
    assert [trial.enqueued for trial in rest] == [{}, {}]


def test_the_front_is_printed_and_in_the_json(tuned: Tuned) -> None:
    trials = tuned.state.trials
    values = {trial.number: trial.values or () for trial in trials}
    front = [n for n, one in values.items() if not any(beaten(one, other) for other in values.values())]
    assert sorted(trial.number for trial in tuned.state.front) == front
    summary: dict[str, Any] = json.loads(tuned.done.stdout)
    assert sorted(one["number"] for one in summary["pareto"]) == front
    assert all(tuple(one["values"]) == values[one["number"]] for one in summary["pareto"])
    assert summary["goals"] == [
        {"metric": "f1_macro", "direction": "maximize"},
        {"metric": "loss", "direction": "minimize"},
        {"metric": "accuracy", "direction": "maximize"},
    ]
    shown = run_here("show", tuned.folder).stdout
    assert f"Pareto front: {len(front)} trial(s)" in shown
    assert "trial\toutcome\tf1_macro\tloss\taccuracy\tsteps" in shown
    assert run_here("show", tuned.folder, "0").stdout.count(f"{values[0][1]:.4f}") >= 2
    status = run_here("status", tuned.folder).stdout
    assert "f1_macro, loss, accuracy" in status
    assert "Pareto front: trials" in status
    assert "(on the Pareto front)" in tuned.done.stderr
    assert f"f1_macro {values[0][0]:.4f}, loss {values[0][1]:.4f}, accuracy" in tuned.done.stderr
