"""The process of a rehearsal: a fresh interpreter that runs the user's own code without a GPU, and its answer.

A script is the user's own, run by the user: it has the user's environment, secrets too, as ``python script.py`` would
(the hub's token is needed for configs; trackers and uploads are muted in the process). Nothing of that reaches an
answer: its texts and the last lines of a process that died are redacted.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dryfit.processes.helpers import kill_leftovers, python_command
from dryfit.processes.process import ended_by_signals
from dryfit.processes.rehearsal_stem import RehearsalStem, end_process, has_ended, in_own_session, stem_for
from dryfit.processes.wall import Places, claimed_folder, remove
from dryfit.settings.errors import ChildError, ConfigError, FileError
from dryfit.settings.files import read_bounded, write_model
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.rehearsal_messages import REHEARSED_VARIABLE, RehearsalAnswer, RehearsalRequest, ScriptEnd
from dryfit.settings.secrets import redacted, redacted_json, secrets_of
from dryfit.settings.text import brief
from dryfit.settings.version import PACKAGE_FOLDER

# The interpreter in which a user's script is rehearsed: found, asked what it has, and given the virtual GPU's code.
#
# Nothing is installed into its environment. On its path is put one folder of links to the modules that a rehearsal
# runs, which import torch and the standard library alone.


REHEARSED_TORCH: Final = SpecifierSet(">=2.8,<2.16")
"""Versions of torch in which scripts are rehearsed."""
LEAST_PYTHON: Final = (3, 10)
"""The first version of Python that the virtual GPU's code runs in."""
BESIDE: Final = (
    *("__init__", "older_names", "settings/__init__", "processes/__init__"),
    *(
        "settings/choices",
        "settings/device_reach",
        "settings/devices",
        "settings/errors",
        "settings/files",
        "settings/memory_terms",
    ),
    *("settings/older_python", "settings/private_names", "settings/reach_calibrations"),
    *("settings/records", "settings/rehearsal_messages"),
    *("settings/text", "settings/user_code", "settings/version"),
    *("processes/linux_kernel", "processes/process", "processes/wall", "processes/wall_keeper"),
)
"""What of dryfit the package ``dryfit.gpu`` needs besides itself."""

_GPU: Final = "gpu"
_DOING: Final = "choosing the interpreter to rehearse in"
_ENVIRONMENTS: Final = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that name the active environment; that of a virtual environment goes first, as it is made within conda."""
_HINT: Final = "--python PATH names the interpreter that runs the script"
_NO_TORCH: Final = (
    "activate the environment that trains, or type `dryfit rehearse --python ENVIRONMENT/bin/python ...`: "
    f"it needs torch{REHEARSED_TORCH}"
)
_LIMIT_S: Final = 60.0
_MARK: Final = "dryfit-interpreter "
_QUESTION: Final = f"""
import json, os, sys
said = {{"python": list(sys.version_info[:2])}}
if sys.version_info >= (3, 8):
    from importlib.metadata import version
    from importlib.util import find_spec
    said["eight_bit"] = find_spec("bitsandbytes") is not None
    said["torch"] = None if find_spec("torch") is None else ""
    if said["torch"] is not None:
        try:
            said["torch"] = version("torch")
        except Exception:
            pass  # of its own build
