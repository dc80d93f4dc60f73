"""The process that supervises a rehearsal: chooses the sandbox, stays outside of it, and leaves no process behind."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from dryfit.processes import linux_kernel
from dryfit.processes.process import die_with_parent
from dryfit.processes.wall import Places, WallError, claimed_folder, run_in_view
from dryfit.settings.choices import Wall

_SHARED_MEMORY: Final = "/dev/shm"


Inside = Callable[[Wall], NoReturn]
"""What the process behind the wall does; called in a process of its own."""


def run_walled(places: Places, inside: Inside, kept: Sequence[Path] = (), strongest: Wall | None = None) -> int:
    """Run a function behind the strongest wall that this machine allows; return its wait status.

    When this returns, or when this process ends in any way, all processes that the function has started have ended.

    Args:
        places: They are there.
        kept: Folders in which it writes as it is.
        strongest: The first wall to try; None: the strongest one.
    """
    ways = list(Wall)[list(Wall).index(strongest or Wall.NAMESPACES) :]
    if sys.platform == "linux":
        if Wall.NAMESPACES in ways:
            with suppress(WallError):
                return run_in_view(places, lambda: inside(Wall.NAMESPACES), kept)
            places.clear()
            places.make()
        if Wall.LANDLOCK in ways and linux_kernel.version():
            return _run_beside(lambda: _fenced(places, inside, kept))
    return _run_beside(lambda: inside(Wall.REDIRECT))


def wall_here() -> Wall:
    """Return the strongest sandbox that this machine allows, tested by a process inside it."""
    walls = list(Wall)
    with claimed_folder() as folder:
        child = os.fork()
        if child == 0:
            status = len(walls) - 1
            try:
                places = Places(folder / "tried")
                with places.made():
                    waited = run_walled(places, lambda wall: os._exit(walls.index(wall)))
                    status = os.waitstatus_to_exitcode(waited)
            finally:
                os._exit(status)
        return walls[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def end_as(status: int) -> NoReturn:
    """End this process as another one has ended, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _fenced(places: Places, inside: Inside, kept: Sequence[Path]) -> NoReturn:
    devices = linux_kernel.WRITE_FILE | linux_kernel.TRUNCATE
    rights = {
        "/dev": devices,
        _SHARED_MEMORY: devices | linux_kernel.MAKE_FILE | linux_kernel.REMOVE_FILE,
        **({"/proc": linux_kernel.WRITE_FILE} if os.geteuid() != 0 else {}),
    }
    try:
        linux_kernel.restrict([places.folder, places.temporary, *kept], rights)
    except OSError:
        inside(Wall.REDIRECT)
    inside(Wall.LANDLOCK)


def _run_beside(inside: Callable[[], NoReturn]) -> int:
    """Run a function in a child; end all that it has started, whoever their parents are, when it has ended."""
    pid = os.getpid()
    on_linux = sys.platform == "linux"
    if on_linux:
        linux_kernel.prctl(linux_kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process

    def end_all(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == pid:
            _kill_children(child)
        end_as(number)

    child = os.fork()
    if child == 0:
        die_with_parent(pid)
        inside()
    if on_linux:
        signal.signal(signal.SIGTERM, end_all)
        linux_kernel.prctl(linux_kernel.PR_SET_PDEATHSIG, int(signal.SIGTERM))  # until now it was SIGKILL
    while True:
        ended, status = os.wait()
        if ended == child:
            break
    _kill_children(child)
    return status


def _kill_children(child: int) -> None:
    """Kill a child and, on Linux, all descendants of this process: orphans become its children."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    while sys.platform == "linux" and (alive := _children(os.getpid())):
        for one in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.wait()


def _children(parent: int) -> list[int]:
    """Return the children of a process that are not reaped yet."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found
