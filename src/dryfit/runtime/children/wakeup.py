"""Waits until something happens: a child writes to the FIFO, a process ends, the fork server answers, or ``wake``."""

import os
import selectors
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.25
_POLL_WITHOUT_FIFO_S = 0.05
_READ_BYTES = 65_536


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
