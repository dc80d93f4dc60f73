"""The interpreter in which a user's script is rehearsed: found, asked what it has, and given the virtual GPU's code.

Nothing is installed into its environment. On its path is put one folder of links to the modules that a rehearsal runs,
which import torch and the standard library alone.
"""

import json
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dryfit.processes.wall import claimed_folder
from dryfit.settings.errors import ConfigError
from dryfit.settings.text import brief
from dryfit.settings.version import PACKAGE_FOLDER

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
