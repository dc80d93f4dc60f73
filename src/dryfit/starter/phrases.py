"""The wording of the synthetic posts, read from ``phrases.toml``: criteria, phrases for and against them, frames."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

_WORDING: Final[dict[str, Any]] = tomllib.loads((files("dryfit.starter") / "phrases.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Criterion:
    """A statement about the writer.

    Attributes:
        text: The criterion as the data set states it.
        shows: Phrases that make it true of their subject.
        opposes: Phrases that make it untrue of their subject.
    """

    text: str
    shows: tuple[str, ...]
    opposes: tuple[str, ...]


def _many(table: str, key: str) -> tuple[str, ...]:
    return tuple(_WORDING[table][key])


CRITERIA: Final = tuple(
    Criterion(one["text"], tuple(one["shows"]), tuple(one["opposes"])) for one in _WORDING["criteria"]
)

VERBS: Final[dict[str, tuple[str, str]]] = {verb: (third, past) for verb, (third, past) in _WORDING["verbs"].items()}
"""Third person and past of every verb that opens a phrase."""

AFFIRMING: Final = _many("frames", "affirming")
"""The phrase is true of the writer, now."""

REVERSING: Final = _many("frames", "reversing")
"""The phrase is not true of the writer, now: a phrase that opposes a criterion thereby shows it."""

ABOUT_OTHERS: Final = _many("frames", "about_others")
"""The phrase is true of somebody else; nothing is said of the writer."""

NOW: Final = _many("words", "now")
THEN: Final = _many("words", "then")
PEOPLE: Final = _many("words", "people")
FILLERS: Final = _many("words", "fillers")
