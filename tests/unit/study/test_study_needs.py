"""What a trial asks of a device, from its plan and its failures, and how many trials a machine's cores carry."""

from dataclasses import replace
from typing import Any

import pytest

import plan_jobs
from dryfit.ledger.events import FailureFacts
from dryfit.ledger.state import AttemptState, PlanState, TrialState
from dryfit.processes.packing import Need
from dryfit.settings.errors import Action, AttemptTerms, Failure, FailureKind, RecoveryAction
from dryfit.settings.execution import ExecutionChoice
from dryfit.settings.memory_terms import DeviceSpec, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.study.next_step import Readiness
from dryfit.study.placements import alone_first, fence, trial_need

GIB = 2**30
CHOICE = ExecutionChoice(micro_batch=1, accumulation=1)


def plan(capacity: int = 24, *, misses: int = 0, verdict: VerdictKind = VerdictKind.FITS) -> PlanState:
    """Reserved 8, the least 6, overhead 1, margin 1 GiB."""
    memory = plan_jobs.memory(1, 1).model_copy(
        update={
            "peak_reserved_bytes": 8 * GIB,
            "min_cap_bytes": 6 * GIB,
            "overhead_bytes": GIB,
            "margin_bytes": GIB,
            "required_bytes": 8 * GIB,
        }
    )
    device = DeviceSpec(name="made up", capacity_bytes=capacity * GIB)
    known = memory if verdict.fits else None
    answer = PlanAnswer(
        verdict=verdict, device=device, memory=known, execution=CHOICE, fallbacks=(CHOICE,), torch="2", planner_s=0
    )
    return PlanState("key", answer, misses=misses)


def asked(plan: PlanState | None, readiness: Readiness = Readiness.PLANNED, **terms: Any) -> Need:
    return trial_need(5, plan, readiness, AttemptTerms(**terms))


def test_beside_others_it_is_counted_with_all_that_it_would_take_and_alone_with_the_least() -> None:
    need = asked(plan())
    assert (need.shared_bytes, need.alone_bytes, need.exclusive) == (10 * GIB, 7 * GIB, False)
    assert asked(plan(9)).shared_bytes == 9 * GIB, "no more than the device has"


def test_what_is_not_known_runs_alone() -> None:
    unknown = asked(plan(verdict=VerdictKind.UNKNOWN), Readiness.EXCLUSIVE)
    assert (unknown.shared_bytes, unknown.alone_bytes, unknown.exclusive) == (None, None, True)
    assert asked(plan(misses=1)).exclusive, "its plan was wrong"
    assert asked(plan(), exclusive=True).exclusive
    assert asked(plan(), avoid=frozenset("1")).avoid == frozenset("1")
    assert asked(None) == Need(5)


def test_the_fence_is_the_allocators_share() -> None:
    need = asked(plan())
    assert fence(need, plan(), 24 * GIB) == 9 / 24
    assert fence(need, plan(), None) is None
    assert fence(replace(need, exclusive=True), plan(), 24 * GIB) is None
    assert fence(Need(5), None, 24 * GIB) is None
    assert fence(need, plan(), 9 * GIB) is None, "nothing can come beside it"


OOM = Failure(FailureKind.OOM_DEVICE, "it did not suffice")
GIVE_UP = RecoveryAction(Action.GIVE_UP, "it did not suffice")


def trial(known: PlanState | None, *, place: str = "here/0", before: tuple[Action, ...] = ()) -> TrialState:
    attempts = [
        AttemptState(
            n, 0.0, place, trial=5, failure=FailureFacts(kind=FailureKind.OOM_NEIGHBOUR, sentence="", action=action)
        )
        for n, action in enumerate(before, start=1)
    ]
    attempts.append(AttemptState(len(attempts) + 1, 0.0, place, trial=5))
    return TrialState(5, {}, {}, {}, 0, "", attempts=attempts, plan=known)


def test_a_trial_that_ran_out_beside_others_gets_a_device_for_itself_once() -> None:
    again = alone_first(GIVE_UP, OOM, trial(plan()), shared=True)
    assert again.action is Action.EXCLUSIVE and "has it for itself now" in again.reason
    assert alone_first(GIVE_UP, OOM, trial(plan(), before=(Action.EXCLUSIVE,)), shared=True) is GIVE_UP


@pytest.mark.parametrize(
    ("failure", "one", "shared"),
    [
        (OOM, trial(plan()), False),
        (OOM, trial(plan(misses=1)), True),
        (OOM, trial(None), True),
        (OOM, trial(plan(), place="here/cpu"), True),
        (OOM, trial(plan(verdict=VerdictKind.UNKNOWN)), True),
        (Failure(FailureKind.USER_CODE, ""), trial(plan()), True),
    ],
)
def test_others_are_given_up(failure: Failure, one: TrialState, shared: bool) -> None:
    assert alone_first(GIVE_UP, failure, one, shared=shared) is GIVE_UP
