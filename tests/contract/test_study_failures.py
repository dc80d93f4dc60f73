"""Every kind of failure through the whole loop, with what follows it and how its trial ends.

The processes are scripted: what a real one leaves behind is in tests/chaos and tests/gpu, see
``docs/failures.md``.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import instant
from dryfit.documents.plans import plan_lines
from dryfit.ledger.events import AttemptEnded
from dryfit.processes.child import ChildStatus
from dryfit.settings.errors import Action, ChildFault, Evidence, ExitStatus, FailureKind
from dryfit.settings.jobs import ChildResult
from dryfit.settings.training_messages import StopReason, TrainRequest, TrainResult
from dryfit.settings.trial import Outcome
from dryfit.study.next_step import End
from dryfit.study.studies import exit_status

A, K = Action, FailureKind
GIB = 2**30


def fault(*types: str, code: str = "", message: str = "boom", trace: str = "") -> Evidence:
    return Evidence(exit_code=1, fault=ChildFault(types or ("builtins.RuntimeError",), code, message, trace))


def crash(number: int, **known: Any) -> Evidence:
    return replace(Evidence(signal=number), **known)


OOM = fault("torch.OutOfMemoryError", message="CUDA out of memory")
NEIGHBOURS = replace(OOM, planned_bytes=10 * GIB, peak_bytes=GIB, device_total_bytes=24 * GIB, neighbour_bytes=20 * GIB)
READING = 'File "loop.py", line 1, in _load_from_checkpoint'
NOT_FOR_TRIALS = {K.PLANNER}


@pytest.fixture(autouse=True)
def no_power_is_cut_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)


@dataclass(frozen=True)
class Shows:
    """What a kind of failure is recognised by, what follows where it goes on, and what becomes of the trial then."""

    kind: FailureKind
    evidence: Evidence
    actions: tuple[Action, ...]
    outcome: Outcome | None = Outcome.FAILED
    end: End = End.DONE
    result: ChildResult | None = field(default=None, repr=False)


def stopped(by: StopReason) -> ChildResult:
    return ChildResult(TrainResult(value=None, best=None, steps=3, stopped_by=by))


EVERY = (
    Shows(K.INTERRUPTED, crash(9, killed_by_us="now"), (A.PAUSE,), None, End.PAUSED),
    Shows(K.CONFIG, fault(code="CONFIG"), (A.GIVE_UP,)),
    Shows(K.DATA, fault(code="DATA"), (A.GIVE_UP,), end=End.BAD_DATA),
    Shows(K.NETWORK, fault("builtins.ConnectionError"), (*(A.RETRY,) * 3, A.GIVE_UP)),
    Shows(K.DISK_FULL, Evidence(exit_code=int(ChildStatus.DISK_FULL), disk_full=True), (A.PAUSE,), None, End.PAUSED),
    Shows(K.CHANGED, fault(code="CHANGED"), (A.PAUSE,), None, End.PAUSED),
    Shows(K.CHECKPOINT_CORRUPT, fault("builtins.EOFError", trace=READING), (*(A.RETRY,) * 3, A.GIVE_UP)),
    Shows(K.OOM_NEIGHBOUR, NEIGHBOURS, (*(A.RETRY,) * 3, *(A.EXCLUSIVE,) * 5, A.GIVE_UP)),
    Shows(K.OOM_HOST, crash(9, oom_kills_rose=True), (A.LIGHTER, A.GIVE_UP)),
    Shows(K.SHM_FULL, crash(signal.SIGBUS, shm_free_bytes=0), (*(A.LIGHTER,) * 3, A.GIVE_UP)),
    Shows(K.POISONED, fault(code="POISONED"), (*(A.RETRY,) * 3, A.GIVE_UP)),
    Shows(K.DEVICE_LOST, crash(6, xids=(79,)), (*(A.ELSEWHERE,) * 3, A.GIVE_UP)),
    Shows(K.DEVICE_ASSERT, fault(message="CUDA error: device-side assert triggered"), (A.DIAGNOSE, A.GIVE_UP)),
    Shows(K.COMM, fault("torch.distributed.DistBackendError"), (A.RETRY, A.ELSEWHERE, A.GIVE_UP)),
    Shows(K.HANG, crash(9, killed_by_us="hang"), (A.RETRY, A.GIVE_UP)),
    Shows(K.TIMEOUT, crash(9, killed_by_us="timeout"), (A.GIVE_UP,)),
    Shows(K.NONFINITE, fault(code="NONFINITE"), (A.PRUNE,), Outcome.PRUNED),
    Shows(K.START, Evidence(exit_code=1, started=False), (*(A.RETRY,) * 3, A.GIVE_UP)),
    Shows(K.NATIVE_CRASH, crash(signal.SIGSEGV), (A.RETRY, A.GIVE_UP)),
    Shows(K.KILLED, crash(9), (*(A.RETRY,) * 3, A.GIVE_UP)),
    Shows(K.USER_CODE, fault("builtins.KeyError"), (A.GIVE_UP,)),
    Shows(K.INTERNAL, fault(code="INTERNAL"), (A.STOP_STUDY,), None, End.BROKEN),
)
ENDLESS = (
    Shows(K.PREEMPTED, Evidence(), (A.RETRY,) * 6, Outcome.COMPLETE, result=stopped(StopReason.SIGTERM)),
    Shows(K.LOST, Evidence(server_lost=True), (A.RETRY,) * 6, Outcome.COMPLETE),
)


def study(**tables: dict[str, Any]) -> Any:
    """One trial, unplanned."""
    return instant.config(**{"study": {"trials": 1}, "execution": {"memory_limit": None}} | tables)


def shown(case: Shows, times: int) -> instant.Script:
    """A script: the trial's first processes end so, the others do their work."""
    left: Iterator[int] = iter(range(times))
    return lambda _: None if next(left, None) is None else instant.Ends(case.result, case.evidence)


