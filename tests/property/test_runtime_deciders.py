"""Any evidence gets exactly one failure; recovery always comes to an end."""

from hypothesis import given
from hypothesis import strategies as st

from dryfit.core.failure import (
    PERMITTED,
    Action,
    ChildFault,
    Evidence,
    Failure,
    FailureKind,
    PastFailure,
)
from dryfit.core.jobs import ChildResult, Job, StopReason, TrainResult
from dryfit.runtime.faults import classify
from dryfit.runtime.recovery import decide

codes = st.sampled_from(["", "CONFIG", "DATA", "LOAD", "INTERNAL", "NONFINITE", "CHECKPOINT", "CHILD", "?"])
names = st.sampled_from(["builtins.MemoryError", "torch.OutOfMemoryError", "builtins.ValueError", "a.B[ENOSPC]"])
faults = st.builds(ChildFault, st.lists(names).map(tuple), codes, st.text(), st.text())
evidence = st.builds(
    Evidence,
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 80),
    fault=st.none() | faults,
    log_tail=st.text(),
    started=st.booleans(),
    beat_age_s=st.floats(0, 1e6),
    stop_asked=st.booleans(),
    killed_by_us=st.sampled_from(["", "start", "hang", "timeout", "now"]),
    server_lost=st.booleans(),
    oom_kills_rose=st.booleans(),
)
trained = st.builds(
    TrainResult, value=st.none(), best=st.none(), steps=st.just(1), stopped_by=st.sampled_from(StopReason)
)
results = st.none() | st.builds(ChildResult, train=trained) | st.builds(ChildResult, fault=faults)
kinds = st.sampled_from(FailureKind)


@given(evidence, results, st.sampled_from(Job))
def test_any_evidence_gets_one_kind_and_a_sentence(evidence, result, job):
    failure = classify(evidence, result, job=job)
    assert job is Job.PLAN or failure.kind is not FailureKind.PLANNER
    assert isinstance(failure.kind, FailureKind)
    assert failure.sentence == "" or "{" not in failure.sentence.split("(")[0] or evidence.fault or result
    assert classify(evidence, result, job=job) == failure


@given(st.lists(kinds, min_size=200, max_size=200), st.integers(0, 20))
def test_failures_without_progress_use_up_the_counted_retries(sequence, retries):
    past: tuple[PastFailure, ...] = ()
    counted = 0
    for kind in sequence:
        action = decide(Failure(kind, "x"), past, retries=retries)
        if PERMITTED[kind].counts and action.action is Action.RETRY:
            counted += 1
        past += (PastFailure(kind, False),)
        if action.action is not Action.RETRY:
            break
    assert counted <= retries


@given(kinds, st.lists(st.builds(PastFailure, kinds, st.booleans())).map(tuple), st.integers(0, 100), st.integers(0, 3))
def test_a_decision_keeps_to_what_the_kind_permits(kind, past, retries, rungs_left):
    permission = PERMITTED[kind]
    decided = decide(Failure(kind, "x"), past, retries=retries, rungs_left=rungs_left)
    assert decided.action in (permission.action, permission.then)
    assert 0 <= decided.delay_s <= 300
    if permission.action is Action.RETRY and not permission.counts and permission.limit is None:
        assert decided.action is Action.RETRY


@given(kinds.filter(lambda kind: PERMITTED[kind].action is Action.RETRY), st.integers(1, 50))
def test_progress_never_runs_out_of_retries(kind, n):
    past = (PastFailure(kind, True),) * n
    assert decide(Failure(kind, "x"), past, retries=0, reached_checkpoint=True).action is Action.RETRY


@given(kinds.filter(lambda kind: PERMITTED[kind].limit is not None))
def test_a_kind_gives_up_after_its_limit_without_progress(kind):
    permission = PERMITTED[kind]
    assert permission.limit is not None
    past = (PastFailure(kind, True), *(PastFailure(kind, False),) * permission.limit)
    assert decide(Failure(kind, "x"), past, retries=100).action is permission.then
    assert decide(Failure(kind, "x"), past[:-1], retries=100).action is permission.action


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_trial_that_ran_out_of_device_memory_tries_every_fallback_and_no_more(fallbacks, retries):
    failure, past = Failure(FailureKind.OOM_DEVICE, "x"), ()
    for left in range(fallbacks, 0, -1):
        assert decide(failure, past, retries=retries, rungs_left=left).action is Action.RUNG
        past += (PastFailure(FailureKind.OOM_DEVICE, False),)
    assert decide(failure, past, retries=retries, rungs_left=0).action is Action.GIVE_UP
    if retries:  # rungs use up no retry
        assert decide(Failure(FailureKind.KILLED, "x"), past, retries=retries).action is Action.RETRY


def test_a_planner_is_tried_twice_then_the_memory_is_unknown():
    failure = Failure(FailureKind.PLANNER, "x")
    assert decide(failure, (), retries=0).action is Action.RETRY
    again = (PastFailure(FailureKind.PLANNER, False),)
    assert decide(failure, again, retries=100).action is Action.UNPLANNED
