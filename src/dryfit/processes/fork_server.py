"""The fork server: imports everything once, then makes a child in milliseconds; early ones between two imports.

``python -m dryfit.processes.fork_server SOCKET_FD CONTROL_PID MODULE...``. It imports, forks, reaps and nothing
else: one thread, no tensors, no CUDA. It ends with the control process, and its children end with it.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dryfit.processes.child import ChildStatus, library_versions, run_child
from dryfit.processes.child_spec import (
    SERVE,
    Exited,
    Forked,
    ForkRequest,
    LineBuffer,
    Ready,
    Refused,
    secrets_from_input,
)
from dryfit.processes.helpers import reap_any
from dryfit.processes.process import die_with_parent, let_signals_through
from dryfit.settings.jobs import result_file
from dryfit.settings.secrets import redacted
from dryfit.settings.wire import Wire

_READ_BYTES = 65_536


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def unsafe_to_fork() -> str:
    """Return why a fork of this process might hang or crash its child; empty if it is safe."""
    count = _thread_count()
    if count != 1:
        return f"the fork server has {count} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA in the fork server"
    return ""


class ForkServer:
    """Reads fork requests from a socket, forks, and relays how the children end.

    Args:
        connection: To the control process.
        secrets: As for :func:`dryfit.processes.child.run_child`.
    """

    def __init__(self, connection: socket.socket, secrets: Mapping[str, str]) -> None:
        self._connection = connection
        self._secrets = secrets
        redacted("", secrets)  # how each is recognised is worked out here, for all children
        self._keys: dict[int, str] = {}
        self._lines = LineBuffer()
        self._waiting: list[ForkRequest] = []
        self._importing = False
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._on_child())  # so that the wakeup fd is written, too
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)

    def say(self, message: Wire) -> None:
        """Send one message to the control process."""
        self._connection.sendall(message.model_dump_json().encode() + b"\n")

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules; at each :data:`~dryfit.processes.child_spec.SERVE` make the children that can be made.

        A child's end is told at once: who waits for it would else wait for an import. None is made while a module is
        half imported: the child would have that half.
        """
        for name in modules:
            if name == SERVE:
                self._read(timeout_s=0)
                self._fork_waiting(whole=False)
                continue
            self._importing = True
            signal.raise_signal(signal.SIGCHLD)  # for a child that has ended since the last import
            importlib.import_module(name)
            self._importing = False
            torch: Any = sys.modules.get("torch")
            if torch is not None:
                torch.set_num_threads(1)

    def serve(self) -> None:
        """Work until the control process closes its end."""
        while True:
            self._fork_waiting(whole=True)
            if not self._read():
                return

    def _read(self, timeout_s: float | None = None) -> bool:
        """Wait for requests and ends of children; False: the control process has closed its end."""
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        if self._wakeup_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wakeup_read, _READ_BYTES)
            self._reap()
        if self._connection.fileno() in ready:
            data = self._connection.recv(_READ_BYTES)
            self._waiting += [ForkRequest.model_validate_json(line) for line in self._lines.feed(data)]
            return bool(data)
        return True

    def _fork_waiting(self, *, whole: bool) -> None:
        """Make the children that were asked for; unless all is imported, only those whose job is."""
        able = [one for one in self._waiting if whole or one.entry.partition(":")[0] in sys.modules]
        self._waiting = [one for one in self._waiting if one not in able]
        for request in able:
            self._fork(request)

    def _on_child(self) -> None:
        if self._importing:
            self._reap()

    def kill_children(self) -> None:
        """Kill every child that runs, with all it started."""
        for pid in self._keys:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _fork(self, request: ForkRequest) -> None:
        why = unsafe_to_fork()
        if why:
            print(f"fork of {request.key} refused: {why}", flush=True)
            self.say(Refused(key=request.key, why=why, unsafe=True))
            return
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            self.say(Refused(key=request.key, why=f"fork failed: {error}", unsafe=False))
            return
        if pid == 0:
            self._become(request, server_pid)
        self._keys[pid] = request.key
        self.say(Forked(key=request.key, pid=pid))

    def _become(self, request: ForkRequest, server_pid: int) -> NoReturn:
        """In the child: close what is the server's, and do the job. Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            os.close(self._wakeup_read)
            os.close(self._wakeup_write)
            self._connection.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_child(Path(request.request_path), request.entry, server_pid, self._secrets)
        finally:
            os._exit(ChildStatus.NO_LAST_WORD)

    def _reap(self) -> None:
        while (gone := reap_any()) is not None:
            pid, status = gone
            key = self._keys.pop(pid, None)
            if key is not None:
                self.say(Exited(key=key, status=status))


def main() -> None:
    """Serve on an inherited socket until the control process ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    control_pid = int(sys.argv[2])
    # A batch system may signal all processes of a job: the children must outlive that to write a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    let_signals_through()
    die_with_parent(control_pid)
    # A collection would write to every page that the children share; while all is imported, it would only take time.
    gc.disable()
    begun_s = time.monotonic()
    server = ForkServer(connection, secrets_from_input())
    library_versions()
    result_file()  # made here once for all children
    with suppress(ConnectionError):
        server.preload(sys.argv[3:])
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        server.say(Ready(import_s=time.monotonic() - begun_s))
        server.serve()
    server.kill_children()


if __name__ == "__main__":
    main()
