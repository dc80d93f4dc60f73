"""The present state of a running study, kept up to date from its events and messages.

:class:`LiveStudy` takes events and messages as they come, from an observer or from the study's files, and returns a
:class:`LiveView`. It prints nothing.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dryfit.core.settings.trial import Outcome
from dryfit.core.sharding.device_groups import HERE, node_of
from dryfit.core.wire import BEAT_FILE, Message, Phase, Progress
from dryfit.reporting.eta import Pace, Running, study_left_s, trial_left_s
from dryfit.reporting.trials import goal_names
from dryfit.reporting.worth import flaws_of_best, strongest_baseline
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    Event,
    SessionOpened,
    TrialAsked,
    TrialFinished,
)
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState

PLANNING, WAITING, STARTING = "planning", "waiting", "starting"


@dataclass(frozen=True, slots=True)
class Vitals:
    """Host memory and heartbeat of a process; None where unknown.

    Attributes:
        rss_bytes: Resident host memory now.
        beat_age_s: Seconds since its last heartbeat.
    """

    rss_bytes: int | None = None
    beat_age_s: float | None = None


def read_vitals(folder: Path, pid: int | None, now_s: float) -> Vitals:
    """Read the vitals of an attempt's process: one ``stat`` of its heartbeat file, one query of the process.

    Args:
        folder: The folder of the attempt.
        pid: Its process id; None if unknown.
        now_s: Unix time.
    """
    rss_bytes, beat_age_s = None, None
    with suppress(OSError):
        beat_age_s = max(0.0, now_s - (folder / BEAT_FILE).stat().st_mtime)
    if pid is not None:
        with suppress(psutil.Error, OSError):  # gone meanwhile
            rss_bytes = int(psutil.Process(pid).memory_info().rss) or None  # 0: it has ended and was not reaped yet
    return Vitals(rss_bytes, beat_age_s)


@dataclass(frozen=True, slots=True)
class TrialView:
    """A trial in progress.

    Attributes:
        number: Its number.
        phase: ``planning``, ``waiting``, ``starting``, or the phase its process reports: load, train, evaluate, save.
        step: Optimizer steps done.
        total_steps: Steps of the whole trial; 0 if unknown.
        loss: The last reported training loss.
        goals: The value of each goal at the last validation; empty before the first.
        curve: The study's metric at each validation, earlier attempts included.
        device_bytes: Memory that it holds on its device; None if unknown.
        rss_bytes: Resident host memory of its process; None if unknown.
        beat_age_s: Seconds since its last heartbeat.
        left_s: Estimated seconds to its last step.
        node: The machine that it runs on.
    """

    number: int
    phase: str
    step: int
    total_steps: int
    loss: float | None
    goals: tuple[float | None, ...]
    curve: tuple[float, ...]
    device_bytes: int | None
    rss_bytes: int | None
    beat_age_s: float | None
    left_s: float | None
    node: str = HERE

    @property
    def memory_bytes(self) -> int | None:
        """Its memory on the device where that is known, else on the host."""
        return self.rss_bytes if self.device_bytes is None else self.device_bytes


@dataclass(frozen=True, slots=True)
class LiveView:
    """A running study.

    Attributes:
        goals: Names of the goals, the study's metric first.
        trials: The trials in progress, by number.
        total: Number of trials asked for.
        counted: Number of trials done.
        counts: Number of trials by outcome.
        elapsed_s: Seconds of work on the study, earlier sessions included.
        left_s: Estimated seconds to its end.
        best: Number of the best trial, and its value of the study's metric.
        baseline: The study's metric of the strongest baseline; None: not known.
        flaws: Why the best trial is worth nothing, as far as is known.
        front: Number of trials on the Pareto front; 0 with one goal.
        note: What the control process does at the moment.
    """

    goals: tuple[str, ...]
    trials: tuple[TrialView, ...]
    total: int
    counted: int
    counts: dict[Outcome, int]
    elapsed_s: float
    left_s: float | None
    best: tuple[int, float] | None
    baseline: float | None
    flaws: tuple[str, ...]
    front: int
    note: str


@dataclass(slots=True)
class _Live:
    """A trial's progress, as far as its process has reported it."""

    phase: str
    attempt: int = 0
    pid: int | None = None
    node: str = HERE
    placed_s: float | None = None
    loss: float | None = None
    device_bytes: int | None = None
    step: int = 0
    total_steps: int = 0
    first_step: int | None = None
    first_s: float = 0.0

    def pace(self, now_s: float) -> Pace:
        """Return its pace since its first progress message."""
        first = self.step if self.first_step is None else self.first_step
        return Pace(first, self.step, self.total_steps, now_s - self.first_s)


