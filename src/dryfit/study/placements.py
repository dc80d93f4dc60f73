"""Where the trials of a session run: devices, needs, and memory not yet given back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dryfit.ledger.events import DeviceSetAside, Event, ParallelSet
from dryfit.ledger.state import PlanState, TrialState
from dryfit.processes.child_spec import ChildExited
from dryfit.processes.failures import attempt_terms
from dryfit.processes.gpus import GpuState, ProcessOwner
from dryfit.processes.node import DeviceFacts, NodeFacts, Nodes
from dryfit.processes.packing import Allocation, Blocker, Cluster, DeviceCapacity, Limit, Need, group_capacity
from dryfit.settings.devices import (
    cpu_of,
    device_in_words,
    devices_of,
    left_over,
    node_of,
    on_cpu,
    overlap,
    place_in_words,
    places_of,
    visible_devices,
)
from dryfit.settings.errors import Action, AttemptTerms, Failure, FailureKind, RecoveryAction
from dryfit.settings.execution import ExecutionSettings
from dryfit.settings.jobs import training_of
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.settings.text import gib
from dryfit.study.context import StudyContext, device_places
from dryfit.study.messages import RunningAttempt
from dryfit.study.next_step import Readiness
from dryfit.study.trial_plans import kind_of

# What a trial needs of a device, from its plan and its failures. Pure.


def trial_need(
    number: int,
    plan: PlanState | None,
    readiness: Readiness,
    terms: AttemptTerms,
    *,
    host_bytes: int | None = None,
    device_count: int | None = None,
) -> Need:
    """Return a trial's need of a device.

    The need of a trial that has run out of memory although its plan fits is unknown: it runs alone, like one without
    a plan.

    Args:
        number: The trial.
        plan: Its plan for one kind of device, if it has a valid one.
        readiness: Whether it may run, and must run alone.
        terms: What earlier failures ask of its next attempt.
        host_bytes: Its host memory; None: not known.
        device_count: Devices that it takes; None: as many as most.
    """
    missed = plan is not None and plan.misses > 0
    memory = plan.answer.memory if plan is not None else None
    shared_bytes = alone_bytes = None
    if plan is not None and memory is not None and plan.answer.verdict.fits:
        # Reserved as it would be with memory in plenty: kernels wait where the allocator must give back first.
        plenty_bytes = memory.peak_reserved_bytes + memory.overhead_bytes + memory.margin_bytes
        capacity_bytes = max(plan.answer.device.capacity_bytes, memory.required_bytes)
        shared_bytes = min(max(memory.required_bytes, plenty_bytes), capacity_bytes)
        alone_bytes = _required_bytes(plan, memory.required_bytes) - memory.margin_bytes
    return Need(
        number,
        shared_bytes=shared_bytes,
        alone_bytes=alone_bytes,
        exclusive=readiness is Readiness.EXCLUSIVE or terms.exclusive or missed,
        avoid=terms.avoid,
        host_bytes=host_bytes,
        device_count=device_count,
        kind=plan.kind if plan is not None else None,
    )


def process_count(plan: PlanState | None, execution: ExecutionSettings) -> int:
    """Return the number of processes of a trial's next attempt, by its plan, else by the study file."""
    choice = plan.execution if plan is not None else None
    return execution.processes if choice is None or choice.tp is None else choice.tp


def _required_bytes(plan: PlanState, first_bytes: int) -> int:
    """Return what the plan's present choice requires, or its first choice if the plan has no number for it."""
    priced = (fallback.required_bytes for fallback in plan.answer.ladder if fallback.execution == plan.execution)
    return min(first_bytes, next(priced, first_bytes))


