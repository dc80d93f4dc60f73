"""A study that plans: what is planned, refused, run alone or on a fallback, and that no kill changes any of it."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dryfit
import instant
import plan_jobs
from dryfit.documents.live_progress import event_line
from dryfit.documents.plans import plan_totals
from dryfit.documents.report_tables import trials_table
from dryfit.documents.story import story_lines, trial_story
from dryfit.documents.summary import summarise
from dryfit.ledger.events import AttemptPlaced, Event, TrialFinished, TrialPlanned
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import Action, ExitStatus, FailureKind
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import Job
from dryfit.study.next_step import End
from dryfit.study.trial_plans import nothing_fits_text
from golden import Golden
from study_runs import ends, fold, write_study
from study_runs import run as study_run

MIXED = {
    "train.batch_size": [2, 8, 16],
    "train.max_length": [32, 64, 2048, 4096],
    "head.layers": [0, 1, 2, plan_jobs.UNKNOWN, plan_jobs.CRASHES],
    "optim.lr": {"low": 1e-5, "high": 1e-2, "log": True},
}


@pytest.fixture(autouse=True)
def no_power_is_cut_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of events are written."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


def outcome_of(state: StudyState) -> list[tuple[Any, ...]]:
    """All that no kill may change: what was asked, what became of it, and how it was run."""
    return [
        (
            trial.params,
            trial.outcome,
            trial.value,
            trial.reason,
            trial.plan.answer if trial.plan else None,
            trial.plan.execution if trial.plan else None,
        )
        for trial in state.trials
    ]


def crash_instead(subject: PlanSubject, body: PlanRequest) -> PlanAnswer:
    """The stand-in's answer; where its process would crash, the instant one does."""
    if subject.settings.head.layers == plan_jobs.CRASHES:
        raise instant.Crash
    return plan_jobs.answer(subject, body)


def _plan_told(run: instant.Run, number: int, folder: Path) -> list[str]:
    """What a trial's story tells of its plan: the lines before those of what happened."""
    lines = story_lines(trial_story(run.state, number, run.events, StudyLayout(folder)))
    return [line for line in lines[: lines.index("")] if not line.startswith(("  worked", "  seed"))]


def test_nothing_is_planned_without_a_device_or_a_limit(tmp_path: Path) -> None:
    study = instant.config(space={"train.batch_size": [2, 64]}, execution={"memory_limit": None})
    run = instant.run(tmp_path, study)
    assert run.end is End.DONE
    assert run.supervisor.planned() == []
    assert plan_totals(run.state) is None
    assert "plans" not in summarise(run.state).model_dump(exclude_none=True)
    assert trials_table(run.state).heads[-2] == "time"


def test_a_trial_is_run_with_what_was_chosen(tmp_path: Path, golden: Golden) -> None:
    study = instant.config(
        study={"trials": 1}, train={"batch_size": 20, "max_length": 128}, execution={"optimizer_impl": "plain"}
    )
    run = instant.run(tmp_path, study)
    (request,) = run.supervisor.trained()
    assert (request.plan.micro_batch, request.plan.accumulation, request.plan.checkpointing) == (5, 4, True)
    assert request.plan.effective_batch == 20
    assert request.plan.memory_limit_bytes == 512 * plan_jobs.MIB
    table = [row[-3:-1] for row in trials_table(run.state).rows]
    lines = [event_line(event, run.state) for event in run.events if isinstance(event, TrialPlanned)]
    golden("show", _plan_told(run, 0, tmp_path), table, lines)
    plans = summarise(run.state).plans
    assert (plans.planned, plans.refused, plans.unknown, plans.observed_over_planned) == (1, 0, 0, 1.0)


def test_a_refused_trial_costs_no_budget_and_says_why(tmp_path: Path, golden: Golden) -> None:
    run = instant.run(tmp_path, instant.config(space={"train.max_length": [64, 2048]}))
    assert run.end is End.DONE
    assert run.state.counts[Outcome.COMPLETE] == 4
    refused = [trial for trial in run.state.trials if trial.outcome is Outcome.REFUSED]
    assert refused
    assert not refused[0].attempts
    golden("show", refused[0].reason, _plan_told(run, refused[0].number, tmp_path))
    assert len(run.supervisor.planned()) == 2


UNKNOWN_ORDER: dict[str, Any] = {
    "optim.name": ["adamw", "adafactor", "sgd", "lion", "radam"],
    "head.pooling": ["cls", "mean", "max", "attention"],
    "head.activation": ["gelu", "relu", "tanh", "silu"],
}
"""More combinations than are tried one by one."""


