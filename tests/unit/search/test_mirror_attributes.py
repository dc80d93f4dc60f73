"""Which failures are errors of CUDA, and which memory is told, as the mirror's user attributes have it."""

from typing import Any

import pytest

from dryfit.ledger.events import FailureFacts, Observed
from dryfit.ledger.state import AttemptState, PlanState, TrialState
from dryfit.search.follower_runs import end_attributes, failure_attributes, plan_attributes, user_attributes
from dryfit.settings.errors import Action, FailureKind
from dryfit.settings.execution import ExecutionChoice, MemoryPlan, WorstBatch
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, PeakAt, StepPhase, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.trial import FoldScore, Outcome


def failure(kind: str, error: str = "", error_type: str = "", sentence: str = "said") -> FailureFacts:
    return FailureFacts(
        kind=FailureKind(kind), sentence=sentence, action=Action.RETRY, error_type=error_type, error=error
    )


@pytest.mark.parametrize(
    "of",
    [
        failure("oom_device", "CUDA out of memory. Tried to allocate 2 GiB", "torch.OutOfMemoryError"),
        failure("oom_neighbour"),
        failure("device_assert", "CUDA error: device-side assert triggered", "torch.AcceleratorError"),
        failure("device_lost", sentence="the driver gave its device up (Xid 79)"),
        failure("native_crash", "CUDA error: an illegal memory access was encountered", "builtins.RuntimeError"),
        failure("user_code", "CUDA error: invalid configuration argument", "builtins.RuntimeError"),
        failure("user_code", "something else", "torch.AcceleratorError"),
        failure("comm", "NCCL error in: ProcessGroupNCCL.cpp", "torch.distributed.DistBackendError"),
        failure("native_crash", "CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm", "builtins.RuntimeError"),
        failure("native_crash", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "builtins.RuntimeError"),
    ],
)
def test_errors_of_cuda(of: FailureFacts) -> None:
    found = failure_attributes(of)
    assert found["cuda_error"] is True
    assert found["cuda_error_type"] == (of.error_type or of.kind)
    assert found["cuda_error_msg"] == (of.error or of.sentence)
    assert found["failure_kind"] == of.kind


@pytest.mark.parametrize(
    "of",
    [
        failure("user_code", "Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
        failure("user_code", "Torch not compiled with CUDA enabled", "builtins.AssertionError"),
        failure("oom_host", "DefaultCPUAllocator: can't allocate memory", "builtins.RuntimeError"),
        failure("comm", "gloo/transport/tcp/pair.cc: Connection closed by peer", "builtins.RuntimeError"),
        failure("killed", sentence="killed from outside (SIGKILL), nobody knows why"),
    ],
)
def test_what_is_none_of_cudas(of: FailureFacts) -> None:
    assert set(failure_attributes(of)) == {"failure", "failure_kind"}


def test_every_kind_is_told() -> None:
    assert {failure_attributes(failure(kind))["failure_kind"] for kind in FailureKind} == set(FailureKind)


MEMORY = MemoryPlan(
    peak_allocated_bytes=70,
    peak_reserved_bytes=80,
    min_cap_bytes=80,
    overhead_bytes=10,
    margin_bytes=10,
    required_bytes=100,
    by_category={},
    by_phase={},
    peak_at=PeakAt(phase=StepPhase.BACKWARD, module="encoder", op="mm"),
    worst_batch=WorstBatch(rows=8, length=16, from_data=True),
)


def plan(kind: str = "cuda", **facts: Any) -> PlanState:
    device = DeviceSpec(name="card", capacity_bytes=1000, kind=DeviceKind(kind))
    shown = {"memory": MEMORY, "execution": ExecutionChoice(micro_batch=8, accumulation=1), **facts}
    return PlanState("k", PlanAnswer(verdict=VerdictKind.FITS, device=device, torch="2.0", planner_s=1.0, **shown))


@pytest.mark.parametrize(("kind", "peak_bytes"), [("cuda", 70), ("cpu", 90)])
def test_planned_is_what_observed_is_compared_with(kind: str, peak_bytes: int) -> None:
    assert plan_attributes(plan(kind)) == {"planned_bytes": peak_bytes}
    assert plan_attributes(plan(kind, memory=None)) == {"planned_bytes": None}


def ended(outcome: str = "complete", **facts: Any) -> TrialState:
    return TrialState(0, {}, {}, {}, seed=0, fingerprint="f", outcome=Outcome(outcome), **facts)


OBSERVED = Observed(allocated_bytes=60, reserved_bytes=65, rss_bytes=80)


def test_observed_is_of_the_device_or_of_the_process() -> None:
    assert end_attributes(ended(observed=OBSERVED))["observed_bytes"] == 60
    assert end_attributes(ended(observed=OBSERVED, plan=plan("cpu")))["observed_bytes"] == 80
    without = OBSERVED.model_copy(update={"allocated_bytes": None})
    assert end_attributes(ended(observed=without))["observed_bytes"] == 80
    assert "observed_bytes" not in end_attributes(ended(plan=plan("cpu")))


def test_after_a_fallback_the_first_plan_is_nothing_to_compare_with() -> None:
    shards = ExecutionChoice(micro_batch=8, accumulation=1, tp=2)
    own = plan(fallbacks=(shards,))
    assert "planned_bytes" not in end_attributes(ended(observed=OBSERVED, plan=own))
    own.fallbacks_taken = 1
    assert user_attributes(ended(observed=OBSERVED, plan=own))["planned_bytes"] is None
    assert user_attributes(ended(observed=OBSERVED, plan=own))["tp"] == 2
    assert user_attributes(ended("failed", plan=own))["planned_bytes"] == 70


def test_the_last_failure_is_shown_and_no_cuda_error_is_forgotten() -> None:
    failures = (failure("oom_device", "CUDA out of memory"), failure("killed"))
    attempts = [AttemptState(number, 0.0, trial=0, failure=one) for number, one in enumerate(failures, start=1)]
    found = user_attributes(ended("failed", attempts=attempts))
    assert (found["attempts"], found["failure_kind"]) == (2, "killed")
    assert (found["cuda_error"], found["cuda_error_msg"]) == (True, "CUDA out of memory")


@pytest.mark.parametrize(
    ("outcome", "shown"), [("pruned", True), ("refused", True), ("failed", False), ("complete", False)]
)
def test_only_what_optuna_calls_pruned_has_a_reason_for_that(outcome: str, shown: bool) -> None:
    found = end_attributes(ended(outcome, reason="because"))
    assert ("prune_reason" in found) is shown
    assert (found["outcome"], found["reason"]) == (outcome, "because")


def test_folds_are_shown_with_their_spread() -> None:
    folds = tuple(
        FoldScore(value=value, also=(2 * value,), best_step=4, steps=5, schedule_steps=9) for value in (0.5, 0.7)
    )
    found = end_attributes(ended(value=0.6, folds=folds))
    assert found["folds"] == [[0.5, 1.0], [0.7, 1.4]]
    assert found["spreads"] == pytest.approx([0.02**0.5, 2 * 0.02**0.5])
    pruned = end_attributes(ended("pruned", folds=folds[:1]))
    assert pruned["folds"] == [[0.5, 1.0]] and "spreads" not in pruned
    assert "folds" not in end_attributes(ended(value=0.6))
