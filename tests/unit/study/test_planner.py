"""What is planned for, under which key, and what a plan lets a trial do."""

from typing import Any

import pytest

import plan_jobs
from dryfit.ledger.state import AttemptState, PlanState, TrialState
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, PlanSubject, UnknownPolicy, plan_execution
from dryfit.settings.memory_terms import Allocator, DeviceKind, DeviceSpec, OptimizerImpl, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import OptimSettings, TrainSettings, TrialSettings
from dryfit.settings.training_messages import ResolveResult
from dryfit.study.next_step import Readiness
from dryfit.study.trial_plans import plan_key, planning_device, readiness_of, refusal_text

CARD = DeviceSpec(name="A card", capacity_bytes=24 * 2**30, capability=(8, 9))


def resolved(device: DeviceKind, spec: DeviceSpec | None = None) -> ResolveResult:
    return plan_jobs.resolved().model_copy(update={"device": device, "device_spec": spec})


def test_what_is_planned_for() -> None:
    none, limit = ExecutionSettings(), ExecutionSettings(memory_limit="14GiB")
    assert planning_device(resolved(DeviceKind.CPU), none) is None
    cpu = planning_device(resolved(DeviceKind.CPU), limit)
    assert cpu is not None and (cpu.kind, cpu.capacity_bytes) == (DeviceKind.CPU, 14 * 2**30)
    assert planning_device(resolved(DeviceKind.CUDA, CARD), none) == CARD
    limited = planning_device(resolved(DeviceKind.CUDA, CARD), limit)
    assert limited == CARD.model_copy(update={"capacity_bytes": 14 * 2**30})
    assert planning_device(resolved(DeviceKind.CUDA, CARD), ExecutionSettings(memory_limit="25GiB")) == CARD
    assert planning_device(resolved(DeviceKind.CUDA), limit) is None


AS_SET = ExecutionSettings()


def request(execution: ExecutionSettings = AS_SET, **tables: Any) -> PlanRequest:
    subject = PlanSubject(task=BuiltInTask.CRITERIA, settings=TrialSettings(**tables))
    return PlanRequest(subjects=(subject,), device=CARD, execution=execution, trace_dir="somewhere")


def test_a_plan_holds_while_nothing_that_decides_it_changes() -> None:
    key = plan_key(request(), "2.0")
    same = [
        plan_key(request(optim=OptimSettings(lr=0.1)), "2.0"),
        plan_key(request(ExecutionSettings(threads=3, unknown=UnknownPolicy.REFUSE, device="cuda")), "2.0"),
        plan_key(request().model_copy(update={"trace_dir": "elsewhere"}), "2.0"),
    ]
    assert set(same) == {key}
    other = [
        plan_key(request(train=TrainSettings(batch_size=2)), "2.0"),
        plan_key(request(ExecutionSettings(checkpointing=False)), "2.0"),
        plan_key(request(ExecutionSettings(allow="exact")), "2.0"),
        plan_key(request(ExecutionSettings(tp=2)), "2.0"),
        plan_key(request(ExecutionSettings(tp=4)), "2.0"),
        plan_key(request().model_copy(update={"device": CARD.model_copy(update={"capacity_bytes": 1})}), "2.0"),
        plan_key(request(), "2.1"),
    ]
    assert len({key, *other}) == 8


def test_a_request_is_written_under_the_names_it_always_had() -> None:
    asked = request(ExecutionSettings(tp=2)).model_copy(update={"every_fallback": True})
    written = asked.model_dump(mode="json")
    assert (written["wishes"]["tp"], written["every_rung"]) == (2, True)
    assert not {"execution", "every_fallback"} & written.keys()
    assert PlanRequest.model_validate_json(asked.model_dump_json()) == asked


def trial(plan: PlanState | None = None, *, attempts: int = 0) -> TrialState:
    begun = [AttemptState(number + 1, 0.0, trial=0) for number in range(attempts)]
    plans = {plan.key: plan} if plan is not None else {}
    return TrialState(0, {}, {}, {}, 0, "", attempts=begun, plan=plan, plans=plans)


def planned(verdict: VerdictKind, **more: Any) -> PlanState:
    return PlanState("k", PlanAnswer(verdict=verdict, device=CARD, torch="2.0", planner_s=1.0, **more))


@pytest.mark.parametrize(
    ("verdict", "ready"),
    [
        (VerdictKind.FITS, Readiness.PLANNED),
        (VerdictKind.FITS_WITH, Readiness.PLANNED),
        (VerdictKind.REFUSED, Readiness.REFUSED),
        (VerdictKind.UNKNOWN, Readiness.EXCLUSIVE),
    ],
)
def test_a_verdict_decides_what_a_trial_may_do(verdict: VerdictKind, ready: Readiness) -> None:
    assert readiness_of(trial(planned(verdict)), ["k"], UnknownPolicy.EXCLUSIVE) is ready
    assert readiness_of(trial(planned(verdict)), ["another"], UnknownPolicy.EXCLUSIVE) is Readiness.UNPLANNED


def test_trials_without_a_plan() -> None:
    assert readiness_of(trial(), ["k"], UnknownPolicy.EXCLUSIVE) is Readiness.UNPLANNED
    assert readiness_of(trial(attempts=1), ["k"], UnknownPolicy.EXCLUSIVE) is Readiness.PLANNED
    unknown = trial(planned(VerdictKind.UNKNOWN, reasons=("an op",)))
    assert readiness_of(unknown, ["k"], UnknownPolicy.REFUSE) is Readiness.REFUSED
    assert refusal_text(unknown.plan.answer) == 'its memory is unknown, and execution.unknown is "refuse" (an op)'


def test_a_choice_is_carried_out_and_the_rest_of_the_plan_stays() -> None:
    execution = ExecutionSettings(memory_limit="1GiB", allocator=Allocator.NATIVE, reentrant=True, loader_workers=2)
    plan = plan_execution(execution, effective_batch=10, device=DeviceKind.CUDA, cores=8, parallel=2)
    choice = ExecutionChoice(
        micro_batch=4,
        accumulation=3,
        checkpointing=True,
        optimizer_impl=OptimizerImpl.PLAIN,
        offload_optimizer=True,
    )
    done = choice.carried_out(plan)
    changed = {"micro_batch", "accumulation", "checkpointing", "optimizer_impl", "offload_optimizer"}
    assert done.model_dump(include=changed) == choice.model_dump(include=changed)
    assert done.model_dump(exclude=changed) == plan.model_dump(exclude=changed)
    with pytest.raises(ValueError, match="accumulation is 2, the batch needs 3"):
        ExecutionChoice(micro_batch=4, accumulation=2).carried_out(plan)