sys.stdout.write("\\n{_MARK}" + json.dumps(said) + "\\n")
sys.stdout.flush()
os._exit(0)
"""
"""Asked without importing torch, which takes seconds: whether that works is seen when the script is run."""
_ELF: Final = b"\x7fELF"
_MACHINES: Final = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}


@dataclass(frozen=True, slots=True)
class UserPython:
    """An interpreter of the user's, other than dryfit's own.

    Attributes:
        path: As it was named: links are not followed, which would lead out of a virtual environment.
        has_eight_bit: Whether bitsandbytes is installed there.
    """

    path: Path
    has_eight_bit: bool


def user_python(given: Path | None, environment: Mapping[str, str]) -> tuple[UserPython | None, str]:
    """Return the interpreter that a script is rehearsed in, and a remark on it; None: dryfit's own.

    Args:
        given: What the user named; None: that of the active environment.
        environment: The user's.

    Raises:
        ConfigError: There is no such interpreter, or no script can be rehearsed in it.
    """
    if given is None:
        found = _active(environment)
        path = None if found is None else found[1]
    else:
        path = _named(given)
    if path is None or _is_own(path):
        if find_spec("torch") is None:
            raise ConfigError(_DOING, f"{sys.executable} has no torch", hint=_NO_TORCH)
        return None, ""
    said = _asked(path)
    if given is None and said["torch"] is None and find_spec("torch") is not None:
        return None, f"{path} has no torch: the script is rehearsed with dryfit's own interpreter"
    _demand(path, said)
    return UserPython(path, bool(said.get("eight_bit"))), ""


@contextmanager
def code_folder() -> Generator[Path, None, None]:
    """Provide a folder that has the virtual GPU's code and nothing else, for an interpreter's path."""
    with claimed_folder() as place:
        folder = place / "code"
        package = folder / PACKAGE_FOLDER.name
        for name in BESIDE:
            link = package / f"{name}.py"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(PACKAGE_FOLDER / f"{name}.py")
        (package / _GPU).symlink_to(PACKAGE_FOLDER / _GPU)
        for made in (*(one.parent for one in package.glob("*/__init__.py") if not one.parent.is_symlink()), package):
            made.chmod(0o555)
        yield folder


def command(python: Path, code: Path, module: str, *arguments: str) -> list[str]:
    """Command that runs a module of a folder in another interpreter; no file of the current folder can shadow one."""
    # In the place of the current folder, where it is on the path: PYTHONSAFEPATH leaves it out.
    start = f"import sys; sys.path[:sys.path[:1] == ['']] = [{str(code)!r}]; import runpy"
    return [str(python), "-c", f"{start}; runpy.run_module({module!r}, None, '__main__', True)", *arguments]


def _active(environment: Mapping[str, str]) -> tuple[str, Path] | None:
    """Return the interpreter of the active environment, with the variable that names it; None: none is active."""
    for variable in _ENVIRONMENTS:
        if folder := environment.get(variable):
            path = Path(folder) / "bin" / "python"
            if not path.exists():
                found = f"{variable} is {folder}, where there is no bin/python: it was removed or moved"
                raise ConfigError(_DOING, found, "an environment that is there", f"deactivate it; {_HINT}")
            return variable, path
    return None


def _named(given: Path) -> Path:
    path = given.expanduser().absolute()
    allowed = "the interpreter itself: .venv/bin/python"
    if path.is_dir():
        inside = path / "bin" / "python"
        raise ConfigError(_DOING, f"{given} is a folder", allowed, f"--python {inside}" if inside.exists() else "")
    if path.is_symlink() and not path.exists():
        raise ConfigError(_DOING, f"{given} leads to {path.readlink()}, which is not there", allowed, "make it anew")
    if not path.exists():
        raise ConfigError(_DOING, f"there is no file {given}", allowed)
    return path


def _is_own(path: Path) -> bool:
    """Whether an interpreter is that of dryfit's own environment."""
    return path == Path(sys.executable) or path.parent.parent.resolve() == Path(sys.prefix).resolve()


def _asked(path: Path) -> dict[str, Any]:
    """Return what an interpreter says of itself; what else it prints, as a ``sitecustomize`` may, is passed over."""
    _demand_machine(path)
    try:
        done = subprocess.run(
            [str(path), "-c", _QUESTION], capture_output=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(_DOING, f"{path} did not start within {_LIMIT_S:.0f} s", "an interpreter") from None
    except OSError as error:
        raise ConfigError(_DOING, f"{path} cannot be started: {error.strerror}", "a Python interpreter") from error
    lines = done.stdout.decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith(_MARK)), None)  # what else was said came before
    if said is None:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        found = f"{path} is no working Python: it ended with status {done.returncode}"
        raise ConfigError(_DOING, f"{found}, {brief(last)}" if last else found, "a Python interpreter")
    return json.loads(said.removeprefix(_MARK))


