"""User attributes of mirrored trials that tell of failures and memory, so that a study can be asked for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dryfit.core.failure import Action, FailureKind
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.trial import FoldScore, Outcome, fold_spreads

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


def failure_attributes(failure: Mapping[str, Any]) -> dict[str, Any]:
    """What the failure of an attempt says of its trial.

    Args:
        failure: The ``failure`` of an ``attempt_ended`` event.
    """
    kind, sentence = str(failure["kind"]), str(failure["sentence"])
    error_type, error = str(failure.get("error_type", "")), str(failure.get("error", ""))
    found: dict[str, Any] = {"failure": f"{kind}: {sentence}", "failure_kind": kind}
    if kind in _CUDA_KINDS or error_type.startswith(_CUDA_TYPES) or _speaks_of_cuda(error or sentence):
        found |= {"cuda_error": True, "cuda_error_type": error_type or kind, "cuda_error_msg": error or sentence}
    return found


def _speaks_of_cuda(text: str) -> bool:
    return any(words in text for words in _CUDA_TEXTS)


@dataclass(slots=True)
class PlannedMemory:
    """What a trial's plan says of its memory.

    Attributes:
        peak_bytes: Of what it allocates; on the CPU of all its processes; None: unknown.
        on_cpu: Whether it is for the CPU.
        of_another: Whether the trial is run otherwise than the plan's memory is of.
        ranks: How many the planner cuts its model over, by what is chosen and then by each fallback; None: it does not.
        fallbacks_taken: How many fallbacks were taken.
    """

    peak_bytes: int | None
    on_cpu: bool
    of_another: bool
    ranks: tuple[int | None, ...] = (None,)
    fallbacks_taken: int = 0

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "PlannedMemory":
        """Read a planner's answer."""
        memory, on_cpu = answer.get("memory"), answer["device"]["kind"] == DeviceKind.CPU
        peak_bytes: int | None = None
        if memory is not None:
            cut: Mapping[str, Any] | None = answer.get("cut")
            degree = cut["degree"] if cut is not None else 1
            whole_bytes = degree * (memory["required_bytes"] - memory["margin_bytes"])
            peak_bytes = whole_bytes if on_cpu else memory["peak_allocated_bytes"]
        execution: Mapping[str, Any] | None = answer.get("execution")
        fallbacks: list[Mapping[str, Any]] = answer.get("fallbacks") or []
        ranks = tuple(one.get("tp") if one is not None else None for one in (execution, *fallbacks))
        return cls(peak_bytes, on_cpu, of_another=execution is None, ranks=ranks)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the trial's attributes say of how its next process is run."""
        ranks = self.ranks[self.fallbacks_taken] if self.fallbacks_taken < len(self.ranks) else None
        return {} if ranks is None else {"tp": ranks}

    def note_failure(self, failure: Mapping[str, Any]) -> None:
        """The trial goes on with the next fallback of its plan, if that followed."""
        self.fallbacks_taken += failure.get("action") == Action.FALLBACK
        self.of_another = self.of_another or self.fallbacks_taken > 0


def end_attributes(event: Mapping[str, Any], plan: PlannedMemory | None) -> dict[str, Any]:
    """What the end of a trial says: why it was pruned, what its folds have come to, and the peaks of its last process.

    Args:
        event: ``trial_finished``.
        plan: Of the trial.
    """
    outcome = Outcome(event["outcome"])
    found: dict[str, Any] = {"outcome": outcome.value}
    if event.get("reason"):
        found["reason"] = event["reason"]
    if outcome in (Outcome.PRUNED, Outcome.REFUSED):
        found["prune_reason"] = event.get("reason", "")
    folds: list[Mapping[str, Any]] = event.get("folds") or []
    if folds:
        scores = [FoldScore.from_json(fold) for fold in folds]
        found["folds"] = [list(score.values) for score in scores]
        if event.get("value") is not None:
            found["spreads"] = list(fold_spreads(scores))
    observed: Mapping[str, Any] | None = event.get("observed")
    if observed is not None:
        allocated_bytes = observed.get("allocated_bytes")
        by_process = allocated_bytes is None or (plan is not None and plan.on_cpu)
        found["observed_bytes"] = observed.get("rss_bytes") if by_process else allocated_bytes
        if plan is not None and plan.of_another:
            found["planned_bytes"] = None  # the two would speak of different executions
    return found
