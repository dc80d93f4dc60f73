"""Versions and code hash of an installation, and the identity of machine and process; compared when an agent joins."""

import functools
import hashlib
import os
import platform
import secrets
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dryfit.core.version import VERSION
from dryfit.nodes.messages import Identity

_LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate", "numpy")
"""What decides, beside our own code, the values that a trial comes to."""


@functools.cache
def installation() -> dict[str, str]:
    """Return what trials' values depend on of an installation, by name: versions, and a hash of our own code."""
    found = {"dryfit": VERSION, "code": _code_hash(), "python": ".".join(map(str, sys.version_info[:2]))}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return in words how an agent's installation differs from that of the control process; empty: it does not."""
    names = [name for name in (*here, *(set(there) - set(here))) if here.get(name) != there.get(name)]
    return ", ".join(f"{name} {there.get(name, 'unknown')} instead of {here.get(name, 'unknown')}" for name in names)


def _code_hash() -> str:
    package = Path(__file__).parents[1]
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        hashed.update(f"{path.relative_to(package)}\0".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def own_identity() -> Identity:
    """Return who this process is, as an agent."""
    return Identity(
        agent=secrets.token_hex(8),
        host=platform.node(),
        boot=_boot(),
        pid=os.getpid(),
        started=_state_and_start(os.getpid())[1],
    )


def has_ended(agent: Identity) -> bool:
    """Whether it is certain that an agent's process is gone, and its children with it: it was one of this machine."""
    if not agent.boot or agent.boot != _boot():
        return False
    state, started = _state_and_start(agent.pid)
    return state in ("", "Z", "X") or started != agent.started


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state and when it began, as Linux tells (proc_pid_stat(5)); empty and 0 without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _boot() -> str:
    """Return what identifies this machine since its start, and the space in which process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
