"""The last guard of a rehearsal: what would be written elsewhere by a way that nobody thought of is refused.

Python tells of most of what it is asked to do by audit events; by then, whatever the functions of
:mod:`dryfit.virtual.writes.redirected_files` do is known. C code that opens files by itself tells nothing.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from dryfit.virtual.writes.shadow import Shadow

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS: Final = {
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Which arguments of an event are paths that are changed."""
_PROCESSES: Final = {"subprocess.Popen": 0, "os.system": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Events of programs that are started, and which argument names them."""
_ONLY_ASK: Final = frozenset({"nvidia-smi", "rocm-smi", "lscpu", "lspci", "uname", "ldconfig", "which"})
"""Programs by which libraries ask about the machine: they write nothing."""


def install(shadow: Shadow, on_process: Callable[[str], None]) -> None:
    """Watch for the life of the process.

    Args:
        shadow: Says where may be written.
        on_process: Called with the name of each program that is started and may write something.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(args[2], int) or args[2] & _WRITES:
                _judge(shadow, args[0])
        elif event in _PATHS:
            for at in _PATHS[event]:
                _judge(shadow, args[at])
        elif event in _PROCESSES:
            program = os.path.basename(_program(args[_PROCESSES[event]]))  # noqa: PTH119
            if program not in _ONLY_ASK:
                on_process(program)

    sys.addaudithook(hook)


def _judge(shadow: Shadow, path: Any) -> None:
    """Refuse to change a path.

    Raises:
        PermissionError: It is not in the shadow, nor where the script may write as it is.
    """
    if isinstance(path, int) or shadow.is_trusted:
        return
    text = os.fsdecode(path)
    with shadow.as_asked():
        real = os.path.realpath(text)
    if not shadow.is_free(real) and not real.startswith(shadow.folder + "/"):
        raise PermissionError(
            errno.EACCES, "a rehearsal writes nothing elsewhere, and this way of writing could not be redirected", text
        )


def _program(argument: Any) -> str:
    """Return the name of a program: the first word of a command, or of a list."""
    if isinstance(argument, list | tuple):
        argument = argument[0] if argument else ""
    words = os.fsdecode(argument).split()
    return words[0] if words else ""
