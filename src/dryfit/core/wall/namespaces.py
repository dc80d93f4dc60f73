"""A copy-on-write view (overlayfs in namespaces) of all file systems, for a process and its children.

A user, mount, process and IPC namespace of its own, with overlayfs over every folder: reads come from what is there,
writes go to the rehearsal's folder. No privileges are needed where the kernel lets users make namespaces (Linux 5.13
and newer; some distributions and most containers do not). Mounts that the process inherits are locked: no overlay can
be laid over a folder that has one below it, so such a folder is made anew, with an overlay for each of its entries.
"""

import os
import shutil
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from dryfit.core.process import die_with_parent
from dryfit.core.wall import linux
from dryfit.core.wall.places import Places

_NO_FILES: Final = frozenset(
    {
        *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "devtmpfs", "mqueue", "securityfs", "debugfs", "tracefs"),
        *("bpf", "configfs", "pstore", "efivarfs", "binfmt_misc", "autofs", "fusectl", "rpc_pipefs", "nsfs"),
    }
)
"""File systems that are views of the kernel: they are there, and nothing can be written to them."""
_OF_KERNEL: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs")
"""Entries of ``/proc`` by which root changes the machine."""
_MOST_COPIED_BYTES: Final = 64 << 20
"""Files beside mount points are copied up to this size; larger ones can only be read."""
_READY: Final = b"ready"


class WallError(Exception):
    """This kernel, or its administrator, does not allow such a view."""


def run_in_view(places: Places, inside: Callable[[], NoReturn], kept: Sequence[Path] = ()) -> int:
    """Run a function in a process of such a view; return its wait status once it and all it started have ended.

    Args:
        kept: Folders in which it writes as it is.

    Raises:
        WallError: There can be none; nothing was run.
    """
    hears, tells = os.pipe()
    pid = os.getpid()
    outer = os.fork()
    if outer == 0:
        os.close(hears)
        _in_outer(_View(places, kept), inside, tells, pid)
    os.close(tells)
    with os.fdopen(hears, "rb") as said:
        first, _, rest = said.read().partition(b"\n")
    _, status = os.waitpid(outer, 0)
    if first != _READY:
        raise WallError(first.decode(errors="replace") or f"the process that makes it ended with status {status}")
    return int(rest) if rest else int(signal.SIGKILL)


def _in_outer(view: "_View", inside: Callable[[], NoReturn], tells: int, parent: int) -> NoReturn:
    """Make the namespaces and wait for the process that is the first one in them."""
    status = 1
    try:
        cwd = os.getcwd()
        uid, gid = os.getuid(), os.getgid()
        writer = _writer_of_maps(uid, gid)
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
        writer()
        die_with_parent(parent)
        pid = os.getpid()
        first = os.fork()
        if first == 0:
            _in_first(view, inside, tells, cwd, pid)
        os.close(tells)
        os.waitpid(first, 0)
        status = 0
    except BaseException as error:  # noqa: BLE001  # whatever it is, there is no view
        _tell(tells, f"{error}".encode())
    finally:
        os._exit(status)


def _in_first(view: "_View", inside: Callable[[], NoReturn], tells: int, cwd: str, parent: int) -> NoReturn:
    """Build the view and run the function in a child: with this process all others of its namespace end."""
    try:
        _end_with(parent)
        os.setsid()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
        view.build()
        os.chdir(cwd)
        _tell(tells, _READY + b"\n")
    except BaseException as error:  # noqa: BLE001  # whatever it is, there is no view
        _tell(tells, f"{error}".encode())
        os._exit(1)
    child = os.fork()
    if child == 0:
        os.close(tells)
        linux.drop_capabilities(linux.CAP_SYS_ADMIN, linux.CAP_SYS_CHROOT)
        inside()
    while True:
        pid, status = os.wait()
        if pid == child:
            _tell(tells, str(status).encode())
            os._exit(0)


