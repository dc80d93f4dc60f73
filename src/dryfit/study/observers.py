"""Observers and listeners of a study, each in a thread of its own."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol, TypeAlias, cast

from dryfit.ledger.events import EVENT, Event
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import each_event
from dryfit.ledger.replay import StudyState
from dryfit.settings.errors import ConfigError
from dryfit.settings.files import appending
from dryfit.settings.secrets import redacted, secrets_of
from dryfit.settings.user_code import FunctionName, check_call, imported_function
from dryfit.settings.wire import Message

# Observers of a study: each is called in a thread of its own, so that nothing it does can change or delay the study.
#
# The study's own thread only puts calls into a queue. An observer that fails, that is too slow or that hangs is
# detached: it is called no more, the reason is written down once, and the study goes on as if there had been no such
# observer.


MOST_WAITING: Final = 10_000
"""An observer with so many calls in its queue is too slow: it is detached."""
FINISH_S: Final = 10.0
"""Seconds that observers get, all together, for the rest of their queues when a session has ended."""

MAKE_S: Final = 10.0
"""Seconds that a session waits at its beginning for an observer to be made; then it goes on without."""

_METHODS: Final = ("on_open", "on_event", "on_message", "on_note")
_REPORT_S: Final = 1.0


class Observer(Protocol):
    """An observer of running studies. Subclass it and override the methods that you need.

    Its methods are called one after another, in the order of what happened, in a thread of their own. What they raise,
    and how long they take, changes nothing in the study: an observer that raises, that has fallen 10,000 calls behind
    or that has not finished 10 s after the study's end is called no more, and the reason is printed on stderr and
    written to ``logs/observers.txt`` in the study's folder. Events and states are the observer's own copies.
    """

    def on_open(self, layout: StudyLayout) -> None:
        """Work on the study in the folder ``layout.folder`` begins; its events follow."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """An event was written to the study's ledger; ``state`` is the study just after it."""

    def on_message(self, number: int, message: Message) -> None:
        """The process of trial ``number`` said something that the ledger does not keep: its phase or its progress."""

    def on_note(self, text: str) -> None:
        """The control process says in a sentence what it is doing."""


_Calls: TypeAlias = SimpleQueue[Callable[[Observer], None] | None]


