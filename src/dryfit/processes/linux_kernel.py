"""System calls of Linux that Python 3.11 has no function for, and Landlock: a fence that the kernel guards."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# System calls of Linux that Python 3.11 has no function for; each raises ``OSError`` with its path.


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


# Restrict a process and its children by Landlock: they can write in named folders alone.
#
# Landlock (Linux 5.13 and newer) needs no privileges and refuses every way of creating, changing and removing files
# elsewhere, of C code and other programs too. It knows nothing of owners, modes, times and extended attributes: a
# seccomp filter refuses to change any.


_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_RULESET_VERSION: Final = 1
_PATH_BENEATH: Final = 1
WRITE_FILE: Final = 1 << 1
REMOVE_FILE: Final = 1 << 5
MAKE_FILE: Final = 1 << 8
_REFER: Final = 1 << 13
TRUNCATE: Final = 1 << 14
_OF_FILES: Final = WRITE_FILE | TRUNCATE
"""linux/landlock.h: rights that a rule for a file, not a folder, may give."""
_FIRST: Final = sum(1 << bit for bit in (1, *range(4, 13)))
"""Writing to a file, and making and removing any kind of entry."""
_SINCE: Final = {2: _REFER, 3: TRUNCATE}
"""Rights that later versions know: to link or rename between folders, and to cut a file."""

_SECCOMP_MODE_FILTER: Final = 2
_PR_SET_SECCOMP: Final = 22
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_METADATA: Final = {
    "x86_64": (
        0xC000003E,
        (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466, 469),
    ),
    "aarch64": (0xC00000B7, (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466, 469)),
}
"""By machine: its name in audit.h, and the numbers of chmod, chown, utime, setxattr, removexattr and the like."""


def version() -> int:
    """Return the version of Landlock that the kernel has; 0: none."""
    with suppress(OSError, AttributeError):
        return syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_RULESET_VERSION))
    return 0


def restrict(folders: Iterable[Path], rights: Mapping[str, int]) -> None:
    """Restrict this process permanently; it must have one thread.

    Args:
        folders: Where everything is allowed.
        rights: What is allowed elsewhere, by path.

    Raises:
        OSError: The kernel does not have it, or does not allow it.
    """
    known = version()
    if not known:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    handled = _FIRST | sum(right for since, right in _SINCE.items() if known >= since)
    attributes = ctypes.c_uint64(handled)
    ruleset = syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(8), ctypes.c_uint(0))
    try:
        for path, allowed in [*((str(folder), handled) for folder in folders), *rights.items()]:
            _allow(ruleset, path, allowed & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    _refuse_metadata()


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH)
    except OSError:
        return  # nothing there to be allowed
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _OF_FILES, parent)
        syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(parent)


def _refuse_metadata() -> None:
    """Install the filter; where the machine is another one, modes and times stay unguarded."""
    if platform.machine() not in _METADATA:
        return
    audit, numbers = _METADATA[platform.machine()]
    steps = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_EQUAL, 0, len(numbers) + 1, audit),  # of a 32-bit program all is allowed: its numbers are others
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        *((_JUMP_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(program))
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)