@pytest.mark.parametrize("case", [*EVERY, *ENDLESS], ids=lambda case: str(case.kind))
def test_a_failure_that_goes_on(tmp_path: Path, case: Shows) -> None:
    run = instant.run(tmp_path, study(), script=shown(case, len(case.actions)))
    (trial,) = run.state.trials
    failures = [attempt.failure for attempt in trial.attempts if attempt.failure is not None]
    assert [one.kind for one in failures] == [case.kind] * len(case.actions)
    assert tuple(one.action for one in failures) == case.actions
    assert (trial.outcome, run.end) == (case.outcome, case.end)
    assert all(one.sentence.strip() for one in failures)
    if case.outcome is Outcome.FAILED:
        assert trial.reason.startswith(f"{case.kind}: ")
    if case.kind is K.NATIVE_CRASH:
        assert [one.outcome for one in run.state.history()] == [Outcome.FAILED], "so the sampler is told"


@pytest.mark.parametrize("case", [case for case in EVERY if len(case.actions) > 1], ids=lambda case: str(case.kind))
def test_a_failure_that_passes(tmp_path: Path, case: Shows) -> None:
    """One less than it takes to give up, and the trial completes with the value it would have had anyway."""
    run = instant.run(tmp_path / "failing", study(), script=shown(case, len(case.actions) - 1))
    undisturbed = instant.run(tmp_path / "whole", study())
    assert run.end is End.DONE
    assert [trial.outcome for trial in run.state.trials] == [Outcome.COMPLETE]
    assert run.state.trials[0].value == undisturbed.state.trials[0].value
    configs = {request.config.fingerprint for request in run.supervisor.trained()}
    assert configs == {request.config.fingerprint for request in undisturbed.supervisor.trained()}


def test_every_kind_is_shown() -> None:
    assert {case.kind for case in (*EVERY, *ENDLESS)} == set(K) - NOT_FOR_TRIALS - {K.OOM_DEVICE}


def ended(run: instant.Run) -> list[AttemptEnded]:
    return [event for event in run.events if isinstance(event, AttemptEnded)]


def test_progress_starts_the_count_anew_and_the_same_checkpoint_is_none(tmp_path: Path) -> None:
    steps = iter([10, 20, 30, 40, 50, 60, 60, 60])
    killed = Evidence(signal=9)

    def script(_: TrainRequest) -> instant.Ends | None:
        step = next(steps, None)
        return None if step is None else instant.Ends(None, killed, checkpoint=step)

    run = instant.run(tmp_path / "moving", study(runtime={"retries": 0}), script=script)
    assert run.state.trials[0].outcome is Outcome.COMPLETE
    assert len(run.state.trials[0].attempts) == 9
    stuck = instant.run(tmp_path / "stuck", study(), script=lambda _: instant.Ends(None, killed, checkpoint=10))
    (trial,) = stuck.state.trials
    assert trial.outcome is Outcome.FAILED
    assert len(trial.attempts) == 5  # the first made progress, four did not


