"""Decide the next step of a study: pure functions of its ledger and of what runs now."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dryfit.ledger.replay import StudyState
from dryfit.processes.packing import CPU, Blocker, Cluster, Fit, Limit, Need, need_on, pack
from dryfit.settings.errors import PERMITTED, FailureKind
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.trial import Outcome


class End(StrEnum):
    """Why a control process leaves a study."""

    DONE = "done"
    NO_IMPROVEMENT = "no_improvement"
    TOO_MANY_FAILURES = "too_many_failures"
    SAME_FAILURE = "same_failure"
    BAD_DATA = "bad_data"
    REFUSED = "refused"
    MAX_HOURS = "max_hours"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    PAUSED = "paused"
    BROKEN = "broken"

    @property
    def is_final(self) -> bool:
        """Whether nothing is left to do unless the study is extended."""
        return self in (End.DONE, End.NO_IMPROVEMENT)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a study ends, and how much it does at once.

    Attributes:
        parallel: Most trials side by side.
        planners: Most trials whose memory is planned at once.
        device_wait_s: How long others may hold all that could be used, before the study pauses.
    """

    total: int
    parallel: int
    max_wall_s: float | None
    patience: int | None
    max_failed_in_a_row: int
    max_refused_in_a_row: int
    planners: int = 2
    device_wait_s: float = math.inf
    max_same_failure: int = 3


@dataclass(frozen=True, slots=True)
class Trip:
    """Why a study starts no more trials.

    Attributes:
        end: How the session ends.
        sentence: The reason, for a person.
    """

    end: End
    sentence: str


