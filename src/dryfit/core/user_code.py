"""Finding something of the user's own by its name, in a process that did not define it."""

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dryfit.core.errors import DryfitError


@dataclass(frozen=True, slots=True)
class Search:
    """What is looked for, and what is said where it is not there.

    Attributes:
        doing: For messages.
        error: What is raised.
        paths: Folders that are imported from, beside installed packages.
        hint: What to do where a module is not there.
    """

    doing: str
    error: type[DryfitError]
    paths: Sequence[str]
    hint: str

    def module(self, name: str) -> ModuleType:
        """Import a module.

        Raises:
            DryfitError: There is none. What the module itself raises is passed on.
        """
        self.look_there()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            if missing != name and not name.startswith(f"{missing}."):
                raise
            allowed = f"installed modules, and those in {self.listed}" if self.paths else "installed modules"
            raise self.error(self.doing, f"there is no module {missing}", allowed, self.hint) from error

    def look_there(self) -> None:
        """Import from the paths too, from now on."""
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        importlib.invalidate_caches()  # a fork server has listed folders earlier

    def named(self, module: ModuleType, place: str, qualname: str) -> object:
        """What stands under a name in a module.

        Raises:
            DryfitError: Nothing does.
        """
        found: object = module
        for part in qualname.split("."):
            if not hasattr(found, part):
                near = difflib.get_close_matches(part, dir(found), n=1)
                hint = f"did you mean {near[0]}?" if near else "define it outside of functions and `if` blocks"
                raise self.error(self.doing, f"{place} has no {qualname}", "a name defined there", hint)
            found = getattr(found, part)
        return found

    @property
    def listed(self) -> str:
        """The paths, in words."""
        return ", ".join(self.paths) or "no folder"


def source_hash(file: Path | None) -> str:
    """Hash of a source file; of nothing where there is none."""
    source = file.read_bytes() if file is not None and file.is_file() else b""
    return hashlib.sha256(source).hexdigest()[:16]


def source_file(defined: object) -> Path | None:
    """The file that a function or a class is defined in; None where nobody knows."""
    unwrapped = inspect.unwrap(defined) if callable(defined) else defined
    try:
        return Path(inspect.getsourcefile(unwrapped) or "")  # pyright: ignore[reportArgumentType]  # refused below
    except TypeError:
        return None