class ObserverThread(Observer):
    """Calls an observer in a thread of its own. Its methods wait for nothing and raise nothing, but for :meth:`check`.

    A thread begins with :meth:`on_open` and ends with :meth:`end`; several studies may follow one another. Once an
    observer is detached it stays so.

    Args:
        name: What people are told that it is.
        make: Returns the observer; called in the thread as it begins.
    """

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self._name = name
        self._make = make
        self._made = threading.Event()
        self._refused: ConfigError | None = None
        self._calls: _Calls = SimpleQueue()
        self._copy: _Copy | None = None
        self._log: Path | None = None
        self._thread: threading.Thread | None = None
        self._report: threading.Thread | None = None
        self._detached = False
        self._detaching = threading.Lock()

    def on_open(self, layout: StudyLayout) -> None:
        """Start the thread for a study."""
        if self._detached:
            return
        self._calls, self._copy, self._log = SimpleQueue(), _Copy(layout.ledger), layout.logs / "observers.txt"
        name = f"observer {self._name}"
        self._thread = threading.Thread(target=self._work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._call(lambda observer: observer.on_open(layout))

    def check(self) -> None:
        """Wait a while for the observer to be made.

        Raises:
            ConfigError: What was made is no observer.
        """
        self._made.wait(MAKE_S)
        if self._refused is not None:
            raise self._refused

    def on_event(self, event: Event, state: StudyState) -> None:
        """Pass an event on. ``state`` stays here: the observer gets a copy, which its own thread keeps."""
        if self._copy is not None:
            self._call(partial(self._copy.hand_on, event))

    def on_message(self, number: int, message: Message) -> None:
        """Pass a message on."""
        self._call(lambda observer: observer.on_message(number, message))

    def on_note(self, text: str) -> None:
        """Pass a note on."""
        self._call(lambda observer: observer.on_note(text))

    def end(self) -> None:
        """Let the thread end after the calls in its queue."""
        self._calls.put(None)

    def wait(self, until_s: float) -> None:
        """Wait for the end of the thread; an observer that is not done by ``until_s`` is detached.

        Args:
            until_s: A time of the monotonic clock.
        """
        thread, self._thread = self._thread, None
        if thread is not None and not self._detached:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                self._detach(f"had not finished {FINISH_S:g} s after the end of the session", _stack(thread))
        if self._report is not None:
            self._report.join(_REPORT_S)

    def _call(self, call: Callable[[Observer], None]) -> None:
        if self._detached or self._thread is None:
            return
        if self._calls.qsize() >= MOST_WAITING:
            self._detach(f"is {MOST_WAITING:,} calls behind", _stack(self._thread))
        else:
            self._calls.put(call)

    def _work(self, calls: _Calls) -> None:
        """In the thread: make the observer, then the calls."""
        try:
            observer = self._take()
            while observer is not None and (call := calls.get()) is not None and not self._detached:
                call(observer)
        except BaseException as error:  # noqa: BLE001  # sys.exit() in an observer ends it, and nothing else
            what = traceback.format_exception_only(error)[0].partition("\n")[0]
            self._detach(f"raised {what}", traceback.format_exc())

    def _take(self) -> Observer | None:
        """Return the observer; None where what was made is none."""
        try:
            made = self._make()
            self._refused = _refusal(made, self._name)
            return None if self._refused is not None else cast("Observer", made)
        finally:
            self._made.set()

    def _detach(self, why: str, trace: str) -> None:
        with self._detaching:
            if self._detached:
                return
            self._detached = True
        # By a thread, because the disk and stderr may be what hangs.
        report = threading.Thread(target=_report_detached, args=(self._name, why, trace, self._log), daemon=True)
        report.start()
        self._report = report  # only now: whoever waits joins it, which fails before it runs


class _Copy:
    """A state of the study that belongs to one observer, made from the ledger's events."""

    def __init__(self, ledger: Path) -> None:
        self._state = StudyState()
        self._ledger = ledger
        self._next = 0

    def hand_on(self, event: Event, observer: Observer) -> None:
        """Apply an event, and those before it that observers were not told, and give both to the observer."""
        if self._next < event.seq:
            for earlier in islice(each_event(self._ledger), self._next, event.seq):
                self._state.apply(earlier)
        own = EVENT.validate_json(event.model_dump_json())
        self._state.apply(own)
        self._next = event.seq + 1
        observer.on_event(own, self._state)


def threaded(observer: Observer) -> ObserverThread:
    """Return the thread of an observer; one that is a thread already stays as it is.

    Raises:
        ConfigError: It lacks a method.
    """
    if isinstance(observer, ObserverThread):
        return observer
    name = f"{type(observer).__module__}.{type(observer).__qualname__}"
    refused = _refusal(observer, name)
    if refused is not None:
        raise refused
    return ObserverThread(name, lambda: observer)


def _refusal(made: object, name: str) -> ConfigError | None:
    """Return why something is no observer; None where it is one."""
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not missing:
        return None
    found = f"the {type(made).__name__} has no method {', '.join(missing)}"
    hint = "a subclass of dryfit.Observer has all of them"
    return ConfigError(f"attaching the observer {name}", found, ", ".join(_METHODS), hint)


@contextmanager
def in_threads(observers: Sequence[Observer]) -> Generator[list[ObserverThread], None, None]:
    """Provide a thread for each observer; when the block ends, they have :data:`FINISH_S` seconds to finish.

    Args:
        observers: Observers; one that has a thread already keeps it.

    Raises:
        ConfigError: One lacks a method.
    """
    threads = [threaded(observer) for observer in observers]
    try:
        yield threads
    finally:
        until_s = time.monotonic() + FINISH_S
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.wait(until_s)


def _stack(thread: threading.Thread) -> str:
    """Return what a thread is doing."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]  # its documented name
    return "".join(traceback.format_stack(frame))


def _report_detached(name: str, why: str, trace: str, log: Path | None) -> None:
    """Write down once why an observer is detached; if this is not possible either, nobody is told."""
    secrets = secrets_of(os.environ)
    text = redacted(f"the observer {name} {why}; it is detached; the study goes on", secrets)
    place = ""
    with suppress(OSError):
        if log is not None:
            log.parent.mkdir(exist_ok=True)  # in the folder of a study, if that is still there
            with appending(log) as file:
                file.write(
                    f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n{redacted(trace, secrets)}\n".encode(
                        errors="backslashreplace"
                    )
                )
            place = f" (see {log})"
    with suppress(OSError, ValueError, AttributeError):  # no stderr, or a closed one
        sys.stderr.write(f"dryfit: {text}{place}\n")
        sys.stderr.flush()


# Listeners: functions of the user's own that the study file names, each of which makes an observer of the study.


def listeners(names: Sequence[str]) -> list[ObserverThread]:
    """Import the functions of ``study.listeners``; each is called when its observer's thread begins.

    Args:
        names: Their names, with the folders that they are imported from.

    Raises:
        ConfigError: One cannot be imported, or cannot be called without arguments.
    """
    return [ObserverThread(FunctionName.parse(name).short, _function(FunctionName.parse(name))) for name in names]


def _function(name: FunctionName) -> Callable[[], object]:
    doing = f"importing {name.short} of study.listeners"
    if name.folder and name.folder not in sys.path:
        sys.path.append(name.folder)  # behind all others: no file there replaces a module that this process imports
    wanted = "a function without arguments that returns an observer, such as a subclass of dryfit.Observer"
    function = imported_function(name, doing, wanted)
    check_call(function, doing, wanted)
    return function
