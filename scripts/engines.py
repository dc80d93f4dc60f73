"""Install the programs that tests need and that come as Debian packages: `make engines`. Silent when all are there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that tests run: its command, the Debian package it comes in, and what it is for."""

    command: str
    package: str
    used_for: str


ENGINES = (
    Engine("systemd-analyze", "systemd", "checking the unit file of docs/supervision.md"),
    Engine("unshare", "util-linux", "tests with mounts that nothing else sees"),
    Engine("mount", "mount", "tests on a disk that is full"),
    Engine("pg_ctl", "postgresql", "a mirror whose database stops and comes back"),
    Engine("munged", "munge", "whom a Slurm of the tests believes"),
    Engine("slurmctld", "slurm-wlm", "agents as jobs of Slurm: the queue"),
    Engine("slurmd", "slurm-wlm", "agents as jobs of Slurm: a node"),
    Engine("g++", "g++", "layers that torch compiles"),
    Engine("chromium-headless-shell", "chromium-headless-shell", "pages as a browser shows them"),
)

ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where Debian puts servers; a user's PATH often lacks them."""

POSTGRESQL = Path("/usr/lib/postgresql")
"""Where Debian puts each version of PostgreSQL; no PATH has its programs."""

Find = Callable[[str], str | None]


def find(command: str) -> str | None:
    """Return the path of a program on PATH or among those for administrators, None where there is none."""
    folders = (os.environ.get("PATH", os.defpath), *ADMIN_FOLDERS, *map(str, sorted(POSTGRESQL.glob("*/bin"))))
    return shutil.which(command, path=os.pathsep.join(folders))


def absent(engines: Sequence[Engine], look: Find) -> list[Engine]:
    """List the engines that are not installed."""
    return [engine for engine in engines if look(engine.command) is None]


def commands(packages: Sequence[str], *, root: bool, look: Find) -> list[list[str]]:
    """Return the commands that install Debian packages, none where this system or this user cannot."""
    apt = look("apt-get")
    sudo = [] if root else [look("sudo")]
    if apt is None or None in sudo:
        return []
    start = [*(word for word in sudo if word), "env", "DEBIAN_FRONTEND=noninteractive", apt, "-qq"]
    start += ["-o", "DPkg::Lock::Timeout=300"]  # another installation may be running
    return [[*start, "update"], [*start, "install", "--yes", "--no-install-recommends", *packages]]


def refusal(engines: Sequence[Engine], found: str) -> str:
    """Say which programs are missing, and what a person can do about it."""
    lines = [f"  {engine.command} (Debian package {engine.package}): {engine.used_for}" for engine in engines]
    packages = " ".join(dict.fromkeys(engine.package for engine in engines))
    return "\n".join((
        "installing what the tests run: these programs are missing",
        *lines,
        f"{found}; allowed: a system with apt-get, as root or with sudo",
        f"run `apt-get install {packages}` as root, or install these programs as your system does",
        "without them their tests are skipped, and fail where CI is set",
    ))  # fmt: skip


def main() -> int:
    """Install what is missing; return 1 where something still is."""
    wanted = absent(ENGINES, find)
    if not wanted:
        return 0
    packages = list(dict.fromkeys(engine.package for engine in wanted))
    steps = commands(packages, root=os.geteuid() == 0, look=find)
    if not steps:
        print(refusal(wanted, "there is no apt-get here, or no sudo"), file=sys.stderr)
        return 1
    for step in steps:
        status = subprocess.run(step, check=False, stdin=subprocess.DEVNULL).returncode
        if status != 0:
            print(refusal(wanted, f"`{' '.join(step)}` ended with status {status}"), file=sys.stderr)
            return 1
    still = absent(wanted, find)
    if still:
        print(refusal(still, "their packages are installed and the programs are not there"), file=sys.stderr)
    return int(bool(still))


if __name__ == "__main__":
    sys.exit(main())
