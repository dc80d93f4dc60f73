"""Which failures are errors of CUDA, and which memory is told, as the mirror's user attributes have it."""

from typing import Any

import pytest

from dryfit.core.failure import FailureKind
from dryfit.search.mirror.attributes import PlannedMemory, end_attributes, failure_attributes


def failure(kind: str, error: str = "", error_type: str = "", sentence: str = "said") -> dict[str, Any]:
    return {"kind": kind, "sentence": sentence, "action": "retry", "error_type": error_type, "error": error}


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
def test_errors_of_cuda(of: dict[str, Any]) -> None:
    found = failure_attributes(of)
    assert found["cuda_error"] is True
    assert found["cuda_error_type"] == (of["error_type"] or of["kind"])
    assert found["cuda_error_msg"] == (of["error"] or of["sentence"])
    assert found["failure_kind"] == of["kind"]


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
def test_what_is_none_of_cudas(of: dict[str, Any]) -> None:
    assert set(failure_attributes(of)) == {"failure", "failure_kind"}


def test_every_kind_is_told() -> None:
    assert {failure_attributes(failure(kind))["failure_kind"] for kind in FailureKind} == set(FailureKind)


AS_WISHED: dict[str, Any] = {"micro_batch": 8, "accumulation": 1}


def answer(kind: str = "cuda", *, execution: object = AS_WISHED, memory: bool = True) -> dict[str, Any]:
    sizes = {"peak_allocated_bytes": 70, "required_bytes": 100, "margin_bytes": 10}
    return {"device": {"kind": kind}, "execution": execution, "memory": sizes if memory else None}


@pytest.mark.parametrize(("kind", "peak_bytes"), [("cuda", 70), ("cpu", 90)])
def test_planned_is_what_observed_is_compared_with(kind: str, peak_bytes: int) -> None:
    assert PlannedMemory.of(answer(kind)).peak_bytes == peak_bytes
    assert PlannedMemory.of(answer(kind, memory=False)).peak_bytes is None


def ended(outcome: str = "complete", **facts: Any) -> dict[str, Any]:
    return {"outcome": outcome, "reason": "", **facts}


OBSERVED = {"allocated_bytes": 60, "reserved_bytes": 65, "rss_bytes": 80}


def test_observed_is_of_the_device_or_of_the_process() -> None:
    assert end_attributes(ended(observed=OBSERVED), None)["observed_bytes"] == 60
    assert end_attributes(ended(observed=OBSERVED), PlannedMemory(90, True, False))["observed_bytes"] == 80
    assert end_attributes(ended(observed={**OBSERVED, "allocated_bytes": None}), None)["observed_bytes"] == 80
    assert "observed_bytes" not in end_attributes(ended(observed=None), PlannedMemory(90, True, False))


def test_after_another_rung_the_first_plan_is_nothing_to_compare_with() -> None:
    plan = PlannedMemory.of(answer())
    plan.note_failure({"kind": "killed", "action": "retry"})
    assert "planned_bytes" not in end_attributes(ended(observed=OBSERVED), plan)
    plan.note_failure({"kind": "oom_device", "action": "rung"})
    assert end_attributes(ended(observed=OBSERVED), plan)["planned_bytes"] is None
    assert "planned_bytes" not in end_attributes(ended("failed", observed=None), plan)


@pytest.mark.parametrize(
    ("outcome", "told"), [("pruned", True), ("refused", True), ("failed", False), ("complete", False)]
)
def test_only_what_optuna_calls_pruned_has_a_reason_for_that(outcome: str, told: bool) -> None:
    found = end_attributes(ended(outcome, reason="because"), None)
    assert ("prune_reason" in found) is told
    assert (found["outcome"], found["reason"]) == (outcome, "because")


def test_folds_are_told_with_their_spread() -> None:
    folds = [
        {"value": value, "also": [2 * value], "best_step": 4, "steps": 5, "schedule_steps": 9} for value in (0.5, 0.7)
    ]
    found = end_attributes(ended(value=0.6, folds=folds), None)
    assert found["folds"] == [[0.5, 1.0], [0.7, 1.4]]
    assert found["spreads"] == pytest.approx([0.02**0.5, 2 * 0.02**0.5])
    pruned = end_attributes(ended("pruned", folds=folds[:1]), None)
    assert pruned["folds"] == [[0.5, 1.0]] and "spreads" not in pruned
    assert "folds" not in end_attributes(ended(value=0.6), None)
