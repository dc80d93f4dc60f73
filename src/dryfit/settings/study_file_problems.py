"""Problems of a study file: the line of the key, its value, what is allowed, the nearest key."""

import difflib
import json
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, cast

from pydantic import ValidationError

from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_text import CASE_KEYS, SEARCHABLE, TABLES, legal_values
from dryfit.settings.tables import TrialSettings
from dryfit.settings.task_facts import is_own_key

# Line numbers of the keys in a TOML text, for error messages.
#
# The standard library's parser keeps no line numbers. This scanner expects text that ``tomllib`` has accepted, so it
# only has to find the keys, not to validate them.


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


# Problems of a study file for error messages: key, value, allowed values, nearest key.


_ALL_KEYS: Final = tuple(f"{table}.{key}" for table, keys in TABLES.items() for key in keys)
_SHOWN_CHARS: Final = 60
MOST_PROBLEMS: Final = 50
"""Problems of one file that are told: each costs a search for the nearest key."""
_CLOSE_ENOUGH: Final = 0.6
_MISSING: Final = object()
_RENAMED: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    ("runtime", "keep_best"): ("best:K, all or none", 'write keep = "best:3" for keep_best = 3'),
    ("execution", "frozen_cache"): (
        "no such limit",
        "remove it: frozen layers are computed in each step, and nothing is kept",
    ),
}
"""Keys of earlier versions: what is allowed now, and what to write."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a study file.

    Attributes:
        path: Its path from the top of the document; a searched key is one part, ``("space", "optim.lr", 0)``.
        found: What was found, a sentence without the key's name.
        allowed: What is allowed; may be empty.
        hint: What to do; may be empty.
    """

    path: KeyPath
    found: str
    allowed: str = ""
    hint: str = ""

    @property
    def key(self) -> str:
        """The path as a dotted key."""
        return ".".join(str(part) for part in self.path if isinstance(part, str))


def shown(value: object) -> str:
    """Return a value as JSON, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def explain(error: ValidationError, document: Mapping[str, Any]) -> list[Problem]:
    """Turn a validation error into problems, one for each path.

    Args:
        error: The error of validating ``document``.
        document: The parsed study file, searched keys by dotted name.
    """
    problems: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _own_path(detail["loc"])
        if detail["type"] == "default_factory_not_called":
            continue  # a default that follows from another key, and that one has a problem of its own
        if len(problems) == MOST_PROBLEMS:
            break
        if path in problems:
            continue  # every member of a union reports its own failure
        problems[path] = _problem(path, detail["type"], detail["msg"], _value_at(document, path))
    return list(problems.values())


def unknown_searched_keys(keys: Iterable[str]) -> list[Problem]:
    """Return problems of the names in ``[space]`` that are no key of a trial."""
    return [
        Problem(
            ("space", key),
            "names no key that can be searched",
            "a dotted name of a key in " + ", ".join(f"[{table}]" for table in TrialSettings.model_fields),
            _did_you_mean(key, SEARCHABLE),
        )
        for key in islice((key for key in keys if key not in SEARCHABLE and not is_own_key(key)), MOST_PROBLEMS)
    ]


def _own_path(loc: Sequence[str | int]) -> KeyPath:
    """Return the validator's location as a path of the document, without the names of union members."""
    if loc[:2] == ("search", "enqueue"):
        return tuple(loc[:4])
    if loc[0] != "space":
        return tuple(loc[:2])
    if len(loc) > 4 and loc[3] == "when":
        return tuple(loc[:5])
    return tuple(loc[:4])


def _value_at(document: Mapping[str, Any], path: KeyPath) -> object:
    value: Any = document
    for part in path:
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if isinstance(value, Mapping) and part in value:
            value = cast("Mapping[Any, Any]", value)[part]
        elif isinstance(part, int) and part < len(items) and isinstance(items[part], dict):
            value = items[part]
        elif part not in (0, "choices"):  # the short forms: a lone case without a list, choices without a case
            return _MISSING
    return cast("object", value)


