"""The text of each command, in a file of its own: what tests render is compared with its section of the file.

``pytest --rewrite-golden`` writes what it renders instead. A section bears the name of its test.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dryfit.settings.errors import DryfitError

FOLDER: Final = Path(__file__).parents[1] / "golden"
_HEAD: Final = "=== "


@dataclass(frozen=True, slots=True)
class Golden:
    """Compares what one test renders.

    Attributes:
        test: The test's name, with its file from ``tests``.
        rewrite: Whether to write the text instead.
        folder: Of the files.
    """

    test: str
    rewrite: bool
    folder: Path = FOLDER

    def __call__(self, command: str, *parts: object) -> None:
        """Compare parts with the test's section: texts, lines, rows of cells, and tables."""
        text = "\n\n".join("\n".join(map(str.rstrip, _lines(part))) for part in parts).rstrip("\n")
        text = text.replace(str(FOLDER.parents[1]), "REPOSITORY")
        known = sections(self.folder / f"{command}.txt")
        if self.rewrite:
            known[self.test] = text
            written = "\n\n".join(f"{_HEAD}{test}\n{known[test]}" for test in sorted(known))
            (self.folder / f"{command}.txt").write_text(f"{written}\n", encoding="utf-8")
        assert text == known.get(self.test)


def sections(file: Path) -> dict[str, str]:
    """Return the text of each test in a file; none where there is no file."""
    _, *found = f"\n{file.read_text('utf-8')}".split(f"\n{_HEAD}") if file.exists() else [""]
    return {head: text.rstrip("\n") for head, _, text in (section.partition("\n") for section in found)}


def _lines(part: object) -> Iterable[str]:
    match part:
        case str():
            yield from part.splitlines()
        case list() | tuple():
            for one in part:
                yield " | ".join(map(str, one)) if isinstance(one, tuple) else str(one)
        case _:
            yield from _lines([getattr(part, "heads", part), *getattr(part, "rows", ())])


def refusal(call: Callable[..., object], *given: object, **named: object) -> str:
    """Return what a call is refused with: the whole text of a dryfit error."""
    with pytest.raises(DryfitError) as caught:
        call(*given, **named)
    return str(caught.value)
