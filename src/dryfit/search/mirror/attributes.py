"""User attributes of mirrored trials: failures, CUDA errors, planned and observed memory, folds."""

from typing import Any

from dryfit.core.failure import FailureKind
from dryfit.core.settings.trial import Outcome
from dryfit.store.events import FailureFacts
from dryfit.store.state import PlanState, TrialState

_CUDA_KINDS = frozenset(
    {FailureKind.OOM_DEVICE, FailureKind.OOM_NEIGHBOUR, FailureKind.DEVICE_ASSERT, FailureKind.DEVICE_LOST}
)

_CUDA_TYPES = ("torch.OutOfMemoryError", "torch.AcceleratorError", "torch.cuda.")
"""How names of classes begin that torch raises for errors of CUDA; torch/__init__.py and torch/cuda/__init__.py."""

_CUDA_TEXTS = (
    "CUDA error",  # torch c10/cuda/CUDAException.cpp
    "CUDA out of memory",  # torch c10/cuda/CUDACachingAllocator.cpp
    "CUDA driver error",  # torch c10/cuda/driver_api.h
    "CUBLAS_STATUS_",  # torch aten/src/ATen/cuda/Exceptions.h, as the four below
    "CUDNN_STATUS_",
    "cuDNN error",
    "CUSOLVER_STATUS_",
    "CUSPARSE_STATUS_",
    "NCCL error",  # torch torch/csrc/distributed/c10d/NCCLUtils.hpp
)


def failure_attributes(failure: FailureFacts) -> dict[str, Any]:
    """Return the attributes of a trial by the failure of one of its attempts."""
    kind, error_type, message = failure.kind, failure.error_type, failure.error or failure.sentence
    attributes: dict[str, Any] = {"failure": f"{kind.value}: {failure.sentence}", "failure_kind": kind.value}
    if kind in _CUDA_KINDS or error_type.startswith(_CUDA_TYPES) or any(text in message for text in _CUDA_TEXTS):
        attributes |= {"cuda_error": True, "cuda_error_type": error_type or kind.value, "cuda_error_msg": message}
    return attributes


def plan_attributes(plan: PlanState) -> dict[str, Any]:
    """Return the attributes of a trial by its plan: peak memory, and over how many ranks its model is sharded."""
    attributes = {"planned_bytes": plan.peak_bytes}
    execution = plan.execution
    return attributes if execution is None or execution.tp is None else {**attributes, "tp": execution.tp}


def end_attributes(trial: TrialState) -> dict[str, Any]:
    """Return the attributes of a trial's end: why it was pruned, its folds' values, the peaks of its last process."""
    assert trial.outcome is not None
    attributes: dict[str, Any] = {"outcome": trial.outcome.value}
    if trial.reason:
        attributes["reason"] = trial.reason
    if trial.outcome in (Outcome.PRUNED, Outcome.REFUSED):
        attributes["prune_reason"] = trial.reason
    if trial.folds:
        attributes["folds"] = [list(score.values) for score in trial.folds]
        if trial.value is not None:
            attributes["spreads"] = list(trial.spreads)
    if trial.observed is not None:
        attributes["observed_bytes"] = trial.observed_bytes
        if trial.plan is not None and trial.plan.runs_otherwise:
            attributes["planned_bytes"] = None  # the two would speak of different executions
    return attributes


def user_attributes(trial: TrialState) -> dict[str, Any]:
    """Return all user attributes of a trial."""
    attributes: dict[str, Any] = {
        "params": trial.params,
        "trial": trial.number,
        "seed": trial.seed,
        "cuda_error": False,
    }
    if trial.attempts:
        attributes["attempts"] = trial.attempts[-1].number
    for attempt in trial.attempts:
        if attempt.failure is not None:
            attributes |= failure_attributes(attempt.failure)
    if trial.plan is not None:
        attributes |= plan_attributes(trial.plan)
    return attributes if trial.outcome is None else attributes | end_attributes(trial)
