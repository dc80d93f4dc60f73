"""Requests to stop, by signal or by ``dryfit stop``, and the dump of the control process's stacks on SIGUSR1."""

import faulthandler
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from dryfit.processes.process import end_of_command
from dryfit.settings.files import appending, contents, first_error_wins
from dryfit.study.next_step import End

GRACEFUL = "graceful"
NOW = "now"
_REQUEST_BYTES = 1 << 10

_REASONS = {
    signal.SIGINT: End.INTERRUPTED,
    signal.SIGTERM: End.STOPPED,
    signal.SIGHUP: End.STOPPED,
    signal.SIGUSR2: End.STOPPED,
}
"""SIGUSR2 is the warning that a batch system sends some time before it takes the machine away."""


class StopSignals:
    """Context that turns stop signals into stop requests for the running study.

    It may span several studies that run one after another: a signal between two of them is not lost, and a Ctrl-C
    after it ends the process. Handlers are only installed in the main thread, because Python allows it nowhere
    else. SIGHUP stays ignored where it is: that is how ``nohup`` works. After a stop, a command ignores what repeats
    itself while it ends.
    """

    def __init__(self) -> None:
        self._old: dict[signal.Signals, object] = {}
        self.listener: Callable[[signal.Signals], None] | None = None
        self.why: End | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            for number, handler in self._old.items():
                over = self.why is not None and handler is end_of_command
                restored = signal.SIG_IGN if over else handler
                signal.signal(number, restored)  # pyright: ignore[reportArgumentType]  # what signal() itself returned
            self._old.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # At once: handlers of signals that come faster than they are handled run within each other.
        if self.why is not None and number != signal.SIGINT:
            return
        received, first = signal.Signals(number), self.why is None
        self.why = self.why or _REASONS[received]
        if self.listener is not None:
            self.listener(received)
        elif received is signal.SIGINT and not first:
            raise KeyboardInterrupt  # no study runs that could end at once: a person must not have to wait


class StopRequests:
    """Collects requests to stop while it is entered; the driver looks at them between any two steps.

    The first request means: checkpoint and stop. A SIGINT after it, as of a person who presses Ctrl-C once more, or
    ``dryfit stop --now``, means: now. Other signals may come as often as they like: the terminal and the shell send a
    SIGHUP each, ``timeout`` sends SIGTERM to the process and to its group, a batch system warns before it ends a job.

    Args:
        request_file: The file that ``dryfit stop`` writes.
        wake: Wakes the driver; called from signal handlers.
        signals: Handlers that are installed already; None: own ones are, while it is entered.
        check: Called at each look; raises where the study cannot go on at all.
    """

    def __init__(
        self,
        request_file: Path,
        wake: Callable[[], None],
        signals: StopSignals | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = request_file
        self._wake = wake
        self._signals = signals or StopSignals()
        self._own = ExitStack()
        self._own_signals = signals is None
        self._check = check
        self.why: End | None = None
        self.at_once = False

    def __enter__(self) -> Self:
        self._file.unlink(missing_ok=True)
        self._signals.listener = self._on_signal
        self.why = self.why or self._signals.why
        if self._own_signals:
            self._own.enter_context(self._signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            self._own.close()
            self._signals.listener = None
            self._file.unlink(missing_ok=True)

    def look(self) -> None:
        """Read a request that was made through the file; before it, make sure that the study can go on."""
        self._check()
        data = contents(self._file, _REQUEST_BYTES)
        if data is not None:
            self.why = self.why or End.STOPPED
            self.at_once = self.at_once or data.strip() == NOW.encode()

    def asked(self) -> bool:
        """Look, and return whether a stop was asked for."""
        self.look()
        return self.why is not None

    def _on_signal(self, received: signal.Signals) -> None:
        if self.why is not None and received is signal.SIGINT:
            self.at_once = True
        self.why = self.why or _REASONS[received]
        self._wake()


@contextmanager
def stacks_on_request(file: Path) -> Generator[None, None, None]:
    """Let SIGUSR1 append the stacks of all threads to a file, and do nothing else, within this block.

    An embedding program that handles the signal itself keeps it.
    """
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    with appending(file) as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
