"""The memory plans of a study's trials, and why a trial that does not fit is refused."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dryfit.ledger.events import TrialPlanned
from dryfit.ledger.folder import shared_traces
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import PlanState, TrialState
from dryfit.processes.child_spec import ChildExited, ChildSpec
from dryfit.processes.failures import ANOTHER_ATTEMPT, classify, decide_recovery
from dryfit.processes.node import DeviceFacts, NodeFacts, Nodes, first_node, plannable_bytes
from dryfit.search.space import SmallestPoints, Space
from dryfit.settings.choices import Precision
from dryfit.settings.devices import cpu_of, parse_device
from dryfit.settings.errors import Action, Failure, FailureKind, PastFailure
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, Fallback, UnknownPolicy
from dryfit.settings.memory_key import memory_key
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, Effect, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest, PlanResult, RehearsedPlanRequest, StudyTokens
from dryfit.settings.sharding import AUTO
from dryfit.settings.tables import CalledCode
from dryfit.settings.task_facts import task_word
from dryfit.settings.text import gib
from dryfit.settings.training_messages import ResolveResult
from dryfit.settings.trial import Outcome
from dryfit.settings.version import VERSION
from dryfit.settings.wire import Job, digest
from dryfit.study.context import AnyStudy, StudyContext, degrees_at_hand, trial_settings
from dryfit.study.next_step import Readiness
from dryfit.study.pace import has_bf16
from dryfit.study.requests import plan_subject, preparing_limits, rehearsed_plan_request

# The kinds of device that a study's trials are planned for: a limited CPU, or each model of GPU of its nodes.


_STEP_BYTES: Final = 128 * 2**20
"""Memory is counted in such steps: drivers and torch tell some MiB more or less of GPUs of one model."""

_AS_LARGE: Final = 1.02
"""The size of a GPU that is expected is that of a table, up to 0.2 GiB from what a driver says."""


def planning_device(resolved: ResolveResult, execution: ExecutionSettings) -> DeviceSpec | None:
    """Return the device of this machine that trials are planned for; None if they are not planned.

    On the CPU only a limit gives a plan something to keep to.
    """
    if resolved.device is DeviceKind.CUDA:
        return resolved.device_spec and execution.limited(resolved.device_spec)
    if execution.limit_bytes is None:
        return None
    return DeviceSpec(name="the CPU", kind=DeviceKind.CPU, capacity_bytes=execution.limit_bytes)


def kind_of(device: DeviceFacts, study: AnyStudy) -> DeviceSpec | None:
    """Return the kind of a CUDA device; of one that its driver does not describe that of the first machine.

    Where machines join, or this one has GPUs that are not alike, memory is counted in whole steps, so that GPUs of one
    model are of one kind.
    """
    spec = device.spec if device.spec is not None else study.resolved.device_spec
    several = study.config.nodes is not None or len(set(study.resolved.device_specs)) > 1
    if spec is not None and several:
        spec = spec.model_copy(update={"capacity_bytes": max(1, spec.capacity_bytes // _STEP_BYTES) * _STEP_BYTES})
    return spec and study.config.execution.limited(spec)


def planned_devices(study: AnyStudy) -> tuple[DeviceSpec, ...]:
    """Return every kind of device that trials may run on now, smallest first; none if trials are not planned.

    A GPU that the study file expects is among them until one as large is there.
    """
    config, resolved = study.config, study.resolved
    if config.objective is not None:
        return ()  # what it calls is not rehearsed
    devices = [device for node in study.nodes.values() for device in node.devices]
    if resolved.device is not DeviceKind.CUDA or not (devices or config.nodes is not None):
        one = planning_device(resolved, config.execution)
        return () if one is None else (one,)
    every = [kind for device in devices if (kind := kind_of(device, study)) is not None]
    kinds = list(dict.fromkeys(every))
    if config.nodes is not None and config.nodes.expect is not None:
        expected = config.execution.limited(parse_device(config.nodes.expect))
        if all(one.capacity_bytes * _AS_LARGE < expected.capacity_bytes for one in kinds):
            kinds.append(expected)
    return tuple(sorted(kinds, key=lambda kind: (kind.capacity_bytes, kind.name)))


def plan_here(kinds: Collection[DeviceSpec], trial: TrialState) -> PlanState | None:
    """Return the plan by which a trial is trained once more: for a device that is here, or else its last one.

    Args:
        kinds: Of :func:`planned_devices`, here.
        trial: The trial.
    """
    plans = (trial.plan, *trial.plans.values())
    here = (plan for plan in plans if plan is not None and plan.answer.verdict.fits and plan.answer.device in kinds)
    return next(here, trial.plan)


def like(kind: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether two kinds are one model of GPU, whatever memory it has."""
    return (kind.name, kind.capability) == (other.name, other.capability)


# Messages for trials that do not fit: the numbers, and settings that would fit.
#
# ``dryfit plan`` prints a plan in ``documents/plans.py``, and so do reports.


def needed_bytes(answer: PlanAnswer) -> int:
    """Return the memory that a device must have for the plan as asked."""
    return answer.memory.required_bytes if answer.memory is not None else _capacity(answer) + answer.shortfall_bytes


def least_fallback(answer: PlanAnswer) -> Fallback | None:
    """The fallback that needs least and leaves the experiment as it is; None where none needs less than was asked."""
    own = [one for one in answer.ladder if one.execution is not None and one.required_bytes < needed_bytes(answer)]
    return min(own, key=lambda fallback: fallback.required_bytes, default=None)