def fence(need: Need, plan: PlanState | None, capacity_bytes: int | None) -> float | None:
    """Return the share of a device that a trial's allocator may use beside others; None: all.

    The context is left out, as torch leaves it out: where it is larger than planned, the trial must not pay for it.

    Args:
        need: The need of the trial.
        plan: Its plan, if it has one.
        capacity_bytes: The memory of the device; None: not known.
    """
    memory = plan.answer.memory if plan is not None else None
    if need.exclusive or need.shared_bytes is None or memory is None or capacity_bytes is None:
        return None
    share = (need.shared_bytes - memory.overhead_bytes) / capacity_bytes
    return share if 0 < share < 1 else None


def alone_first(answer: RecoveryAction, failure: Failure, trial: TrialState, *, shared: bool) -> RecoveryAction:
    """Return the recovery from a failure: a trial that would fail for memory first gets a device for itself.

    Args:
        answer: The action that was decided.
        failure: The failure that it follows.
        trial: The trial; this failure is not among its past ones yet.
        shared: Whether trials may share a device at all.
    """
    plan, device = trial.plan, trial.attempts[-1].device
    gives_up = failure.kind is FailureKind.OOM_DEVICE and answer.action is Action.GIVE_UP
    if not gives_up or not shared or device is None or plan is None or not plan.answer.verdict.fits:
        return answer
    if plan.misses or attempt_terms(trial.past_failures).exclusive:
        return answer
    return RecoveryAction(Action.EXCLUSIVE, f"{answer.reason}; it shared its device, and has it for itself now")


# Device memory that an ended process has not given back: noticed and waited for, until its device is set aside.


RETURN_WAIT_S = 120.0
"""How long memory may take to come back; usually the kernel frees it as the process ends."""

SLACK_BYTES = 256 << 20
"""Growth that counts as none: contexts of others and the driver's own memory change too."""

LOOK_EVERY_S = 1.0
LOOK_BUSY_EVERY_S = 30.0
"""Seconds between two looks at a device that nothing could be placed on."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory that an ended process has left on a device.

    Attributes:
        number: The trial whose process it was.
        since_s: When it ended.
        most_bytes: The most that it can have taken; None: not known.
    """

    number: int
    since_s: float
    most_bytes: int | None


@dataclass(slots=True)
class DeviceRecord:
    """The session's record of one device.

    Attributes:
        look: The last look at it; None: nothing is known.
        looked_s: When that was.
        quiet_bytes: The least memory that belonged to no listed process while nothing of ours ran there.
        lists_ours: Whether a process of ours was ever listed there: from inside some containers none is.
        leftover: The memory that is waited for.
    """

    look: GpuState | None = None
    looked_s: float | None = None
    quiet_bytes: int | None = None
    lists_ours: bool = False
    leftover: Leftover | None = None

    def left_bytes(self, *, ours_run: bool) -> int:
        """Return the memory that an ended process still holds, as far as can be seen.

        The driver may still list the process. If it does not, the memory that belongs to no process has grown; that
        says nothing where our processes are not listed while they live.
        """
        look = self.look
        if look is None:
            return 0
        gone_bytes = look.held_bytes(ProcessOwner.GONE)
        judged = self.lists_ours and look.owners_known and (not ours_run or look.held_bytes(ProcessOwner.OURS) > 0)
        if not judged or self.quiet_bytes is None:
            return gone_bytes
        grown_bytes = look.unaccounted_bytes - self.quiet_bytes
        most_bytes = self.leftover.most_bytes if self.leftover is not None else None
        if most_bytes is not None:
            grown_bytes = min(grown_bytes, most_bytes)
        return gone_bytes + (grown_bytes if grown_bytes > SLACK_BYTES else 0)


