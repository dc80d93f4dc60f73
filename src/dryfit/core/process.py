"""What a process owes its parent: to die with it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when the thread that forked it ends.

    The setting is not inherited, so every descendant calls this itself. A no-op where the kernel has no such signal.

    Args:
        parent_pid: The parent's process id, read before the fork; another parent now means that it died meanwhile.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
