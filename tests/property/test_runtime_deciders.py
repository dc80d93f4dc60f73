"""Any evidence gets exactly one failure; recovery always comes to an end."""

from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.failures import ANOTHER_ATTEMPT, ROWS, attempt_terms, classify, decide_recovery
from dryfit.settings.errors import (
    PERMITTED,
    Action,
    ChildFault,
    DryfitError,
    Evidence,
    Failure,
    FailureKind,
    PastFailure,
)
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.wire import Job


def all_codes(cls: type[DryfitError]) -> set[str]:
    return {cls.code}.union(*(all_codes(one) for one in cls.__subclasses__()))


ALL_CODES = sorted(all_codes(DryfitError))

codes = st.sampled_from(["", *ALL_CODES, "?"])
names = st.sampled_from(
    [
        "builtins.MemoryError",
        "torch.OutOfMemoryError",
        "builtins.ValueError",
        "builtins.OSError[ENOSPC]",
        "builtins.OSError[EMFILE]",
        "torch.distributed.DistBackendError",
        "builtins.ConnectionError",
        "a.B[ENOSPC]",
    ]
)
known_texts = sorted({text for row in ROWS for text in row.texts})
words = st.lists(st.sampled_from(known_texts) | st.text(max_size=20), max_size=4).map(" ".join)
faults = st.builds(ChildFault, st.lists(names).map(tuple), codes, words, words, st.text())
sizes = st.none() | st.integers(0, 2**40)
evidence = st.builds(
    Evidence,
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 80),
    fault=st.none() | faults,
    log_tail=words,
    started=st.booleans(),
    beat_age_s=st.floats(0, 1e6),
    stop_asked=st.booleans(),
    killed_by_us=st.sampled_from(["", "start", "hang", "timeout", "now"]),
    server_lost=st.booleans(),
    oom_kills_rose=st.booleans(),
    phase=st.sampled_from(["", "load", "train"]),
    step=st.integers(0, 10**9),
    device=st.none() | st.text(max_size=3),
    device_free_bytes=sizes,
    device_total_bytes=sizes,
    neighbour_bytes=sizes,
    planned_bytes=sizes,
    peak_bytes=sizes,
    xids=st.lists(st.integers(0, 200), max_size=3).map(tuple),
    shm_free_bytes=sizes,
    disk_free_bytes=sizes,
    diagnostic=st.booleans(),
    stacks=st.text(max_size=50),
)
trained = st.builds(
    TrainResult, value=st.none(), best=st.none(), steps=st.just(1), stopped_by=st.sampled_from(StopReason)
)
results = st.none() | st.builds(ChildResult, answer=trained) | st.builds(ChildResult, fault=faults)
kinds = st.sampled_from(FailureKind)
actions = st.sampled_from(Action)
pasts = st.lists(st.builds(PastFailure, kinds, st.booleans(), actions, st.none() | st.sampled_from("01")))

OUTSIDE = {FailureKind.PREEMPTED, FailureKind.LOST}
"""Deaths that say nothing about a trial: they may go on for ever."""


@given(evidence, results, st.sampled_from(Job))
def test_any_evidence_gets_one_kind_and_a_sentence(evidence, result, job):
    failure = classify(evidence, result, job=job)
    assert job in (Job.PLAN, Job.REHEARSE) or failure.kind is not FailureKind.PLANNER
    assert isinstance(failure.kind, FailureKind)
    assert failure.sentence.strip()
    assert classify(evidence, result, job=job) == failure


@given(st.data(), st.integers(0, 20), st.integers(0, 5))
def test_failures_without_progress_come_to_an_end(data, retries, fallbacks):
    """Whatever the order of kinds: only deaths that say nothing about a trial go on for ever."""
    past: tuple[PastFailure, ...] = ()
    own = st.sampled_from(sorted(set(FailureKind) - OUTSIDE))
    most = retries + fallbacks + sum(stage.times or 0 for one in PERMITTED.values() for stage in one.stages) + 1
    for _ in range(most):
        kind = data.draw(own)
        decided = decide_recovery(Failure(kind, "x"), past, retries=retries, fallbacks_left=fallbacks, diagnosable=True)
        fallbacks -= decided.action is Action.FALLBACK
        assert fallbacks >= 0
        past += (PastFailure(kind, False, decided.action),)
        if decided.action not in ANOTHER_ATTEMPT:
            return
    raise AssertionError(past)


@given(kinds, pasts.map(tuple), st.integers(0, 100), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_decision_keeps_to_what_the_kind_permits(kind, past, retries, fallbacks_left, progress, diagnosable):
    permission = PERMITTED[kind]
    decided = decide_recovery(
        Failure(kind, "x"),
        past,
        retries=retries,
        fallbacks_left=fallbacks_left,
        reached_checkpoint=progress,
        diagnosable=diagnosable,
    )
    diagnosed = attempt_terms(past).diagnostic
    assert decided.action in {permission.then, *(stage.action for stage in permission.stages)} or (
        diagnosed and decided.action is Action.GIVE_UP
    )
    assert 0 <= decided.delay_s <= 300
    assert decided.reason
    if decided.action is Action.DIAGNOSE:
        assert diagnosable and not diagnosed
    if kind in OUTSIDE:
        assert decided.action is Action.RETRY


@given(kinds.filter(lambda kind: PERMITTED[kind].stages[0].action is Action.RETRY), st.integers(1, 50))
def test_progress_never_runs_out_of_retries(kind, n):
    past = (PastFailure(kind, True),) * n
    assert decide_recovery(Failure(kind, "x"), past, retries=0, reached_checkpoint=True).action is Action.RETRY


@given(kinds.filter(lambda kind: PERMITTED[kind].stages[-1].times is not None))
def test_a_kind_goes_through_its_stages_without_progress_and_then_ends(kind):
    permission = PERMITTED[kind]
    due = [stage.action for stage in permission.stages for _ in range(stage.times or 0)]
    past: tuple[PastFailure, ...] = (PastFailure(kind, True, Action.RETRY),)
    for action in due:
        assert decide_recovery(Failure(kind, "x"), past, retries=100, diagnosable=True).action is action
        past += (PastFailure(kind, False, action),)
    assert decide_recovery(Failure(kind, "x"), past, retries=100, diagnosable=True).action is permission.then


@given(kinds, st.integers(0, 3))
def test_an_attempt_run_to_learn_more_is_the_last(kind, retries):
    past = (PastFailure(FailureKind.DEVICE_ASSERT, False, Action.DIAGNOSE),)
    decided = decide_recovery(Failure(kind, "x"), past, retries=retries, fallbacks_left=3, diagnosable=True)
    outside = {FailureKind.INTERRUPTED, FailureKind.DISK_FULL, FailureKind.INTERNAL, *OUTSIDE}
    assert (decided.action is Action.GIVE_UP) is (kind not in outside)


def test_a_planner_is_tried_twice_then_the_memory_is_unknown():
    failure = Failure(FailureKind.PLANNER, "x")
    assert decide_recovery(failure, (), retries=0).action is Action.RETRY
    again = (PastFailure(FailureKind.PLANNER, False),)
    assert decide_recovery(failure, again, retries=100).action is Action.UNPLANNED
