"""A study as its report sees it, its verdict and its figures: what they say of studies that never ran."""

import itertools
import random
from math import nan
from typing import Any

import plotly.graph_objects
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.documents.pages import text
from dryfit.documents.plots import (
    MOST_CURVE_POINTS,
    MOST_CURVES,
    WorkAxis,
    curves_figure,
    evenly,
    front_figure,
    history_figure,
    importance_figure,
    lanes,
    memory_figure,
    slice_figure,
    timeline_figure,
)
from dryfit.documents.report import refusal_cells, refusals
from dryfit.documents.report_tables import trouble_lines, troubles_of
from dryfit.documents.worth import verdict_of
from dryfit.ledger.events import AttemptEnded, DeviceSetAside, ParallelSet, ReportMade, SessionOpened
from dryfit.ledger.state import AttemptEnd, SessionState
from dryfit.search.importance import Importance, Importances
from dryfit.settings.choices import Direction
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.trial import Goal, MetricPoint, Outcome
from golden import Golden
from ledgers import begun, drawn, eventful


def test_a_lost_attempt_ends_with_its_session_not_after_the_night() -> None:
    state = eventful().state()
    lost = next(attempt for attempt in state.attempts if attempt.failure and attempt.failure.kind is FailureKind.LOST)
    assert lost.end is AttemptEnd.FAILED
    assert lost.time_s < 60
    assert lost.end_s == state.sessions[0].last_at_s
    assert state.attempts[-1].end is AttemptEnd.RUNNING
    assert state.present[lost.trial].time_s < 120
    last = eventful()
    last.open()
    assert last.state().attempts[-1].end is AttemptEnd.LOST


def test_refusals_with_one_plan_are_one_row_with_what_decides_memory_alone() -> None:
    state = eventful().state()
    found = refusals(state)
    numbers = [trial.number for trial in state.trials if trial.outcome is Outcome.REFUSED]
    assert sorted(trial.number for trials in found for trial in trials) == numbers
    assert len(found) < len(numbers)
    for trials in found:
        params, count, needed, capacity, _ = refusal_cells(trials)
        assert "train.batch_size" in params and "train.max_length" in params and "optim.lr" not in params
        assert int(count) == len(trials) and float(needed.split()[0]) > float(capacity.split()[0])


def test_the_front_leaves_out_trials_without_every_value(golden: Golden) -> None:
    script = begun(also=[Goal(name="loss", direction=Direction.MINIMIZE)])
    for number, also in enumerate([(), (float("nan"),), (0.4,)]):
        script.ask(number, {})
        script.finish(number, Outcome.COMPLETE, 0.9 - number / 10, also=also)
    state = script.state()
    assert [trial.number for trial in state.front] == [2]
    golden("report", verdict_of(state, defaults_first=False).result)


def test_the_verdict_says_by_how_much_and_how_sure(golden: Golden) -> None:
    script = begun()
    for number, value in enumerate([0.70, 0.80, 0.75, 0.78]):
        script.complete(number, {"optim.lr": 1e-4}, [value])
    less = begun(metric="loss")
    less.events[0] = less.events[0].model_copy(update={"direction": Direction.MINIMIZE})
    less.complete(0, {}, [0.7])
    less.complete(1, {}, [0.4])
    cases = ((script, True), (script, False), (less, True))
    said = [verdict_of(of.state(), defaults_first=defaults) for of, defaults in cases]
    golden("report", *([one.result, one.certainty] for one in said))


def test_the_verdict_on_little_or_nothing(golden: Golden) -> None:
    bad = begun()
    for number, outcome, value in ((0, Outcome.FAILED, None), (1, Outcome.REFUSED, None), (2, Outcome.COMPLETE, nan)):
        bad.ask(number, {})
        bad.finish(number, outcome, value)
    bad.ask(3, {})
    one = begun()
    one.complete(0, {}, [0.5])
    failed_first = begun()
    failed_first.ask(0, {})
    failed_first.finish(0, Outcome.FAILED)
    failed_first.complete(1, {}, [0.5])
    said = [verdict_of(script.state(), defaults_first=True) for script in (begun(), bad, one, failed_first)]
    golden("report", *([one.result, one.certainty] for one in said))