def _demand(path: Path, said: Mapping[str, Any]) -> None:
    version: Sequence[int] = said["python"]
    python, torch = ".".join(map(str, version)), said.get("torch")
    least = ".".join(map(str, LEAST_PYTHON))
    if tuple(version) < LEAST_PYTHON:
        raise ConfigError(_DOING, f"{path} is Python {python}", f"Python {least} or newer")
    if torch is None:
        raise ConfigError(_DOING, f"{path} has no torch", hint=_NO_TORCH)
    try:
        inside = not torch or REHEARSED_TORCH.contains(Version(torch).base_version)
    except InvalidVersion:
        inside = True  # a build of the user's own
    if not inside:
        raise ConfigError(
            _DOING, f"{path} has torch {torch}", f"torch{REHEARSED_TORCH}, in which this was tried", _HINT
        )


def _demand_machine(path: Path) -> None:
    """Refuse an interpreter that is built for another processor."""
    theirs, ours = _machine(path), _machine(Path(sys.executable))
    if theirs != ours and theirs and ours:
        raise ConfigError(_DOING, f"{path} is built for {theirs}", f"one for this machine: {ours}")


def _machine(path: Path) -> str:
    """Return the processor that a program is built for; empty where its first bytes do not say it."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError:
        return ""
    if len(head) < 20 or not head.startswith(_ELF):
        return ""
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _MACHINES.get(number, f"machine {number}")


CHILD_MODULE: Final = "dryfit.gpu"

_TAIL_LINES = 30
_TAIL_BYTES = 1 << 14
_READ_BYTES = 1 << 16
_POLL_S = 0.1
_AFTER_END_S = 2.0
"""How long output is still read after the process has ended, where one of its own children keeps it open."""
_AT_ONCE_S = 0.5
"""How long one may take to end that has not begun."""
_INTERRUPTED_S = 20.0
"""How long a rehearsal that is interrupted may take to say what it has seen."""
_LIMIT_FACTOR = 2.0
_LIMIT_EXTRA_S = 300.0
_MOST_ANSWER_BYTES = 1 << 26
_CRASHES = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
"""Signals of a process that broke by itself."""

OnOutput = Callable[[bytes], None]
"""Called with what the script prints, on either stream, as it comes."""


@dataclass(frozen=True, slots=True)
class RehearsalSurroundings:
    """What the process of a rehearsal is started with.

    Attributes:
        environment: The whole environment of the user.
        additions: Variables that the script's launcher would set.
        import_paths: Folders to import from, beside those of a new interpreter.
        folder: Its working directory.
        module: The module that is run with the request's file.
        python: The interpreter, where it is another one than dryfit's own.
    """

    environment: Mapping[str, str]
    additions: Mapping[str, str] = field(default_factory=dict[str, str])
    import_paths: tuple[str, ...] = ()
    folder: Path | None = None
    module: str = CHILD_MODULE
    python: Path | None = None

    @contextmanager
    def command(self, *arguments: str) -> Generator[list[str], None, None]:
        """Provide the command that runs the module with arguments; what it needs is there within the block."""
        if self.python is None:
            yield python_command(self.module, *arguments)
            return
        with code_folder() as code:
            yield command(self.python, code, self.module, *arguments)

    def stem(self) -> RehearsalStem | None:
        """Return the process from which rehearsals in these surroundings fork; None where imports are not shared."""
        variables, folder = self.variables(), self.folder or Path.cwd()
        key = (self.python, folder, *sorted(variables.items()))
        return stem_for(key, lambda: RehearsalStem(self.command, variables, folder))

    def variables(self) -> dict[str, str]:
        """Return the environment of the process: no GPU, unbuffered output, a stack where it crashes."""
        paths = [*self.import_paths, *filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))]
        made = {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            REHEARSED_VARIABLE: "1",
        }
        return {**self.environment, **self.additions, **made} | (
            {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        )


class RehearsalInterrupted(KeyboardInterrupt):
    """Ctrl-C came while a rehearsal ran.

    Attributes:
        answer: What was seen until then.
    """

    def __init__(self, answer: RehearsalAnswer) -> None:
        super().__init__()
        self.answer = answer


def run_rehearsal(
    request: RehearsalRequest,
    surroundings: RehearsalSurroundings,
    on_output: OnOutput,
    folder: Path | None = None,
    views: Mapping[str, Path] = MappingProxyType({}),
) -> RehearsalAnswer:
    """Run a rehearsal in a process of its own and return its answer; its files are removed.

    A process that ends without an answer, or does not end within twice the time that the first step may take, is an
    answer too: it could not run.

    Args:
        request: ``scratch_dir`` and ``answer_file`` are set here.
        folder: Where its files lie; None: in a temporary folder.
        views: Files for viewers, by what they are, and where each is put.

    Raises:
        RehearsalInterrupted: Ctrl-C came; the process has said what it has seen.
        ChildError: The answer cannot be read.
        OSError: No process can be made.
    """
    with ended_by_signals(), claimed_folder() if folder is None else _made(folder) as place:
        file = place / "answer.json"
        places = {"scratch_dir": str(place), "answer_file": str(file), "parent_pid": os.getpid(), "views": tuple(views)}
        write_model(place / "request.json", request.model_copy(update=places), durable=False)
        limit_s = _LIMIT_FACTOR * request.timeout_s + _LIMIT_EXTRA_S
        end = _run(place, surroundings, on_output, limit_s)
        for name, target in views.items():
            with suppress(FileNotFoundError):  # nothing was seen that it could show
                shutil.move(place / name, target)
        secrets = secrets_of(surroundings.environment)
        answer = _answer(file, secrets) or _without_answer(request, end, secrets)
    if end.is_interrupted:
        raise RehearsalInterrupted(answer)
    return answer


@contextmanager
def _made(folder: Path) -> Generator[Path, None, None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        remove(folder)


@dataclass(frozen=True, slots=True)
class _End:
    """How the process ended: its status (minus a signal), None after the limit; its last output; whether by Ctrl-C."""

    status: int | None
    tail: str
    limit_s: float
    is_interrupted: bool = False


def broke(answer: RehearsalAnswer) -> bool:
    """Whether a script may have failed for want of memory alone: after an out-of-memory error, or by a crash.

    Both is what a C++ library may make of an error that is raised below it, as torch's autograd does.
    """
    return answer.end is ScriptEnd.FAILED and (bool(answer.out_of_memory) or answer.killed_by in _CRASHES)


def _run(folder: Path, surroundings: RehearsalSurroundings, on_output: OnOutput, limit_s: float) -> _End:
    """Run the rehearsal of a folder's request: forked where imports are shared, else in a process from nothing."""
    request = folder / "request.json"
    stem = surroundings.stem() if surroundings.module == CHILD_MODULE else None
    if stem is not None:
        stem.ask(request)
        try:
            end = _followed(stem.output, stem.has_ended, folder, on_output, limit_s)
            return _End(stem.status, end.tail, limit_s, end.is_interrupted)
        finally:
            if stem.status is None:
                stem.close()
    with surroundings.command(str(request)) as words:
        process = in_own_session(words, surroundings.variables(), surroundings.folder)
        assert process.stdout is not None
        try:
            with process.stdout as output:
                end = _followed(output.fileno(), lambda: has_ended(process), folder, on_output, limit_s)
            if end.has_ended:
                kill_leftovers(process.pid)  # before it is reaped, its process id is its own
            return _End(process.wait() if end.has_ended else None, end.tail, limit_s, end.is_interrupted)
        finally:
            end_process(process)  # Ctrl-C, another signal, or the limit


