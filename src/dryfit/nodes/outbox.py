"""Sent messages that the other side has not acknowledged yet, in order. Pure."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Numbered messages, from 1, that outlive a connection: a new one begins with those not acknowledged."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def acknowledged(self) -> int:
        """The last number that was acknowledged; 0: none was."""
        return self._last - len(self._kept)

    def put(self, message: T) -> int:
        """Keep a message; return its number."""
        self._last += 1
        self._kept.append((self._last, message))
        return self._last

    def acknowledge(self, number: int) -> None:
        """Forget the messages up to a number, which the other side has taken in."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def waiting(self) -> Iterator[tuple[int, T]]:
        """Yield what is not acknowledged, oldest first, with its numbers."""
        return iter(tuple(self._kept))


class Inbox:
    """Which messages of the other side have been taken in: each counts once, however often it is sent."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def is_new(self, number: int) -> bool:
        """Take in a message's number; False where it was taken in before.

        Raises:
            ValueError: A message before it is missing.
        """
        if number > self.last + 1:
            raise ValueError(f"message {number} comes after message {self.last}")
        if number <= self.last:
            return False
        self.last = number
        return True
