"""The wall around a rehearsal: a copy-on-write view of all file systems, and the folders behind it."""

import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, NoReturn

from dryfit.processes import linux_kernel
from dryfit.processes.process import die_with_parent
from dryfit.settings.choices import Wall

# Temporary folders of a rehearsal: they receive all writes and are removed at the end.


_PREFIX: Final = "dryfit-rehearsal-"
_STOP: Final = "stop"
_LOCK: Final = "lock"
_LONGEST_TEMPORARY: Final = 60
"""Letters of a temporary folder: sockets of ``multiprocessing`` lie 32 letters below it, and may have 107."""
_CACHES: Final = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "~/.cache/huggingface",
    "HF_HUB_CACHE": "",
    "HF_XET_CACHE": "",
    "HF_ASSETS_CACHE": "",
    "HF_MODULES_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TRANSFORMERS_CACHE": "",
    "SENTENCE_TRANSFORMERS_HOME": "",
    "TORCH_HOME": "",
    "TORCH_EXTENSIONS_DIR": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TRITON_CACHE_DIR": "",
    "TRITON_HOME": "~/.triton",
    "NUMBA_CACHE_DIR": "",
    "KERAS_HOME": "~/.keras",
    "NLTK_DATA": "~/nltk_data",
    "MPLCONFIGDIR": "~/.config/matplotlib",
}
"""Variables that name caches of libraries, and where these are without."""


WALLS: Final = {
    Wall.NAMESPACES: "a copy-on-write view: whatever is written, real files stay as they are",
    Wall.LANDLOCK: "writes of Python are redirected, the kernel refuses all others",
    Wall.REDIRECT: "only writes of Python are redirected, code in C and other programs write real files",
}
"""What each wall does, in words."""


class Places:
    """Folders of one rehearsal.

    Args:
        folder: All of them are in it. A script that sees a copy-on-write view of all files finds only ``own`` there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        """What is written, each file below its own absolute path."""
        self.own = folder / "own"
        """What the process can write as it is: its answer and its temporary folder."""
        self.work = folder / "work"
        """What overlayfs needs."""
        self.temporary = self.own / "tmp"

    @contextmanager
    def made(self) -> Generator[None, None, None]:
        """Within, they are there."""
        with nullcontext() if self._is_short() else claimed_folder() as short:
            if short is not None:
                self.temporary = short
            self.make()
            try:
                yield
            finally:
                self.clear()

    def _is_short(self) -> bool:
        return len(str(self.temporary.absolute())) <= _LONGEST_TEMPORARY

    def own_behind(self, wall: Wall) -> Path:
        """Return where the process behind a wall finds what it can write as it is."""
        return (self.folder if wall is Wall.NAMESPACES else self.own).resolve()

    def enter(self, wall: Wall) -> Path:
        """Let this process, which is behind a wall, use its temporary folder; return what is its own."""
        own = self.own_behind(wall)
        temporary = own / self.temporary.name if self.temporary.parent == self.own else self.temporary.resolve()
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        return own

    def stop(self) -> None:
        """Ask the process behind the wall to say what it has seen, and to end."""
        (self.own / _STOP).touch()

    def is_stopped(self, wall: Wall) -> bool:
        """Whether that was asked for; of the process behind a wall."""
        return (self.own_behind(wall) / _STOP).exists()

    def make(self) -> None:
        """Make the folders."""
        for one in (self.files, self.own, self.work, self.temporary):
            one.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove them."""
        for one in (self.files, self.own, self.work):
            remove(one)


