"""Observers that tests attach to studies: a good one, and some that go wrong in every way they can."""

import copy
import errno
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import dryfit
from dryfit.ledger.events import Event, ReportMade
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState

HANG_S = 60.0


@dataclass
class Recorder(dryfit.Observer):
    """Keeps all it is told, with a copy of the trials and counts after each event."""

    told: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def on_open(self, layout: StudyLayout) -> None:
        self._hear("open")

    def on_event(self, event: Event, state: StudyState) -> None:
        self._hear(event.type)
        self.events.append(event)
        self.seen.append(facts(state))

    def on_message(self, number: int, message: object) -> None:
        self._hear("message")

    def on_note(self, text: str) -> None:
        self._hear("note")

    def _hear(self, what: str) -> None:
        self.told.append(what)
        self.threads.add(threading.get_ident())


def facts(state: StudyState) -> tuple[Any, ...]:
    """What a state says, as it is now."""
    best = None if state.best is None else state.best.number
    return copy.deepcopy((state.created, state.generations, state.sessions, state.trials, state.counts, best))


@dataclass
class Hangs(dryfit.Observer):
    """Hangs in the first call of one kind; ``inside`` says that it is there, and ``left`` that it has come back."""

    method: str = "on_open"
    inside: bool = False
    left: bool = False
    calls: int = 0

    def on_open(self, layout: StudyLayout) -> None:
        self._hear("on_open")

    def on_event(self, event: Event, state: StudyState) -> None:
        self._hear("on_event")

    def on_note(self, text: str) -> None:
        self._hear("on_note")

    def _hear(self, method: str) -> None:
        self.calls += 1
        if method == self.method:
            self.inside = True
            threading.Event().wait(HANG_S)
            self.left = True


@dataclass
class Raises(dryfit.Observer):
    """Raises in the first call of one kind."""

    error: BaseException = field(default_factory=lambda: ConnectionError("the tracker is down"))
    method: str = "on_event"
    calls: int = 0

    def on_open(self, layout: StudyLayout) -> None:
        self._hear("on_open")

    def on_event(self, event: Event, state: StudyState) -> None:
        self._hear("on_event")

    def on_message(self, number: int, message: object) -> None:
        self._hear("on_message")

    def on_note(self, text: str) -> None:
        self._hear("on_note")

    def _hear(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            raise self.error


class Exits(dryfit.Observer):
    """Ends its process, or so it thinks."""

    def on_event(self, event: Event, state: StudyState) -> None:
        sys.exit(7)


class Changes(dryfit.Observer):
    """Writes into all it is given: values, parameters, verdicts and counts."""

    def on_event(self, event: Event, state: StudyState) -> None:
        if isinstance(event, ReportMade):
            event.point.metrics["changed"] = 0.0
            object.__setattr__(event.point, "value", -1e9)
        for trial in state.trials:
            trial.params.clear()
            trial.internal.update(dict.fromkeys(trial.internal, 0.0))
            trial.distributions.clear()
            trial.value = -1e9
        state.best = None
        state.front.clear()
        state.counts.update(dict.fromkeys(state.counts, 10_000))
        state.sessions[-1].closed = "changed"


def full_disk() -> OSError:
    """What a full disk says to a program that writes to it."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/metrics.log")
