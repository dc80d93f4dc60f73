"""Reading of a file that another process appends to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.regular_files import reading, whole_lines


@dataclass(slots=True)
class LineTail:
    """Reads the lines appended to a file since the last call; an incomplete last line is left for later."""

    path: Path
    offset: int = 0

    def read(self) -> Iterator[bytes]:
        """Yield every complete new line, without its line end.

        Raises:
            FileError: Something else than a regular file of lines stands at the path.
        """
        try:
            with reading(self.path) as file:
                file.seek(self.offset)
                for line in whole_lines(file, self.path):
                    self.offset += len(line)
                    yield line[:-1]
        except FileNotFoundError:
            return