@contextmanager
def claimed_folder() -> Generator[Path, None, None]:
    """Provide a temporary folder of this process; folders of killed processes are removed."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, in whatever way
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _remove_left() -> None:
    """Remove temporary folders whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or just being made
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder as far as this user can, whatever the modes of what is in it."""

    def again(function: Callable[..., object], path: str, _: object) -> None:
        with suppress(OSError):
            for one in (os.path.dirname(path), path):
                if not os.path.islink(one):
                    os.chmod(one, stat.S_IRWXU)
            if function is os.unlink:
                os.unlink(path)
            else:
                shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=again)


def caches(environment: Mapping[str, str], apart: Iterable[Path]) -> list[Path]:
    """Return the folders that libraries use as caches, but for those that contain anything else of the user's.

    Args:
        apart: The project: script, working folder, home.
    """
    named = (environment.get(name) or usual for name, usual in _CACHES.items())
    folders = {Path(text).expanduser().resolve() for text in named if text}
    projects = [path.resolve() for path in apart]
    return sorted(folder for folder in folders if not any(path.is_relative_to(folder) for path in projects))


# A copy-on-write view (overlayfs in namespaces) of all file systems, for a process and its children.
#
# A user, mount, process and IPC namespace of its own, with overlayfs over every folder: reads come from what is
# there, writes go to the rehearsal's folder. No privileges are needed where the kernel lets users make namespaces
# (Linux 5.13 and newer; some distributions and most containers do not). Mounts that the process inherits are locked:
# no overlay can be laid over a folder that has one below it, so such a folder is made anew, with an overlay for each
# of its entries.


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
        linux_kernel.unshare(linux_kernel.CLONE_NEWUSER | linux_kernel.CLONE_NEWPID)
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
        linux_kernel.unshare(linux_kernel.CLONE_NEWNS | linux_kernel.CLONE_NEWIPC)
        view.build()
        os.chdir(cwd)
        _tell(tells, _READY + b"\n")
    except BaseException as error:  # noqa: BLE001  # whatever it is, there is no view
        _tell(tells, f"{error}".encode())
        os._exit(1)
    child = os.fork()
    if child == 0:
        os.close(tells)
        linux_kernel.drop_capabilities(linux_kernel.CAP_SYS_ADMIN, linux_kernel.CAP_SYS_CHROOT)
        inside()
    while True:
        pid, status = os.wait()
        if pid == child:
            _tell(tells, str(status).encode())
            os._exit(0)


def _end_with(parent: int) -> None:
    """End with the process outside: in here its number is 0, gone or not."""
    linux_kernel.prctl(linux_kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
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
        linux_kernel.mount("none", "/", flags=linux_kernel.MS_REC | linux_kernel.MS_PRIVATE)
        # Opened before the folder becomes a mount of its own: upper and work folders must be on the same mount.
        self._upper = os.open(self._root, os.O_PATH | os.O_DIRECTORY)
        linux_kernel.mount(self._root, self._root, flags=linux_kernel.MS_BIND | linux_kernel.MS_REC)
        self._show("/")
        self._show_sockets()
        for path in self._kept:
            linux_kernel.mount(path, self._at(path), flags=linux_kernel.MS_BIND | linux_kernel.MS_REC)
        linux_kernel.mount(str(self._places.own), self._at(self._folder), flags=linux_kernel.MS_BIND)
        os.close(self._upper)
        linux_kernel.make_root(self._root)

    def _at(self, path: str) -> str:
        return self._root + path

    def _show(self, path: str) -> None:
        """Let a folder be in the view, with all that is mounted below."""
        kind, read_only = self._mounts.get(path, ("", False))
        if path == "/proc":
            self._show_processes()
        elif path in ("/dev", "/sys"):
            self._make_folder(path)
            linux_kernel.mount(path, self._at(path), flags=linux_kernel.MS_BIND | linux_kernel.MS_REC)
            linux_kernel.make_read_only(self._at(path), recursive=path == "/sys")
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
            linux_kernel.mount(path, target, flags=linux_kernel.MS_BIND)
        except OSError:
            return  # of another user: an empty place
        linux_kernel.make_read_only(target)

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
            linux_kernel.mount("overlay", target, "overlay", 0, ",".join([*options, "userxattr"]))
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
        linux_kernel.mount("tmpfs", str(memory), "tmpfs", linux_kernel.MS_NOSUID | linux_kernel.MS_NODEV, "mode=1777")
        for name in ("upper", "work"):
            (memory / name).mkdir()
        (memory / "upper").chmod(0o1777)
        try:
            upper = os.open(memory / "upper", os.O_PATH)
            self._overlay(path, self._at(path), upper, str(memory / "work"))
        except OSError:  # until Linux 6.6 tmpfs keeps no attributes of users
            linux_kernel.mount(str(memory / "upper"), self._at(path), flags=linux_kernel.MS_BIND)

    def _show_processes(self) -> None:
        """Let ``/proc`` be that of the new process namespace."""
        self._make_folder("/proc")
        target = self._at("/proc")
        linux_kernel.mount(
            "proc", target, "proc", linux_kernel.MS_NOSUID | linux_kernel.MS_NODEV | linux_kernel.MS_NOEXEC
        )
        for name in _OF_KERNEL:
            path = f"{target}/{name}"
            if os.path.exists(path):
                linux_kernel.mount(path, path, flags=linux_kernel.MS_BIND | linux_kernel.MS_REC)
                linux_kernel.make_read_only(path, recursive=True)

    def _show_sockets(self) -> None:
        """Let sockets that somebody listens at be themselves: through an overlay nobody would answer."""
        with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
            paths = {words[7] for words in (line.rstrip("\n").split(maxsplit=7) for line in lines) if len(words) == 8}
            for path in sorted(path for path in paths if path.startswith("/")):
                with suppress(OSError):
                    real = os.path.realpath(path)
                    if stat.S_ISSOCK(os.stat(self._at(real)).st_mode):
                        linux_kernel.mount(real, self._at(real), flags=linux_kernel.MS_BIND)

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
