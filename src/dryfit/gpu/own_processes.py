"""Processes that a script starts for its ranks by itself: the first of them is a call in the script's own process.

A ``multiprocessing.Process`` whose target is a function of the script's waits. Where the script waits for it, asks
whether it lives, or ends, the first that has the most common target runs here, and no other. Where the script first
asks a pipe, a queue or an event for what such processes give, they are helpers, and are started. A helper is a fork
whatever start method the script chose: a fresh interpreter would have no virtual GPU.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing import connection, queues, synchronize
from multiprocessing.context import ForkProcess, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

_ASKS = (
    (connection.Connection, ("recv", "recv_bytes", "poll", "send", "send_bytes")),
    (connection, ("wait",)),
    (queues.Queue, ("get",)),
    (queues.SimpleQueue, ("get",)),
    (synchronize.Event, ("wait",)),
    (synchronize.Condition, ("wait",)),
)
"""What a script asks, or gives, a process that runs beside it."""


class _Call(NamedTuple):
    """What a process is to call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _FreshProcess(ForkProcess):
    """A fork in the place of a process of the start methods ``spawn`` and ``forkserver``."""


class OwnProcesses:
    """The processes of a script that wait.

    Args:
        is_own: Whether a file is the script's.
        has_trained: Whether the script has trained already: what it starts then does something else.
        note: Called with a text for people.
        on_fresh: Called in a fork that stands for a fresh interpreter, which may use the device.

    Attributes:
        alike: How many processes run what is rehearsed.
    """

    def __init__(
        self,
        is_own: Callable[[str], bool],
        has_trained: Callable[[], bool],
        note: Callable[[str], None],
        on_fresh: Callable[[], None],
    ) -> None:
        self._is_own, self._has_trained, self._note, self._on_fresh = is_own, has_trained, note, on_fresh
        self._is_fresh = False
        self.alike = 1
        self._calls: WeakKeyDictionary[BaseProcess, _Call] = WeakKeyDictionary()
        self._waiting: list[BaseProcess] = []
        self._stood_for: WeakSet[BaseProcess] = WeakSet()
        """Those that wait or count as ended, and were never started."""
        self._start, self._pid = BaseProcess.start, os.getpid()

    def install(self) -> None:
        """Let processes wait from now on."""
        own, make = self, BaseProcess.__init__

        @wraps(make)
        def noted(
            self: BaseProcess,
            group: None = None,
            target: Any = None,
            name: Any = None,
            args: Any = (),
            *rest: Any,
            **given: Any,
        ) -> None:
            make(self, group, target, name, args, *rest, **given)
            own._calls[self] = _Call(target, tuple(args), dict((*rest, given.get("kwargs", {}))[0]))

        @wraps(self._start)
        def start(self: BaseProcess) -> None:
            if own._is_rank(self):
                own._waiting.append(self)
                own._stood_for.add(self)
            else:
                own._begin(self)

        SpawnContext.Process = ForkServerContext.Process = _FreshProcess  # pyright: ignore
        os.register_at_fork(after_in_child=self._forked)
        BaseProcess.__init__, BaseProcess.start = noted, start
        for name, answer in (("join", None), ("is_alive", False), ("terminate", None), ("kill", None), ("close", None)):
            setattr(BaseProcess, name, self._standing(getattr(BaseProcess, name), answer, runs=name in _WAITS))
        for name, answer in (("exitcode", 0), ("pid", self._pid), ("ident", self._pid)):
            asked = vars(BaseProcess)[name].fget
            setattr(BaseProcess, name, property(self._standing(asked, answer, runs=name in _WAITS)))
        for owner, names in _ASKS:
            for name in names:
                setattr(owner, name, self._asking(getattr(owner, name)))

    def _begin(self, process: BaseProcess) -> None:
        """Start a process: as a fork, which is told from those that the script itself forks."""
        by_default = not isinstance(process, ForkProcess) and multiprocessing.get_start_method() != "fork"
        self._is_fresh = by_default or isinstance(process, _FreshProcess)
        try:
            self._start(process)
        finally:
            self._is_fresh = False

    def _forked(self) -> None:
        if self._is_fresh:
            self._on_fresh()

    def _is_rank(self, started: BaseProcess) -> bool:
        target = self._calls[started].target if started in self._calls else None
        while isinstance(target, partial):
            target = target.func
        code = getattr(target, "__code__", None)
        if code is None or started.daemon or os.getpid() != self._pid or self._has_trained():
            return False
        return self._is_own(code.co_filename)

    def _standing(self, real: Callable[..., Any], answer: Any, *, runs: bool) -> Callable[..., Any]:
        """Return what answers for a process that was never started; it runs the first where the script waits."""

        @wraps(real)
        def asked(process: BaseProcess, *args: Any, **kwargs: Any) -> Any:
            if runs and process in self._stood_for:
                self.run_first()
            return answer if process in self._stood_for else real(process, *args, **kwargs)

        return asked

    def _asking(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.start_all()
            return ask(*args, **kwargs)

        return asked

    def _taken(self) -> list[BaseProcess]:
        """Return what waits, which then waits no more; in a process forked from the script's own, nothing."""
        waiting, self._waiting = self._waiting, []
        return waiting if os.getpid() == self._pid else []

    def start_all(self) -> None:
        """Start what waits, in the order of the script: they are its helpers."""
        for one in self._taken():
            self._stood_for.discard(one)
            self._begin(one)

    def run_first(self) -> None:
        """Run the first process that waits here, where any does: of those whose target the most of them have.

        Where the script has trained meanwhile, they are helpers, and are started.
        """
        if self._has_trained():
            self.start_all()
        waiting = self._taken()
        if not waiting:
            return
        [(target, count)] = Counter(self._calls[one].target for one in waiting).most_common(1)
        first = next(one for one in waiting if self._calls[one].target == target)
        name = getattr(target, "__name__", "a function")
        self._note(
            f"of {len(waiting)} processes that the script starts, {count} with {name}, the first such is "
            "rehearsed, in the script's own; each other takes as much again, on its device or on the same"
        )
        self.alike = count
        multiprocessing.current_process().name = first.name
        call = self._calls[first]
        call.target(*call.args, **call.kwargs)


_WAITS = frozenset({"join", "is_alive", "exitcode"})
"""What a script asks of a process that it waits for."""