def _problem(path: KeyPath, kind: str, message: str, value: object) -> Problem:
    names = tuple(str(part) for part in path if isinstance(part, str))
    if kind == "extra_forbidden":
        return _unknown_key(path, names)
    if kind == "missing":
        return Problem(path, "is missing", legal_values(names))
    found = "is wrong" if value is _MISSING else f"is {shown(value)}"
    if kind == "value_error":
        return Problem(path, message.removeprefix("Value error, "))
    return Problem(path, found, legal_values(names), _quotes_hint(value, names))


def _unknown_key(path: KeyPath, names: tuple[str, ...]) -> Problem:
    if len(names) == 1:
        tables = (*TABLES, "space")
        owners = [key for key in _ALL_KEYS if key.partition(".")[2] == names[0]]
        hint = f"did you mean {owners[0]}?" if owners else _did_you_mean(names[0], tables, nearest_always=True)
        return Problem(path, "is no table of a study file", "one of " + ", ".join(tables), hint)
    if names[0] == "space":
        return Problem(
            path, "is no key of a case", "one of " + ", ".join(CASE_KEYS), _did_you_mean(names[-1], CASE_KEYS)
        )
    if names in _RENAMED:
        return Problem(path, f"is no key of [{names[0]}] any more", *_RENAMED[names])
    own = TABLES[names[0]]
    hint = _did_you_mean(names[1], own)
    elsewhere = [key for key in _ALL_KEYS if key.partition(".")[2] == names[1]]
    if not hint and elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    hint = hint or _did_you_mean(".".join(names), _ALL_KEYS, nearest_always=True)
    return Problem(path, f"is no key of [{names[0]}]", "one of " + ", ".join(own), hint)


def _did_you_mean(name: str, legal: Iterable[str], *, nearest_always: bool = False) -> str:
    def nearness(candidate: str) -> tuple[float, bool]:
        same_letters = sorted(name) == sorted(candidate)  # letters swapped: the usual slip
        return difflib.SequenceMatcher(None, name, candidate).ratio(), same_letters

    nearest = max(legal, key=nearness)
    return f"did you mean {nearest}?" if nearest_always or nearness(nearest)[0] >= _CLOSE_ENOUGH else ""


def _quotes_hint(value: object, names: tuple[str, ...]) -> str:
    """Return a hint for a value with wrong quotes, or a mistyped choice; empty: none."""
    words = legal_values(names)
    if isinstance(value, str) and words.startswith(("a number", "an integer", "true or false")):
        plain = value.strip().replace(".", "", 1).replace("-", "").replace("e", "", 1)
        if plain.isdigit() or value in ("true", "false"):
            return f"write it without quotes: {value.strip()}"
    if isinstance(value, int | float) and words.startswith("text"):
        return f'write it in quotes: "{value}"'
    if isinstance(value, str) and words.startswith("one of "):
        return _did_you_mean(value, words.removeprefix("one of ").split(", "))
    return ""


def config_error(file: str, problems: Sequence[Problem], origins: Mapping[KeyPath, str]) -> ConfigError:
    """Return one error for all problems, each with its line.

    Args:
        file: The study file's name, for the message.
        problems: The problems; at least one.
        origins: Where each path was written: ``line 12`` or ``--set``.
    """
    ordered = sorted(problems, key=lambda problem: _line_number(origins.get(problem.path, "")))
    if len(ordered) == 1:
        (only,) = ordered
        place = origins.get(only.path, "")
        doing = f"reading {file}" + (f", {place}" if place else "")
        return ConfigError(doing, f"{only.key} {only.found}".strip(), only.allowed, only.hint)
    lines = [f"{len(ordered)} problems"]
    for problem in ordered:
        place = origins.get(problem.path, "")
        lines.append(f"  {place + ': ' if place else ''}{problem.key} {problem.found}")
        if problem.allowed:
            lines.append(f"    allowed: {problem.allowed}")
        if problem.hint:
            lines.append(f"    next: {problem.hint}")
    return ConfigError(f"reading {file}", "\n".join(lines))


def _line_number(place: str) -> int:
    return int(place.rpartition(" ")[2]) if place.startswith("line ") else 0