def test_a_space_whose_smallest_values_do_not_fit_ends_at_once(tmp_path: Path, golden: Golden) -> None:
    study = instant.config(
        space={
            "optim.lr": {"low": 1e-5, "high": 1e-2, "log": True},
            "train.batch_size": [128, 32, 64],
            "head.pooling": ["cls", "mean"],
        },
        train={"max_length": 4096},
        search={"sampler": "random"},
    )
    run = instant.run(tmp_path, study)
    assert run.end is End.REFUSED
    assert len(run.state.trials) <= 3
    smallest = [{"train.batch_size": 32, "head.pooling": pooling} for pooling in ("cls", "mean")]
    assert any(point.items() <= run.state.trials[1].params.items() for point in smallest)
    golden("tune", nothing_fits_text(run.state))
    again = instant.run(tmp_path, study)
    assert again.end is End.REFUSED
    assert len(run.state.trials) < len(again.state.trials) <= len(run.state.trials) + 3, "no new count"


def test_a_study_without_a_space_ends_with_its_first_refusal(tmp_path: Path, golden: Golden) -> None:
    run = instant.run(tmp_path, instant.config(train={"max_length": 4096}))
    assert run.end is End.REFUSED and len(run.state.trials) == 1
    golden("tune", nothing_fits_text(run.state))


def test_after_a_refusal_the_smallest_values_are_tried_and_the_search_goes_on(tmp_path: Path) -> None:
    lengths = {"train.max_length": {"low": 64, "high": 65536, "step": 64}}
    run = instant.run(tmp_path, instant.config(space=lengths, train={"max_length": 65536}))
    assert run.end is End.DONE and run.state.counts[Outcome.COMPLETE] == 4
    first, second, *_ = run.state.trials
    assert first.outcome is Outcome.REFUSED
    assert (second.outcome, second.params) == (Outcome.COMPLETE, {"train.max_length": 64})
    assert sum(trial.params == {"train.max_length": 64} for trial in run.state.trials) == 1


@pytest.mark.parametrize("sampler", [pytest.param("tpe", marks=pytest.mark.nightly), "random"])
def test_a_space_of_unknown_order_in_which_nothing_fits_ends_after_a_thousand_refusals(
    tmp_path: Path, sampler: str
) -> None:
    """80 PLAN children answer for all of them: what a learning rate changes is not memory."""
    study = instant.config(
        space={
            "optim.lr": {"low": 1e-5, "high": 1e-2, "log": True},
            **UNKNOWN_ORDER,
        },
        train={"max_length": 4096},
        search={"sampler": sampler} | ({"startup_trials": 10} if sampler == "random" else {}),
    )
    run = instant.run(tmp_path, study)
    assert run.end is End.REFUSED
    assert run.state.counts[Outcome.REFUSED] == 1000
    assert len(run.state.trials) == 1000
    assert len(run.supervisor.planned()) <= 80
    assert len({tuple(trial.params.items()) for trial in run.state.trials}) == 1000
    assert "1000" in nothing_fits_text(run.state)
    three = study.runtime.model_copy(update={"max_refused_in_a_row": 3})
    again = instant.run(tmp_path, study.model_copy(update={"runtime": three}))
    assert again.end is End.REFUSED  # a person who goes on gets a new count
    assert len(again.state.trials) == 1003


def test_a_planner_that_crashes_does_so_once_for_a_study(tmp_path: Path) -> None:
    """Twice at most: it is tried again, and what is unknown then stays so for every trial of the kind."""
    study = instant.config(
        train={"batch_size": 2},
        head={"layers": plan_jobs.CRASHES},
        space={"optim.lr": {"low": 1e-5, "high": 1e-2, "log": True}},
    )
    run = instant.run(tmp_path, study, answerer=crash_instead)
    assert run.end is End.DONE
    assert len(run.supervisor.planned()) == 2
    assert run.state.counts[Outcome.COMPLETE] == 4
    plans = plan_totals(run.state)
    assert plans is not None and plans.unknown == 4
    plan = run.state.trials[3].plan
    assert plan.answer.reasons == ("planner: planning its memory ended without an answer (SIGSEGV)",)