@dataclass(frozen=True, slots=True)
class _Followed:
    has_ended: bool
    tail: str
    is_interrupted: bool


def _followed(output: int, is_over: Callable[[], bool], folder: Path, on_output: OnOutput, limit_s: float) -> _Followed:
    """Pass on the output of a rehearsal until it has ended, is interrupted, or the limit comes."""
    tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
    keep = _kept(tail, on_output)
    is_interrupted = False
    try:
        ended = _follow(is_over, output, keep, time.monotonic() + limit_s)
    except KeyboardInterrupt:  # a second one ends it as it is
        is_interrupted, wait_s = True, _AT_ONCE_S
        with suppress(FileNotFoundError):  # it has not begun, or has ended
            Places(folder).stop()
            wait_s = _INTERRUPTED_S
        ended = _follow(is_over, output, keep, time.monotonic() + wait_s)
    return _Followed(ended, b"\n".join(tail)[-_TAIL_BYTES:].decode(errors="replace"), is_interrupted)


def _follow(is_over: Callable[[], bool], output: int, on_output: OnOutput, deadline_s: float) -> bool:
    """Pass on the output of a process until it has ended; return False where the deadline came first."""
    os.set_blocking(output, False)
    is_open = True
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not is_over():
            if time.monotonic() > deadline_s:
                return False
            if not is_open:
                time.sleep(_POLL_S)
            elif selector.select(_POLL_S):
                is_open = _read_some(output, on_output)
        last_s = time.monotonic() + _AFTER_END_S
        while is_open and time.monotonic() < last_s and selector.select(_POLL_S):
            is_open = _read_some(output, on_output)
    return True


