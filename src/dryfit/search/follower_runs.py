"""A study as its followers show it: a run for each trial, a function of the ledger alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pydantic import ValidationError

from dryfit.ledger.events import EVENT, Event, FailureFacts, ReportMade, StudyCreated, TrialEvent
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import PlanState, TrialState
from dryfit.settings.errors import FailureKind
from dryfit.settings.trial import MetricPoint, Outcome, Scalar

_NO_EVENT: Final = ("json_invalid", "union_tag_invalid", "union_tag_not_found")
"""How pydantic calls a line that is no JSON, or of an event that only a newer dryfit knows."""

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

NUMBERS = ("planned_bytes", "observed_bytes", "attempts", "tp")
"""Attributes of a trial that are also metrics once it has ended."""

Fact = bool | int | float | str


def parse_event(line: bytes) -> Event | None:
    """Parse a line of the ledger; None where it holds no event that this dryfit knows."""
    try:
        return EVENT.validate_json(line)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] in _NO_EVENT:
            return None
        raise


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


@dataclass(frozen=True, slots=True)
class RunPoint:
    """One validation of a trial.

    Attributes:
        n: Index of the report, from 0.
        step: Optimizer steps done.
        at_s: When the ledger noted it, in Unix seconds.
        values: Every metric, ``value`` (what is optimised) and ``epoch``.
    """

    n: int
    step: int
    at_s: float
    values: Mapping[str, float]


@dataclass(slots=True)
class Run:
    """One trial as a tracker shows it.

    Attributes:
        trial: What the ledger says of it so far.
        key: Its id: a function of the study, the generation and the number.
        name: What it is called.
        points: Its validations, in the order of the ledger.
    """

    trial: TrialState
    key: str
    name: str
    points: list[RunPoint] = field(default_factory=list[RunPoint])

    @property
    def ended(self) -> bool:
        """Whether no event about it will follow."""
        return self.trial.outcome is not None

    @property
    def params(self) -> dict[str, Scalar]:
        """Its parameters, and what it is made from besides."""
        return {**self.trial.params, "seed": self.trial.seed}

    @property
    def facts(self) -> dict[str, Fact]:
        """What else is known of it: outcome, why, failures, memory planned and observed. Lists are JSON."""
        trial = self.trial
        known = {key: value for key, value in user_attributes(trial).items() if key not in ("params", "seed")}
        known["generation"] = trial.generation
        kinds = [attempt.failure.kind.value for attempt in trial.attempts if attempt.failure is not None]
        if kinds:
            known["failure_kinds"] = ", ".join(dict.fromkeys(kinds))
        return {
            key: value if isinstance(value, Fact) else json.dumps(value)
            for key, value in known.items()
            if value is not None
        }

    @property
    def numbers(self) -> dict[str, float]:
        """What is measured once: values of the goals, memory, time. Empty until it has ended."""
        if not self.ended:
            return {}
        trial, facts = self.trial, self.facts
        found = {key: float(value) for key in NUMBERS if isinstance(value := facts.get(key), int | float)}
        found |= {"steps": float(trial.steps_done), "time_s": round(trial.time_s, 3)}
        for index, value in enumerate(trial.values or ()):
            found[f"final_value_{index + 1}" if index else "final_value"] = value
        return found


class Runs:
    """All runs of a ledger. The same events always give the same runs: a restart needs no memory."""

    def __init__(self) -> None:
        self.state = StudyState()
        self.runs: list[Run] = []

    @property
    def created(self) -> StudyCreated:
        """The study."""
        assert self.state.created is not None
        return self.state.created

    @property
    def key(self) -> str:
        """The id of the run that stands for the study; it does not change with its file."""
        return self.created.id

    @property
    def began_s(self) -> float:
        """When the study was created, in Unix seconds."""
        return self.created.at

    @property
    def folder(self) -> str:
        """A name for the study that no other has: its own, and the beginning of its id."""
        return f"{self.created.name}-{self.key[:8]}"

    @property
    def closed(self) -> str | None:
        """Why the last session ended; None: it is open, or was killed."""
        return self.state.sessions[-1].closed if self.state.sessions else None

    @property
    def facts(self) -> dict[str, Fact]:
        """What is known of the study."""
        created = self.created
        goals = ", ".join(f"{goal.direction} {goal.name}" for goal in created.goals)
        known: dict[str, Fact] = {"task": str(created.task), "goals": goals, "generation": self.state.generation.number}
        best = self.state.best
        if best is not None and best.value is not None:
            known |= {"best_trial": best.number, "best_value": best.value}
        known |= {str(outcome): self.state.counts[outcome] for outcome in Outcome}
        return known if self.closed is None else {**known, "ended": self.closed}

    def apply(self, event: Event) -> int | None:
        """Apply one event, and return the number of the trial that it is about; None: about none."""
        self.state.apply(event)
        if not isinstance(event, TrialEvent):
            return None
        trial = self.state.trials[event.number]
        if event.number == len(self.runs):
            key = f"{self.key[:32]}-{trial.generation}-{trial.number}"
            self.runs.append(Run(trial, key, f"trial-{trial.number:04d}"))
        if isinstance(event, ReportMade):
            self.runs[event.number].points.append(_point(event.point, event.at))
        return event.number


def _point(point: MetricPoint, at_s: float) -> RunPoint:
    fold = {"fold": float(point.fold)} if point.fold else {}
    values = {**point.metrics, **fold, "epoch": float(point.epoch), "value": float(point.value)}
    return RunPoint(point.n, point.step, at_s, values)


class RunWriter(Protocol):
    """Writes runs to one target. A new one continues what another one has written, however that ended."""

    def identity(self) -> str:
        """Return what tells this target from others; where it changes, everything is written."""
        ...

    def write(self, runs: Runs, numbers: list[int]) -> None:
        """Write what the target lacks of the study and of these trials."""
        ...

    def unsettled(self) -> set[int]:
        """Return the trials whose runs the target may not have, although they were written: none, if calls wait."""
        return set()

    def close(self) -> None:
        """Hand over what is unsettled."""