# ---- running out of the device's memory


def oom_study(**tables: dict[str, Any]) -> Any:
    return instant.config(
        **{"study": {"trials": 1}, "train": {"batch_size": 16, "max_length": 16}, "execution": {"memory_limit": "1GiB"}}
        | tables
    )


def test_oom_takes_fallback_after_fallback_and_never_changes_the_experiment(tmp_path: Path) -> None:
    run = instant.run(tmp_path, oom_study(), script=lambda _: instant.Ends(None, OOM))
    (trial,) = run.state.trials
    plan = trial.plan
    assert plan is not None and len(plan.answer.fallbacks) >= 3
    requests = run.supervisor.trained()
    assert len(requests) == 1 + len(plan.answer.fallbacks)
    micro = [(request.plan.micro_batch, request.plan.accumulation) for request in requests]
    assert all(rows * times == 16 for rows, times in micro)
    assert [rows for rows, _ in micro] == sorted((rows for rows, _ in micro), reverse=True)
    assert len({request.config.fingerprint for request in requests}) == 1
    assert (plan.misses, plan.fallbacks_left) == (len(requests), 0)
    assert trial.outcome is Outcome.FAILED and trial.reason.startswith("oom_device: ")
    assert run.state.counts[Outcome.FAILED] == 1
    assert [one.outcome for one in run.state.history()] == [Outcome.REFUSED], "so the sampler is told"
    assert [event.failure.action for event in ended(run) if event.failure] == [
        *(A.FALLBACK for _ in plan.answer.fallbacks),
        A.GIVE_UP,
    ]


def test_oom_with_room_left_in_the_plan_completes_with_the_same_value(tmp_path: Path) -> None:
    case = Shows(K.OOM_DEVICE, OOM, (A.FALLBACK,) * 2, Outcome.COMPLETE)
    run = instant.run(tmp_path / "oom", oom_study(), script=shown(case, 2))
    whole = instant.run(tmp_path / "whole", oom_study())
    assert run.state.trials[0].value == whole.state.trials[0].value
    assert run.state.trials[0].plan is not None and run.state.trials[0].plan.misses == 2
    assert "planned" not in ended(run)[0].failure.detail  # nothing was measured on this machine


OOM_VALIDATING = replace(OOM, phase="evaluate")


def test_oom_in_a_validation_takes_fewer_rows_there_and_leaves_training_as_it_is(tmp_path: Path) -> None:
    case = Shows(K.OOM_DEVICE, OOM_VALIDATING, (A.FALLBACK,) * 2, Outcome.COMPLETE)
    run = instant.run(tmp_path / "oom", oom_study(), script=shown(case, 2))
    whole = instant.run(tmp_path / "whole", oom_study())
    (trial,) = run.state.trials
    assert trial.value == whole.state.trials[0].value
    first, *others = [request.plan for request in run.supervisor.trained()]
    assert [plan.eval_rows for plan in (first, *others)] == [64, 32, 16]
    assert {plan.model_copy(update={"eval_batch": None}) for plan in others} == {first}
    assert (trial.plan.eval_batches_taken, trial.plan.fallbacks_taken, trial.plan.misses) == (2, 0, 2)
    failure = ended(run)[0].failure
    assert failure is not None and failure.phase == "evaluate"
    assert "lower execution.eval_batch" in failure.sentence
    assert any("the 2. smaller validation batch" in line for line in plan_lines(trial))


def test_a_validation_of_one_row_that_runs_out_takes_the_fallbacks_of_training(tmp_path: Path) -> None:
    run = instant.run(tmp_path, oom_study(), script=lambda _: instant.Ends(None, OOM_VALIDATING))
    (trial,) = run.state.trials
    plan = trial.plan
    requests = run.supervisor.trained()
    assert len(requests) == 1 + len(plan.answer.eval_batches) + len(plan.answer.fallbacks)
    assert (plan.eval_batches_left, plan.fallbacks_left) == (0, 0)
    assert {request.plan.eval_rows for request in requests[len(plan.answer.eval_batches) :]} == {1}
    assert trial.outcome is Outcome.FAILED


# ---- learning more of an assertion on the device