class Readiness(StrEnum):
    """Whether an open trial may have a process."""

    UNPLANNED = "unplanned"
    """Its memory must be planned first."""
    PLANNED = "planned"
    EXCLUSIVE = "exclusive"
    """It may run if no other trial is on its device."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Live:
    """What the control process knows besides the ledger.

    Attributes:
        cluster: Where trials can run, and the trials that have a process.
        planning: Numbers of the trials whose memory is being planned now.
        readiness: Readiness of open trials; those left out are planned.
        needs: Needs of open trials, each on every kind of device that it may run on; those left out ask for nothing.
        waiting_until_s: Earliest time (Unix seconds) of the next attempt of trials that must wait.
        stopping: Why no new process may start, if so.
        now_s: Unix seconds.
        idle_since_s: Since when only the lack of a device keeps every trial from running; None: it does not.
        nothing_fits: Whether every trial that could be asked for would be refused.
    """

    cluster: Cluster
    waiting_until_s: Mapping[int, float]
    stopping: End | None
    now_s: float
    planning: frozenset[int] = frozenset()
    readiness: Mapping[int, Readiness] = field(default_factory=dict[int, Readiness])
    needs: Mapping[int, Sequence[Need]] = field(default_factory=dict[int, Sequence[Need]])
    idle_since_s: float | None = None
    nothing_fits: bool = False

    @property
    def running(self) -> frozenset[int]:
        """Numbers of the trials that have a process."""
        return frozenset(allocation.number for allocation in self.cluster.allocations)

    def needs_of(self, number: int) -> Sequence[Need]:
        """Return what an open trial asks of a device, for each kind of device that it may run on."""
        return self.needs.get(number) or [Need(number, exclusive=self.ready(number) is Readiness.EXCLUSIVE)]

    def need(self, number: int, kind: DeviceSpec | None) -> Need:
        """Return what an open trial asks of a device of one kind."""
        return need_on(self.needs_of(number), number, kind)

    def ready(self, number: int) -> Readiness:
        """Return whether an open trial may have a process."""
        return self.readiness.get(number, Readiness.PLANNED)

    def is_ready(self, number: int) -> bool:
        """Whether a trial could have a process now if a device had room for it."""
        return self.may_start(number) and self.ready(number) in (Readiness.PLANNED, Readiness.EXCLUSIVE)

    def may_start(self, number: int) -> bool:
        """Whether a trial has waited long enough since its last failure."""
        return self.waiting_until_s.get(number, 0.0) <= self.now_s


@dataclass(frozen=True, slots=True)
class PlaceTrial:
    """Start a process for a trial that exists, on a device, a group of them or a CPU.

    Attributes:
        kind: The kind of device that its need there is for; None: any.
    """

    number: int
    place: str = CPU.place
    kind: DeviceSpec | None = None


@dataclass(frozen=True, slots=True)
class AskTrial:
    """Make trial ``number``: suggest its parameters and record them."""

    number: int


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """Plan the memory of a trial."""

    number: int


@dataclass(frozen=True, slots=True)
class RefuseTrial:
    """End a trial that does not fit, before it has had a process."""

    number: int


@dataclass(frozen=True, slots=True)
class StopTrials:
    """Ask every running trial to checkpoint and stop; start nothing more."""

    why: End


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for news: nothing can be started now.

    Attributes:
        until_s: When to look again at the latest (Unix seconds); None: any time.
        why: What keeps a trial that could start from doing so; None: enough of them run.
    """

    until_s: float | None = None
    why: Blocker | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the session: nothing runs and nothing more is to start; ``text`` adds to the reason."""

    why: End
    text: str = field(default="", compare=False)


Step = PlaceTrial | AskTrial | PlanTrial | RefuseTrial | StopTrials | Wait | EndSession


def next_step(state: StudyState, limits: Limits, live: Live) -> Step:
    """Decide the next step of a study.

    Trials that exist come before new ones, lowest number first, and a new trial is asked for only when a process
    is free for it, one that is being planned counting as one that runs: so at ``parallel = 1`` each suggestion knows
    every earlier result, however often the control process died in between.
    """
    if live.stopping is not None:
        return Wait() if live.running else EndSession(live.stopping)
    if limits.max_wall_s is not None and state.generation_wall_until_s(live.now_s) >= limits.max_wall_s:
        return StopTrials(End.MAX_HOURS)
    trip = tripped(state, limits)
    if trip is not None:
        return Wait() if live.running else EndSession(trip.end)
    idle = [trial.number for trial in state.open_trials if trial.number not in live.running | live.planning]
    early = _before_a_process(idle, limits, live)
    if early is not None:
        return early
    ready = [number for number in idle if live.is_ready(number)]
    if len(live.running) >= limits.parallel:
        return Wait()
    packed = pack([need for number in ready for need in live.needs_of(number)], live.cluster)
    if isinstance(packed, Fit):
        return PlaceTrial(packed.number, packed.place, packed.kind)
    return _without_room(limits, live, packed) or _without_a_place(state, limits, live, idle, packed)


def has_all_trials(state: StudyState, total: int) -> bool:
    """Whether every requested trial has ended, so that no further machine is needed."""
    return not state.open_trials and state.counted >= total


def _new_trial_blocker(state: StudyState, live: Live, idle: Sequence[int]) -> Blocker | None:
    """Return what keeps even a small new trial from starting: one that is alone, or for which a device is kept."""
    needs = [need for number in idle if live.is_ready(number) for need in live.needs_of(number)]
    packed = pack([*needs, Need(len(state.trials))], live.cluster)
    return packed if isinstance(packed, Blocker) else None


def tripped(state: StudyState, limits: Limits) -> Trip | None:
    """Return why no more trials are of use, if so many have failed in such a way; None otherwise.

    The failed trials of this session since the last that ended well count (see
    :class:`~dryfit.ledger.state.FailureTally`). A trial that runs meanwhile may yet end well, and then nothing has
    tripped.

    * Nothing in this study has ended well, and one failed because of its data: so will the others.
    * Nothing has ended well, and the first ``max_same_failure`` fail in one way, which is not the fault of their
      parameters.
    * A setting, or a model, is wrong in the same way ``max_same_failure`` times.
    * ``max_failed_in_a_row`` failed, in whatever way.
    """
    failures = state.failures
    useless = state.counts[Outcome.COMPLETE] + state.counts[Outcome.PRUNED] == 0
    for (kind, error_type, place), count in failures.alike.most_common():
        how = f"{kind}: {error_type or 'no exception'}, {place}"
        if useless and kind is FailureKind.DATA:
            return Trip(End.BAD_DATA, f"no trial could use the data ({how})")
        if count < limits.max_same_failure:
            continue
        if kind is FailureKind.CONFIG:
            return Trip(End.SAME_FAILURE, f"{count} trials have the same fault in their settings ({how})")
        if useless and not PERMITTED[kind].blames_point:
            return Trip(End.SAME_FAILURE, f"the first trials failed in the same way, {count} of them ({how})")
    if failures.in_a_row >= limits.max_failed_in_a_row:
        return Trip(End.TOO_MANY_FAILURES, f"{failures.in_a_row} trials failed in a row")
    return None


def _before_a_process(idle: Sequence[int], limits: Limits, live: Live) -> Step | None:
    """Return the step that an existing trial needs first, whether a process is free or not."""
    for number in idle:
        match live.ready(number):
            case Readiness.REFUSED:
                return RefuseTrial(number)
            case Readiness.UNPLANNED if live.may_start(number) and len(live.planning) < limits.planners:
                return PlanTrial(number)
            case _:
                pass
    return None


def _without_room(limits: Limits, live: Live, why: Blocker | None) -> Step | None:
    """Return the end of a session where other processes have held a device for too long; None: not so."""
    if live.running or why is None or why.limit in (Limit.NOT_RETURNED, Limit.SET_ASIDE):
        return None
    waited_s = 0.0 if live.idle_since_s is None else live.now_s - live.idle_since_s
    if waited_s < limits.device_wait_s:
        return None
    hint = "free it, or set execution.memory_limit to what is left, then resume"
    hint = hint if why.limit is not Limit.NO_NODE else "let one join, then resume"
    return EndSession(End.PAUSED, f"waited {waited_s:.0f} s for room (runtime.device_wait_s): {why.text}; {hint}")


def _without_a_place(state: StudyState, limits: Limits, live: Live, idle: Sequence[int], why: Blocker | None) -> Step:
    """Return the step where a process is free and no existing trial can have it now."""
    enough = state.counted + len(state.open_trials) >= limits.total
    nothing_fits = live.nothing_fits or state.refused_in_a_row >= limits.max_refused_in_a_row
    gave_up = limits.patience is not None and state.finished_since_best >= limits.patience
    # Trials that wait for room count: a new one may fit where they do not, but no more are asked for than could run.
    waiting_here = [n for n in idle if live.may_start(n) or live.ready(n) is Readiness.UNPLANNED]
    taken = len(live.running) + len(live.planning) + len(waiting_here)
    wanted = not (enough or nothing_fits or gave_up)
    if wanted and taken < limits.parallel:
        blocker = _new_trial_blocker(state, live, idle)
        if blocker is None:
            return AskTrial(len(state.trials))
        why = why or blocker
    waiting = [live.waiting_until_s[number] for number in idle if not live.may_start(number)]
    if why is not None and why.limit is Limit.SET_ASIDE and not live.running:
        return EndSession(End.PAUSED, why.text)
    if waiting or live.running or live.planning or why is not None:
        return Wait(min(waiting, default=None), why)
    if enough:
        return EndSession(End.DONE)
    return EndSession(End.REFUSED if nothing_fits else End.NO_IMPROVEMENT)
