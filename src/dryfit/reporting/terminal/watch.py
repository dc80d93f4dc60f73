"""A study that another process runs, watched through its files: the ledger, and what the processes of trials say."""

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
from dryfit.reporting.data.work import runs
from dryfit.reporting.terminal.live import LiveStudy, LiveView, Vitals, read_vitals
from dryfit.runtime.children.result_reading import parse_messages
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import LedgerTail
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptState, SessionState, TrialState

_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchedMemory:
    """The memory of trials that run on one device, or on the host.

    Attributes:
        device: None: on the host.
        trials: That run there.
        planned_bytes: What they are counted with; None where that is not known of each.
        observed_bytes: What they hold now; None where that is not known of any.
        capacity_bytes: Of the device.
    """

    device: str | None
    trials: tuple[int, ...]
    planned_bytes: int | None
    observed_bytes: int | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """A study as it is now.

    Attributes:
        running: Whether a process works on it.
        study: What is worked on, and how far it is.
        summary: Its counts, plans and failures; None before its first event.
        memory: Of what runs now.
    """

    running: bool
    study: LiveView
    summary: StudySummary | None
    memory: tuple[WatchedMemory, ...]


@dataclass(slots=True)
class _Heard:
    """What is read of a process that runs."""

    tail: LineTail
    device_bytes: int | None = None


class StudyFollower:
    """Reads a study's files as they grow. It writes nothing and takes no lock.

    Args:
        layout: Where the study lies.
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
        self._live = LiveStudy(self._clock, self._look)
        self._live.on_open(self._layout)
        self._heard: dict[tuple[int, int], _Heard] = {}
        self._summary: StudySummary | None = None

    def look(self) -> Watched:
        """Read what is new.

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
        self._hear(running)
        view = self._live.view()
        return Watched(
            running=bool(self._state.sessions) and self._alive(self._state.sessions[-1]),
            study=view,
            summary=self._summary,
            memory=self._memory(running, {trial.number: trial.memory_bytes for trial in view.trials}),
        )

    def _look(self, folder: Path, pid: int | None, now_s: float) -> Vitals:
        """Vitals of a process; of one on another machine only what its folder tells."""
        here = bool(self._state.sessions) and self._state.sessions[-1].host == self._host
        return read_vitals(folder, pid if here else None, now_s)

    def _alive(self, session: SessionState) -> bool:
        """Whether the control process of a session lives: on another machine, as long as it has not left in order."""
        if session.closed is not None or session.host != self._host or session.pid is None:
            return session.closed is None
        with suppress(psutil.Error):
            process = psutil.Process(session.pid)
            # A process id may have been given to somebody else since.
            is_it = process.create_time() <= session.opened_at_s + _CLOCK_SLACK_S
            return is_it and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _running(self) -> list[tuple[TrialState, AttemptState]]:
        newest = [(trial, trial.attempts[-1]) for trial in self._state.open_trials if trial.attempts]
        return [(trial, attempt) for trial, attempt in newest if runs(attempt, self._state.sessions)]

    def _hear(self, running: list[tuple[TrialState, AttemptState]]) -> None:
        keys = {(trial.number, attempt.number) for trial, attempt in running}
        self._heard = {key: heard for key, heard in self._heard.items() if key in keys}
        for number, attempt in sorted(keys):
            path = self._layout.trial(number).attempt(attempt) / MESSAGES_FILE
            heard = self._heard.setdefault((number, attempt), _Heard(LineTail(path)))
            for message in _newest(parse_messages(list(heard.tail.read()))):
                self._live.on_message(number, message)
                if isinstance(message, Progress):
                    heard.device_bytes = message.device_bytes

    def _memory(
        self, running: list[tuple[TrialState, AttemptState]], shown_bytes: Mapping[int, int | None]
    ) -> tuple[WatchedMemory, ...]:
        by_device: dict[str | None, list[tuple[TrialState, AttemptState]]] = {}
        for trial, attempt in running:
            by_device.setdefault(attempt.device, []).append((trial, attempt))
        spec = self._state.resolved.device_spec if self._state.resolved is not None else None
        found: list[WatchedMemory] = []
        for device in sorted(by_device, key=str):
            there = by_device[device]
            planned = [_planned_bytes(trial, attempt) for trial, attempt in there]
            # What is shown of a trial is its host's memory as long as it has not said what it takes of its device.
            observed = [
                shown_bytes.get(trial.number)
                if device is None
                else self._heard[trial.number, attempt.number].device_bytes
                for trial, attempt in there
            ]
            seen = [size_bytes for size_bytes in observed if size_bytes is not None]
            found.append(
                WatchedMemory(
                    device=device,
                    trials=tuple(trial.number for trial, _ in there),
                    planned_bytes=sum(one or 0 for one in planned) if None not in planned else None,
                    observed_bytes=sum(seen) if seen else None,
                    capacity_bytes=spec.capacity_bytes if spec is not None and device is not None else None,
                )
            )
        return tuple(found)


def _newest(messages: list[Message]) -> list[Message]:
    """Messages without progress that was made before the last: who begins to watch late must not take it for speed."""
    last = next((message for message in reversed(messages) if isinstance(message, Progress)), None)
    return [message for message in messages if not isinstance(message, Progress) or message is last]


def _planned_bytes(trial: TrialState, attempt: AttemptState) -> int | None:
    """What an attempt is counted with; before anybody counts, what its plan says."""
    if attempt.needs_bytes is not None:
        return attempt.needs_bytes
    plan = trial.plan
    if plan is None or plan.fallbacks_taken or plan.answer.execution is None or plan.answer.memory is None:
        return None
    return plan.answer.memory.required_bytes


def watched_lines(watched: Watched) -> list[str]:
    """What stands below the trials that are worked on: memory, and what goes wrong."""
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
