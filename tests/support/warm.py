"""Start dryfit's own processes by a fork of one that has imported everything, instead of by a new interpreter.

Importing takes a real ``dryfit tune`` about a CPU second, its fork server seven more, and as much each job that gets
an interpreter of its own. :func:`install` replaces ``subprocess.Popen`` in the tests' process by :class:`WarmPopen`,
which recognises ``[sys.executable, "-m", "dryfit...", ...]`` and has such a process forked by a *warm* process.
Everything else starts as always, and so does a process with settings that imports read (see
:data:`IMPORT_VARIABLES`).

There are two warm processes (:class:`Kind`). A process that sees no GPU is forked from one that has imported what a
rehearsal imports before the user's script, and no more: what the script imports, it imports after torch was patched,
as in a new interpreter. Such a fork starts its own processes from nothing: they must not have what it has patched.

A forked process has what a started one has: arguments, environment, open files, folder, session, signal handlers,
exit status, and, for whoever looks at ``/proc``, its command line and environment. Its parent is the process that
asked for it. What differs: modules are there that nobody imported (torch in a control process), with the memory that
they take. Tests of just these ask for the fixture ``cold``; ``DRYFIT_COLD=1`` turns all of this off.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NoReturn

from dryfit.processes.child_spec import FIXED
from dryfit.processes.process import die_with_parent

COLD_VARIABLE: Final = "DRYFIT_COLD"
IMPORT_VARIABLES: Final = (
    *("PYTHON", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "CUDA_", "OMP_", "KMP_", "GOMP_", "MKL_", "LD_", "LC_"),
    *("MALLOC_", "ARROW_", "ACCELERATE_", "HOME", "LANG"),
)
"""How names of variables begin that libraries read while they are imported; of ``PYTHONPATH`` see :func:`shadowed`."""
_PATH_VARIABLE: Final = "PYTHONPATH"
_UNBUFFERED: Final = "PYTHONUNBUFFERED"
_FAULTS: Final = "PYTHONFAULTHANDLER"
"""No import reads these two: a fork does what the interpreter does of them at its start (:func:`_set_streams`)."""
_AT_START: Final = ("sitecustomize", "usercustomize")
"""Modules that an interpreter imports at its start, where it finds them."""
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class Kind(StrEnum):
    """Which warm process forks a process."""

    WHOLE = "whole"
    """It has imported what dryfit's commands and jobs import."""
    NO_DEVICE = "no device"
    """It sees no GPU, and has imported what a rehearsal imports before it runs the user's script."""


_MODULES: Final = {
    Kind.WHOLE: (
        *(
            "dryfit.documents.command_line",
            "dryfit.documents.live_progress",
            "dryfit.study.studies",
            "dryfit.study.trainings",
        ),
        *(
            "dryfit.study.session",
            "dryfit.training.trial_jobs",
            "dryfit.training.trial_jobs",
            "dryfit.training.resolve",
        ),
        *("dryfit.training.plan_job", "dryfit.training.batch_check", "dryfit.processes.fork_server"),
        *("dryfit.search.follower_process", "dryfit.training.objective"),
    ),
    Kind.NO_DEVICE: ("dryfit.gpu.__main__", "dryfit.gpu.session"),
}
_ENVIRONMENT: Final = {Kind.WHOLE: FIXED, Kind.NO_DEVICE: {**FIXED, _DEVICES: ""}}
"""What a warm process has in its environment besides what the tests have."""
_REHEARSAL: Final = "dryfit.gpu"
_COMMANDS: Final = (
    *(
        "dryfit.documents.command_line",
        "dryfit.processes.fork_server",
        "dryfit.processes.child",
        "dryfit.training.in_process",
    ),
    *("dryfit.search.follower_process", _REHEARSAL),
)
"""What is started warm: modules with something to import."""
_PYTHON: Final = sys.executable
_SCRIPT: Final = ".py"
_PADDING: Final = 65_536
"""Bytes kept for the environment of a forked process, which stands where that of the warm process stood."""
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_MESSAGE_BYTES: Final = 150_000
_STANDARD: Final = (0, 1, 2)
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_POLL_S: Final = 0.0005
_POLLS: Final = 20_000
_PID_BYTES: Final = 20


