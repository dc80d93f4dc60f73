"""The version of the package, its folder, and the platforms that it supports."""

import hashlib
import sys
from pathlib import Path

from dryfit.settings.errors import MachineError

# The version of the package and its folder, where both planes can read them.


VERSION = "0.2.0"
PACKAGE_FOLDER = Path(__file__).parents[1]
"""Where the sources of ``dryfit`` are: what is kept on disk is keyed by a hash of them."""


def refuse_unsupported_platform(name: str = sys.platform) -> None:
    """Refuse any platform other than Linux and macOS.

    Raises:
        MachineError: Elsewhere.
    """
    if name not in ("linux", "darwin"):
        raise MachineError(
            "starting dryfit",
            f"this platform is {name}",
            "Linux, and macOS",
            "dryfit isolates trials with POSIX processes and signals: on Windows use WSL 2",
        )


def minor_version(version: str) -> tuple[str, ...]:
    """Return major and minor of a version, its build left out: ``("2", "13")`` of ``2.13.0+cu130``."""
    return tuple(version.split("+", maxsplit=1)[0].split(".")[:2])


def code_fingerprint(package: Path) -> str:
    """Hash the Python sources below a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