def test_a_trial_that_runs_out_of_device_memory_goes_on_with_the_next_fallback(tmp_path: Path, golden: Golden) -> None:
    study = instant.config(
        study={"trials": 1},
        train={"batch_size": 8, "max_length": 64},
        head={"hidden": plan_jobs.UNDERESTIMATED, "layers": 1},
    )
    run = instant.run(tmp_path, study)
    (trial,) = run.state.trials
    assert trial.outcome is Outcome.COMPLETE
    failures = [attempt.failure for attempt in trial.attempts]
    assert [(one.kind, one.action) if one else None for one in failures] == [
        (FailureKind.OOM_DEVICE, Action.FALLBACK),
        None,
    ]
    first, second = run.supervisor.trained()
    assert (first.plan.micro_batch, first.plan.checkpointing) == (8, False)
    assert (second.plan.micro_batch, second.plan.checkpointing) == (8, True)
    golden("show", _plan_told(run, trial.number, tmp_path))
    plans = plan_totals(run.state)
    assert plans is not None and (plans.out_of_memory, plans.observed_over_planned) == (1, None)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_killed_after_every_event(tmp_path: Path, parallel: int) -> None:
    """The same trials, ends, plans and executions; a plan the ledger holds is never made again."""
    search = {"sampler": "tpe" if parallel == 1 else "random"}
    study = instant.config(
        study={"trials": 8},
        space=MIXED,
        head={"hidden": plan_jobs.UNDERESTIMATED},
        search=search,
        runtime={"parallel": parallel, "max_failed_in_a_row": 50},
    )
    whole = instant.run(tmp_path / "whole", study, answerer=crash_instead)
    assert whole.end is End.DONE
    verdicts = {trial.plan.answer.verdict for trial in whole.state.trials if trial.plan}
    assert verdicts >= {VerdictKind.UNKNOWN, VerdictKind.REFUSED} and len(verdicts) > 2
    assert any(trial.plan and trial.plan.fallbacks_taken for trial in whole.state.trials)
    for kept in range(1, len(whole.events)):
        folder = tmp_path / "killed"
        first = instant.run(folder, study, answerer=crash_instead, kill_after=kept)
        known = {event.key for event in first.events if isinstance(event, TrialPlanned)}
        second = instant.run(folder, study, answerer=crash_instead)
        assert second.end is End.DONE
        assert outcome_of(second.state) == outcome_of(whole.state), kept
        planned = Counter(event.number for event in second.events if isinstance(event, TrialPlanned))
        assert set(planned.values()) == {1}
        assert not {event.key for event in second.events[kept:] if _answers(event)} & known
        shutil.rmtree(folder)


def _answers(event: Event) -> bool:
    return isinstance(event, TrialPlanned) and event.answer is not None


def test_a_killed_streak_of_refusals_goes_on_where_it_was(tmp_path: Path) -> None:
    study = instant.config(space=UNKNOWN_ORDER, train={"max_length": 4096}, runtime={"max_refused_in_a_row": 6})
    first = instant.run(tmp_path, study, kill_after=14)
    assert 0 < first.state.refused_in_a_row < 6
    second = instant.run(tmp_path, study)
    assert second.end is End.REFUSED
    assert len(second.state.trials) == 6


def test_a_killed_search_for_smallest_values_goes_on_where_it_was(tmp_path: Path) -> None:
    poolings = {"head.pooling": UNKNOWN_ORDER["head.pooling"], "train.batch_size": [8, 16]}
    study = instant.config(space=poolings, train={"max_length": 4096})
    whole = instant.run(tmp_path / "whole", study)
    assert whole.end is End.REFUSED
    for kill_after in range(2, len(whole.events)):
        folder = tmp_path / str(kill_after)
        instant.run(folder, study, kill_after=kill_after)
        again = instant.run(folder, study)
        assert again.end is End.REFUSED
        assert [trial.params for trial in again.state.trials] == [trial.params for trial in whole.state.trials]


# ---- with real processes


def test_real_children_plan_crash_run_out_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_jobs.use_stand_ins(monkeypatch, Job.PLAN, Job.TRAIN, Job.RESOLVE)
    folder = plan_jobs.write_study(
        tmp_path / "study",
        study={"trials": 4},
        execution={"memory_limit": '"512MiB"'},
        train={"batch_size": 8, "max_length": 64},
        head={"hidden": plan_jobs.UNDERESTIMATED},
        space={'"head.layers"': f"[1, {plan_jobs.CRASHES}]", '"optim.lr"': "{low = 1e-5, high = 1e-3}"},
    )
    done = dryfit.tune(folder, overrides=("search.sampler=random", "study.seed=1"))
    assert (done.end, done.status) == (End.DONE, ExitStatus.DONE)
    state = dryfit.open_study(folder)
    layers = {trial.params["head.layers"] for trial in state.trials}
    assert layers == {1, plan_jobs.CRASHES}
    for trial in state.trials:
        crashed = trial.params["head.layers"] == plan_jobs.CRASHES
        assert (trial.plan.answer.verdict is VerdictKind.UNKNOWN) == crashed
        assert "SIGSEGV" in trial.plan.answer.reasons[0] if crashed else trial.plan.fallbacks_taken == 1
    crashed_tries = list((folder / "trials").glob("*/plan-*"))
    assert len(crashed_tries) == 3  # one that answered, one that crashed and was tried again


