"""Which trials become an ensemble, what is refused before anything is trained, and what processes are asked."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import instant
import plan_jobs
from dryfit.api import train_ensemble, training
from dryfit.api.training import study_snapshot, train
from dryfit.core.errors import ChildError, ConfigError, LedgerError
from dryfit.core.jobs.ensemble import EnsembleRequest, EnsembleResult
from dryfit.core.jobs.train import FinalRequest
from dryfit.core.settings.choices import BuiltInTask
from dryfit.core.settings.trial import MetricPoint, Outcome
from dryfit.runtime.machine.local_node import LocalNode
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState
from dryfit.study.loop.final_runs import EnsembleRun, FinalRun, final_run
from dryfit.study.loop.final_training import FinalTraining
from dryfit.study.loop.next_step import End
from dryfit.study.loop.stops import StopRequests
from dryfit.study.trials.context import StudySnapshot


def trial(number: int, value: float | None, *, outcome: Outcome = Outcome.COMPLETE, **params: Any) -> TrialState:
    """A trial that has ended; its learning rate is its own."""
    drawn = {"optim.lr": 1e-3 * (number + 1)} | {name.replace("__", "."): value for name, value in params.items()}
    made = TrialState(
        number=number, params=drawn, internal={}, distributions={}, seed=50 + number, fingerprint="", outcome=outcome
    )
    made.value = value
    made.reports.append(MetricPoint(n=0, step=7 + number, epoch=1.0, value=value or 0.0, metrics={}))
    made.best = 0
    return made


def view(folder: Path, trials: Sequence[TrialState], **tables: Any) -> StudySnapshot:
    state = StudyState()
    state.trials.extend(trials)
    tables = {"execution": {"memory_limit": "64GiB"}} | tables
    study = instant.config(space={"optim.lr": {"low": 1e-4, "high": 1.0, "log": True}}, **tables)
    return StudySnapshot(
        config=study,
        layout=StudyLayout(folder),
        state=state,
        resolved=plan_jobs.resolved(),
        nodes=instant.one_node(),
    )


class Called:
    """What would have been run."""

    def __init__(self) -> None:
        self.runs: list[FinalRun] = []
        self.together: EnsembleRun | None = None

    def __call__(self, _study: StudySnapshot, runs: list[FinalRun], _told: object, together: EnsembleRun) -> Any:
        self.runs, self.together = runs, together
        return End.STOPPED, {}

    @property
    def numbers(self) -> list[int]:
        return [run.trial.number for run in self.runs]


def asked(monkeypatch: pytest.MonkeyPatch, study: StudySnapshot, top: int, **wishes: Any) -> tuple[Called, list[str]]:
    called, told = Called(), list[str]()
    monkeypatch.setattr(training, "study_snapshot", lambda _: study)
    monkeypatch.setattr(training, "do_runs", called)
    outcome = train_ensemble(study.layout.folder, top=top, on_note=told.append, **wishes)
    assert (outcome.end, outcome.model) == (End.STOPPED, None)
    return called, told


VALUES = [0.4, 0.9, float("nan"), 0.7, None, 0.8]


@pytest.mark.parametrize(("metric", "best"), [("f1_macro", [1, 5, 3]), ("loss", [0, 3, 5])])
def test_the_best_by_the_metric_are_trained_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, best: list[int]
) -> None:
    """Neither those without a value nor those that ended before their time."""
    trials = [trial(number, value) for number, value in enumerate(VALUES)]
    trials += [trial(6, 0.95, outcome=Outcome.PRUNED), trial(7, 0.05, outcome=Outcome.FAILED)]
    study = view(tmp_path, trials, study={"metric": metric})
    called, told = asked(monkeypatch, study, 3)
    assert called.numbers == best
    assert called.together is not None
    assert called.together.name == "top3-" + "-".join(f"{number:04d}" for number in best)
    assert [run.seed for run in called.runs] == [50 + number for number in best]
    assert told == [f"{called.together.name}: trials {', '.join(map(str, best))}"]


def test_trials_with_the_same_settings_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same: Any = {"optim__lr": 0.5}
    trials = [trial(0, 0.1), trial(1, 0.8, **same), trial(2, 0.9, **same), trial(3, 0.8, **same), trial(4, 0.7)]
    study = view(tmp_path, trials)
    assert asked(monkeypatch, study, 3)[0].numbers == [2, 4, 0]
    with pytest.raises(ConfigError, match="3 completed with a value, 5 with those that repeat one") as refused:
        train_ensemble(tmp_path, top=4)
    assert "top2 to top3" in str(refused.value)


def test_a_study_of_several_goals_is_ranked_by_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = view(tmp_path, [trial(0, 0.5), trial(1, 0.6)], study={"also": ["auroc"]})
    called, told = asked(monkeypatch, study, 2)
    assert called.numbers == [1, 0]
    assert told[0] == "the best by f1_macro alone: auroc is not looked at"


@pytest.mark.parametrize(
    ("wishes", "name", "seeds", "steps"),
    [
        ({"seed": 4}, "top2-0001-0000-seed-4", [4, 4], [None, None]),
        ({"with_validation": True}, "top2-0001-0000-with-validation", [51, 50], [8, 7]),
        ({"seed": 50, "with_validation": True}, "top2-0001-0000-seed-50-with-validation", [50, 50], [8, 7]),
    ],
)
def test_what_changes_the_result_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wishes: Any, name: str, seeds: list[int], steps: list[int | None]
) -> None:
    called, _ = asked(monkeypatch, view(tmp_path, [trial(0, 0.5), trial(1, 0.6)]), 2, **wishes)
    assert called.together is not None
    assert called.together.name == name
    assert [run.seed for run in called.runs] == seeds
    assert [run.last_step for run in called.runs] == steps


@pytest.mark.parametrize(
    ("top", "said"),
    [(3, "2 completed with a value"), (1, "an ensemble of 1"), (0, "2 to 32 members"), (33, "2 to 32 members")],
)
def test_as_many_as_there_are_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: int, said: str
) -> None:
    monkeypatch.setattr(training, "study_snapshot", lambda _: view(tmp_path, [trial(0, 0.5), trial(1, 0.6)]))
    with pytest.raises(ConfigError, match=said):
        train_ensemble(tmp_path, top=top)


def test_a_study_without_a_completed_trial_has_no_best_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = view(tmp_path, [trial(0, None, outcome=Outcome.PRUNED)])
    monkeypatch.setattr(training, "study_snapshot", lambda _: study)
    with pytest.raises(ConfigError, match="no trial has completed"):
        train_ensemble(tmp_path, top=2)


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        (BuiltInTask.CAUSAL_LM, "generated answers have no mean"),
        (BuiltInTask.OBJECTIVE, "your function does"),
        ("file.py:Own", "what a mean of your task's outputs would be"),
    ],
)
def test_a_task_without_a_mean_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, hint: str
) -> None:
    study = view(tmp_path, [trial(0, 0.5), trial(1, 0.6)])
    named = study.config.study.model_copy(update={"task": task})
    own = replace(study, config=study.config.model_copy(update={"study": named}))
    monkeypatch.setattr(training, "study_snapshot", lambda _: own)
    with pytest.raises(ConfigError, match=hint) as refused:
        train_ensemble(tmp_path, top=2)
    assert "one of criteria, evidence, share, joint" in str(refused.value)


def test_nothing_is_trained_for_a_place_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "study_snapshot", lambda _: view(tmp_path, [trial(0, 0.5), trial(1, 0.6)]))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").touch()
    with pytest.raises(ConfigError, match="something is there already"):
        train_ensemble(tmp_path, top=2, out=taken)


def test_one_model_is_no_ensemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = view(tmp_path, [trial(0, 0.5)])
    monkeypatch.setattr("dryfit.api.training.study_snapshot", lambda _, **__: study)
    with pytest.raises(ConfigError, match="train_ensemble"):
        train(tmp_path, trial="top2")
    with pytest.raises(LedgerError):
        study_snapshot(tmp_path)


def work_on(study: StudySnapshot, supervisor: instant.InstantSupervisor) -> FinalTraining:
    stops = StopRequests(study.layout.stop_request, supervisor.wake)
    return FinalTraining(study, LocalNode(supervisor), stops, lambda _: None)


def test_the_process_gets_each_model_with_what_it_came_to(tmp_path: Path) -> None:
    study, supervisor = view(tmp_path, [trial(0, 0.5), trial(1, 0.6)]), instant.InstantSupervisor()
    runs = [final_run(one, seed=None, with_validation=False) for one in study.state.trials]
    work = work_on(study, supervisor)
    work.do(runs, most=2)
    results = tuple(work.results[run.name] for run in runs)
    together = EnsembleRun(tuple(runs), cast(Any, results))
    work.do([together], most=1)
    found = work.results[together.name]
    assert isinstance(found, EnsembleResult)
    assert found.members == results
    bodies = [spec.body for spec in supervisor.started]
    asked_of = bodies[-1]
    assert isinstance(asked_of, EnsembleRequest)
    assert [type(body) for body in bodies[:2]] == [FinalRequest, FinalRequest]
    trained = [body.training.config for body in bodies[:2] if isinstance(body, FinalRequest)]
    assert [member.training.config for member in asked_of.members] == trained
    assert [member.model_dir for member in asked_of.members] == [
        str(study.layout.final(run.name).model) for run in runs
    ]
    assert [member.searched for member in asked_of.members] == [0.5, 0.6]
    assert asked_of.model_dir == str(study.layout.final(together.name).model)


def test_a_stop_ends_the_evaluation_at_once_and_leaves_it_for_the_next_time(tmp_path: Path) -> None:
    """It has no checkpoint to write; no failure is told of it."""
    study, killed = view(tmp_path, [trial(0, 0.5), trial(1, 0.6)]), list[str]()

    class Slow(instant.InstantSupervisor):
        def start(self, spec: Any) -> None:
            super().start(spec)
            if isinstance(spec.body, EnsembleRequest):
                self.events.clear()
                study.layout.stop_request.parent.mkdir(parents=True, exist_ok=True)
                study.layout.stop_request.write_text("graceful", encoding="utf-8")

        def kill(self, key: str, why: str = "now") -> None:
            killed.append(key)
            self.events.append(
                instant.ChildExited(key, None, instant.Evidence(signal=9, killed_by_us=why))  # type: ignore[arg-type]
            )

    supervisor = Slow()
    runs = [final_run(one, seed=None, with_validation=False) for one in study.state.trials]
    work = work_on(study, supervisor)
    work.do(runs, most=1)
    together = EnsembleRun(tuple(runs), cast(Any, tuple(work.results.values())))
    work.do([together], most=1)
    assert killed == [f"{together.name}-1"]
    assert together.name not in work.results


def test_a_member_that_fails_is_told_and_nothing_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = view(tmp_path, [trial(0, 0.5), trial(1, 0.6)])
    failed = ChildError("training trial-0001-seed-51", "its process failed (it crashed)")
    monkeypatch.setattr(training, "study_snapshot", lambda _: study)
    monkeypatch.setattr(training, "do_runs", lambda *_: (End.DONE, {"trial-0001-seed-51": failed}))
    with pytest.raises(ChildError, match="it crashed"):
        train_ensemble(tmp_path, top=2)
