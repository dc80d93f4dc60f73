"""Clean-up that never hides the error it runs after."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

Exit: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""An exit callback of an exit stack."""


class first_error_wins:  # noqa: N801  # read as a statement: with first_error_wins(error)
    """Clean up after ``error``: a failure in here is added to it as a note; without an error it is raised as usual.

    Args:
        error: The error being raised; None: none.
    """

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def __enter__(self) -> None:
        """Begin to clean up."""

    def __exit__(
        self, kind: type[BaseException] | None, trouble: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep a failure from replacing the error; a Ctrl-C is not a failure."""
        if self._error is None or not isinstance(trouble, Exception):
            return False
        self._error.add_note(f"cleaning up failed as well: {type(trouble).__name__}: {trouble}")
        return True


def closing(close: Callable[[], object]) -> Exit:
    """Return an exit callback that calls ``close`` without hiding the error being raised."""

    def leave(_kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        with first_error_wins(error):
            close()

    return leave