@dataclass(frozen=True)
class Start:
    """A process to be: what ``Popen`` was asked for.

    Attributes:
        module: What it runs as ``__main__``: a module, or the file of a script.
        arguments: What follows the module.
        safe_path: Whether its folder stays out of ``sys.path`` (``-P``).
        warnings: Filters of warnings, as ``-W`` takes them.
        environment: All of it.
        folder: Where it runs.
        keep: Descriptors that it inherits under their own numbers, besides the standard three.
        session: Whether it leads a session of its own.
        ignored: Signals that it ignores, as its parent does.
        parent: Process id of who asks.
    """

    module: str
    arguments: list[str]
    safe_path: bool
    warnings: list[str]
    environment: dict[str, str]
    folder: str
    keep: list[int]
    session: bool
    ignored: list[int]
    parent: int

    @property
    def kind(self) -> Kind:
        """Which warm process is like it."""
        hides = self.environment.get(_DEVICES) == "" and _devices_at_first != ""
        return Kind.NO_DEVICE if hides or self.module == _REHEARSAL else Kind.WHOLE


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide what an import does, but those that dryfit sets for every child."""
    apart = {*FIXED, _PATH_VARIABLE, _UNBUFFERED, _FAULTS}
    return {
        name: value for name, value in environment.items() if name.startswith(IMPORT_VARIABLES) and name not in apart
    }


def can_be_warm(environment: Mapping[str, str], warm: Mapping[str, str]) -> bool:
    """Return whether what the warm process imported is what a process with this environment would import."""
    fixed = all(environment.get(name, value) in (value, warm.get(name)) for name, value in FIXED.items())
    return fixed and COLD_VARIABLE not in environment and of_imports(environment) == of_imports(warm)


def shadowed(folders: Sequence[str], imported: Mapping[str, Any]) -> list[str]:
    """Return what a new interpreter would import from one of these folders, and we have not, or from elsewhere."""
    found: set[str] = set()
    for folder in folders:
        found.update(name for name in _AT_START if os.path.isfile(os.path.join(folder, name + _SCRIPT)))
        for stem in {Path(name).stem for name in os.listdir(folder)} if os.path.isdir(folder) else ():
            file = getattr(imported.get(stem), "__file__", None)
            if stem in imported and not (file and file.startswith(folder)):
                found.add(stem)
    return sorted(found)


_path_at_first = {name: value for name, value in os.environ.items() if name == _PATH_VARIABLE}
_devices_at_first = os.environ.get(_DEVICES)


class _Warm:
    """The warm process, as the process sees it that asks it to fork."""

    def __init__(self, kind: Kind) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._asking, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
        with theirs:
            words = [str(theirs.fileno()), str(os.getpid()), kind]
            command = [sys.executable, "-P", __file__, *words, "-" * _PADDING]
            # Without what one test sets for its own processes: this one outlives the test.
            apart = ("DRYFIT_", _PATH_VARIABLE)
            own = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
            environment = {**own, **_path_at_first, **_ENVIRONMENT[kind], "_": "-" * _PADDING}
            served = cold_popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        served.returncode = 0  # it ends with us, and nobody waits for it
        atexit.register(self._asking.close)

    def fork(self, start: Start, standard: Sequence[int]) -> int:
        """Have a process forked that becomes our child; return its process id.

        0 where it would not be alike, or where the warm process is gone: it is started from nothing then.
        """
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # an orphan's new parent is the nearest such ancestor
        try:
            socket.send_fds(self._asking, [json.dumps(asdict(start)).encode()], [*standard, *start.keep])
            answer = self._asking.recv(64)
        except ConnectionError:
            answer = b""
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(answer or 0)


cold_popen: Any = subprocess.Popen
"""Starts processes from nothing."""
_processes: dict[Kind, _Warm] = {}
"""The warm processes of this one, those that were used."""
_own_kind: Kind | None = None
"""Of which kind this process is, if it is a warm one or a fork of one; such a process can fork itself."""


def _fork(start: Start, standard: Sequence[int]) -> int | None:
    """Return the process id of a warm child, or None where this process cannot have one now."""
    if _own_kind is None:
        process = _processes.get(start.kind) or _processes.setdefault(start.kind, _Warm(start.kind))
        return process.fork(start, standard) or None
    if threading.active_count() != 1 or start.kind is not _own_kind or not _alike(start):
        return None
    hears, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(start, [*standard, *start.keep], tells, of_command=True)
    os.close(tells)
    os.read(hears, 1)
    os.close(hears)
    return pid


@dataclass(frozen=True)
class _Command:
    """What a command starts, of those that may be warm: as in :class:`Start`."""

    module: str
    arguments: list[str]
    safe_path: bool
    warnings: list[str]


def _recognised(args: Any) -> _Command | None:
    """Return what a command starts, or None where that may not be warm."""
    words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
    if words[:1] != [_PYTHON]:
        return None
    rest, filters, safe_path = words[1:], list[str](), False
    while rest[:1] in (["-P"], ["-W"]):
        safe_path = safe_path or rest[0] == "-P"
        filters += rest[1:2] if rest[0] == "-W" else []
        rest = rest[2 if rest[0] == "-W" else 1 :]
    if rest[:1] and rest[0].endswith(_SCRIPT) and not safe_path:
        return _Command(rest[0], rest[1:], safe_path, filters)
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _COMMANDS:
        return _Command(rest[1], rest[2:], safe_path, filters)
    return None


class WarmPopen(cold_popen):
    """``subprocess.Popen`` that has processes of dryfit's modules forked from a warm one."""

    def _execute_child(  # type: ignore[no-untyped-def]  # the signature is that of Python 3.11 to 3.13
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        known = _recognised(args)
        plain = not (executable or preexec_fn or shell or startupinfo) and gid is uid is gids is None and umask < 0
        pid = None
        if known and plain and close_fds and process_group == -1:
            with suppress(FileNotFoundError):  # the current folder is gone: that is what the test is about
                start = Start(
                    **vars(known),
                    environment=dict(os.environ if env is None else env),
                    folder=os.fspath(cwd) if cwd is not None else os.getcwd(),
                    keep=sorted(pass_fds),
                    session=start_new_session,
                    ignored=[number for number in _HANDLED if signal.getsignal(number) is signal.SIG_IGN],
                    parent=os.getpid(),
                )
                ends = (p2cread, c2pwrite, errwrite)
                standard = [end if end != -1 else own for end, own in zip(ends, _STANDARD, strict=True)]
                pid = _fork(start, standard)
        if pid is None:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def available() -> bool:
    """Return whether processes can be warm here, and shall be."""
    return sys.platform == "linux" and COLD_VARIABLE not in os.environ


def install() -> None:
    """Let this process start dryfit's processes warm from now on, where that is possible at all."""
    if available():
        subprocess.Popen = WarmPopen  # type: ignore[misc]


# ---- in the warm process, and in what is forked from it ----

_imported_with: dict[str, str] = {}
_set_by_imports: dict[str, str] = {}
_PATH: list[str] = []
"""Where this process finds modules, without ``PYTHONPATH``."""


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [place for place in environment.get(_PATH_VARIABLE, "").split(os.pathsep) if place]


def _place_descriptors(held: Sequence[int], targets: Sequence[int], ready: int) -> int:
    """Give the held descriptors their numbers, and close all others; return where ``ready`` is now."""
    above = max([64, ready, *held, *targets]) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in held]
    ready = fcntl.fcntl(ready, fcntl.F_DUPFD_CLOEXEC, above)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*moved, ready):
            with suppress(OSError):  # the one that lists
                os.close(int(name))
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target)
        os.close(source)
    return ready