@dataclass(slots=True)
class Leftovers:
    """Watches the devices of one session, without waiting itself.

    Attributes:
        state_of: Returns the state of a device now; None: it is not known.
    """

    state_of: Callable[[str], GpuState | None]
    _records: dict[str, DeviceRecord] = field(default_factory=dict[str, DeviceRecord])

    def look(self, device: str, now_s: float, *, ours_run: bool, every_s: float = LOOK_EVERY_S) -> GpuState | None:
        """Return a look at a device that is no older than ``every_s``.

        Args:
            device: Its name.
            now_s: The time, of any clock.
            ours_run: Whether a process of ours runs there.
            every_s: 0: look now.
        """
        record = self._records.setdefault(device, DeviceRecord())
        # A clock that was set back makes no look valid for longer.
        if record.looked_s is not None and 0 <= now_s - record.looked_s < every_s:
            return record.look
        record.look, record.looked_s = self.state_of(device), now_s
        if record.look is None:
            return None
        record.lists_ours = record.lists_ours or record.look.held_bytes(ProcessOwner.OURS) > 0
        if not ours_run:
            quiet_bytes = record.look.unaccounted_bytes
            record.quiet_bytes = quiet_bytes if record.quiet_bytes is None else min(record.quiet_bytes, quiet_bytes)
        return record.look

    def ended(self, device: str, leftover: Leftover, *, ours_run: bool) -> None:
        """Look at a device where a process has ended; if not all memory is back, wait for it."""
        self.look(device, leftover.since_s, ours_run=ours_run, every_s=0.0)
        record = self._records[device]
        before, record.leftover = record.leftover, leftover
        if not record.left_bytes(ours_run=ours_run):
            record.leftover = before

    def waiting_for(self, device: str, *, ours_run: bool) -> str:
        """Return what is waited for on a device, in words; empty: nothing."""
        record = self._records.get(device)
        if record is None or record.leftover is None:
            return ""
        left_bytes = record.left_bytes(ours_run=ours_run)
        if not left_bytes:
            record.leftover = None
            return ""
        number = record.leftover.number
        return f"{gib(left_bytes)} of {place_in_words(device)} are not back since trial {number} has ended"

    def overdue(self, device: str, now_s: float) -> bool:
        """Return whether a device has kept memory for too long."""
        record = self._records.get(device)
        leftover = record.leftover if record is not None else None
        return leftover is not None and now_s - leftover.since_s >= RETURN_WAIT_S


# Placement of a session's trials: describes devices and needs to packing, and tracks the state of devices.


_AUTO: Final = "auto"
_CONTEXT_MOST_BYTES: Final = 1 << 30
"""What a process can hold of its device beside what its allocator tells of."""