def _end_with(parent: int) -> None:
    """End with the process outside: in here its number is 0, gone or not."""
    linux.prctl(linux.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if not Path(f"/proc/{parent}").exists():  # still the /proc of outside
        os._exit(1)


def _tell(pipe: int, text: bytes) -> None:
    with suppress(OSError):
        os.write(pipe, text)


def _writer_of_maps(uid: int, gid: int) -> Callable[[], None]:
    """Return what gives this process its own numbers in a new user namespace; called once before, once in it.

    The maps are written by a child that has stayed outside: whoever is root there may map all users, so that files of
    other users can be copied and changed as before.
    """
    goes, go = os.pipe()
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go)
            os.read(goes, 1)
            try:
                _write_maps(pid, "0 0 4294967295", "0 0 4294967295")
            except OSError:
                Path(f"/proc/{pid}/setgroups").write_text("deny")
                _write_maps(pid, f"{uid} {uid} 1", f"{gid} {gid} 1")
            status = 0
        finally:
            os._exit(status)
    os.close(goes)

    def write() -> None:
        os.close(go)
        if os.waitpid(child, 0)[1] != 0:
            raise WallError("the users of a namespace cannot be mapped")

    return write


def _write_maps(pid: int, users: str, groups: str) -> None:
    Path(f"/proc/{pid}/uid_map").write_text(users)
    Path(f"/proc/{pid}/gid_map").write_text(groups)