def test_nothing_fits_is_the_answer_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from dryfit.documents.command_output import end_document, show

    plan_jobs.use_stand_ins(monkeypatch, Job.PLAN, Job.TRAIN, Job.RESOLVE)
    folder = plan_jobs.write_study(
        tmp_path / "study",
        execution={"memory_limit": '"512MiB"'},
        train={"max_length": 4096},
        space={'"optim.lr"': "{low = 1e-5, high = 1e-3}"},
    )
    done = dryfit.tune(folder)
    assert (done.end, done.status) == (End.REFUSED, ExitStatus.ANSWER_IS_NO)
    assert done.summary.trials.refused == 1
    show(end_document(done))
    said = capsys.readouterr().err
    assert "nothing fits the device" in said and "1 refused" in said
    assert "would fit: max length 4096 -> 8" in said


@pytest.mark.slow
def test_the_real_planner_decides_how_a_real_study_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plenty, then a little less than the largest trial needs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def study(name: str, limit_bytes: int) -> Path:
        execution = f'memory_limit = "{limit_bytes}B"'
        write_study(tmp_path / name, trials=2, execution=execution, runtime="max_refused_in_a_row = 3")
        return tmp_path / name

    plenty = study("plenty", 8 * 2**30)
    done = study_run("tune", plenty, "--quiet")
    assert done.returncode == 0, done.stderr
    plans = [trial.plan for trial in fold(plenty).trials]
    memories = [plan.answer.memory for plan in plans if plan is not None]
    assert [plan.answer.verdict for plan in plans if plan is not None] == [VerdictKind.FITS] * 2
    assert "run with micro-batch" in study_run("show", plenty, "0").stdout

    largest = max(memory.required_bytes for memory in memories if memory is not None)
    tight = study("tight", largest - 1000)
    done = study_run("tune", tight, "--quiet")
    assert done.returncode == 0, done.stderr
    assert VerdictKind.FITS_WITH in {trial.plan.answer.verdict for trial in fold(tight).trials if trial.plan}
    for whole, split in zip(ends(plenty), ends(tight), strict=True):
        assert split.params == whole.params
        assert [n for n, _, _ in split.reports] == [n for n, _, _ in whole.reports]


def test_an_unknown_trial_runs_alone_or_is_refused(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "runtime": {"parallel": 3},
        "study": {"trials": 12},
        "search": {"sampler": "random"},
        "train": {"batch_size": 2},
    }
    space = {"head.layers": [0, plan_jobs.UNKNOWN, plan_jobs.RAISES]}
    alone = instant.run(tmp_path / "alone", instant.config(space=space, **tables))
    assert alone.end is End.DONE
    unknown = [t for t in alone.state.trials if t.plan and t.plan.answer.verdict is VerdictKind.UNKNOWN]
    assert unknown and all(trial.outcome is Outcome.COMPLETE for trial in unknown)
    assert 1 < alone.supervisor.most_at_once <= 3
    assert _ran_alone(alone.events, {trial.number for trial in unknown})
    reasons = {trial.plan.answer.reasons for trial in unknown if trial.plan}
    assert reasons == {("aten.made_up in model.py:7",), ("planner: planning its memory failed: KeyError: 'made up'",)}
    refuse = instant.config(space=space, execution={"unknown": "refuse"}, **tables)
    refused = instant.run(tmp_path / "refused", refuse)
    assert refused.end is End.DONE
    assert refused.state.counts[Outcome.REFUSED] > 0
    assert all('execution.unknown is "refuse"' in trial.reason for trial in refused.state.trials if not trial.attempts)


def _ran_alone(events: list[Event], unknown: set[int]) -> bool:
    running: set[int] = set()
    for event in events:
        if isinstance(event, AttemptPlaced):
            running.add(event.number)
            if len(running) > 1 and running & unknown:
                return False
        elif isinstance(event, TrialFinished):
            running.discard(event.number)
    return True