def test_parallel_attempts_get_rows_of_their_own() -> None:
    script = begun()
    for number, device in enumerate(["0", "1", "0", None, None]):
        script.ask(number, {})
        script.place(number, device=device)
    rows = [row for _, row in lanes(script.state().attempts)]
    assert rows == ["device 0 1", "device 1", "device 0 2", "slot 1", "slot 2"]


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=6))
def test_time_is_drawn_in_order_and_pauses_cost_little(stretches: list[tuple[float, float]]) -> None:
    sessions, now = [], 1e9
    for pause, worked in stretches:
        opened = SessionOpened(at=now + pause, pid=1, host="", version="", total=1)
        sessions.append(SessionState(opened, now + pause + worked))
        now += pause + worked
    axis = WorkAxis.of(sessions)
    moments = [at for session in sessions for at in (session.opened_at_s, session.last_at_s)]
    drawn_at = [axis.at(at) for at in moments]
    assert all(before <= after for before, after in itertools.pairwise(drawn_at))
    for session in sessions:
        length = axis.at(session.last_at_s) - axis.at(session.opened_at_s)
        assert length == pytest.approx(session.work_s, abs=1e-3)
    worked = sum(worked for _, worked in stretches)
    assert drawn_at[-1] <= worked * (1 + 0.05 * len(stretches)) + 1e-3
    ticks = axis.ticks()
    assert ticks[0][0] == 0
    assert len(ticks) <= 2 * 8 + 1


def test_every_figure_is_one_that_plotly_takes() -> None:
    script = eventful()
    for number, also in ((41, 0.3), (42, 0.2)):
        script.ask(number, drawn(random.Random(number)))
        script.finish(number, Outcome.COMPLETE, 0.5, also=(also,))
    script.events[0] = script.events[0].model_copy(update={"also": (Goal(name="loss", direction=Direction.MINIMIZE),)})
    state = script.state()
    found = Importances(30, 5, (Importance("optim.lr", 0.7, 30), Importance("loss.gamma", 0.3, 12)))
    memory = memory_figure(state)
    assert memory is not None
    figures = [
        history_figure(state),
        front_figure(state),
        importance_figure(found),
        *(slice_figure(state, name) for name in drawn(random.Random(0))),
        curves_figure(state)[0],
        timeline_figure(state),
        memory,
    ]
    for figure in figures:
        checked = plotly.graph_objects.Figure(figure)  # raises where a property is unknown or a value illegal
        assert len(checked.data) > 0
    names = {trace["name"] for trace in figures[0]["data"]}
    assert names == {"complete", "pruned (last value)", "best so far", "failed", "refused", "not finished"}


def test_the_best_so_far_never_gets_worse_and_ends_at_the_best() -> None:
    state = eventful(60).state()
    line = next(trace for trace in history_figure(state)["data"] if trace["name"] == "best so far")
    known = [value for value in line["y"] if value is not None]
    assert known == sorted(known)
    assert known[-1] == state.ranked[0].score


def test_scales_are_those_the_parameters_were_drawn_on() -> None:
    state = eventful().state()
    assert slice_figure(state, "optim.lr")["layout"]["xaxis"]["type"] == "log"
    assert slice_figure(state, "head.dropout")["layout"]["xaxis"]["type"] == "linear"
    assert slice_figure(state, "head.pooling")["layout"]["xaxis"]["type"] == "category"


