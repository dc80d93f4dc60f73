"""Starts child processes, reads their messages and collects evidence of their ends; decides nothing."""

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from dryfit.processes.attempt import Attempt, FreshChild, clear, read_result
from dryfit.processes.child_spec import (
    SERVER_MESSAGE,
    ChildEvent,
    ChildExited,
    ChildMessage,
    ChildSpec,
    Exited,
    Forked,
    ForkRequest,
    LineBuffer,
    Ready,
    Refused,
    ServerMessage,
    SupervisorSettings,
    child_environment,
    secrets_as_input,
)
from dryfit.processes.evidence import dump_stacks
from dryfit.processes.failures import CRASH_SIGNALS
from dryfit.processes.helpers import end_helper, kill_session, python_command, start_helper, sweep, wait_gone
from dryfit.settings.errors import InternalError, MachineError, PoisonedError
from dryfit.settings.files import first_error_wins, write_model
from dryfit.settings.jobs import ChildRequest, ChildResult
from dryfit.settings.secrets import secrets_of
from dryfit.settings.study_file import Isolation
from dryfit.settings.wire import REQUEST_FILE, STACKS_FILE, STOP_FILE, VERDICT_FILE, Note, Verdict

# The control process's connection to its fork server: starts it, sends requests, and receives messages.


_READ_BYTES = 65_536
_END_S = 5.0


