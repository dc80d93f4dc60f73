"""System calls of Linux that Python 3.11 has no function for; each raises ``OSError`` with its path."""

import ctypes
import os
from typing import Any, Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
"""linux/sched.h"""
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
"""linux/mount.h"""
CAP_SYS_CHROOT: Final = 18
CAP_SYS_ADMIN: Final = 21
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAPBSET_DROP: Final = 24
_MNT_DETACH: Final = 2
_MOUNT_ATTR_RDONLY: Final = 1
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_SYS_MOUNT_SETATTR: Final = 442  # the same on all architectures
_CAPABILITY_VERSION: Final = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_libc: Final[Any] = ctypes.CDLL(None, use_errno=True)


def checked(result: int, path: str = "") -> int:
    """Return the result of a system call.

    Raises:
        OSError: It is -1.
    """
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call by its number."""
    return checked(_libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, value: int = 0, *more: Any) -> None:
    """Change this process."""
    checked(_libc.prctl(option, ctypes.c_ulong(value), *(more or (0, 0, 0))))


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    checked(_libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system."""
    made = [text.encode(errors="surrogateescape") for text in (source, target, kind, options)]
    checked(_libc.mount(made[0], made[1], made[2], ctypes.c_ulong(flags), made[3]), target)


def make_read_only(path: str, *, recursive: bool = False) -> None:
    """Let nothing be written below a mount point by way of this mount."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    where = path.encode(errors="surrogateescape")
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, where, ctypes.c_uint(flags), ctypes.byref(attributes), size)


def make_root(path: str) -> None:
    """Let a mount point be the root, and have the old root nowhere."""
    os.chdir(path)
    checked(_libc.pivot_root(b".", b"."), path)
    checked(_libc.umount2(b".", _MNT_DETACH), path)


def drop_capabilities(*dropped: int) -> None:
    """Give up capabilities for good, for this process and all that it starts.

    A user other than root keeps none at all: a new user namespace has given all of them.
    """
    for capability in dropped:
        prctl(PR_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31, then of 32 to 63
    if os.geteuid() == 0:
        checked(_libc.capget(header, sets))
        for capability in dropped:
            for one in range(3):
                sets[3 * (capability // 32) + one] &= ~(1 << capability % 32)
    checked(_libc.capset(header, sets))