ASSERT = fault(message="CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (fault(code="DATA", message="row 7: label 9 of 4"), "; run again to learn where: data: row 7: label 9 of 4"),
        (crash(9), "; run again to learn where: killed: killed from outside"),
        (fault(message="device-side assert triggered at Loss.cu:242"), "Loss.cu:242"),
    ],
)
def test_the_attempt_that_learns_more_ends_the_trial(tmp_path: Path, then: Evidence, reason: str) -> None:
    ends = iter([ASSERT, then])
    run = instant.run(tmp_path, study(), script=lambda _: instant.Ends(None, next(ends)))
    (trial,) = run.state.trials
    assert trial.outcome is Outcome.FAILED
    assert trial.reason.startswith("device_assert: ") and reason in trial.reason
    assert len(trial.attempts) == 2
    assert [record.outcome for record in run.state.history()] == [Outcome.REFUSED]


def test_a_stop_in_between_does_not_forget_what_was_to_be_learned(tmp_path: Path) -> None:
    ends = iter([ASSERT, Evidence(server_lost=True), crash(9)])
    run = instant.run(tmp_path, study(), script=lambda _: instant.Ends(None, next(ends)))
    (trial,) = run.state.trials
    assert [attempt.failure.action for attempt in trial.attempts if attempt.failure] == [A.DIAGNOSE, A.RETRY, A.GIVE_UP]


def test_a_kill_between_the_last_attempt_and_the_end_changes_no_reason(tmp_path: Path) -> None:
    def run(folder: Path, kill_after: int | None = None) -> instant.Run:
        ends = iter([ASSERT, fault(code="CONFIG", message="odd")])
        return instant.run(folder, study(), script=lambda _: instant.Ends(None, next(ends)), kill_after=kill_after)

    whole = run(tmp_path / "whole")
    last = max(index for index, event in enumerate(whole.events) if isinstance(event, AttemptEnded))
    run(tmp_path / "killed", kill_after=last + 1)
    resumed = instant.run(tmp_path / "killed", study())
    assert resumed.state.trials[0].reason == whole.state.trials[0].reason


# ---- what is kept of a failure


# ---- the breaker


def breaking(evidence: Evidence, **runtime: int) -> dict[str, Any]:
    return {
        "study": study(study={"trials": 9}, runtime=runtime),
        "script": lambda _: instant.Ends(None, evidence),
    }


@pytest.mark.parametrize(
    ("evidence", "runtime", "end", "trials", "status"),
    [
        (fault("a.Odd"), {}, End.SAME_FAILURE, 3, ExitStatus.ANSWER_IS_NO),
        (fault("a.Odd"), {"max_same_failure": 2}, End.SAME_FAILURE, 2, ExitStatus.ANSWER_IS_NO),
        (fault("a.Odd"), {"max_same_failure": 99}, End.TOO_MANY_FAILURES, 5, ExitStatus.ANSWER_IS_NO),
        (fault(code="CONFIG"), {}, End.SAME_FAILURE, 3, ExitStatus.ANSWER_IS_NO),
        (fault(code="DATA"), {}, End.BAD_DATA, 1, ExitStatus.CANNOT_RUN),
        (crash(9, killed_by_us="timeout"), {}, End.SAME_FAILURE, 3, ExitStatus.ANSWER_IS_NO),
        (crash(9), {}, End.DONE, 9, ExitStatus.ANSWER_IS_NO),  # nobody knows who kills: no reason to stop
        (OOM, {}, End.TOO_MANY_FAILURES, 5, ExitStatus.ANSWER_IS_NO),  # the next one may be smaller
    ],
)
def test_a_study_whose_trials_fail_stops(
    tmp_path: Path, evidence: Evidence, runtime: dict[str, int], end: End, trials: int, status: ExitStatus
) -> None:
    run = instant.run(tmp_path, **breaking(evidence, **runtime))
    assert run.end is end
    assert run.state.counts[Outcome.FAILED] == len(run.state.trials) == trials
    assert exit_status(end, run.state) is status


def test_the_next_session_tries_again(tmp_path: Path) -> None:
    first = instant.run(tmp_path, **breaking(fault("a.Odd")))
    assert first.end is End.SAME_FAILURE
    assert instant.run(tmp_path, study(study={"trials": 9})).end is End.DONE


def test_an_invariant_that_broke_stops_the_study_with_its_own_status(tmp_path: Path) -> None:
    run = instant.run(tmp_path, **breaking(fault(code="INTERNAL")))
    assert run.end is End.BROKEN
    assert exit_status(End.BROKEN, run.state) is ExitStatus.BUG
