"""Clean-up that never hides the error it runs after."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeAlias

Exit: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""An exit callback of an exit stack."""


@contextmanager
def first_error_wins(error: BaseException | None) -> Generator[None, None, None]:
    """Clean up after ``error``: a failure in here is added to it as a note; without an error it is raised as usual.

    Args:
        error: The error being raised; None: none.
    """
    try:
        yield
    except Exception as trouble:  # whatever it is, the first error is raised
        if error is None:
            raise
        error.add_note(f"cleaning up failed as well: {type(trouble).__name__}: {trouble}")


def closing(close: Callable[[], object]) -> Exit:
    """Return an exit callback that calls ``close`` without hiding the error being raised."""

    def leave(_kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        with first_error_wins(error):
            close()

    return leave
