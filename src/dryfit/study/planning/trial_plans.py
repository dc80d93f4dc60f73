"""The memory plans of a study's trials: taken from the ledger, or made by PLAN children."""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.core.failure import Action, Failure, FailureKind, PastFailure
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.memory import ExecutionChoice, VerdictKind
from dryfit.core.jobs.plan import PlanAnswer, PlanRequest, PlanResult, RehearsedPlanRequest, StudyTokens
from dryfit.core.jobs.train import ResolveResult
from dryfit.core.settings.execution import (
    DeviceKind,
    DeviceSpec,
    ExecutionSettings,
    UnknownPolicy,
)
from dryfit.core.settings.memory_key import memory_key
from dryfit.core.settings.objective_table import CalledCode
from dryfit.core.settings.task_facts import task_word
from dryfit.core.sharding.device_groups import cpu_of
from dryfit.core.sharding.rank_search import AUTO
from dryfit.core.text.units import parse_bytes
from dryfit.core.version import VERSION
from dryfit.core.wire import canonical_json
from dryfit.runtime.children.child_spec import ChildExited, ChildSpec
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.recovery import ANOTHER_ATTEMPT, decide_recovery
from dryfit.runtime.machine.host_memory import plannable_bytes
from dryfit.runtime.machine.node import NodeFacts, Nodes, first_node
from dryfit.store.events import TrialPlanned
from dryfit.store.layout import shared_traces
from dryfit.store.state import TrialState
from dryfit.study.loop.next_step import Readiness
from dryfit.study.resources.trial_devices import degrees_at_hand
from dryfit.study.trials.child_limits import preparing_limits
from dryfit.study.trials.child_requests import plan_subject, rehearsed_plan_request
from dryfit.study.trials.context import StudyContext
from dryfit.study.trials.trial_config import trial_settings

_GIB: Final = 2**30
_NO_MEMORY_IN_IT = {"device", "threads", "unknown"}
"""Wishes that change no plan: what is left of them is in the device already, or decides only what follows."""


def planning_device(resolved: ResolveResult, execution: ExecutionSettings) -> DeviceSpec | None:
    """Return the device a study's trials are planned for; None if they are not planned.

    On the CPU only a limit gives a plan something to keep to.
    """
    limit_bytes = parse_bytes(execution.memory_limit) if execution.memory_limit is not None else None
    if resolved.device is DeviceKind.CUDA:
        spec = resolved.device_spec
        if spec is None or limit_bytes is None:
            return spec
        return spec.model_copy(update={"capacity_bytes": min(spec.capacity_bytes, limit_bytes)})
    if limit_bytes is None:
        return None
    return DeviceSpec(name="the CPU", kind=DeviceKind.CPU, capacity_bytes=limit_bytes)


