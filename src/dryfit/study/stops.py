"""Requests to stop a study: Ctrl-C, signals of a scheduler, and the file that ``dryfit stop`` writes."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from dryfit.core.cleanup import first_error_wins
from dryfit.study.machine import End

GRACEFUL = "graceful"
NOW = "now"

_REASONS = {signal.SIGINT: End.INTERRUPTED, signal.SIGTERM: End.STOPPED, signal.SIGHUP: End.STOPPED}


class StopRequests:
    """Collects requests while it is entered; the study's loop looks at them between any two steps.

    The first request means: checkpoint and stop. A second signal, or ``dryfit stop --now``, means: now. Handlers are
    only installed in the main thread, because Python allows it nowhere else.

    Args:
        request_file: What ``dryfit stop`` writes.
        wake: Makes the loop look; called from signal handlers.
    """

    def __init__(self, request_file: Path, wake: Callable[[], None]) -> None:
        self._file = request_file
        self._wake = wake
        self._old: dict[signal.Signals, object] = {}
        self.why: End | None = None
        self.at_once = False

    def __enter__(self) -> Self:
        self._file.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in _REASONS:
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with first_error_wins(error):
            for number, handler in self._old.items():
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # what signal() itself returned
            self._old.clear()
            self._file.unlink(missing_ok=True)

    def look(self) -> None:
        """Notice a request made through the file."""
        try:
            text = self._file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return
        self.why = self.why or End.STOPPED
        self.at_once = self.at_once or text == NOW

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.why is not None:
            self.at_once = True
        self.why = self.why or _REASONS[signal.Signals(number)]
        self._wake()
