"""The line of the user's own file in an exception that libraries have raised."""

import traceback
from types import TracebackType


class OwnLine:
    """Adds to an exception the line of the user's file where it began: what follows are lines of libraries.

    Args:
        file: The user's file, as frames name it.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        own = [frame for frame in traceback.extract_tb(trace) if frame.filename == self._file]
        if error is not None and own:
            error.add_note(f"from {own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}")