def refusal_text(answer: PlanAnswer) -> str:
    """Return why a trial is refused, as one line with numbers."""
    if answer.verdict is VerdictKind.UNKNOWN:
        why = "; ".join(answer.reasons) or "the planner gives no reason"
        return f'its memory is unknown, and execution.unknown is "refuse" ({why})'
    each = f" on each of {answer.devices} devices" if answer.devices > 1 else ""
    parts = [f"needs {gib(needed_bytes(answer))}{each}, {answer.device.name} has {gib(_capacity(answer))}"]
    least = least_fallback(answer)
    if least is not None:
        parts.append(f"at least {gib(least.required_bytes)} ({least.change})")
    fitting = [_suggestion(fallback) for fallback in _named([answer])]
    parts.append(f"would fit: {' or '.join(fitting)}" if fitting else "no change known makes it fit")
    return "; ".join(parts)


def refused_for_memory(state: StudyState) -> list[tuple[TrialState, PlanAnswer]]:
    """Return the trials refused in a row of which it is known that they do not fit, with their plans."""
    return [(trial, answer) for trial, answer in _refused_in_a_row(state) if answer.verdict is VerdictKind.REFUSED]


def _refused_in_a_row(state: StudyState) -> list[tuple[TrialState, PlanAnswer]]:
    if not state.refused_in_a_row:
        return []
    refused = [
        (trial, trial.plan.answer)
        for trial in state.present
        if trial.outcome is Outcome.REFUSED and trial.plan is not None
    ]
    return refused[-state.refused_in_a_row :]


def nothing_fits_text(state: StudyState) -> str:
    """Return the last words of a study of refusals: the trial that came closest, and what would fit."""
    known = refused_for_memory(state)
    head = f"the last {len(_refused_in_a_row(state))} trials were refused: none fits"
    if not known:
        return f"{head}, for no plan could be made; see `dryfit show`, or set execution.unknown to exclusive"
    trial, answer = min(known, key=lambda refused: least_bytes(refused[1]))
    smallest = smallest_left(Space.from_json(state.generation.comparability.space), state)
    if smallest is not None and not smallest.points:
        head = f"nothing in the search space fits: {_smallest_text(smallest.names)} refused as well"
    lines = [head, f"  closest: {_closest(trial, answer)}"]
    lines += [f"  would fit: {_suggestion(fallback)}" for fallback in _named([answer for _, answer in known])]
    lines.append(f"  or a device, or execution.memory_limit, of {gib(least_bytes(answer))} or more")
    return "\n".join(lines)


def smallest_left(space: Space, state: StudyState) -> SmallestPoints | None:
    """Return the points that take least memory, without those that the trials refused in a row rule out.

    Without points nothing in the space fits. None where it is not known which points take least.
    """
    smallest = SmallestPoints.of(space)
    for trial, _ in refused_for_memory(state):
        smallest = smallest.without(trial.params) if smallest is not None else None
    return smallest


def _smallest_text(names: Sequence[str]) -> str:
    return (
        f"the smallest values of {', '.join(names)} are" if names else "no searched key changes memory, and a trial is"
    )


def _closest(trial: TrialState, answer: PlanAnswer) -> str:
    least = least_fallback(answer)
    run_as = f" with {least.change}" if least is not None else ""
    params = ", ".join(f"{name} = {value}" for name, value in trial.params.items())
    needs = f"needs {gib(least_bytes(answer))}{run_as}, {answer.device.name} has {gib(_capacity(answer))}"
    return f"trial {trial.number} {needs}" + (f" ({params})" if params else "")


def _named(answers: Sequence[PlanAnswer]) -> list[Fallback]:
    """What is worth telling of all that fits: for one device, and with more devices.

    Of one refusal that is the first fallback of each kind; of several the one that needs least.
    """
    named: list[Fallback] = []
    for several in (False, True):
        fitting = ([one for one in answer.ladder if one.fits and (one.devices > 1) == several] for answer in answers)
        first = [fallbacks[0] for fallbacks in fitting if fallbacks]
        named += sorted(first, key=lambda fallback: (fallback.devices, fallback.required_bytes))[:1]
    return named


def _suggestion(fallback: Fallback) -> str:
    effect = "changes the experiment" if fallback.effect is Effect.SEMANTICS else "execution.allow or a wish forbids it"
    effect = fallback.note if fallback.devices > 1 else effect
    return f"{fallback.change} ({gib(fallback.required_bytes)}, {effect})"


def least_bytes(answer: PlanAnswer) -> int:
    """Return the least memory that the plan needs with any change that leaves the experiment as it is."""
    least = least_fallback(answer)
    return needed_bytes(answer) if least is None else least.required_bytes


def _capacity(answer: PlanAnswer) -> int:
    return answer.device.capacity_bytes


# The memory plans of a study's trials: taken from the ledger, or made by PLAN children.


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
        reason = f"{FailureKind.PLANNER}: {failure.sentence}"
        self._answer(number, device, PlanAnswer.unknown(device, (reason,), self._torch))
        return None

    def abandon(self) -> None:
        """Kill every PLAN child: none has anything to keep."""
        for key in self.running:
            first_node(self._nodes).kill(key)
        self.running.clear()
        self._planned_for.clear()

    def _answer(self, number: int, device: DeviceSpec, answer: PlanAnswer) -> None:
        self._write(TrialPlanned(number=number, key=self._keys[number, device], answer=answer))

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
