"""Clean-up that never hides what it cleans up after."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

Exit: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""What an exit stack takes as the end of something."""


class first_error_wins:  # noqa: N801  # read as a statement: with first_error_wins(error)
    """Clean up after ``error``: what fails in here is added to it as a note. Without an error it is raised as ever.

    Args:
        error: What is on its way out; None: nothing.
    """

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def __enter__(self) -> None:
        """Begin to clean up."""

    def __exit__(
        self, kind: type[BaseException] | None, trouble: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep what failed from taking the error's place; a Ctrl-C is nothing that failed."""
        if self._error is None or not isinstance(trouble, Exception):
            return False
        self._error.add_note(f"cleaning up failed as well: {type(trouble).__name__}: {trouble}")
        return True


def closing(close: Callable[[], object]) -> Exit:
    """``close`` as the end of something in an exit stack, which does not hide the error it is called for."""

    def leave(_kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        with first_error_wins(error):
            close()

    return leave
