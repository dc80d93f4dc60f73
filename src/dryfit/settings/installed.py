"""Versions of installed packages, read from metadata alone: works where torch cannot be imported."""

import ast
import platform
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from dryfit.settings.version import VERSION

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
        *(f"{name} {_version(name)}" for name in _LIBRARIES),
        f"NVIDIA driver {_driver_version(driver)}",
    ]


def _version(name: str) -> str:
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