def _read_some(output: int, on_output: OnOutput) -> bool:
    """Pass on what can be read now; return False at the end."""
    try:
        data = os.read(output, _READ_BYTES)
    except BlockingIOError:
        return True
    if data:
        on_output(data)
    return bool(data)


def _kept(tail: deque[bytes], on_output: OnOutput) -> OnOutput:
    """Return a function that passes output on, and keeps its last lines; of a progress bar the last state."""
    rest = b""

    def keep(data: bytes) -> None:
        nonlocal rest
        on_output(data)
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-_TAIL_BYTES:]
        if tail and lines:
            tail.pop()  # the line that was not complete
        tail.extend(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
        if lines or not tail:
            tail.append(rest)
        else:
            tail[-1] = rest

    return keep


def _answer(file: Path, secrets: Mapping[str, str]) -> RehearsalAnswer | None:
    try:
        text = read_bounded(file, _MOST_ANSWER_BYTES)
        return RehearsalAnswer.model_validate_json(redacted_json(text, secrets))
    except FileNotFoundError:
        return None
    except (ValueError, FileError) as error:
        raise ChildError("reading the answer of a rehearsal", f"it is no answer: {error}") from error


def _without_answer(request: RehearsalRequest, end: _End, secrets: Mapping[str, str]) -> RehearsalAnswer:
    name = ""
    if end.status is None:
        reason = f"no answer within {end.limit_s:.0f} s"
    elif end.status < 0:
        name = str(-end.status)
        with suppress(ValueError):
            name = signal.Signals(-end.status).name
        reason = f"the process of the rehearsal was ended by signal {name}"
        if -end.status == signal.SIGKILL and sys.platform == "linux":
            reason += ", as the kernel does where host memory is used up"
    else:
        reason = f"the process of the rehearsal ended with status {end.status}, and without an answer"
    return RehearsalAnswer(
        verdict=VerdictKind.UNKNOWN,
        end=ScriptEnd.NO_STEP if end.status is None else ScriptEnd.FAILED,
        device=request.device,
        ranks=request.ranks,
        reasons=(reason,),
        traceback=redacted(end.tail, secrets),
        killed_by=name,
    )