def test_axes_of_few_whole_numbers_have_no_tick_between_them() -> None:
    def axes(trials: int) -> list[dict[str, Any]]:
        script = begun()
        for number in range(trials):
            script.complete(number, {"train.batch_size": 8 + number % trials, "head.dropout": number / 10}, [0.5])
        state = script.state()
        figures = [history_figure(state), slice_figure(state, "train.batch_size")]
        return [figure["layout"]["xaxis"] for figure in (*figures, slice_figure(state, "head.dropout"))]

    assert [axis.get("dtick") for axis in axes(3)] == [1, 1, None]
    assert [axis.get("dtick") for axis in axes(40)] == [None, None, None]
    script = begun()
    script.ask(0, {})
    script.place(0)
    for n, step in enumerate((2, 4)):
        point = MetricPoint(n=n, step=step, epoch=n + 1.0, value=0.5, metrics={})
        script.say(ReportMade(number=0, attempt=1, point=point))
    assert curves_figure(script.state())[0]["layout"]["xaxis"]["dtick"] == 1
    assert "dtick" not in curves_figure(eventful().state())[0]["layout"]["xaxis"]


def test_many_curves_are_thinned_and_it_is_said() -> None:
    script = begun()
    for number in range(MOST_CURVES + 40):
        values = [0.5] * (MOST_CURVE_POINTS + 50) if number == 3 else [0.4 + number / 1000]
        script.complete(number, {}, values)
    figure, said = curves_figure(script.state())
    assert len(figure["data"]) == MOST_CURVES
    assert f"{MOST_CURVES} of {MOST_CURVES + 40} trials" in said
    shown = {trace["name"] for trace in figure["data"]}
    assert {f"trial {number}" for number in range(MOST_CURVES + 20, MOST_CURVES + 40)} <= shown
    long = [trace for trace in figure["data"] if len(trace["x"]) == MOST_CURVE_POINTS]
    assert [trace["name"] for trace in long] == ["trial 3"]
    assert (long[0]["x"][0], long[0]["x"][-1]) == (20, 20 * (MOST_CURVE_POINTS + 50))
    assert f"{MOST_CURVE_POINTS} validations" in said
    few, nothing = curves_figure(eventful(5).state())
    assert few["data"]
    assert nothing == ""


@given(st.lists(st.integers(), max_size=50), st.integers(2, 20))
def test_thinning_keeps_order_and_ends(items: list[int], most: int) -> None:
    kept = evenly(items, most)
    assert len(kept) == min(len(items), most)
    if items:
        assert (kept[0], kept[-1]) == (items[0], items[-1])
    left = iter(items)
    assert all(item in left for item in kept)


def test_labels_say_tags_instead_of_meaning_them() -> None:
    script = begun(name="x", metric="<a href='https://x.org'>f1</a>")
    script.ask(0, {"head.pooling": "<b onclick=1>cls</b>"})
    script.place(0)
    script.fail(0, 1, FailureKind.USER_CODE, "<img src=x onerror=alert(1)>", Action.GIVE_UP)
    script.finish(0, Outcome.COMPLETE, 0.5)
    state = script.state()
    figures = [history_figure(state), slice_figure(state, "head.pooling"), timeline_figure(state)]
    for figure in figures:
        assert "<a href" not in str(figure)
        assert "<b onclick" not in str(figure)
        assert "<img" not in str(figure)
    assert text("<b>&") == "&lt;b&gt;&amp;"


# ---- What is said of a study that is not all well


def test_counts_of_a_study_in_which_everything_happens() -> None:
    state = eventful().state()
    troubles = troubles_of(state)
    hit = {trial.number for trial in state.trials if any(attempt.failure for attempt in trial.attempts)}
    tried = [trial for trial in state.trials if trial.outcome is not None and trial.attempts]
    assert troubles.success.trials == len(tried)
    assert troubles.success.clean_trials == len(tried) - len(hit)
    ended = [attempt for trial in state.trials for attempt in trial.attempts if attempt.ended]
    assert troubles.success.attempts == len(ended)
    assert troubles.success.clean_attempts == sum(attempt.failure is None for attempt in ended)
    assert troubles.success.vanished == 0
    kinds = {view.kind: view for view in troubles.failures}
    assert set(kinds) == {FailureKind.LOST, FailureKind.NATIVE_CRASH, FailureKind.USER_CODE}
    crashes = [one for one in ended if one.failure is not None and one.failure.kind is FailureKind.NATIVE_CRASH]
    of_crashes = kinds[FailureKind.NATIVE_CRASH]
    assert (of_crashes.trials, of_crashes.attempts, len(crashes)) == ((7, 17, 27, 37), 4, 4)
    assert of_crashes.time_s == pytest.approx(sum(attempt.time_s for attempt in crashes), abs=1e-3)
    assert kinds[FailureKind.USER_CODE].actions == {"give_up": 4}
    costs = [view.lost_s for view in troubles.failures]
    assert costs == sorted(costs, reverse=True)


