"""Line numbers of the keys in a TOML text, for error messages.

The standard library's parser keeps no line numbers. This scanner expects text that ``tomllib`` has accepted, so it
only has to find the keys, not to validate them.
"""

import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

KeyPath = tuple[str | int, ...]
"""Keys from the top of the document down; an int is a place in an array."""

_SPACE: Final = re.compile(r"[ \t]*")
_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_DOT: Final = re.compile(r"[ \t]*\.[ \t]*")
_KEY_PART: Final = re.compile(r"""[\w-]+|"(?:\\.|[^"\\])*"|'[^']*'""")
# A string of one of four kinds, with up to two quotes right before the closing three; else to the end of the value.
_VALUE: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})|'{3}.*?'{3}(?:'{0,2})|"(?:\\.|[^"\\])*"|'[^']*'|[^,\]}#\n]*''', re.DOTALL
)


def locate_keys(text: str) -> dict[KeyPath, int]:
    """Return the line of every table, key and array element of a TOML document.

    Args:
        text: A document that ``tomllib.loads`` accepts.

    Returns:
        The line, from 1, where each path is first written.
    """
    return _Scanner(text).document()


def parse_key(text: str) -> tuple[tuple[str, ...], int]:
    """Parse a dotted key, with quoted parts, at the start of ``text``.

    Returns:
        The parts, and where the key ends.

    Raises:
        ValueError: There is no key.
    """
    scanner = _Scanner(text)
    scanner.take(_SPACE)
    return scanner.key(), scanner.at


@dataclass(slots=True)
class _Scanner:
    text: str
    at: int = 0
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    tables_in_array: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    line_starts: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.line_starts = [0, *(index + 1 for index, char in enumerate(self.text) if char == "\n")]

    def document(self) -> dict[KeyPath, int]:
        """Scan tables and keys to the end."""
        table: KeyPath = ()
        while self._more():
            start = self.at
            if self.text.startswith("[[", self.at):
                self.at += 2
                table = self._header(array=True, start=start)
            elif self.text[self.at] == "[":
                self.at += 1
                table = self._header(array=False, start=start)
            else:
                self._assignment(table)
        return self.lines

    def take(self, pattern: re.Pattern[str]) -> str:
        """Move past what a pattern finds here, and return it; empty where it finds nothing."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found is not None else self.at
        return found.group() if found is not None else ""

    def key(self) -> tuple[str, ...]:
        """Read a dotted key; ends behind its last part and the space after it."""
        parts = [self._key_part()]
        while self.take(_DOT):
            parts.append(self._key_part())
        self.take(_SPACE)
        return tuple(parts)

    def _key_part(self) -> str:
        part = self.take(_KEY_PART)
        if not part:
            raise ValueError(f"no key at {self.text[self.at : self.at + 20]!r}")
        return tomllib.loads(f"part = {part}")["part"] if part[0] in "\"'" else part

    def _more(self) -> bool:
        """Move past space, ends of lines and comments; False at the end."""
        self.take(_BLANK)
        return self.at < len(self.text)

    def _mark(self, path: KeyPath, start: int) -> None:
        self.lines.setdefault(path, bisect_right(self.line_starts, start))

    def _header(self, *, array: bool, start: int) -> KeyPath:
        self.take(_SPACE)
        parts = self.key()
        self.at += 2 if array else 1
        path: KeyPath = ()
        for part in parts[:-1]:
            path = self._inside(path, part, start)
        if not array:
            return self._inside(path, parts[-1], start)
        path = (*path, parts[-1])
        self._mark(path, start)
        index = self.tables_in_array.get(path, 0)
        self.tables_in_array[path] = index + 1
        self._mark((*path, index), start)
        return (*path, index)

    def _inside(self, path: KeyPath, part: str, start: int) -> KeyPath:
        """Return the path one step down: of an array of tables, that of its newest table."""
        path = (*path, part)
        self._mark(path, start)
        count = self.tables_in_array.get(path)
        return path if count is None else (*path, count - 1)

    def _assignment(self, table: KeyPath) -> None:
        start = self.at
        path = table
        for part in self.key():
            path = (*path, part)
            self._mark(path, start)
        self.at += 1  # the equals sign
        self.take(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        match self.text[self.at]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case _:
                self.take(_VALUE)

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        self._more()
        while self.text[self.at] != "]":
            self._mark((*path, index), self.at)
            self._value((*path, index))
            index += 1
            self._skip_separator()
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self._more()
        while self.text[self.at] != "}":
            self._assignment(path)
            self._skip_separator()
        self.at += 1

    def _skip_separator(self) -> None:
        self._more()
        if self.text[self.at] == ",":
            self.at += 1
            self._more()
