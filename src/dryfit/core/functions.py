"""How a function is named, so that another process finds it."""

from dataclasses import dataclass

_SCRIPT_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function by the place it is defined in.

    Attributes:
        place: A module's dotted name, or a file ending in ``.py``.
        qualname: The function's name there; dotted for one in a class.
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

    def __str__(self) -> str:
        return f"{self.place}:{self.qualname}"
