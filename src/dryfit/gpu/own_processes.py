"""Processes that a script starts for its ranks by itself: the first of them is a call in the script's own process.

A ``multiprocessing.Process`` whose target is a function of the script's waits. Where the script waits for it, asks
whether it lives, or ends, the first that has the most common target runs here, and no other. Where the script first
asks a pipe, a queue or an event for what such processes give, they are helpers, and are started as the script wants.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing import connection, process, queues, synchronize
from typing import Any

_ASKS = (
    (connection.Connection, ("recv", "recv_bytes", "poll", "send", "send_bytes")),
    (connection, ("wait",)),
    (queues.Queue, ("get",)),
    (queues.SimpleQueue, ("get",)),
    (synchronize.Event, ("wait",)),
    (synchronize.Condition, ("wait",)),
)
"""What a script asks, or gives, a process that runs beside it."""


class OwnProcesses:
    """The processes of a script that wait.

    Args:
        is_own: Whether a file is the script's.
        has_trained: Whether the script has trained already: what it starts then does something else.
        note: Called with a text for people.

    Attributes:
        alike: How many processes run what is rehearsed.
    """

    def __init__(
        self,
        is_own: Callable[[str], bool],
        has_trained: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        self._is_own, self._has_trained, self._note = is_own, has_trained, note
        self.alike = 1
        self._waiting: list[process.BaseProcess] = []
        self._start = process.BaseProcess.start
        self._pid = os.getpid()

    def install(self) -> None:
        """Let processes wait from now on."""
        own = self

        @wraps(self._start)
        def start(self: process.BaseProcess) -> None:
            if own._is_rank(self):
                self._popen = _Waiting(own.run_first)  # pyright: ignore[reportAttributeAccessIssue]
                own._waiting.append(self)
            else:
                own._start(self)

        process.BaseProcess.start = start
        for owner, names in _ASKS:
            for name in names:
                setattr(owner, name, self._asking(getattr(owner, name)))

    def _is_rank(self, started: Any) -> bool:
        target = started._target
        while isinstance(target, partial):
            target = target.func
        code = getattr(target, "__code__", None)
        if code is None or started.daemon or os.getpid() != self._pid or self._has_trained():
            return False
        return self._is_own(code.co_filename) and started._popen is None

    def _asking(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.start_all()
            return ask(*args, **kwargs)

        return asked

    def start_all(self) -> None:
        """Start what waits, in the order of the script: they are its helpers."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one._popen = None  # pyright: ignore[reportAttributeAccessIssue]
            self._start(one)

    def run_first(self) -> None:
        """Run the first process that waits here, where any does: of those whose target the most of them have."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        targets = Counter(one._target for one in waiting)  # pyright: ignore[reportAttributeAccessIssue]
        [(target, count)] = targets.most_common(1)
        first: Any = next(one for one in waiting if one._target is target)  # pyright: ignore[reportAttributeAccessIssue]
        self._note(
            f"of {len(waiting)} processes that the script starts, {count} with {target.__name__}, the first such is "
            "rehearsed, in the script's own; each other takes as much again, on its device or on the same"
        )
        self.alike = count
        multiprocessing.current_process().name = first.name
        target(*first._args, **first._kwargs)


class _Waiting:
    """In the place of what runs a process: whoever asks for its end lets the first of all run."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.pid, self.returncode = os.getpid(), 0
        self.sentinel = 0

    def poll(self, *_: Any) -> int:
        """Run it, and return the status of an end."""
        self._run()
        return 0

    def wait(self, timeout: float | None = None) -> int:
        """Run it, and return the status of an end."""
        return self.poll(timeout)

    def terminate(self) -> None:
        """Nothing runs that could be ended."""

    kill = close = terminate
