"""Commands in mounts and control groups of their own, where a test may fill a disk or use up memory."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from parts import need

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def in_own_mounts(script: str, *, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run a shell script whose mounts nobody else sees, and which vanish with it; skip where that is not allowed."""
    unshare = need("unshare")
    need("mount")
    probe = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    tried = subprocess.run([unshare, "-m", "sh", "-c", probe, "/mnt"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this machine allows no mounts of a test's own: {tried.stderr.strip()}")
    command = [unshare, "-m", "sh", "-ec", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _own_group() -> Path:
    """The folder of this process's memory control group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _V1 / path.lstrip("/")
    return _V2 / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with a memory limit, for processes that move into it; skip where none can be made.

    Yields:
        Its folder: a process moves in by writing its id to ``cgroup.procs``.
    """
    group = _own_group() / f"dryfit-chaos-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        try:
            (group / name).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        with suppress(OSError):  # no swap, or none that is counted
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()