class LiveStudy:
    """Keeps the state of a running study from events and messages.

    Args:
        clock: Unix time in seconds.
        vitals: Reads the vitals of a process; see :func:`read_vitals`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        vitals: Callable[[Path, int | None, float], Vitals] = read_vitals,
    ) -> None:
        self._clock = clock
        self._vitals = vitals
        self._layout: StudyLayout | None = None
        self._state: StudyState | None = None
        self._trials: dict[int, _Live] = {}
        self._ends: list[float] = []
        self._finished_s: list[float] = []
        self._note = ""

    def on_open(self, layout: StudyLayout) -> None:
        """Learn the study's folder, from which vitals are read."""
        self._layout = layout

    def on_event(self, event: Event, state: StudyState) -> None:
        """Apply an event."""
        self._state = state
        match event:
            case SessionOpened():
                done = [trial for trial in state.present if trial.outcome is not None and trial.outcome.counts]
                self._finished_s = [trial.time_s for trial in done]
            case TrialAsked(number=number):
                self._trials[number] = _Live(WAITING)
            case AttemptPlaced(number=number, attempt=attempt, node=node):
                self._trials[number] = _Live(STARTING, attempt, placed_s=event.at, node=node)
                self._note = ""
            case AttemptStarted(number=number, pid=pid):
                if number not in self._trials:  # this session goes on with it
                    going_on = state.trials[number].attempts[-1]
                    self._trials[number] = _Live(
                        STARTING, going_on.number, placed_s=going_on.placed_at_s, node=node_of(going_on.place)
                    )
                self._trials[number].pid = pid
            case AttemptEnded(number=number) if number in self._trials:
                before = self._trials[number]
                self._trials[number] = _Live(WAITING, step=before.step, total_steps=before.total_steps)
            case TrialFinished():
                self._finish(event, state)
            case _:
                pass

    def on_message(self, number: int, message: Message) -> None:
        """Apply a message of a trial's process, or of its planner while the trial has no process."""
        trial = self._trials.get(number)
        if trial is None:
            return
        match message:
            case Phase(name=name):
                trial.phase = name if trial.attempt else PLANNING
            case Progress(step=step, total_steps=total_steps, loss=loss, device_bytes=device_bytes):
                trial.step, trial.total_steps, trial.loss, trial.device_bytes = step, total_steps, loss, device_bytes
                if trial.first_step is None:
                    trial.first_step, trial.first_s = step, self._clock()
            case _:
                pass

    def on_note(self, text: str) -> None:
        """Remember what the control process does."""
        self._note = text

    def view(self) -> LiveView:
        """Return the study as it is now."""
        now_s, state = self._clock(), self._state
        trials = tuple(self._trial_view(number, now_s) for number in sorted(self._trials))
        if state is None or not state.sessions:
            return LiveView((), trials, 0, 0, dict.fromkeys(Outcome, 0), 0.0, None, None, None, (), 0, self._note)
        best, baseline = state.best, strongest_baseline(state)
        return LiveView(
            goals=goal_names(state),
            trials=trials,
            total=state.sessions[-1].total,
            counted=state.counted,
            counts=dict(state.counts),
            elapsed_s=state.wall_until_s(now_s),
            left_s=self._left_s(state, now_s),
            best=(best.number, best.value) if best is not None and best.value is not None else None,
            baseline=baseline.metrics[state.goals[0].name] if baseline is not None else None,
            flaws=flaws_of_best(state),
            front=len(state.front),
            note=self._note,
        )

    def _finish(self, event: TrialFinished, state: StudyState) -> None:
        """Remember how long the trial took, and after which share of its steps it ended."""
        live = self._trials.pop(event.number, None)
        if event.outcome.counts:
            self._finished_s.append(state.trials[event.number].time_s)
        if live is not None and live.total_steps and event.outcome in (Outcome.COMPLETE, Outcome.PRUNED):
            self._ends.append(min(1.0, event.steps / live.total_steps))

    def _left_s(self, state: StudyState, now_s: float) -> float | None:
        running = [
            Running(now_s - trial.placed_s, trial.pace(now_s))
            for trial in self._trials.values()
            if trial.placed_s is not None
        ]
        session = state.sessions[-1]
        return study_left_s(
            waiting=max(0, session.total - state.counted - len(running)),
            running=running,
            finished_s=self._finished_s,
            ends=self._ends,
            parallel=session.side_by_side or session.parallel,
        )

    def _trial_view(self, number: int, now_s: float) -> TrialView:
        live, state = self._trials[number], self._state
        reports = state.trials[number].reports if state is not None else []
        vitals = Vitals()
        if self._layout is not None and live.attempt:
            pid = live.pid if live.node == HERE else None  # of another machine: here it is nobody, or somebody else
            vitals = self._vitals(self._layout.trial(number).attempt(live.attempt), pid, now_s)
        last, names = (reports[-1] if reports else None), goal_names(state) if state is not None else ()
        return TrialView(
            number=number,
            phase=live.phase,
            step=live.step,
            total_steps=live.total_steps,
            loss=live.loss,
            goals=(last.value, *(last.metrics.get(name) for name in names[1:])) if last is not None else (),
            curve=tuple(point.value for point in reports),
            device_bytes=live.device_bytes,
            rss_bytes=vitals.rss_bytes,
            beat_age_s=vitals.beat_age_s,
            left_s=trial_left_s(live.pace(now_s)),
            node=live.node,
        )