def _write_over(begin: int, end: int, text: bytes) -> None:
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _show_in_proc(start: Start) -> None:
    """Let ``/proc/PID/cmdline`` and ``environ`` say what they would of a started process (proc(5), fields 48 to 51)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[number - 3]) for number in (48, 49, 50, 51))
    flags = [*(["-P"] if start.safe_path else []), *(word for one in start.warnings for word in ("-W", one))]
    what = [start.module] if start.module.endswith(_SCRIPT) else ["-m", start.module]
    words = [sys.executable, *flags, *what, *start.arguments]
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in start.environment.items())
    if len(command) < arg_end - arg_start and len(variables) < env_end - env_start:
        _write_over(arg_start, arg_end, command)
        _write_over(env_start, env_end, variables)


def _set_signals(ignored: Sequence[int]) -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_streams(environment: Mapping[str, str]) -> None:
    """Let the standard streams be as at the start of an interpreter with this environment."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        own: Any = getattr(sys, name)
        if environment.get(_UNBUFFERED):
            raw = io.FileIO(number, "w", closefd=False)
            raw.name = own.name
            own = io.TextIOWrapper(raw, own.encoding, own.errors, write_through=True)
            setattr(sys, name, own)
            setattr(sys, f"__{name}__", own)
        if number == 1:
            own.reconfigure(line_buffering=own.isatty())
    if environment.get(_FAULTS):
        faulthandler.enable()


def _filter_warnings(filters: Sequence[str]) -> None:
    """Let filters of the command line stand where they do in an interpreter that has imported what this one has.

    Python puts them before its own filters, of which the first is of ``__main__``; libraries put theirs before them.
    """
    if not filters:
        return
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings._processoptions(filters)  # type: ignore[attr-defined]
        asked = list(warnings.filters)
    place = next(number for number, one in enumerate(warnings.filters) if one[3] == "__main__")
    warnings.filters[place:place] = asked  # type: ignore[index]
    sys.warnoptions[:] = filters
    with warnings.catch_warnings():  # leaving it, Python forgets what it has found by the filters before
        pass


