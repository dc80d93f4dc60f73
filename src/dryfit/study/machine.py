"""What to do next with a study: pure functions of the ledger's fold and of what runs now."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dryfit.core.failure import FailureKind
from dryfit.core.trial import Outcome
from dryfit.core.wire import StopReason, TrainResult
from dryfit.store.events import TrialFinished
from dryfit.store.replay import StudyState, TrialState


class End(StrEnum):
    """Why a control process leaves a study."""

    DONE = "done"
    NO_IMPROVEMENT = "no_improvement"
    TOO_MANY_FAILURES = "too_many_failures"
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
    """When a study ends."""

    total: int
    parallel: int
    max_wall_s: float | None
    patience: int | None
    max_failed_in_a_row: int


@dataclass(frozen=True, slots=True)
class Live:
    """What the control process knows beside the ledger.

    Attributes:
        running: Numbers of the trials that have a process.
        waiting_until_s: Earliest time (Unix seconds) of the next attempt of trials that must wait.
        stopping: Why no new process may start, if so.
        now_s: Unix seconds.
    """

    running: frozenset[int]
    waiting_until_s: Mapping[int, float]
    stopping: End | None
    now_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Start a process for a trial that exists."""

    number: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Make trial ``number``: suggest its parameters and write them down."""

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


Step = Place | Ask | StopRunning | Wait | Leave


def next_step(state: StudyState, limits: Limits, live: Live) -> Step:
    """Decide the next step of a study.

    Trials that exist come before new ones, lowest number first, and a new trial is asked for only when a process
    is free for it: so at ``parallel = 1`` each suggestion knows every earlier result, however often the control
    process died in between.
    """
    if live.stopping is not None:
        return Wait() if live.running else Leave(live.stopping)
    if limits.max_wall_s is not None and state.wall_until_s(live.now_s) >= limits.max_wall_s:
        return StopRunning(End.MAX_HOURS)
    if state.failed_in_a_row >= limits.max_failed_in_a_row:
        return Wait() if live.running else Leave(End.TOO_MANY_FAILURES)
    if len(live.running) >= limits.parallel:
        return Wait()
    idle = [trial.number for trial in state.open_trials if trial.number not in live.running]
    ready = [number for number in idle if live.waiting_until_s.get(number, 0.0) <= live.now_s]
    if ready:
        return Place(ready[0])
    enough = state.counted + len(live.running) + len(idle) >= limits.total
    gave_up = limits.patience is not None and state.finished_since_best >= limits.patience
    if not enough and not gave_up:
        return Ask(len(state.trials))
    if idle:
        return Wait(min(live.waiting_until_s[number] for number in idle))
    if live.running:
        return Wait()
    return Leave(End.DONE if enough else End.NO_IMPROVEMENT)


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
        )
    if result.value is None or math.isnan(result.value):
        return TrialFinished(
            number=trial.number,
            outcome=Outcome.PRUNED,
            steps=result.steps,
            reason=f"{FailureKind.NONFINITE}: no validation gave a number",
        )
    reason = "early stopping" if result.stopped_by is StopReason.EARLY_STOPPING else ""
    return TrialFinished(
        number=trial.number,
        outcome=Outcome.COMPLETE,
        value=result.value,
        best=result.best,
        steps=result.steps,
        reason=reason,
    )