@dataclass(slots=True)
class Placements:
    """Records which trial runs where, in one session.

    Attributes:
        study: The study.
        nodes: Where trials run, to be looked at.
        write: Appends an event to the ledger.
        note: Tells the user a sentence.
        clock: Unix time in seconds.
        running: The trials that have a process, by the process's key.
    """

    study: StudyContext
    nodes: Nodes
    write: Callable[[Event], None]
    note: Callable[[str], None]
    clock: Callable[[], float]
    running: dict[str, RunningAttempt] = field(default_factory=dict[str, RunningAttempt])
    _devices: Mapping[str, DeviceFacts] = field(default_factory=dict[str, DeviceFacts])
    _kinds: Mapping[str, DeviceSpec | None] = field(default_factory=dict[str, DeviceSpec | None])
    _leftovers: Leftovers = field(init=False)
    _most: Mapping[str, int] = field(default_factory=dict[str, int])
    _cpus: Sequence[DeviceCapacity] = ()
    _known: Mapping[str, NodeFacts] | None = None
    _bypassed: dict[int, int] = field(default_factory=dict[int, int])
    _host_bytes: int = 0
    _idle_since_s: float | None = None
    _reported: tuple[int, Limit] | None = None

    def __post_init__(self) -> None:
        self._leftovers = Leftovers(self._state_of)
        self._learn_nodes()
        observed = (trial.observed for trial in self.study.state.trials if trial.observed is not None)
        self._host_bytes = max((peaks.rss_bytes or 0 for peaks in observed), default=0)
        if not self._auto:
            self._reported = self.study.parallelism.most, Limit.ASKED
        self._tell_left_over(())

    def _learn_nodes(self) -> None:
        """Learn which nodes there are; they come and go where agents join."""
        nodes = self.study.nodes
        if nodes == self._known:
            return
        self._known = dict(nodes)
        self._most = {name: self.study.most_on(name) for name in nodes}
        self._cpus = [DeviceCapacity(cpu_of(name)) for name in nodes]
        if self.study.resolved.device is DeviceKind.CUDA:
            self._devices = device_places(nodes)
            self._kinds = {place: kind_of(device, self.study) for place, device in self._devices.items()}
        if self._devices or (self.study.resolved.device is DeviceKind.CUDA and self.study.config.nodes is not None):
            self._cpus = ()  # nodes without a device run nothing; where no driver lists any here, trials find their own

    @property
    def _default_processes(self) -> int:
        """Processes of a trial, and devices of a place, unless its plan says otherwise."""
        return self.study.config.execution.processes

    def _processes(self, plan: PlanState | None) -> int:
        return process_count(plan, self.study.config.execution)

    @property
    def _auto(self) -> bool:
        return self.study.config.runtime.parallel == _AUTO

    @property
    def idle_since_s(self) -> float | None:
        """Since when only the lack of a device keeps every trial from running; None: it does not."""
        return self._idle_since_s

    def cluster(self) -> Cluster:
        """Return where trials can run now, and what runs there; looks again for memory that was not given back."""
        self._learn_nodes()
        allocations = [
            Allocation(child.number, child.place, child.need.shared_bytes, child.need.exclusive)
            for child in self.running.values()
        ]
        set_aside = self.study.state.sessions[-1].set_aside
        capacities, other_places = self._capacities() if self._devices else (self._cpus, {})
        host_free_bytes = self._host_free_bytes()
        unknown = ""
        if host_free_bytes and not self._host_bytes:
            unknown = "nothing is known yet of the host memory of a trial: waiting for the first step of one"
        return Cluster(
            capacities,
            allocations,
            tuple(set_aside),
            host_free_bytes,
            unknown,
            [name for name, most in self._most.items() if len(self._children_on(name)) >= most],
            self._bypassed,
            self._default_processes,
            other_places,
        )

    def needs(
        self, readiness: Mapping[int, Readiness], usable: Callable[[TrialState], Sequence[PlanState]]
    ) -> dict[int, Sequence[Need]]:
        """Return what every open trial without a process asks for, on each kind of device that it may run on.

        Args:
            readiness: Whether each may have a process.
            usable: Returns the plans by which a trial may run, one for each kind of device; none where it has none.
        """
        busy = {child.number for child in self.running.values()}
        idle = [trial for trial in self.study.state.open_trials if trial.number not in busy]
        return {
            trial.number: [
                self._need(trial, plan, readiness.get(trial.number, Readiness.PLANNED))
                for plan in usable(trial) or [None]
            ]
            for trial in idle
        }

    def _need(self, trial: TrialState, plan: PlanState | None, readiness: Readiness) -> Need:
        unplanned = self._auto and bool(self._devices) and plan is None
        return trial_need(
            trial.number,
            plan,
            Readiness.EXCLUSIVE if unplanned else readiness,
            self.terms(trial),
            host_bytes=self._trial_host_bytes(plan),
            device_count=self._processes(plan),
        )

    def terms(self, trial: TrialState) -> AttemptTerms:
        """Return how the next attempt of a trial is to be run."""
        return attempt_terms(trial.past_failures)

    def _trial_host_bytes(self, plan: PlanState | None) -> int | None:
        """Return the host memory of a trial's processes: as planned on the CPU, else that of the largest so far."""
        memory = plan.answer.memory if plan is not None else None
        if memory is not None and not self._devices:
            return self._processes(plan) * memory.required_bytes
        return self._host_bytes or None

    def _host_free_bytes(self) -> dict[str, int]:
        """Return the free memory of each node where trials run, if that decides how many do; else nothing."""
        if not self._auto:
            return {}
        nodes = dict.fromkeys(node_of(child.place) for child in self.running.values())
        return {name: self._free_bytes(name) for name in nodes}

    def _free_bytes(self, node: str) -> int:
        children = self._children_on(node)
        attempts = {child.number: self.study.state.trials[child.number].attempts[-1] for child in children}
        pids = [attempt.pid for attempt in attempts.values() if attempt.pid is not None]
        look = self.nodes.all()[node].host_memory(pids)
        own = self.study.config.function is not None  # its steps are not known
        grown = [attempt.pid for attempt in attempts.values() if own or attempt.first_step_ms is not None]
        self._host_bytes = max([self._host_bytes, *(look.rss_bytes.get(pid or 0, 0) for pid in grown)])
        expected: dict[int, int] = {}
        for child in children:  # a child whose process is not known yet has taken nothing
            expected[attempts[child.number].pid or -1 - child.number] = child.need.host_bytes or self._host_bytes
        return look.available_bytes(expected)

    def _children_on(self, node: str) -> list[RunningAttempt]:
        return [child for child in self.running.values() if node_of(child.place) == node]

    def _state_of(self, device: str) -> GpuState | None:
        return self.nodes.all()[node_of(device)].look(visible_devices(device) or "")

    def _capacities(self) -> tuple[list[DeviceCapacity], dict[int, list[DeviceCapacity]]]:
        """Return the places of the usual size, and those of other sizes that open trials take.

        Places of different sizes share devices, and so what runs there.
        """
        set_aside = self.study.state.sessions[-1].set_aside
        plans = [plan for trial in self.study.state.open_trials for plan in trial.plans.values()]
        sizes = {self._processes(plan) for plan in plans} - {self._default_processes}
        places = {size: self._places(size) for size in (self._default_processes, *sorted(sizes))}
        names = dict.fromkeys(name for one in places.values() for place in one for name in devices_of(place))
        each = {name: self._capacity(name) for name in names}
        capacities = {
            size: [group_capacity(place, [each[name] for name in devices_of(place)]) for place in same_size]
            for size, same_size in places.items()
        }
        usual, other_places = capacities.pop(self._default_processes), capacities
        if self._default_processes > 1:
            return usual, other_places  # what is left of a group that lost a device is blocked until the next division
        return [place for place in usual if place.place not in set_aside], other_places  # it may just have changed

    def _places(self, size: int) -> list[str]:
        """Return the places of ``size`` devices; those where trials of that size run stay as they are."""
        set_aside = self.study.state.sessions[-1].set_aside
        own = [child.place for child in self.running.values() if len(devices_of(child.place)) == size]
        return places_of(tuple(self._devices), size, set_aside=set_aside, taken=own)

    def _capacity(self, name: str) -> DeviceCapacity:
        now_s, there = self.clock(), self._on(name)
        full = len(self.running) >= self.study.parallelism.most
        every_s = LOOK_BUSY_EVERY_S if full else self._look_every_s(now_s)
        look = self._leftovers.look(name, now_s, ours_run=bool(there), every_s=every_s)
        blocked = self._leftovers.waiting_for(name, ours_run=bool(there))
        if blocked and self._leftovers.overdue(name, now_s):
            self.set_aside(name, blocked)
        planned_for = self._devices[name].capacity_bytes
        if look is None:
            return DeviceCapacity(name, planned_for, 0, blocked, self._kinds[name])
        planned_bytes = sum(child.need.shared_bytes or 0 for child in there)
        # The driver and torch may count a few MiB differently: what was planned for is there.
        capacity_bytes = max(look.total_bytes, planned_for or 0)
        neighbour_bytes = look.neighbour_bytes(planned_bytes, ours=bool(there))
        return DeviceCapacity(name, capacity_bytes, neighbour_bytes, blocked, self._kinds[name])

    def _look_every_s(self, now_s: float) -> float:
        """Return how old a look at a device may be: longer, the longer others hold its memory."""
        waited_s = now_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        return min(max(LOOK_EVERY_S, waited_s / 10), LOOK_BUSY_EVERY_S)

    def _on(self, name: str) -> list[RunningAttempt]:
        return [child for child in self.running.values() if overlap(child.place, name)]

    def fence(self, plan: PlanState | None, need: Need, place: str) -> float | None:
        """Return the share of each of its devices that a trial's allocator may take; None: all.

        The smallest of several devices counts: each process then has at least what it was planned with.
        """
        if on_cpu(place) or self.study.parallelism.most == 1:
            return None
        looks = {
            one: self._leftovers.look(one, self.clock(), ours_run=bool(self._on(one))) for one in devices_of(place)
        }
        totals = [
            look.total_bytes if look is not None else self._devices[one].capacity_bytes for one, look in looks.items()
        ]
        return fence(need, plan, min((one for one in totals if one is not None), default=None))

    def start(self, key: str, child: RunningAttempt, passed: Iterable[int]) -> None:
        """Record a process that is about to start.

        Args:
            key: The key of the process.
            child: Its attempt.
            passed: Trials with lower numbers that could have started instead.
        """
        self.running[key] = child
        self._idle_since_s = None
        self._bypassed.pop(child.number, None)
        for number in passed:
            self._bypassed[number] = self._bypassed.get(number, 0) + 1

    def worked(self, child: RunningAttempt) -> None:
        """Look at the devices of a child with several processes after its first step, when all of them hold memory.

        While they live, they can be recognised as ours; after their end they cannot.
        """
        devices = devices_of(child.place)
        for device in devices if len(devices) > 1 else ():
            self._leftovers.look(device, self.clock(), ours_run=True, every_s=0.0)

    def end(self, event: ChildExited) -> None:
        """Record the end of a process, and look whether its device has its memory back."""
        child, evidence = self.running.pop(event.key), event.evidence
        trained = training_of(event.result)
        if trained is not None:
            self._host_bytes = max(self._host_bytes, trained.peak_rss_bytes or 0)
        most_bytes = evidence.peak_bytes + _CONTEXT_MOST_BYTES if evidence.peak_bytes is not None else None
        for device in () if on_cpu(child.place) else devices_of(child.place):
            if device not in self.study.state.sessions[-1].set_aside:
                leftover = Leftover(child.number, self.clock(), most_bytes)
                self._leftovers.ended(device, leftover, ours_run=bool(self._on(device)))

    def set_aside(self, device: str, reason: str) -> None:
        """Give a device no more trials in this session; those that run there go on."""
        set_aside = self.study.state.sessions[-1].set_aside
        if device in set_aside:
            return
        idle = self._left_over()
        look = self._state_of(device)
        if look is not None and look.memory_errors:
            reason += f"; {look.memory_errors} uncorrected memory error(s) since its driver was loaded"
        self.write(DeviceSetAside(device=device, reason=reason))
        self.note(f"{place_in_words(device)} is set aside: {reason}")
        self._tell_left_over(idle)

    def _left_over(self) -> tuple[str, ...]:
        set_aside = self.study.state.sessions[-1].set_aside
        return left_over(tuple(self._devices), self._default_processes, set_aside=set_aside)

    def _tell_left_over(self, before: Sequence[str]) -> None:
        """Say which healthy devices get no trial, unless it was said before."""
        idle = left_over(
            tuple(self._devices), self._default_processes, set_aside=self.study.state.sessions[-1].set_aside
        )
        if idle and idle != tuple(before):
            named, together = ", ".join(map(device_in_words, idle)), self._default_processes
            self.note(f"device(s) {named} stay idle: a trial takes {together} at once")

    def waiting(self, why: Blocker | None) -> None:
        """Record that nothing can be started now, once for each reason other than the number asked for."""
        now_s = self.clock()
        if why is None or self.running:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        most = self.study.parallelism
        reached = (most.most, Limit.ASKED) if why is None else (len(self.running), why.limit)
        if reached != self._reported:
            self._reported = reached
            self.write(ParallelSet(parallel=reached[0], reason=most.reason if why is None else why.text))
