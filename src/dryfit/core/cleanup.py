"""Clean-up that never hides what it cleans up after."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeAlias

Exit: TypeAlias = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
"""What an exit stack takes as the end of something."""


@contextmanager
def first_error_wins(error: BaseException | None) -> Generator[None]:
    """Clean up after ``error``: what fails here is added to it as a note. Without an error it is raised as ever.

    Args:
        error: What is on its way out; None: nothing.
    """
    try:
        yield
    except Exception as trouble:  # whatever it is, it is not what ended the work
        if error is None:
            raise
        error.add_note(f"cleaning up failed as well: {type(trouble).__name__}: {trouble}")


def closing(close: Callable[[], object]) -> Exit:
    """``close`` as the end of something in an exit stack, which does not hide the error it is called for."""

    def leave(_kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        with first_error_wins(error):
            close()

    return leave
