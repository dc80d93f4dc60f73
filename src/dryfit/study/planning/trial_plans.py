"""The memory plans of a study's trials: taken from the ledger, or made by PLAN children."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.core.failure import Action, Failure, FailureKind, PastFailure
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.memory import ExecutionChoice, VerdictKind
from dryfit.core.jobs.plan import PlanAnswer, PlanRequest, PlanResult, RehearsedPlanRequest, StudyTokens
from dryfit.core.settings.choices import Precision
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
from dryfit.core.version import VERSION
from dryfit.core.wire import digest
from dryfit.runtime.children.child_spec import ChildExited, ChildSpec
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.recovery import ANOTHER_ATTEMPT, decide_recovery
from dryfit.runtime.machine.host_memory import plannable_bytes
from dryfit.runtime.machine.node import NodeFacts, Nodes, first_node
from dryfit.store.events import TrialPlanned
from dryfit.store.layout import shared_traces
from dryfit.store.state import PlanState, TrialState
from dryfit.study.loop.next_step import Readiness
from dryfit.study.planning.pace import has_bf16
from dryfit.study.planning.planned_devices import kind_of, like, planned_devices
from dryfit.study.resources.trial_devices import degrees_at_hand
from dryfit.study.trials.child_limits import preparing_limits
from dryfit.study.trials.child_requests import plan_subject, rehearsed_plan_request
from dryfit.study.trials.context import StudyContext
from dryfit.study.trials.trial_config import trial_settings

_GIB: Final = 2**30
_NO_MEMORY_IN_IT = {"device", "threads", "unknown"}
"""Wishes that change no plan: what is left of them is in the device already, or decides only what follows."""


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
    return digest(decides)


def rehearsal_key(request: RehearsedPlanRequest, version: int, torch: str) -> str:
    """Return a hash of everything that decides the answer to a rehearsal of a user's own function.

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
    return digest(decides)


def readiness_of(trial: TrialState, keys: Collection[str], policy: UnknownPolicy) -> Readiness:
    """Return whether an open trial may have a process.

    Args:
        trial: A trial of a study that plans.
        keys: The keys of its plans now, one for each kind of device that it may run on.
        policy: What to do with trials whose memory is unknown.
    """
    if trial.plan is None and trial.attempts:
        return Readiness.PLANNED  # it began without a plan, under an older version: it goes on as it began
    if not trial.plans.keys() >= set(keys):
        return Readiness.UNPLANNED
    if not keys:
        return Readiness.PLANNED  # no device is there now that it could be planned for
    verdicts = {trial.plans[key].answer.verdict for key in keys}
    if any(verdict.fits for verdict in verdicts):
        return Readiness.PLANNED
    allowed = VerdictKind.UNKNOWN in verdicts and policy is not UnknownPolicy.REFUSE
    return Readiness.EXCLUSIVE if allowed else Readiness.REFUSED


@dataclass(frozen=True, slots=True)
class PlanTrouble:
    """A PLAN child that left no answer, where its trial is not simply called unknown."""

    number: int
    failure: Failure
    action: Action
    delay_s: float