def host_bytes_for(execution: ExecutionSettings, device: DeviceKind, nodes: Collection[NodeFacts]) -> int | None:
    """Return the host memory for all ranks of a trial, if ``execution.tp`` is "auto" and they run there; else None.

    In whole GiB, so that a plan is the same after a restart of the machine; of several nodes that of the smallest.
    """
    if execution.tp != AUTO or device is not DeviceKind.CPU:
        return None
    return max(1, plannable_bytes(min(node.host_bytes for node in nodes)) // _GIB) * _GIB


def plan_key(request: PlanRequest, torch: str) -> str:
    """Return a hash of all that decides the answer to a request with one subject."""
    (subject,) = request.subjects
    decides = {
        "subject": memory_key(subject),
        "device": request.device.model_dump(mode="json"),
        "wishes": request.execution.model_dump(mode="json", exclude=_NO_MEMORY_IN_IT),
        "data": request.tokens.data_fingerprint if request.tokens is not None else "",
        "versions": [VERSION, torch],
    }
    if request.execution.tp == AUTO:
        decides |= {"degrees": request.degrees, "host": request.host_bytes}
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()[:16]


def rehearsal_key(request: RehearsedPlanRequest, version: int, torch: str) -> str:
    """Return a hash of all that decides the answer to the request to rehearse what a user's own function makes.

    Every parameter counts: what it does to memory, the function alone knows.

    Args:
        request: The request.
        version: As the study file counts the function's.
        torch: The version of torch.
    """
    calling = request.calling
    decides = {
        "function": [calling.objective.function, version, calling.own_hash],
        "params": calling.params,
        "device": request.device.model_dump(mode="json"),
        "allow": request.allow,
        "versions": [VERSION, torch],
    }
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()[:16]


def readiness_of(trial: TrialState, key: str, policy: UnknownPolicy) -> Readiness:
    """Return whether an open trial may have a process.

    Args:
        trial: A trial of a study that plans.
        key: The key of its plan now.
        policy: What to do with trials whose memory is unknown.
    """
    plan = trial.plan
    if plan is None and trial.attempts:
        return Readiness.PLANNED  # it began without a plan, under an older version: it goes on as it began
    if plan is None or plan.key != key:
        return Readiness.UNPLANNED
    match plan.answer.verdict:
        case VerdictKind.FITS | VerdictKind.FITS_WITH:
            return Readiness.PLANNED
        case VerdictKind.REFUSED:
            return Readiness.REFUSED
        case VerdictKind.UNKNOWN:
            return Readiness.REFUSED if policy is UnknownPolicy.REFUSE else Readiness.EXCLUSIVE


@dataclass(frozen=True, slots=True)
class PlanTrouble:
    """A PLAN child that left no answer, where its trial is not simply called unknown."""

    number: int
    failure: Failure
    action: Action
    delay_s: float


class TrialPlanner:
    """Plans the trials of one session.

    An answer is never asked for twice in a study: trials that differ in nothing that decides memory share it, so a
    space in which little fits is passed through in seconds, and a planner that crashes on a model does so once.

    Args:
        study: The study.
        nodes: The first of them runs PLAN children.
        write: Appends an event to the ledger.
    """

    def __init__(
        self,
        study: StudyContext,
        nodes: Nodes,
        write: Callable[[TrialPlanned], None],
    ) -> None:
        self._study = study
        self._nodes = nodes
        self._write = write
        self._device = planning_device(study.resolved, study.config.execution)
        self._torch = study.resolved.versions.get("torch", "")
        self._degrees = degrees_at_hand(study.config, study.resolved.device, study.nodes)
        self._host_bytes = host_bytes_for(study.config.execution, study.resolved.device, study.nodes.values())
        self.running: dict[str, int] = {}
        self._failures: dict[int, tuple[PastFailure, ...]] = {}
        self._keys: dict[int, str] = {}

    @property
    def plans(self) -> bool:
        """Whether this study plans its trials."""
        return self._device is not None

    @property
    def planning(self) -> frozenset[int]:
        """The numbers of the trials that are being planned."""
        return frozenset(self.running.values())

    def readiness(self) -> dict[int, Readiness]:
        """Return which open trials may have a process; empty if this study plans nothing."""
        if self._device is None:
            return {}
        policy = self._study.config.execution.unknown
        return {
            trial.number: readiness_of(trial, self._key(trial, self._device), policy)
            for trial in self._study.state.open_trials
        }

    def choice(self, trial: TrialState) -> ExecutionChoice | None:
        """Return what a trial is to be run with; None: as the study file says."""
        return trial.plan.execution if trial.plan is not None and self._device is not None else None

    def plan(self, trial: TrialState) -> Sequence[ChildSpec]:
        """Plan a trial: from an earlier answer at once, else by the child that is returned, to be started."""
        assert self._device is not None  # else no trial is unplanned
        key = self._key(trial, self._device)
        if key in self._study.state.answers:
            self._write(TrialPlanned(number=trial.number, key=key))
            return ()
        folder, own = self._new_folder(trial.number), self._study.config.function
        spec = ChildSpec(
            key=f"plan-{trial.number}-{folder.name}",
            folder=folder,
            body=self._request(trial, self._device) if own is None else self._rehearsal(own, trial, self._device),
            limits=preparing_limits(self._study.config.runtime),
            place=cpu_of(first_node(self._nodes).name),
        )
        self.running[spec.key] = trial.number
        return (spec,)

    def take(self, event: ChildExited) -> PlanTrouble | None:
        """Record the answer of a PLAN child.

        Returns:
            What must follow: another try, or a pause for a full disk; None: nothing.
        """
        number = self.running.pop(event.key)
        result = event.result
        if result is not None and isinstance(result.answer, PlanResult):
            self._failures.pop(number, None)
            self._answer(number, result.answer.answers[0])
            return None
        failure = classify(event.evidence, result, job=Job.PLAN)
        past = self._failures.get(number, ())
        action = decide_recovery(failure, past, retries=self._study.config.runtime.retries)
        self._failures[number] = (*past, PastFailure(failure.kind, reached_checkpoint=False))
        if action.action in ANOTHER_ATTEMPT or action.action is Action.PAUSE:
            return PlanTrouble(number, failure, action.action, action.delay_s)
        self._answer(number, self._unknown(failure))
        return None

    def abandon(self) -> None:
        """Kill every PLAN child: none has anything to keep."""
        for key in self.running:
            first_node(self._nodes).kill(key)
        self.running.clear()

    def _answer(self, number: int, answer: PlanAnswer) -> None:
        self._write(TrialPlanned(number=number, key=self._keys[number], answer=answer))

    def _unknown(self, failure: Failure) -> PlanAnswer:
        assert self._device is not None
        return PlanAnswer(
            verdict=VerdictKind.UNKNOWN,
            device=self._device,
            reasons=(f"{FailureKind.PLANNER}: {failure.sentence}",),
            torch=self._torch,
            planner_s=0.0,
        )

    def _key(self, trial: TrialState, device: DeviceSpec) -> str:
        if trial.number not in self._keys:
            own = self._study.config.function
            self._keys[trial.number] = (
                plan_key(self._request(trial, device), self._torch)
                if own is None
                else rehearsal_key(self._rehearsal(own, trial, device), own.version, self._torch)
            )
        return self._keys[trial.number]

    def _rehearsal(self, own: CalledCode, trial: TrialState, device: DeviceSpec) -> RehearsedPlanRequest:
        calibration_dir = shared_traces(os.environ, Path.home()).parent
        return rehearsed_plan_request(self._study, own, trial, device, calibration_dir)

    def _request(self, trial: TrialState, device: DeviceSpec) -> PlanRequest:
        config = self._study.config
        settings = trial_settings(self._study, trial.params, trial.own)
        execution = config.execution
        if execution.micro_batch is not None and execution.micro_batch > settings.train.batch_size:
            execution = execution.model_copy(update={"micro_batch": settings.train.batch_size})
        source = self._study.resolved.revisions.get(task_word(config.study.task), "")
        tokens = StudyTokens(
            data=config.data,
            cache_dir=str(self._study.layout.cache),
            data_fingerprint=self._study.resolved.data_fingerprint,
        )
        return PlanRequest(
            subjects=(plan_subject(config, settings, source),),
            device=device,
            execution=execution,
            tokens=tokens,
            trace_dir=str(shared_traces(os.environ, Path.home())),
            degrees=self._degrees,
            host_bytes=self._host_bytes,
        )

    def _new_folder(self, number: int) -> Path:
        paths = self._study.layout.trial(number)
        tries = 1
        while paths.planning(tries).exists():
            tries += 1
        return paths.planning(tries)
