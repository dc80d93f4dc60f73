"""Names of a user's own functions and classes, by which another process finds them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

NAME_PATTERN: Final = r"^.+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""What a name looks like in a study file: ``package.module:name`` or ``file.py:name``."""

_SCRIPT_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function or class: the module or file that defines it, and its qualified name.

    Attributes:
        place: A module's dotted name, or a file ending in ``.py``; its folder may precede it.
        qualname: Its qualified name there.
    """

    place: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName":
        """Parse ``place:qualname``."""
        place, _, qualname = text.rpartition(":")
        return cls(place, qualname)

    @property
    def in_script(self) -> bool:
        """Whether the place is a file."""
        return self.place.endswith(_SCRIPT_SUFFIX)

    @property
    def folder(self) -> str:
        """The folder before the place; empty if there is none."""
        return str(Path(self.place).parent) if "/" in self.place else ""

    @property
    def module(self) -> str:
        """The module to import from that folder."""
        return Path(self.place).name.removesuffix(_SCRIPT_SUFFIX)

    @property
    def short(self) -> str:
        """The name without the folder."""
        return f"{Path(self.place).name}:{self.qualname}"

    def within(self, folders: Iterable[Path]) -> Self:
        """Return the name with the first of the folders that has its file, or its module's top package.

        A name that has a folder already, or that is in none of them, stays as it is.
        """
        if self.folder:
            return self
        top = self.place if self.in_script else self.place.partition(".")[0]
        for folder in folders:
            there = (folder / top).is_file() if self.in_script else _has_module(folder, top)
            if there:
                return replace(self, place=str(folder / self.place))
        return self

    def __str__(self) -> str:
        return f"{self.place}:{self.qualname}"


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}{_SCRIPT_SUFFIX}").is_file() or (folder / name / "__init__.py").is_file()
