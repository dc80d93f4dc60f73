"""Versions of installed packages, read from metadata alone: works where torch cannot be imported."""

import ast
import platform
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

from dryfit.settings.errors import MachineError
from dryfit.settings.version import VERSION

OURS = "dryfit"

_LIBRARIES = ("transformers", "accelerate", "peft", "safetensors", "optuna")
_DRIVER = Path("/proc/driver/nvidia/version")
"""What the loaded kernel module says of itself; it cannot hang, as a broken driver's library can."""


def version_lines(driver: Path = _DRIVER) -> list[str]:
    """Return the versions for a bug report: dryfit first, then its dependencies.

    Args:
        driver: The file in which the NVIDIA driver's module tells its version.
    """
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return [
        f"dryfit {VERSION}",
        f"python {platform.python_version()} ({system})",
        _torch(),
        *(f"{name} {installed_version(name)}" for name in _LIBRARIES),
        f"NVIDIA driver {_driver_version(driver)}",
    ]


def installed_version(name: str) -> str:
    """Return the version of a distribution, or that it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return "not installed"


def _torch() -> str:
    try:
        found = distribution("torch")
    except PackageNotFoundError:
        return "torch not installed"
    built = dict(_assigned(_text_of(found, "torch/version.py")))
    name = str(built.get("__version__") or found.version)
    for key, what in (("cuda", "CUDA"), ("hip", "ROCm")):
        if built.get(key):
            return f"torch {name} (built for {what} {built[key]})"
    return f"torch {name} (built for the CPU)" if "cuda" in built else f"torch {name}"


def _text_of(found: Distribution, name: str) -> str:
    try:
        return Path(str(found.locate_file(name))).read_text(encoding="utf-8")
    except OSError:
        return ""


def _assigned(source: str) -> Iterator[tuple[str, object]]:
    """Yield the constants that a module assigns at its top, without running it."""
    try:
        lines = ast.parse(source).body
    except SyntaxError:
        return
    for line in lines:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                yield name, value
            case _:
                pass


def _driver_version(file: Path) -> str:
    """Return the driver's version, of a line such as ``NVRM version: ... x86_64 Kernel Module  535.54.03  ...``."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not loaded"
    found = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return "unknown" if found is None else found[1]


_DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "pyyaml", "google": "protobuf", "pynvml": "nvidia-ml-py"}
"""Packages that have not the name of what brings them."""


def requirements() -> Iterator[tuple[str, str, str]]:
    """Yield what this dryfit requires, as its metadata say.

    Yields:
        The name of a distribution, the whole requirement, and the extra that asks for it; empty: always.
    """
    try:
        lines = requires(OURS) or []
    except PackageNotFoundError:
        return
    for line in lines:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == [\"']([^\"']+)", line)
        if name is not None and name[0] != OURS:  # an extra may take in another one
            yield name[0], line, extra[1] if extra is not None else ""


def how_to_install(error: str) -> str | None:
    """Return the line that installs the package that an error says is missing; None: it says no such thing.

    Args:
        error: A text with ``No module named 'NAME'``; NAME must be of a package among dryfit's own requirements.
    """
    found = re.search(r"No module named '(\w+)", error)
    if found is None:
        return None
    home = _DISTRIBUTIONS.get(found[1], found[1]).replace("-", "_")
    for name, _, extra in requirements():
        if name.replace("-", "_") == home:
            more = "; 'dryfit[all]' for dryfit's own tasks, for Trainers and for plans" if extra else ""
            return f"pip install '{OURS}{f'[{extra}]' if extra else ''}'{more}"
    return None


def missing_package(error: BaseException | None) -> MachineError | None:
    """Return how a missing package is installed, if an error, or one behind it, says that one is missing."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (hint := how_to_install(str(error))):
            return MachineError("running this command", f"{error.name} is not installed", hint=hint)
        error = error.__cause__ or error.__context__
    return None
