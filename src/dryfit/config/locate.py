"""Line numbers of the keys in a TOML text, for error messages.

The standard library's parser keeps no line numbers. This scanner expects text that ``tomllib`` has accepted, so it
only has to find the keys, not to validate them.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

KeyPath = tuple[str | int, ...]
"""Keys from the top of the document down; an int is a place in an array."""

_SPACE: Final = " \t"
_BLANK: Final = " \t\r\n"
_BARE_VALUE_ENDS: Final = ",]}#\n"
_ESCAPES: Final = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\", "e": "\x1b"}
_HEX_DIGITS: Final = {"u": 4, "U": 8, "x": 2}


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
    scanner.skip(_SPACE)
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
        while self._skip_blank_and_comments():
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

    def skip(self, chars: str) -> None:
        """Move past any of ``chars``."""
        while self.at < len(self.text) and self.text[self.at] in chars:
            self.at += 1

    def key(self) -> tuple[str, ...]:
        """Read a dotted key; ends behind its last part and the space after it."""
        parts = [self._key_part()]
        self.skip(_SPACE)
        while self.text.startswith(".", self.at):
            self.at += 1
            self.skip(_SPACE)
            parts.append(self._key_part())
            self.skip(_SPACE)
        return tuple(parts)

    def _key_part(self) -> str:
        if self.text[self.at : self.at + 1] in ('"', "'"):
            return self._string()
        start = self.at
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in "_-"):
            self.at += 1
        if start == self.at:
            raise ValueError(f"no key at {self.text[start : start + 20]!r}")
        return self.text[start : self.at]

    def _skip_blank_and_comments(self) -> bool:
        """Move to the next token; False at the end."""
        self.skip(_BLANK)
        while self.text.startswith("#", self.at):
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
            self.skip(_BLANK)
        return self.at < len(self.text)

    def _mark(self, path: KeyPath, start: int) -> None:
        self.lines.setdefault(path, bisect_right(self.line_starts, start))

    def _header(self, *, array: bool, start: int) -> KeyPath:
        self.skip(_SPACE)
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
        self.skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        match self.text[self.at]:
            case '"' | "'":
                self._string()
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case _:
                while self.at < len(self.text) and self.text[self.at] not in _BARE_VALUE_ENDS:
                    self.at += 1

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        self._skip_blank_and_comments()
        while self.text[self.at] != "]":
            self._mark((*path, index), self.at)
            self._value((*path, index))
            index += 1
            self._skip_separator()
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self._skip_blank_and_comments()
        while self.text[self.at] != "}":
            self._assignment(path)
            self._skip_separator()
        self.at += 1

    def _skip_separator(self) -> None:
        self._skip_blank_and_comments()
        if self.text[self.at] == ",":
            self.at += 1
            self._skip_blank_and_comments()

    def _string(self) -> str:
        """Read any of the four kinds of string. The value of a multi-line one is not needed."""
        quote = self.text[self.at]
        if self.text.startswith(quote * 3, self.at):
            self._multi_line_string(quote)
            return ""
        self.at += 1
        chars: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != quote:
            if quote == '"' and self.text[self.at] == "\\":
                chars.append(self._escape())
            else:
                chars.append(self.text[self.at])
                self.at += 1
        if self.at >= len(self.text):
            raise ValueError("a string without an end")
        self.at += 1
        return "".join(chars)

    def _multi_line_string(self, quote: str) -> None:
        self.at += 3
        while not self.text.startswith(quote * 3, self.at):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += 3
        for _ in range(2):  # up to two quotes may stand right before the closing three
            if self.text.startswith(quote, self.at):
                self.at += 1

    def _escape(self) -> str:
        letter = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        digits = _HEX_DIGITS.get(letter, 0)
        if not digits:
            return _ESCAPES.get(letter, letter)
        code = self.text[self.at : self.at + digits]
        self.at += digits
        return chr(int(code, 16))
