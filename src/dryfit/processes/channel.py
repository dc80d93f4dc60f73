"""The child's side of the messages: reports, heartbeat, verdicts and stop requests, as files in its folder."""

import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from dryfit.settings.files import open_regular, read_model, write_text_atomic
from dryfit.settings.jobs import ChildResult
from dryfit.settings.secrets import redacted_json
from dryfit.settings.training_messages import StopReason
from dryfit.settings.trial import MetricPoint
from dryfit.settings.wire import (
    BEAT_FILE,
    DISK_FULL_BEAT_NS,
    MESSAGES_FILE,
    RESULT_FILE,
    STOP_FILE,
    VERDICT_FILE,
    FirstStep,
    Message,
    Note,
    Phase,
    Progress,
    Report,
    Verdict,
)

T = TypeVar("T")

_BEAT_EVERY_S = 0.5
_PROGRESS_EVERY_S = 0.25
_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.02


class WakeupFifo:
    """Wakes the control process; does nothing without a listener."""

    def __init__(self, fifo: str | None) -> None:
        self._fifo = fifo
        self._fd: int | None = None

    def ring(self) -> None:
        """Wake the control process, if it listens. Never blocks, never fails."""
        if self._fifo is None:
            return
        with suppress(OSError):  # no listener, a full pipe, a removed file: it polls as well
            if self._fd is None:
                fd = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.close(fd)
                    self._fifo = None  # a file that somebody has put there is not ours to write to
                    return
                self._fd = fd
            os.write(self._fd, b"\n")


class Peers(Protocol):
    """The processes of one job, from the side of one of them. All make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def share(self, value: T) -> T:
        """Return rank 0's value on every process."""
        ...


class ChildChannel:
    """Sends a child's messages to the control process, and receives its answers.

    If several processes do one job together, rank 0 alone sends, and its answers are shared with all of them.

    Args:
        folder: The attempt's folder.
        wakeup_fifo: Path of the FIFO to ring, or None.
        placed_at_s: ``time.monotonic()`` when the control process placed this child.
        secrets: Values that must not be in a message or a result, by name.
    """

    def __init__(
        self, folder: Path, *, wakeup_fifo: str | None, placed_at_s: float, secrets: Mapping[str, str] | None = None
    ) -> None:
        self._secrets = secrets or {}
        self.folder = folder
        self.placed_at_s = placed_at_s
        self._wakeup_fifo = WakeupFifo(wakeup_fifo)
        self._beat_path = folder / BEAT_FILE
        self._touch_beat()
        self._last_beat_s = time.monotonic()
        self._progress_s = -math.inf
        self._sigterm = False
        self._stepped = False
        self._peers: Peers | None = None
        self._is_muted = False

    def mute(self) -> None:
        """Send nothing from now on: nobody hears it."""
        self._is_muted = True

    def join(self, peers: Peers) -> None:
        """Become one of several processes that do the job together."""
        self._peers = peers

    def part(self) -> None:
        """Become a single process again."""
        self._peers = None

    @property
    def _sends(self) -> bool:
        return not self._is_muted and (self._peers is None or self._peers.rank == 0)

    def _shared(self, value: T) -> T:
        return value if self._peers is None else self._peers.share(value)

    def note_sigterm(self) -> None:
        """Note that a SIGTERM came; safe inside a signal handler."""
        self._sigterm = True

    def since_placed_ms(self) -> float:
        """Return the milliseconds since the control process decided to start this child."""
        return (time.monotonic() - self.placed_at_s) * 1000

    def send(self, message: Message) -> None:
        """Append one message; whole lines only, in one write."""
        if not self._sends:
            return
        if isinstance(message, Phase):
            self._progress_s = -math.inf  # of what begins now nothing is known yet
            message = message.model_copy(update={"after_ms": self.since_placed_ms()})
        line = redacted_json(message.model_dump_json().encode(), self._secrets) + b"\n"
        fd = open_regular(self.folder / MESSAGES_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        self._wakeup_fifo.ring()

    def stepped(self) -> None:
        """Note that an optimizer step is done; the first one is reported."""
        if not self._stepped:
            self._stepped = True
            self.send(FirstStep(after_ms=self.since_placed_ms()))

    def progress(self, progress: Callable[[], Progress]) -> None:
        """Send how far training is: as a phase begins, and then four times a second at most; else nothing is asked."""
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_EVERY_S:
            self._progress_s = now_s
            self.send(progress())

    def beat(self) -> None:
        """Signal that the training thread is alive; may be called at any rate."""
        now_s = time.monotonic()
        if now_s - self._last_beat_s >= _BEAT_EVERY_S and self._sends:
            self._last_beat_s = now_s
            self._touch_beat()

    def _touch_beat(self) -> None:
        """Set the file's time; it is made again, should somebody have deleted it: the trial is not to blame."""
        fd = open_regular(self._beat_path, os.O_WRONLY | os.O_CREAT)
        try:
            os.utime(fd)
        finally:
            os.close(fd)

    def note_full_disk(self) -> None:
        """Leave the word that the disk is full where no word can be written."""
        with suppress(OSError):
            os.utime(self._beat_path, ns=(DISK_FULL_BEAT_NS, DISK_FULL_BEAT_NS), follow_symlinks=False)

    def stop_requested(self) -> StopReason | None:
        """Return who asked for a checkpoint and a stop; None: nobody did. Cheap: one stat."""
        return self._shared(self._stop_reason() if self._sends else None)

    def _stop_reason(self) -> StopReason | None:
        if (self.folder / STOP_FILE).exists():
            return StopReason.REQUEST
        return StopReason.SIGTERM if self._sigterm else None

    def report(self, point: MetricPoint, *, timeout_s: float, last: bool = False) -> bool:
        """Report a validation and wait for the verdict.

        A stop request does not end the wait: with a checkpoint after a report whose verdict was not received, a resumed
        trial would continue where the undisturbed one was pruned.

        Args:
            point: The validation.
            timeout_s: How long to wait.
            last: As in :class:`~dryfit.settings.wire.Report`.

        Returns:
            Whether to continue. Also True if no verdict came in time; then a note says so.
        """
        return self._shared(self._wait_for_verdict(Report(point=point, last=last), timeout_s) if self._sends else True)

    def _wait_for_verdict(self, report: Report, timeout_s: float) -> bool:
        self.send(report)
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while time.monotonic() < deadline_s:
            verdict = read_model(self.folder / VERDICT_FILE, Verdict)
            if verdict is not None and verdict.n == report.point.n:
                return verdict.proceed
            self.beat()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_POLL_S)
        self.send(Note(text=f"no verdict on report {report.point.n} within {timeout_s:g} s: went on"))
        return True

    def finish(self, result: ChildResult) -> None:
        """Write the result durably and wake the control process."""
        text = redacted_json(result.to_json().encode(), self._secrets).decode()
        write_text_atomic(self.folder / RESULT_FILE, text)
        self._wakeup_fifo.ring()
