"""The platforms that dryfit supports."""

import sys

from dryfit.core.errors import MachineError


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