class TrialPlanner:
    """Plans the trials of one session, each for every kind of device that it may run on.

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
        self._torch = study.resolved.versions.get("torch", "")
        self._host_bytes = host_bytes_for(study.config.execution, study.resolved.device, study.nodes.values())
        self.running: dict[str, int] = {}
        self._planned_for: dict[str, DeviceSpec] = {}
        self._failures: dict[int, tuple[PastFailure, ...]] = {}
        self._keys: dict[tuple[int, DeviceSpec], str] = {}
        self._nodes_known: Mapping[str, NodeFacts] | None = None
        self._kinds_known: Sequence[DeviceSpec] = ()

    @property
    def plans(self) -> bool:
        """Whether this study plans its trials."""
        config = self._study.config
        on_gpus = self._study.resolved.device is DeviceKind.CUDA and config.objective is None
        return (on_gpus and config.nodes is not None) or bool(self._kinds())  # a node may join later

    @property
    def planning(self) -> frozenset[int]:
        """The numbers of the trials that are being planned."""
        return frozenset(self.running.values())

    def readiness(self) -> dict[int, Readiness]:
        """Return which open trials may have a process; empty if this study plans nothing."""
        if not self.plans:
            return {}
        policy = self._study.config.execution.unknown
        return {
            trial.number: readiness_of(trial, self._keys_of(trial).values(), policy)
            for trial in self._study.state.open_trials
        }

    def usable(self, trial: TrialState) -> Sequence[PlanState]:
        """Return the plans by which a trial that is ready may run, for the smallest device first; none: as set.

        Where it fits some kind of device, it does not run on one where that is not known.
        """
        known = [trial.plans[key] for key in self._keys_of(trial).values() if key in trial.plans]
        fitting = [plan for plan in known if plan.answer.verdict.fits]
        return fitting or [plan for plan in known if plan.answer.verdict is VerdictKind.UNKNOWN]

    def refusals(self, trial: TrialState) -> Sequence[PlanAnswer]:
        """Return the answers that refuse a trial, one for each kind of device."""
        return [trial.plans[key].answer for key in self._keys_of(trial).values()]

    def choice(self, plan: PlanState | None) -> ExecutionChoice | None:
        """Return what a trial is to be run with by a plan; None: as the study file, or the user's own code, says."""
        if plan is None or (self._study.config.function is not None and not plan.changes_what_was_asked):
            return None
        return plan.execution

    def plan(self, trial: TrialState) -> Sequence[ChildSpec]:
        """Plan a trial for one kind of device, from an earlier answer at once, else by the child that is returned."""
        device, key = next(each for each in self._keys_of(trial).items() if each[1] not in trial.plans)
        if key in self._study.state.answers:
            self._write(TrialPlanned(number=trial.number, key=key))
            return ()
        folder, own = self._new_folder(trial.number), self._study.config.function
        spec = ChildSpec(
            key=f"plan-{trial.number}-{folder.name}",
            folder=folder,
            body=self._request(trial, device) if own is None else self._rehearsal(own, trial, device),
            limits=preparing_limits(self._study.config.runtime),
            place=cpu_of(first_node(self._nodes).name),
        )
        self.running[spec.key], self._planned_for[spec.key] = trial.number, device
        return (spec,)

    def take(self, event: ChildExited) -> PlanTrouble | None:
        """Record the answer of a PLAN child.

        Returns:
            What must follow: another try, or a pause for a full disk; None: nothing.
        """
        number, device, result = self.running.pop(event.key), self._planned_for.pop(event.key), event.result
        if result is not None and isinstance(result.answer, PlanResult):
            self._failures.pop(number, None)
            self._answer(number, device, result.answer.answers[0])
            return None
        failure = classify(event.evidence, result, job=Job.PLAN)
        past = self._failures.get(number, ())
        action = decide_recovery(failure, past, retries=self._study.config.runtime.retries)
        self._failures[number] = (*past, PastFailure(failure.kind, reached_checkpoint=False))
        if action.action in ANOTHER_ATTEMPT or action.action is Action.PAUSE:
            return PlanTrouble(number, failure, action.action, action.delay_s)
        self._answer(number, device, self._unknown(device, failure))
        return None

    def abandon(self) -> None:
        """Kill every PLAN child: none has anything to keep."""
        for key in self.running:
            first_node(self._nodes).kill(key)
        self.running.clear()
        self._planned_for.clear()

    def _answer(self, number: int, device: DeviceSpec, answer: PlanAnswer) -> None:
        self._write(TrialPlanned(number=number, key=self._keys[number, device], answer=answer))

    def _unknown(self, device: DeviceSpec, failure: Failure) -> PlanAnswer:
        return PlanAnswer(
            verdict=VerdictKind.UNKNOWN,
            device=device,
            reasons=(f"{FailureKind.PLANNER}: {failure.sentence}",),
            torch=self._torch,
            planner_s=0.0,
        )

    def _keys_of(self, trial: TrialState) -> Mapping[DeviceSpec, str]:
        """Return the keys of a trial's plans now, by the kind of device."""
        return {device: self._key(trial, device) for device in self._devices_for(trial)}

    def _devices_for(self, trial: TrialState) -> Sequence[DeviceSpec]:
        """Return the kinds of device that a trial may run on.

        Where there are several, or machines join, one that has begun keeps to its model of GPU, unless the study file
        lets it change.
        """
        kinds, config = self._kinds(), self._study.config
        if config.nodes is None and len(kinds) < 2:
            return kinds
        if trial.params.get("train.precision", config.train.precision) in (Precision.BF16, Precision.TF32):
            kinds = [kind for kind in kinds if has_bf16(kind.kind, kind, cpu=True)] or kinds  # tf32 came with it
        may_change = config.nodes is not None and config.nodes.change_device
        if may_change or trial.plan is None or not trial.attempts:
            return kinds
        own = trial.plan.answer.device
        return [kind for kind in kinds if like(kind, own)] or [own]

    def _kinds(self) -> Sequence[DeviceSpec]:
        """Return the kinds of device that there are; nodes come and go where agents join."""
        if self._study.nodes != self._nodes_known:
            self._nodes_known, self._kinds_known = dict(self._study.nodes), planned_devices(self._study)
        return self._kinds_known

    def _key(self, trial: TrialState, device: DeviceSpec) -> str:
        known = self._keys.get((trial.number, device))
        if known is not None:
            return known
        own = self._study.config.function
        key = self._keys[trial.number, device] = (
            plan_key(self._request(trial, device), self._torch)
            if own is None
            else rehearsal_key(self._rehearsal(own, trial, device), own.version, self._torch)
        )
        return key

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
            degrees=degrees_at_hand(config, self._study.resolved.device, self._with(device)),
            host_bytes=self._host_bytes,
        )

    def _with(self, kind: DeviceSpec) -> Mapping[str, NodeFacts]:
        """Return the nodes that have devices of a kind, or all where trials run on the CPU, or none has."""
        nodes, study = self._study.nodes, self._study
        having = {
            name: node for name, node in nodes.items() if any(kind_of(device, study) == kind for device in node.devices)
        }
        return having or nodes

    def _new_folder(self, number: int) -> Path:
        paths = self._study.layout.trial(number)
        tries = 1
        while paths.planning(tries).exists():
            tries += 1
        return paths.planning(tries)