def test_a_killed_run_is_told_of_before_anybody_looks_at_it(golden: Golden) -> None:
    script = eventful()
    script.now_s += 3600
    script.open()
    troubles = troubles_of(script.state())
    assert troubles.success.vanished == 1
    golden("status", trouble_lines(troubles))


def test_what_was_asked_for_and_what_is_a_result_are_no_failures() -> None:
    script = begun()
    script.ask(0, {})
    script.place(0)
    script.fail(0, 1, FailureKind.INTERRUPTED, "stopped as asked", Action.PAUSE)
    script.place(0, 2)
    script.fail(0, 2, FailureKind.NONFINITE, "loss is nan at step 7", Action.PRUNE)
    script.finish(0, Outcome.PRUNED, reason="nonfinite: loss is nan at step 7")
    troubles = troubles_of(script.state())
    assert (troubles.success.trials, troubles.success.clean_trials) == (1, 1)
    assert (troubles.success.attempts, troubles.success.clean_attempts) == (2, 2)
    assert {view.kind for view in troubles.failures} == {FailureKind.INTERRUPTED, FailureKind.NONFINITE}


def test_reasons_that_differ_in_numbers_are_one(golden: Golden) -> None:
    script = begun()
    for number in range(4):
        script.ask(number, {})
        script.place(number)
        script.say(AttemptEnded(number=number, attempt=1), 1)
    script.finish(0, Outcome.PRUNED, reason="worse than the median of 5 trials at report 2")
    script.finish(1, Outcome.PRUNED, reason="worse than the median of 12 trials at report 0")
    script.finish(2, Outcome.PRUNED, reason="nonfinite: the loss is nan at step 7, learning rate 3e-05")
    script.finish(3, Outcome.FAILED, reason="hang: gave no sign of life for 600 s")
    golden("status", trouble_lines(troubles_of(script.state())))


def test_many_reasons_are_cut_and_counted(golden: Golden) -> None:
    script = begun()
    for number in range(9):
        script.ask(number, {})
        script.finish(number, Outcome.PRUNED, reason=f"because of {'x' * (number + 1)}")
    golden("status", trouble_lines(troubles_of(script.state())))


def test_a_failure_kind_is_one_line_with_what_followed(golden: Golden) -> None:
    script = begun()
    for number, action in ((0, Action.RETRY), (1, Action.GIVE_UP)):
        script.ask(number, {})
        script.place(number)
        script.fail(number, 1, FailureKind.HANG, f"gave no sign of life for {number}", action)
    golden("status", trouble_lines(troubles_of(script.state())))


def test_why_no_more_trials_run_at_once(golden: Golden) -> None:
    script = begun()
    before = trouble_lines(troubles_of(script.state()))
    script.say(ParallelSet(parallel=3, reason="a fourth trial of 7.1 GiB does not fit beside them"))
    script.say(DeviceSetAside(device="2", reason="2.0 GiB are not given back"))
    golden("status", before, trouble_lines(troubles_of(script.state())))


def test_shares_of_nothing_are_not_told(golden: Golden) -> None:
    script = begun()
    script.complete(0, {}, [0.5])
    golden("status", *(trouble_lines(troubles_of(one.state())) for one in (begun(), script)))