class _View:
    """The view while it is built: the new root is the folder of written files."""

    def __init__(self, places: Places, kept: Sequence[Path]) -> None:
        self._places = places
        self._kept = [str(folder.resolve()) for folder in kept if folder.is_dir()]
        self._folder = str(places.folder.resolve())
        self._root = str(places.files.resolve())
        self._mounts = _mounts()
        self._upper = -1
        self._overlays = 0

    def build(self) -> None:
        """Build it and make it the root of this process.

        Raises:
            OSError: The kernel does not allow it.
        """
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        # Opened before the folder becomes a mount of its own: upper and work folders must be on the same mount.
        self._upper = os.open(self._root, os.O_PATH | os.O_DIRECTORY)
        linux.mount(self._root, self._root, flags=linux.MS_BIND | linux.MS_REC)
        self._show("/")
        self._show_sockets()
        for path in self._kept:
            linux.mount(path, self._at(path), flags=linux.MS_BIND | linux.MS_REC)
        linux.mount(str(self._places.own), self._at(self._folder), flags=linux.MS_BIND)
        os.close(self._upper)
        linux.make_root(self._root)

    def _at(self, path: str) -> str:
        return self._root + path

    def _show(self, path: str) -> None:
        """Let a folder be in the view, with all that is mounted below."""
        kind, read_only = self._mounts.get(path, ("", False))
        if path == "/proc":
            self._show_processes()
        elif path in ("/dev", "/sys"):
            self._make_folder(path)
            linux.mount(path, self._at(path), flags=linux.MS_BIND | linux.MS_REC)
            linux.make_read_only(self._at(path), recursive=path == "/sys")
            if path == "/dev":
                self._show_shared_memory()
        elif any(other.startswith(path.rstrip("/") + "/") for other in self._mounts):
            self._make_folder(path)
            for name in _names(path):
                self._show_entry(f"{path.rstrip('/')}/{name}")
        elif read_only or kind in _NO_FILES:
            self._show_as_it_is(path)
        else:
            try:
                self._lay_over(path)
            except OSError:
                if path == os.path.dirname(self._folder) or not kind:
                    raise
                self._show_as_it_is(path)  # a file system that overlayfs does not take

    def _show_entry(self, path: str) -> None:
        """Let an entry of a folder that is made anew be in the view."""
        try:
            facts = os.lstat(path)
        except OSError:
            return  # gone, or a mount that is not ours to see
        if stat.S_ISDIR(facts.st_mode):
            self._show(path)
        elif stat.S_ISLNK(facts.st_mode):
            os.symlink(os.readlink(path), self._at(path))
        elif (
            stat.S_ISREG(facts.st_mode)
            and path not in self._mounts
            and facts.st_size <= _MOST_COPIED_BYTES
            and os.access(path, os.R_OK | os.W_OK)
        ):
            shutil.copy2(path, self._at(path))
            with suppress(OSError):
                os.chown(self._at(path), facts.st_uid, facts.st_gid)
        else:
            self._show_as_it_is(path)

    def _show_as_it_is(self, path: str) -> None:
        """Let a folder or a file be in the view; nothing can be written there, but to sockets, pipes and devices."""
        target = self._at(path)
        if os.path.isdir(path):
            self._make_folder(path)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        try:
            linux.mount(path, target, flags=linux.MS_BIND)
        except OSError:
            return  # of another user: an empty place
        linux.make_read_only(target)

    def _lay_over(self, path: str) -> None:
        """Lay an overlay over a folder; its own place in the folder of written files takes what is written."""
        self._make_folder(path)
        self._overlays += 1
        work = self._places.work / str(self._overlays)
        work.mkdir()
        self._overlay(path, self._at(path), os.open(path[1:] or ".", os.O_PATH, dir_fd=self._upper), str(work))

    def _overlay(self, lower: str, target: str, upper: int, work: str) -> None:
        opened = [os.open(lower, os.O_PATH), upper, os.open(work, os.O_PATH)]  # names may have commas and colons
        try:
            names = ("lowerdir", "upperdir", "workdir")
            options = [f"{name}=/proc/self/fd/{one}" for name, one in zip(names, opened, strict=True)]
            linux.mount("overlay", target, "overlay", 0, ",".join([*options, "userxattr"]))
        finally:
            for one in opened:
                os.close(one)

    def _show_shared_memory(self) -> None:
        """Let ``/dev/shm`` be memory of its own, over what is there."""
        path = "/dev/shm"
        if not os.path.isdir(path):
            return
        memory = self._places.work / "memory"
        memory.mkdir()
        linux.mount("tmpfs", str(memory), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
        for name in ("upper", "work"):
            (memory / name).mkdir()
        (memory / "upper").chmod(0o1777)
        try:
            upper = os.open(memory / "upper", os.O_PATH)
            self._overlay(path, self._at(path), upper, str(memory / "work"))
        except OSError:  # until Linux 6.6 tmpfs keeps no attributes of users
            linux.mount(str(memory / "upper"), self._at(path), flags=linux.MS_BIND)

    def _show_processes(self) -> None:
        """Let ``/proc`` be that of the new process namespace."""
        self._make_folder("/proc")
        target = self._at("/proc")
        linux.mount("proc", target, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        for name in _OF_KERNEL:
            path = f"{target}/{name}"
            if os.path.exists(path):
                linux.mount(path, path, flags=linux.MS_BIND | linux.MS_REC)
                linux.make_read_only(path, recursive=True)

    def _show_sockets(self) -> None:
        """Let sockets that somebody listens at be themselves: through an overlay nobody would answer."""
        with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
            paths = {words[7] for words in (line.rstrip("\n").split(maxsplit=7) for line in lines) if len(words) == 8}
            for path in sorted(path for path in paths if path.startswith("/")):
                with suppress(OSError):
                    real = os.path.realpath(path)
                    if stat.S_ISSOCK(os.stat(self._at(real)).st_mode):
                        linux.mount(real, self._at(real), flags=linux.MS_BIND)

    def _make_folder(self, path: str) -> None:
        """Make a folder of the new root, with the mode, the owner and the times of the one that it stands for."""
        facts = os.stat(path)
        target = path[1:] or "."
        with suppress(FileExistsError):
            os.mkdir(target, dir_fd=self._upper)
        with suppress(OSError):
            os.chown(target, facts.st_uid, facts.st_gid, dir_fd=self._upper)
        mode = stat.S_IMODE(facts.st_mode)
        if os.getuid() != 0:  # it is ours now: we may do what we could before
            mode = mode & 0o7077 | sum(
                bit << 6 for bit in (os.R_OK, os.W_OK, os.X_OK) if os.access(path, bit, effective_ids=True)
            )
        os.chmod(target, mode, dir_fd=self._upper)
        os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns), dir_fd=self._upper)


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _mounts() -> dict[str, tuple[str, bool]]:
    """Return the mount points of this process, with the kind of each file system and whether it is read-only."""
    found: dict[str, tuple[str, bool]] = {}
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            before, _, after = line.partition(b" - ")
            words = before.split()
            path = os.fsdecode(words[4].decode("unicode_escape").encode("latin-1"))
            found[path] = (after.split()[0].decode(), b"ro" in words[5].split(b","))
    return found