def _become(start: Start, held: Sequence[int], ready: int, *, of_command: bool) -> NoReturn:
    """Be the process that was asked for, and end as it ends.

    Args:
        start: What it is.
        held: The descriptors that it has, here.
        ready: A pipe that is told when it is that process for whoever looks at it, as a started one is at once.
        of_command: Whether its parent is a command, and not the tests.
    """
    status = 1
    try:
        if start.session:
            os.setsid()
        elif not of_command:
            os.setpgid(0, os.getpgid(start.parent))
        sys.stdout, sys.stderr, sys.stdin = sys.__stdout__, sys.__stderr__, sys.__stdin__  # type: ignore[assignment]
        null = os.open(os.devnull, os.O_WRONLY)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if of_command:  # what the command has in its buffer is the command's to say
                held = [os.dup(one) if one == number else one for one in held]
                os.dup2(null, number)
            stream.flush()
        ready = _place_descriptors(held, [*_STANDARD, *start.keep], ready)
        _set_streams(start.environment)
        _filter_warnings(start.warnings)
        os.environ.clear()
        _show_in_proc(start)
        os.environ.update(start.environment)
        if start.module.startswith("dryfit.processes"):
            os.environ.update(_set_by_imports)
        os.chdir(start.folder)
        signal.set_wakeup_fd(-1)
        _set_signals(start.ignored)
        os.write(ready, b"!")
        os.close(ready)
        sys.argv = [start.module, *start.arguments]
        sys.path[:] = [*_first_folder(start), *_folders(start.environment), *_PATH]
        tempfile.tempdir = None
        main = f"{start.module}.__main__"
        sys.modules.pop(main if main in sys.modules else start.module, None)  # it is imported again as __main__
        if _own_kind is Kind.NO_DEVICE:
            gc.unfreeze()  # a rehearsal replaces functions in all that the collector knows of
        else:
            gc.freeze()  # what the parent has thrown away must not be collected: it would close descriptors by number
        gc.enable()
        # The first call after a fork makes torch's pool of threads anew, which two threads must not do at once.
        sys.modules["torch"].set_num_threads(1)
        status = _run(start.module)
        if not of_command:
            threading._shutdown()
            atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _first_folder(start: Start) -> list[str]:
    """Return what a new interpreter puts first into ``sys.path``."""
    if start.module.endswith(_SCRIPT):
        return [os.path.dirname(os.path.realpath(start.module))]
    return [] if start.safe_path else [start.folder]


def _run(module: str) -> int:
    """Run a module or a script as ``__main__``; return the exit status that the interpreter would end with."""
    try:
        if module.endswith(_SCRIPT):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _alike(start: Start) -> bool:
    """Return whether a fork of this process is like a new one of which this is asked."""
    more = [folder for folder in _folders(start.environment) if folder not in _PATH]
    return can_be_warm(start.environment, _imported_with) and not shadowed(more, sys.modules)


def _serve(connection: socket.socket) -> None:
    """Fork whatever is asked for, twice, so that it becomes an orphan, and by that a child of who asked."""
    while True:
        data, held, _flags, _address = socket.recv_fds(connection, _MESSAGE_BYTES, 64)
        if not data:
            return
        start = Start(**json.loads(data))
        hears, tells = os.pipe()
        answer = b"0"
        if _alike(start):
            between = os.fork()
            if between == 0:
                _fork_for(start, held, tells)
            os.waitpid(between, 0)  # before the answer: whoever asked adopts orphans only until it has that
            answer = os.read(hears, _PID_BYTES)
        os.close(tells)
        os.read(hears, 1)  # until the child is what was asked for, or is gone
        connection.send(answer)
        for one in (hears, *held):
            os.close(one)


def _fork_for(start: Start, held: Sequence[int], tells: int) -> NoReturn:
    """Fork the process that was asked for, tell its process id, and end, so that it gets another parent."""
    pid = os.fork()
    if pid != 0:
        os.write(tells, f"{pid:<{_PID_BYTES}}".encode())
        os._exit(0)
    for _ in range(_POLLS):
        if os.getppid() == start.parent:
            _become(start, held, tells, of_command=False)
        time.sleep(_POLL_S)
    os._exit(1)


def main() -> None:
    """Import everything, then fork on demand until the tests' process ends."""
    import importlib

    global _own_kind
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    die_with_parent(int(sys.argv[2]))
    kind = Kind(sys.argv[3])
    before = _folders(os.environ)
    _PATH[:] = [place for place in sys.path if place not in before]
    _imported_with.update(os.environ)
    gc.disable()
    for name in _MODULES[kind]:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    if kind is Kind.WHOLE:
        sys.modules["dryfit.processes.child"].library_versions()
    else:
        with suppress(ImportError):  # as a rehearsed script does, without a device
            importlib.import_module("dryfit.gpu.offline_import").import_offline("bitsandbytes")
    gc.collect()
    gc.freeze()
    _set_by_imports.update({name: value for name, value in os.environ.items() if name not in _imported_with})
    _own_kind = kind
    if kind is Kind.WHOLE:
        subprocess.Popen = WarmPopen  # type: ignore[misc]
    _serve(connection)


if __name__ == "__main__":
    sys.modules["warm"] = sys.modules["__main__"]
    main()