class ServerLink:
    """One fork server process.

    Args:
        modules: The modules that it imports.
        environment: Its whole environment.
        secrets: As for :func:`dryfit.processes.child.run_child`.
        log: Where its output is appended.
    """

    def __init__(
        self, modules: tuple[str, ...], environment: dict[str, str], secrets: Mapping[str, str], log: Path
    ) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._lines = LineBuffer()
        self._unsent = b""
        self.ready = False
        self.lost = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, secrets_as_input(secrets) as stdin:
            arguments = (str(theirs.fileno()), str(os.getpid()), *modules)
            command = python_command("dryfit.processes.fork_server", *arguments)
            self._process = start_helper(
                command, environment=environment, log=log, stdin=stdin, keep=(theirs.fileno(),)
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def fileno(self) -> int:
        """File descriptor to select on."""
        return self._connection.fileno()

    def ask(self, request: ForkRequest) -> None:
        """Ask for a fork; what the socket does not take now is sent later."""
        self._unsent += request.model_dump_json().encode() + b"\n"
        self._flush()

    def receive(self) -> list[ServerMessage]:
        """Return the server's messages since the last call; sets ``lost`` if it is gone."""
        self._flush()
        messages: list[ServerMessage] = []
        while not self.lost:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.lost = not data
            messages += [SERVER_MESSAGE.validate_json(line) for line in self._lines.feed(data)]
        return messages

    def close(self) -> None:
        """End the server: it ends with the connection, and is killed if it does not."""
        self._connection.close()
        end_helper(self._process, _END_S if self.ready and not self.lost else 0)

    def kill(self) -> None:
        """Kill the server, and by their death signals its children."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _flush(self) -> None:
        if self._unsent and not self.lost:
            try:
                sent = self._connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
            except BlockingIOError:
                pass
            except ConnectionError:
                self.lost = True


# Waits until something happens: a child writes to the FIFO, a process ends, the fork server answers, or ``wake``.


_POLL_S = 0.25
_POLL_WITHOUT_FIFO_S = 0.05


def _open_fifo(path: Path) -> int | None:
    """Make and open the FIFO; None on a file system that has none (children are then polled more often)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.mkfifo(path, 0o600)
        # For writing too: with a writer of its own the FIFO never reports its end between two children.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        path.unlink(missing_ok=True)
        return None


class Waiter:
    """Waits for all that the supervisor is interested in.

    Args:
        wakeup_fifo: Path of the FIFO that children write to; None: there is none.
    """

    def __init__(self, wakeup_fifo: Path | None) -> None:
        self._fifo = _open_fifo(wakeup_fifo) if wakeup_fifo is not None else None
        self.wakeup_fifo = wakeup_fifo if self._fifo is not None else None
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._wakes: set[int] = set()
        for fd in (self._wake_read, self._fifo):
            if fd is not None:
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ)
        os.set_blocking(self._wake_write, False)

    def watch(self, fd: int, *, wakes: bool = False) -> None:
        """Return from :meth:`block` when ``fd`` becomes readable.

        Args:
            fd: The descriptor.
            wakes: It then counts as a call of :meth:`wake`, for somebody else reads it.
        """
        self._selector.register(fd, selectors.EVENT_READ)
        if wakes:
            self._wakes.add(fd)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; call it before ``fd`` is closed."""
        self._selector.unregister(fd)
        self._wakes.discard(fd)

    def wake(self) -> None:
        """Make :meth:`block` return; safe in a signal handler and in other threads, harmless after the end."""
        with suppress(OSError):
            os.write(self._wake_write, b"\0")

    def block(self, timeout_s: float) -> bool:
        """Block until something happens, for a fraction of a second at most (files may change without a wake-up).

        Returns:
            Whether :meth:`wake` was called, or a descriptor that wakes is readable.
        """
        most_s = _POLL_S if self._fifo is not None else _POLL_WITHOUT_FIFO_S
        woken = False
        for key, _ in self._selector.select(min(timeout_s, most_s)):
            if key.fd in (self._fifo, self._wake_read):
                with suppress(BlockingIOError):
                    os.read(key.fd, _READ_BYTES)
                woken = woken or key.fd == self._wake_read
            woken = woken or key.fd in self._wakes
        return woken

    def close(self) -> None:
        """Remove the FIFO and close everything."""
        self._selector.close()
        wake_write, self._wake_write = self._wake_write, -1
        for fd in (self._wake_read, wake_write, self._fifo):
            if fd is not None:
                os.close(fd)
        if self.wakeup_fifo is not None:
            self.wakeup_fifo.unlink(missing_ok=True)


_TICK_MAX_S = 2.0
_SERVER_FAILURES_MAX = 3
_ASKS_MAX = 2
_GONE_S = 10.0
_CLOSE_S = 20.0
_CLOSE_POLL_S = 0.05
_UNKILLABLE_S = 60.0


class Supervisor:
    """The child processes of one control process. Use it as a context manager, from one thread.

    Args:
        settings: How children are made.

    Raises:
        MachineError: This platform has no fork server, and the settings demand one.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        linux = sys.platform == "linux"
        if settings.isolation is Isolation.FORKSERVER and not linux:
            raise MachineError("starting trials", f"no fork server on {sys.platform}", 'isolation = "auto" or "fresh"')
        self._settings = settings
        self._environment = child_environment(os.environ, settings.marker, settings.environment)
        self._secrets = secrets_of(os.environ)
        self._thread_id = threading.get_ident()
        self._waiter = Waiter(settings.wakeup_fifo)
        self._forks = linux and settings.isolation is not Isolation.FRESH
        self._link: ServerLink | None = None
        self._link_since_s = 0.0
        self._server_failures = 0
        self._suspect = False
        self._attempts: dict[str, Attempt] = {}
        self._held: list[FreshChild] = []
        self._events: list[ChildEvent] = []
        self._tokens = count()
        self._clock_s = 0.0
        self._looked_s = time.monotonic()
        self._closing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            self.close()

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server; None where none runs."""
        return self._link.pid if self._link is not None else None

    def start(self, spec: ChildSpec) -> None:
        """Write a child's request and ask for its process; :meth:`wait` returns its messages and its end.

        Raises:
            OSError: The request cannot be written.
            InternalError: The key is taken, or this is not the thread that made the supervisor (children would be
                killed when this thread ends).
        """
        placed_at_s = time.monotonic()
        if spec.key in self._attempts:
            raise InternalError("starting a child", f"{spec.key} runs already")
        if threading.get_ident() != self._thread_id:
            raise InternalError("starting a child", "called from another thread")
        spec.folder.mkdir(parents=True, exist_ok=True)
        clear(spec.folder)
        wakeup_fifo = self._waiter.wakeup_fifo
        request = ChildRequest(
            placed_at_s=placed_at_s, wakeup_fifo=str(wakeup_fifo.absolute()) if wakeup_fifo else None, body=spec.body
        )
        write_model(spec.folder / REQUEST_FILE, request, durable=False)
        attempt = Attempt(spec, token=str(next(self._tokens)), begun_s=self._clock_s)
        self._attempts[spec.key] = attempt
        self._launch(attempt)

    def wait(self, timeout_s: float) -> list[ChildEvent]:
        """Block until a child says something or ends, :meth:`wake` is called or the time is over.

        Returns:
            All new events in order; the messages of a child come before its end, and its end comes once.
        """
        deadline_s = time.monotonic() + timeout_s
        woken = False
        while True:
            self._look()
            left_s = deadline_s - time.monotonic()
            if self._events or woken or left_s <= 0:
                events, self._events = self._events, []
                return events
            woken = self._waiter.block(left_s)

    def answer(self, key: str, verdict: Verdict) -> None:
        """Answer a report; nothing happens if the child is gone."""
        attempt = self._attempts.get(key)
        if attempt is not None:
            write_model(attempt.spec.folder / VERDICT_FILE, verdict, durable=False)

    def ask_stop(self, key: str) -> None:
        """Ask a child to write a checkpoint and end; after its grace it is killed. Nothing happens if it is gone."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.stop_asked_s is None:
            attempt.stop_asked_s = self._clock_s
            (attempt.spec.folder / STOP_FILE).touch()

    def kill(self, key: str, why: str = "now") -> None:
        """Kill a child with all it started; :meth:`wait` returns its end. Nothing happens if it is gone.

        Args:
            why: As in :attr:`dryfit.settings.errors.Evidence.killed_by_us`.
        """
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.killed_by_us = attempt.killed_by_us or why
            self._kill(attempt)

    def wake(self) -> None:
        """Make :meth:`wait` return; may be called from a signal handler or another thread."""
        self._waiter.wake()

    def watch(self, fd: int) -> None:
        """Make :meth:`wait` return when a descriptor, which the caller reads, is readable."""
        self._waiter.watch(fd, wakes=True)

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor; call it before it is closed."""
        self._waiter.forget(fd)

    def close(self) -> None:
        """Kill what runs, end the fork server and remove the FIFO. Events not yet fetched are dropped.

        A process that a child started and that left its session is found by the marker, and ended too.
        """
        if self._closing:
            return
        self._closing = True
        for key in list(self._attempts):
            self.kill(key, "now")
        deadline_s = time.monotonic() + _CLOSE_S
        while self._attempts and time.monotonic() < deadline_s:
            self._waiter.block(_CLOSE_POLL_S)
            self._look()
        self._close_link()
        self._waiter.close()
        sweep(self._settings.marker)

    def _launch(self, attempt: Attempt) -> None:
        if self._suspect and not any(other.fresh is None for other in self._attempts.values() if other is not attempt):
            self._close_link()  # no child depends on it any more: the next server imports everything anew
        if not self._forks or (self._suspect and self._settings.isolation is Isolation.AUTO):
            self._launch_fresh(attempt)
            return
        if self._link is None:
            settings = self._settings
            self._link = ServerLink(settings.preload, self._environment, self._secrets, settings.server_log)
            self._link_since_s = self._clock_s
            self._waiter.watch(self._link.fileno())
        attempt.asks += 1
        attempt.begun_s = self._clock_s
        path = (attempt.spec.folder / REQUEST_FILE).absolute()
        self._link.ask(ForkRequest(key=attempt.token, request_path=str(path), entry=self._entry(attempt)))

    def _launch_fresh(self, attempt: Attempt) -> None:
        path = (attempt.spec.folder / REQUEST_FILE).absolute()
        try:
            child = FreshChild(path, self._entry(attempt), self._environment, self._secrets)
        except OSError as error:
            self._ended(attempt, trouble=f"no new process: {error}")
            return
        attempt.fresh, attempt.pid, attempt.begun_s = child, child.pid, self._clock_s
        if child.exit_fd is not None:
            self._waiter.watch(child.exit_fd)

    def _entry(self, attempt: Attempt) -> str:
        return self._settings.jobs[attempt.spec.body.job].entry

    def _look(self) -> None:
        """Read all messages and ends, and kill what is overdue."""
        now_s = time.monotonic()
        # Time in which this process did not run (stopped, suspended, a busy machine) is no child's silence.
        self._clock_s += min(now_s - self._looked_s, _TICK_MAX_S)
        self._looked_s = now_s
        self._read_server()
        self._held = [child for child in self._held if self._poll_fresh(child) is None]  # reaped once it does end
        for attempt in list(self._attempts.values()):
            if self._attempts.get(attempt.spec.key) is not attempt:
                continue  # it ended, or was replaced, with the server of the one before
            self._read(attempt)
            status = self._poll_fresh(attempt.fresh) if attempt.fresh is not None else None
            if status is not None:
                self._ended(attempt, status)
            else:
                self._enforce(attempt)

    def _poll_fresh(self, child: FreshChild) -> int | None:
        status = child.poll()
        if status is not None and child.exit_fd is not None:
            self._waiter.forget(child.exit_fd)
            child.release()
        return status

    def _read_server(self) -> None:
        link = self._link
        if link is None:
            return
        for message in link.receive():
            self._take(link, message)
        if link.lost:
            self._lose_server("the fork server died" if link.ready else "the fork server could not start")
        elif not link.ready and self._clock_s - self._link_since_s > self._settings.server_start_s:
            self._lose_server(f"the fork server was not ready within {self._settings.server_start_s:g} s")

    def _take(self, link: ServerLink, message: ServerMessage) -> None:
        if isinstance(message, Ready):
            link.ready = True
            for attempt in self._attempts.values():
                if attempt.pid is None:
                    attempt.begun_s = self._clock_s
            return
        attempt = next((child for child in self._attempts.values() if child.token == message.key), None)
        if attempt is None:
            if isinstance(message, Forked):  # killed before it was made
                kill_session(message.pid, self._settings.marker)
            return
        match message:
            case Forked():
                attempt.pid, attempt.begun_s = message.pid, self._clock_s
            case Exited():
                self._ended(attempt, os.waitstatus_to_exitcode(message.status))
            case Refused():
                if message.unsafe and self._settings.isolation is Isolation.AUTO:
                    self._forks = False
                self._cannot_fork(attempt, message.why)

    def _read(self, attempt: Attempt) -> None:
        key = attempt.spec.key
        self._events += [ChildMessage(key, message) for message in attempt.look(self._clock_s)]

    def _enforce(self, attempt: Attempt) -> None:
        """Kill a child that is overdue, after a dump of its stacks if it hangs."""
        if attempt.killed_s is not None and self._clock_s - attempt.killed_s > _UNKILLABLE_S:
            self._abandon(attempt)
            return
        why = attempt.overdue(self._clock_s)
        if not why:
            return
        if attempt.pid is None and why == "start":
            if self._link is not None and self._link.ready:
                self._lose_server("the fork server did not answer")
            return
        attempt.killed_by_us = why
        if why != "now" and attempt.pid is not None:
            attempt.stacks = dump_stacks(attempt.spec.folder / STACKS_FILE, attempt.pid, self._settings.marker)
        self._kill(attempt)

    def _kill(self, attempt: Attempt) -> None:
        if attempt.killed_s is None:
            attempt.killed_s = self._clock_s
        if attempt.pid is None:
            self._ended(attempt)  # should its process still be made, it is killed on sight
        else:
            kill_session(attempt.pid, self._settings.marker)
            if attempt.fresh is not None:
                attempt.fresh.kill()  # one that has just begun does not carry the marker yet

    def _abandon(self, attempt: Attempt) -> None:
        """Give up on a process that a driver or a file system blocks: even SIGKILL waits for them."""
        if attempt.fresh is not None:
            self._held.append(attempt.fresh)
        self._ended(attempt, trouble=f"process {attempt.pid} was killed {_UNKILLABLE_S:g} s ago and has not ended")

    def _ended(
        self, attempt: Attempt, status: int | None = None, *, server_lost: bool = False, trouble: str = ""
    ) -> None:
        self._read(attempt)
        spec = attempt.spec
        result = read_result(spec.folder)
        poisoned = attempt.fresh is None and attempt.started_s is None and _says_poisoned(result)
        if poisoned:
            self._suspect = True
        elif result is not None and attempt.fresh is None:
            self._server_failures = 0
        if (result is None or poisoned) and self._may_start_again(attempt, status, poisoned=poisoned):
            self._count_server_failure()
            why = "gave no first line in time" if status is None or attempt.killed_by_us else f"ended with {status}"
            self._start_again(attempt, f"the forked child {'found its torch changed' if poisoned else why}")
            return
        del self._attempts[spec.key]
        evidence = attempt.evidence(self._clock_s, result, status=status, server_lost=server_lost, trouble=trouble)
        self._events.append(ChildExited(spec.key, result, self._settings.probe(spec.key, evidence)))

    def _may_start_again(self, attempt: Attempt, status: int | None, *, poisoned: bool) -> bool:
        """Return whether the fork itself may be to blame for the end, so that a fresh interpreter is worth a try."""
        forked = attempt.fresh is None and attempt.pid is not None
        crashed = status is not None and -status in CRASH_SIGNALS
        blamed = attempt.started_s is None and (attempt.killed_by_us == "start" or crashed or poisoned)
        wanted = self._settings.isolation is Isolation.AUTO and attempt.stop_asked_s is None and not self._closing
        return forked and blamed and wanted

    def _start_again(self, attempt: Attempt, why: str) -> None:
        """Start the same child in a fresh interpreter, and add a note on it to its messages."""
        spec = attempt.spec
        clear(spec.folder)
        again = Attempt(spec, token=str(next(self._tokens)), begun_s=self._clock_s)
        again.stop_asked_s = attempt.stop_asked_s
        if again.stop_asked_s is not None:
            (spec.folder / STOP_FILE).touch()
        self._attempts[spec.key] = again
        self._events.append(ChildMessage(spec.key, Note(text=f"{why}: started again in a fresh interpreter")))
        self._launch_fresh(again)

    def _cannot_fork(self, attempt: Attempt, why: str) -> None:
        if self._closing or self._settings.isolation is Isolation.FORKSERVER:
            self._ended(attempt, trouble=f"{why} (see {self._settings.server_log})")
        else:
            self._start_again(attempt, why)

    def _count_server_failure(self) -> None:
        self._server_failures += 1
        if self._server_failures >= _SERVER_FAILURES_MAX and self._settings.isolation is Isolation.AUTO:
            self._forks = False

    def _lose_server(self, why: str) -> None:
        """Kill the fork server and its children; those it had not made yet are asked for again."""
        if self._link is not None:
            self._link.kill()
        self._close_link()
        self._count_server_failure()
        forked = [attempt for attempt in self._attempts.values() if attempt.fresh is None]
        for attempt in forked:
            if attempt.pid is not None:
                kill_session(attempt.pid, self._settings.marker)
                wait_gone(attempt.pid, _GONE_S)
                self._ended(attempt, server_lost=True)
        for attempt in forked:
            if attempt.pid is None and attempt.asks < _ASKS_MAX and self._forks and not self._closing:
                self._launch(attempt)
            elif attempt.pid is None:
                self._cannot_fork(attempt, why)

    def _close_link(self) -> None:
        self._suspect = False
        if self._link is not None:
            link, self._link = self._link, None
            self._waiter.forget(link.fileno())
            link.close()


def _says_poisoned(result: ChildResult | None) -> bool:
    return result is not None and result.fault is not None and result.fault.code == PoisonedError.code
