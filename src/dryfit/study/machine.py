"""What to do next with a study: pure functions of the ledger's fold and of what runs now."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dryfit.core.failure import PERMITTED, FailureKind
from dryfit.core.jobs import StopReason, TrainResult
from dryfit.core.trial import Outcome
from dryfit.store.events import Observed, TrialFinished
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState


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
    """When a study ends, and how much it does at once."""

    total: int
    parallel: int
    max_wall_s: float | None
    patience: int | None
    max_failed_in_a_row: int
    max_refused_in_a_row: int
    planners: int = 2
    max_same_failure: int = 3


@dataclass(frozen=True, slots=True)
class Trip:
    """Why a study starts no more trials.

    Attributes:
        end: How the session ends.
        sentence: What to tell.
    """

    end: End
    sentence: str


class Readiness(StrEnum):
    """Whether an open trial may have a process."""

    UNPLANNED = "unplanned"
    """Its memory is to be planned first."""
    PLANNED = "planned"
    EXCLUSIVE = "exclusive"
    """It may run, with no other trial beside it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Live:
    """What the control process knows beside the ledger.

    Attributes:
        running: Numbers of the trials that have a process.
        planning: Numbers of the trials whose memory is being planned now.
        readiness: Of open trials; those left out are planned.
        waiting_until_s: Earliest time (Unix seconds) of the next attempt of trials that must wait.
        stopping: Why no new process may start, if so.
        now_s: Unix seconds.
    """

    running: frozenset[int]
    waiting_until_s: Mapping[int, float]
    stopping: End | None
    now_s: float
    planning: frozenset[int] = frozenset()
    readiness: Mapping[int, Readiness] = field(default_factory=dict[int, Readiness])

    def ready(self, number: int) -> Readiness:
        """Whether an open trial may have a process."""
        return self.readiness.get(number, Readiness.PLANNED)

    def may_start(self, number: int) -> bool:
        """Whether a trial has waited long enough since its last failure."""
        return self.waiting_until_s.get(number, 0.0) <= self.now_s


@dataclass(frozen=True, slots=True)
class Place:
    """Start a process for a trial that exists."""

    number: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Make trial ``number``: suggest its parameters and write them down."""

    number: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Find out what memory a trial needs."""

    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a trial that does not fit, before it has had a process."""

    number: int


@dataclass(frozen=True, slots=True)
class StopRunning:
    """Ask every running trial to checkpoint and stop; start nothing more."""

    why: End


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be started now; at most until ``until_s`` (Unix seconds), if given."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing runs and nothing more is to start."""

    why: End


Step = Place | Ask | Plan | Refuse | StopRunning | Wait | Leave


def next_step(state: StudyState, limits: Limits, live: Live) -> Step:
    """Decide the next step of a study.

    Trials that exist come before new ones, lowest number first, and a new trial is asked for only when a process
    is free for it, one that is being planned counting as one that runs: so at ``parallel = 1`` each suggestion knows
    every earlier result, however often the control process died in between.
    """
    if live.stopping is not None:
        return Wait() if live.running else Leave(live.stopping)
    if limits.max_wall_s is not None and state.generation_wall_until_s(live.now_s) >= limits.max_wall_s:
        return StopRunning(End.MAX_HOURS)
    trip = tripped(state, limits)
    if trip is not None:
        return Wait() if live.running else Leave(trip.end)
    idle = [trial.number for trial in state.open_trials if trial.number not in live.running | live.planning]
    early = _before_a_process(idle, limits, live)
    if early is not None:
        return early
    ready = [number for number in idle if live.may_start(number) and live.ready(number) is not Readiness.UNPLANNED]
    if len(live.running) >= limits.parallel or _runs_alone(ready, live):
        return Wait()
    return Place(ready[0]) if ready else _without_ready(state, limits, live, idle)


def tripped(state: StudyState, limits: Limits) -> Trip | None:
    """Whether so many trials failed, and in such a way, that more of them are of no use.

    Looked at are the failed trials of this session since the last that ended well (see
    :class:`~dryfit.store.tally.FailureTally`). A trial that runs meanwhile may yet end well, and then nothing has
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
        if useless and not PERMITTED[kind].told:
            return Trip(End.SAME_FAILURE, f"the first trials failed in the same way, {count} of them ({how})")
    if failures.in_a_row >= limits.max_failed_in_a_row:
        return Trip(End.TOO_MANY_FAILURES, f"{failures.in_a_row} trials failed in a row")
    return None


def _before_a_process(idle: Sequence[int], limits: Limits, live: Live) -> Step | None:
    """What is due for a trial that exists, whether a process is free or not."""
    for number in idle:
        match live.ready(number):
            case Readiness.REFUSED:
                return Refuse(number)
            case Readiness.UNPLANNED if live.may_start(number) and len(live.planning) < limits.planners:
                return Plan(number)
            case _:
                pass
    return None


def _runs_alone(ready: Sequence[int], live: Live) -> bool:
    """Whether the trials that run keep the next one from starting, because it, or one of them, must be alone."""
    alone = any(live.ready(number) is Readiness.EXCLUSIVE for number in [*live.running, *ready[:1]])
    return alone and bool(live.running)


def _without_ready(state: StudyState, limits: Limits, live: Live, idle: Sequence[int]) -> Step:
    """What follows where a process is free and no trial that exists can have it now."""
    enough = state.counted + len(state.open_trials) >= limits.total
    nothing_fits = state.refused_in_a_row >= limits.max_refused_in_a_row
    gave_up = limits.patience is not None and state.finished_since_best >= limits.patience
    unplanned = [number for number in idle if live.ready(number) is Readiness.UNPLANNED]
    taken = len(live.running) + len(live.planning) + len(unplanned)
    if not (enough or nothing_fits or gave_up) and taken < limits.parallel:
        return Ask(len(state.trials))
    waiting = [live.waiting_until_s[number] for number in idle if not live.may_start(number)]
    if waiting or live.running or live.planning:
        return Wait(min(waiting, default=None))
    if enough:
        return Leave(End.DONE)
    return Leave(End.REFUSED if nothing_fits else End.NO_IMPROVEMENT)


def finish_trial(trial: TrialState, result: TrainResult) -> TrialFinished | None:
    """The end of a trial whose process left a result; None where that result says it was asked to stop."""
    if result.stopped_by in (StopReason.REQUEST, StopReason.SIGTERM):
        return None
    if result.stopped_by is StopReason.VERDICT:
        last = trial.verdicts[max(trial.verdicts)] if trial.verdicts else None
        return TrialFinished(
            number=trial.number,
            outcome=Outcome.PRUNED,
            steps=result.steps,
            best=result.best,
            reason=last.reason if last else "pruned",
            observed=_observed(result),
        )
    if result.value is None or math.isnan(result.value):
        return TrialFinished(
            number=trial.number,
            outcome=Outcome.PRUNED,
            steps=result.steps,
            reason=f"{FailureKind.NONFINITE}: no validation gave a number",
            observed=_observed(result),
        )
    reason = "early stopping" if result.stopped_by is StopReason.EARLY_STOPPING else ""
    return TrialFinished(
        number=trial.number,
        outcome=Outcome.COMPLETE,
        value=result.value,
        also=result.also,
        best=result.best,
        steps=result.steps,
        reason=reason,
        observed=_observed(result),
    )


def _observed(result: TrainResult) -> Observed | None:
    found = (result.peak_allocated_bytes, result.peak_reserved_bytes, result.peak_rss_bytes)
    if all(size_bytes is None for size_bytes in found):
        return None
    return Observed(allocated_bytes=found[0], reserved_bytes=found[1], rss_bytes=found[2])
