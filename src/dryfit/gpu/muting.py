"""A rehearsal creates nothing elsewhere: installs all that sees to it within the process, and tells what was muted."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.gpu import muted, redirect, unwritten
from dryfit.gpu.redirect import replace_everywhere
from dryfit.gpu.unwritten import SafetensorsFiles
from dryfit.gpu.view import View
from dryfit.gpu.written import SAVES_FILE, Saved
from dryfit.processes.wall import Places
from dryfit.settings.choices import Wall
from dryfit.settings.rehearsal_messages import Muted

_SYSTEM: Final = ("/dev", "/proc", "/sys")
PROCESSES: Final = {"subprocess.Popen": 0, "os.system": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Audit events of programs that are started, and which argument names them."""
_ONLY_ASK: Final = frozenset({"nvidia-smi", "rocm-smi", "lscpu", "lspci", "uname", "ldconfig", "which"})
"""Programs by which libraries ask about the machine: they write nothing."""
_installed: Final[list["Muting"]] = []


class Muting:
    """What the script would have done outside of its process."""

    def __init__(self, own: Path, wall: Wall, view: View | None) -> None:
        self.saved = Saved()
        self.view = view
        self._own = own
        self._wall = wall
        self._said: dict[tuple[str, str], int | None] = {}
        self._programs: Counter[str] = Counter()

    @property
    def muted(self) -> list[Muted]:
        """What was muted up to now, but for files: services, sockets and programs that no wall holds."""
        said = [Muted(what=what, where=where, bytes=size) for (what, where), size in self._said.items()]
        programs = [
            Muted(what="program started, not muted", where=f"{name} ({times}x)" if times > 1 else name)
            for name, times in self._programs.items()
        ]
        return [*said, *programs]

    def say(self, what: str, where: str, size: int | None = None) -> None:
        """List something; the sizes of what is said again are added."""
        before = self._said.get((what, where))
        self._said[what, where] = size if before is None else before + (size or 0)

    def refused(self, path: str) -> None:
        """List a path that was to be written by a way that is refused."""
        self.say("refused to write", path)

    def close(self) -> None:
        """Leave for the process outside what it needs to tell of files."""
        with unmuted():
            self.saved.write(self._own / SAVES_FILE)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Notice programs and sockets: both reach what no wall shows a copy of."""
        if event in PROCESSES and self._wall is Wall.REDIRECT:
            program = os.path.basename(_program(args[PROCESSES[event]]))
            if program not in _ONLY_ASK:
                self._programs[program] += 1
        elif event == "socket.connect" and isinstance(args[1], str | bytes) and args[1]:
            path = os.fsdecode(args[1])
            if path[0] != "\0" and not os.path.realpath(path).startswith((str(self._own), tempfile.gettempdir())):
                self.say("socket", path)


def install(
    places: Places, wall: Wall, make: Callable[[Any, torch.dtype], torch.Tensor], kept: Sequence[Path] = ()
) -> Muting:
    """Let nothing be created elsewhere, for the life of this process; called before the script is run.

    Args:
        places: Folders of the rehearsal.
        wall: What stands around this process.
        make: Makes a tensor without values on the CPU, from shape and type: what is read of a file that was not
            written.
        kept: Folders in which the script writes as it is.

    Returns:
        What tells of what was muted.
    """
    own = places.own_behind(wall)
    view = None
    if wall is not Wall.NAMESPACES:
        view = View(places.files, [places.folder, places.temporary, *kept, *map(Path, _SYSTEM)])
    muting = Muting(own, wall, view)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    SafetensorsFiles(muting.saved, make).install()
    replaced = unwritten.install(muting.saved, make)
    replace_everywhere(replaced if view is not None else replaced | redirect.copying())  # one pass over all objects
    if view is not None:
        redirect.install(view, muting.refused)
    muted.mute_trackers(own, muting.say)
    muted.mute_hub(muting.say, lambda path: muting.saved.size_of(os.fspath(path)))
    sys.addaudithook(muting.audit)
    _installed.append(muting)
    return muting


@contextmanager
def unmuted() -> Iterator[None]:
    """Within, this thread reads and writes the real files, as far as the wall lets it."""
    view = _installed[-1].view if _installed else None
    with view.as_asked() if view is not None else nullcontext():
        yield


def _program(argument: Any) -> str:
    """Return the name of a program: the first word of a command, or of a list."""
    if isinstance(argument, list | tuple):
        argument = argument[0] if argument else ""
    words = os.fsdecode(argument).split()
    return words[0] if words else ""
