"""How a function or a class of the user's own is named, so that another process finds it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

_SCRIPT_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function or a class by the place it is defined in.

    Attributes:
        place: A module's dotted name, or a file ending in ``.py``; the folder it lies in may stand before it.
        qualname: Its name there; dotted for one in a class.
    """

    place: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName":
        """A name from ``place:qualname``."""
        place, _, qualname = text.rpartition(":")
        return cls(place, qualname)

    @property
    def in_script(self) -> bool:
        """Whether the place is a file."""
        return self.place.endswith(_SCRIPT_SUFFIX)

    @property
    def folder(self) -> str:
        """The folder that stands before the place; empty where none does."""
        return str(Path(self.place).parent) if "/" in self.place else ""

    @property
    def module(self) -> str:
        """What to import where that folder is imported from."""
        return Path(self.place).name.removesuffix(_SCRIPT_SUFFIX)

    @property
    def short(self) -> str:
        """The name without the folder."""
        return f"{Path(self.place).name}:{self.qualname}"

    def within(self, folders: Iterable[Path]) -> Self:
        """The name with the first folder before it that has its file, or its module's outermost package.

        One that has a folder already, and one that no folder has, stays as it is.
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
