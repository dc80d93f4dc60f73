"""What a drill says of what it saw: nothing lost, or which trial, kill or process is wrong."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import dryfit.api  # noqa: F401  # the module `doctor` there has the name of its function
from dryfit.core.errors import ExitStatus
from dryfit.core.settings.trial import Outcome
from dryfit.core.text.table import Table
from dryfit.reporting.document import document_of, json_text
from dryfit.study.doctor.drill import MOMENTS, Drill, Kill, TrialEnd, Victim
from study_runs import run_here

END = TrialEnd(lr=0.01, outcome=Outcome.COMPLETE, value=0.5, reports=((3, 0.75), (6, 0.5)))
KILLS = tuple(Kill(moment, 0, float(number)) for number, moment in enumerate(MOMENTS))
GOOD = Drill(KILLS, (END, END), (END, END), left=0, wall_s=31.0)


def test_both_processes_are_killed_at_several_moments() -> None:
    assert {moment.victim for moment in MOMENTS} == set(Victim)
    assert len({moment.event for moment in MOMENTS}) == len(MOMENTS) >= 5


def test_nothing_lost() -> None:
    table, verdict = document_of(GOOD).blocks
    assert isinstance(table, Table) and [row[-1] for row in table.rows] == ["equal", "equal"]
    assert "nothing is lost: 5 kills" in str(verdict)
    said = json.loads(json_text(GOOD))
    assert said["passed"] and said["troubles"] == [] and said["schema"] == 1
    assert said["kills"][1] == {
        "victim": "study's process",
        "moment": "as the trial trains again",
        "trial": 0,
        "after_s": 1.0,
    }
    end = {"outcome": "complete", "value": 0.5, "validations": 2}
    assert said["trials"][1] == {"number": 1, "undisturbed": end, "disturbed": end, "same": True}


@pytest.mark.parametrize(
    ("drill", "words"),
    [
        (replace(GOOD, disturbed=(END, replace(END, value=0.5000001))), "trial(s) 1 came to something else"),
        (replace(GOOD, disturbed=(END, replace(END, reports=((3, 0.75),)))), "trial(s) 1 came to something else"),
        (replace(GOOD, disturbed=(replace(END, lr=0.02), END)), "trial(s) 0 came to something else"),
        (replace(GOOD, disturbed=(END,)), "1 trials instead of 2"),
        (replace(GOOD, kills=KILLS[:3]), "2 of 5 kills came too late"),
        (replace(GOOD, left=1), "1 process(es) were left over"),
        (replace(GOOD, undisturbed=(replace(END, outcome=Outcome.FAILED),) * 2), "although nobody disturbed it"),
    ],
)
def test_whatever_is_wrong_is_said(drill: Drill, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drilled(_note: object, on_kill: Callable[[Kill], None]) -> Drill:
        on_kill(KILLS[0])
        return drill

    monkeypatch.setattr(sys.modules["dryfit.api.doctor"], "run_drill", drilled)
    done = run_here("doctor", "--drill")
    assert done.returncode == ExitStatus.ANSWER_IS_NO
    assert words in done.stdout and "killed the trial's process after a validation, trial 0" in done.stderr


def test_it_has_a_study_of_its_own(tmp_path: Path) -> None:
    done = run_here("doctor", "--drill", tmp_path)
    assert done.returncode == ExitStatus.CANNOT_RUN and "--drill alone" in done.stderr
