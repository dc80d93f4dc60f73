"""The state of a study that another process runs, read from its ledger and from the messages of its trials."""

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dryfit.core.sharding.device_groups import place_in_words
from dryfit.core.text.tail import LineTail
from dryfit.core.text.units import gib
from dryfit.core.text.words import few
from dryfit.core.wire import MESSAGES_FILE, Message, Progress
from dryfit.reporting.data.observed_memory import totals_text
from dryfit.reporting.data.summary import StudySummary, summarise
from dryfit.reporting.data.troubles import trouble_lines
from dryfit.reporting.terminal.live import LiveStudy, LiveView, TrialView, Vitals, read_vitals
from dryfit.runtime.children.result_reading import parse_messages
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import LedgerTail
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptEnd, AttemptState, SessionState, TrialState

_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchedMemory:
    """Memory of the trials that run on one device, or on the host.

    Attributes:
        device: Name of the device; None for the host.
        trials: Numbers of the trials that run there.
        planned_bytes: Sum of their planned memory; None unless it is known for all of them.
        observed_bytes: Sum of the memory they hold now; None if it is known for none of them.
        capacity_bytes: Memory of the device.
    """

    device: str | None
    trials: tuple[int, ...]
    planned_bytes: int | None
    observed_bytes: int | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """One reading of a study.

    Attributes:
        running: Whether a process runs it.
        study: Its trials in progress, and how far it is.
        summary: Its counts, plans and failures; None before its first event.
        memory: Memory of the running trials, by device.
    """

    running: bool
    study: LiveView
    summary: StudySummary | None
    memory: tuple[WatchedMemory, ...]


class StudyFollower:
    """Reads the files of a study as they grow. It writes nothing and takes no lock.

    Args:
        layout: The files of the study.
        clock: Unix time in seconds.
        host: Name of this machine.
    """

    def __init__(self, layout: StudyLayout, clock: Callable[[], float] = time.time, host: str | None = None) -> None:
        self._layout = layout
        self._clock = clock
        self._host = platform.node() if host is None else host
        self._begin()

    def _begin(self) -> None:
        self._ledger = LedgerTail(self._layout.ledger)
        self._state = StudyState()
        self._live = LiveStudy(self._clock, self._vitals)
        self._live.on_open(self._layout)
        self._messages: dict[tuple[int, int], LineTail] = {}
        self._summary: StudySummary | None = None

    def look(self) -> Watched:
        """Read what is new, and return the study as it is now.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        if self._ledger.began_anew():
            self._begin()
        events = self._ledger.read()
        for event in events:
            self._state.apply(event)
            self._live.on_event(event, self._state)
        if events and self._state.created is not None:
            self._summary = summarise(self._state)
        running = self._running()
        self._read_messages(running)
        view = self._live.view()
        return Watched(
            running=bool(self._state.sessions) and self._alive(self._state.sessions[-1]),
            study=view,
            summary=self._summary,
            memory=self._memory(running, {trial.number: trial for trial in view.trials}),
        )

    def _vitals(self, folder: Path, pid: int | None, now_s: float) -> Vitals:
        """Read the vitals of a process; on another machine, only those that its folder has."""
        here = bool(self._state.sessions) and self._state.sessions[-1].host == self._host
        return read_vitals(folder, pid if here else None, now_s)

    def _alive(self, session: SessionState) -> bool:
        """Whether the control process of a session lives; on another machine it does until it closes the session."""
        if session.closed is not None or session.host != self._host or session.pid is None:
            return session.closed is None
        with suppress(psutil.Error):
            process = psutil.Process(session.pid)
            # The process id may have been reused since.
            is_same = process.create_time() <= session.opened_at_s + _CLOCK_SLACK_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _running(self) -> list[tuple[TrialState, AttemptState]]:
        newest = [(trial, trial.attempts[-1]) for trial in self._state.open_trials if trial.attempts]
        return [(trial, attempt) for trial, attempt in newest if attempt.end is AttemptEnd.RUNNING]

    def _read_messages(self, running: list[tuple[TrialState, AttemptState]]) -> None:
        keys = {(trial.number, attempt.number) for trial, attempt in running}
        self._messages = {key: tail for key, tail in self._messages.items() if key in keys}
        for number, attempt in sorted(keys):
            path = self._layout.trial(number).attempt(attempt) / MESSAGES_FILE
            tail = self._messages.setdefault((number, attempt), LineTail(path))
            for message in _without_old_progress(parse_messages(list(tail.read()))):
                self._live.on_message(number, message)

    def _memory(
        self, running: list[tuple[TrialState, AttemptState]], views: Mapping[int, TrialView]
    ) -> tuple[WatchedMemory, ...]:
        by_device: dict[str | None, list[tuple[TrialState, AttemptState]]] = {}
        for trial, attempt in running:
            by_device.setdefault(attempt.device, []).append((trial, attempt))
        spec = self._state.resolved.device_spec if self._state.resolved is not None else None
        memory: list[WatchedMemory] = []
        for device in sorted(by_device, key=str):
            planned = [_planned_bytes(trial, attempt) for trial, attempt in by_device[device]]
            trials = [views[trial.number] for trial, _ in by_device[device]]
            # The host memory of a trial on a device says nothing of what it holds on that device.
            observed = [trial.memory_bytes if device is None else trial.device_bytes for trial in trials]
            known = [size_bytes for size_bytes in observed if size_bytes is not None]
            memory.append(
                WatchedMemory(
                    device=device,
                    trials=tuple(trial.number for trial in trials),
                    planned_bytes=sum(size_bytes or 0 for size_bytes in planned) if None not in planned else None,
                    observed_bytes=sum(known) if known else None,
                    capacity_bytes=spec.capacity_bytes if spec is not None and device is not None else None,
                )
            )
        return tuple(memory)


def _without_old_progress(messages: list[Message]) -> list[Message]:
    """Leave out all progress but the last: read at once, older progress would be taken for speed."""
    last = next((message for message in reversed(messages) if isinstance(message, Progress)), None)
    return [message for message in messages if not isinstance(message, Progress) or message is last]


def _planned_bytes(trial: TrialState, attempt: AttemptState) -> int | None:
    """Return the memory an attempt is counted with; before it is counted, that of its plan."""
    if attempt.needs_bytes is not None:
        return attempt.needs_bytes
    plan = trial.plan
    if plan is None or plan.runs_otherwise or plan.answer.memory is None:
        return None
    return plan.answer.memory.required_bytes


def watched_lines(watched: Watched) -> list[str]:
    """Return the lines below the trials in progress: memory, plans and failures."""
    summary = watched.summary
    lines = [_memory_line(memory) for memory in watched.memory]
    if summary is None:
        return [*lines, "no run of this study has begun yet"]
    if summary.plans is not None:
        lines.append(f"plans: {totals_text(summary.plans)}")
    lines += trouble_lines(summary.troubles)
    return lines if watched.running else [*lines, "nobody runs this study now"]


def _memory_line(memory: WatchedMemory) -> str:
    place = "host" if memory.device is None else place_in_words(memory.device)
    trials = few((str(number) for number in memory.trials), 8)
    parts = [
        f"{gib(size_bytes)} {what}"
        for size_bytes, what in ((memory.planned_bytes, "planned"), (memory.observed_bytes, "observed"))
        if size_bytes is not None
    ]
    parts += [f"of {gib(memory.capacity_bytes)}"] if memory.capacity_bytes is not None else []
    return f"{place}: trial(s) {trials}: {', '.join(parts) or 'memory unknown'}"
