"""Virtual environments that are made for one check and removed after it, and commands run in them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

_OURS = re.compile(r"PYTHON|VIRTUAL_ENV|COVERAGE|PYTEST")
"""Variables by which one environment could reach into another."""


class CheckError(Exception):
    """What a check found wrong, in words for whoever ran it."""


def check(condition: object, message: str) -> None:
    """Raise a CheckError unless a condition holds."""
    if not condition:
        raise CheckError(message)


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Make a folder outside the repository and remove it at the end; ``KEEP=1`` keeps it and says where it is."""
    folder = Path(tempfile.mkdtemp(prefix=f"dryfit-{name}-"))
    try:
        yield folder
    finally:
        if os.environ.get("KEEP") == "1":
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print what is done, and the seconds it took once it is."""
    start = time.monotonic()
    print(f"-- {what}", flush=True)
    try:
        yield
    finally:
        print(f"   {time.monotonic() - start:.0f} s", flush=True)


def outside(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """Return this process's environment without what leads back to this repository's, with some changes."""
    return {key: value for key, value in os.environ.items() if not _OURS.match(key)} | dict(changes)


def run(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, may_fail: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command without standard input and return what it wrote.

    Raises:
        CheckError: It ended with another status than 0, and may not.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=outside() if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 and not may_fail:
        raise CheckError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done


def copy_sources(folder: Path) -> None:
    """Copy what git knows, or does not ignore, of the repository into a folder."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():  # one that is deleted and not committed is listed too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in a folder of its own."""

    folder: Path

    @property
    def bin(self) -> Path:
        """The folder with its programs."""
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / "python"

    def install(self, *requirements: str | Path) -> None:
        """Install requirements by pip, quietly; modules are compiled when they are imported, most of them never.

        Raises:
            CheckError: pip could not.
        """
        run([self.python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements], cwd=self.folder)

    def versions(self, *distributions: str) -> tuple[str, ...]:
        """Return the versions of installed distributions, an empty text for one that is absent."""
        code = (
            "import importlib.metadata as m, sys\n"
            "for name in sys.argv[1:]:\n"
            "    print(next((d.version for d in m.distributions(name=name)), ''))"
        )
        done = run([self.python, "-I", "-c", code, *distributions], cwd=self.folder)
        return tuple(done.stdout.split("\n")[: len(distributions)])


def make_environment(folder: Path, python: str | Path = sys.executable) -> Environment:
    """Make a virtual environment with nothing but pip in it."""
    run([python, "-m", "venv", folder], cwd=folder.parent)
    return Environment(folder)
