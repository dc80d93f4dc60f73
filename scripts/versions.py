"""Run tests on the oldest and newest versions that pyproject.toml allows, and on each Python it names: `make versions`.

Each run has an environment of its own in a temporary folder, one at a time: a torch from the package index may bring
CUDA libraries of several gigabytes. `RUNS="3.11:lowest 3.13:highest"` chooses among the runs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from throwaway import ROOT, CheckError, copy_sources, make_environment, outside, run, temporary_folder, timed

SHOWN = ("torch", "transformers", "accelerate", "optuna")
AT_THEIR_LOWEST = (*SHOWN, "peft")
"""What a run of the lowest versions takes at its lower bound; pip chooses the rest."""
_QUICK = "not slow and not nightly and not gpu and not chaos_long and not nodes"
QUICK = ("-m", _QUICK)
CHECK = ("--light", "-m", f"{_QUICK} and not heavy")
"""What `make check` runs; the tests that are asked for are run after it."""
FREE_BYTES = 15 * 10**9
"""Room for one environment with a CUDA build of torch, and for what pip unpacks on the way."""


class Bounds(StrEnum):
    """Which versions of those allowed a run takes."""

    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what was run, with which versions, and what came of it."""

    python: str
    bounds: Bounds
    versions: tuple[str, ...]
    result: str
    passed: bool


def wanted_runs(pyproject: Mapping[str, Any]) -> list[tuple[str, Bounds]]:
    """List the runs: the oldest Python that is named with the lowest versions, every other one with the highest."""
    named = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text) for text in pyproject["classifiers"])
    pythons = sorted((match[1] for match in named if match), key=lambda text: int(text.partition(".")[2]))
    return [(pythons[0], Bounds.LOWEST), *((python, Bounds.HIGHEST) for python in pythons[1:])]


def chosen_runs(runs: Sequence[tuple[str, Bounds]], words: str) -> list[tuple[str, Bounds]]:
    """Return the runs that were asked for as ``PYTHON:BOUNDS``, usual ones or others; the usual ones where nothing was.

    Raises:
        CheckError: A word is no run.
    """
    found: list[tuple[str, Bounds]] = []
    for word in words.split():
        python, _, bounds = word.partition(":")
        if not re.fullmatch(r"3\.\d+", python) or bounds not in set(Bounds):
            raise CheckError(f"reading RUNS: {word!r} is no run; allowed: 3.N:lowest and 3.N:highest")
        found.append((python, Bounds(bounds)))
    return found or list(runs)


def lowest_pins(pyproject: Mapping[str, Any]) -> list[str]:
    """Return a constraint for each package that is taken at its lower bound.

    Raises:
        CheckError: One of them has no lower bound.
    """
    extras = [text for texts in pyproject["optional-dependencies"].values() for text in texts]
    pins: dict[str, str] = {}
    for requirement in map(Requirement, (*pyproject["dependencies"], *extras)):
        lowest = [part.version for part in requirement.specifier if part.operator == ">="]
        if requirement.name in AT_THEIR_LOWEST and lowest:
            pins.setdefault(requirement.name, f"{requirement.name}=={lowest[0]}")
    lacking = set(AT_THEIR_LOWEST) - set(pins)
    if lacking:
        raise CheckError(f"reading pyproject.toml: no lower bound for {', '.join(sorted(lacking))}")
    return list(pins.values())


def candidates(version: str, home: Path, look: Callable[[str], str | None]) -> Iterable[str | Path]:
    """Yield where an interpreter of a version may be: on PATH, by uv, in pyenv's folder."""
    yield sys.executable
    if found := look(f"python{version}"):
        yield found
    if uv := look("uv"):
        done = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield done.stdout.strip()
    yield from sorted(home.glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)


def works(python: str | Path, version: str) -> bool:
    """Whether an interpreter runs, is of a version and can make environments; a shim of pyenv's may do nothing."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def find_python(version: str, home: Path, look: Callable[[str], str | None] = shutil.which) -> str | Path | None:
    """Return an interpreter of a version, None where this machine has none."""
    return next((python for python in candidates(version, home, look) if works(python, version)), None)


def run_one(folder: Path, python: str | Path, version: str, bounds: Bounds, tests: Sequence[str]) -> Row:
    """Make an environment, run the tests in it on a copy of the sources, and say what came of them."""
    source = folder / "source"
    copy_sources(source)
    environment = make_environment(folder / "environment", python)
    pins = folder / "pins.txt"
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pins.write_text("\n".join(lowest_pins(pyproject) if bounds is Bounds.LOWEST else []), "utf-8")
    try:
        environment.install("--upgrade", "-c", pins, "-e", f"{source}[all,demo,dev]")
    except CheckError as error:
        print(error, file=sys.stderr)
        return Row(version, bounds, ("",) * len(SHOWN), "cannot be installed", passed=False)
    versions = environment.versions(*SHOWN)
    command = [environment.python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    if bounds is Bounds.LOWEST:  # an old library uses what another deprecates, as transformers 5.17 torch.jit.script
        command += ["-W", "ignore::DeprecationWarning"]
    lasts: list[str] = []
    passed = True
    with timed(f"the tests on Python {version}, {', '.join(map(' '.join, zip(SHOWN, versions, strict=True)))}"):
        for selection in (CHECK, (*QUICK, *tests)):
            done = run([*command, *selection], cwd=source, env=outside(), may_fail=True)
            lasts.append((done.stdout.strip().splitlines() or ["no output"])[-1].strip("= "))
            if done.returncode != 0 or not re.search(r"\b\d+ passed", lasts[-1]):
                passed = False
                print(done.stdout[-20000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    return Row(version, bounds, versions, " + ".join(lasts), passed)


def table(rows: Sequence[Row], left_out: Sequence[str]) -> str:
    """Return what was run as a table, and what was left out with the reasons."""
    heads = ("python", "versions", *SHOWN, "result")
    cells = [heads, *((row.python, row.bounds, *row.versions, row.result) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(f"left out: {text}" for text in left_out)])


def status(rows: Sequence[Row]) -> int:
    """Return the exit status: 0 where something was run and all of it passed."""
    return int(not rows or not all(row.passed for row in rows))


def main(tests: Sequence[str]) -> int:
    """Run all that can be run here; return 1 where a run failed, or none was possible."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    rows: list[Row] = []
    left_out: list[str] = []
    try:
        for version, bounds in chosen_runs(wanted_runs(pyproject), os.environ.get("RUNS", "")):
            name = f"Python {version}, {bounds} versions"
            python = find_python(version, Path.home())
            if python is None:
                left_out.append(f"{name}: no python{version} on PATH, by uv or in ~/.pyenv that can make environments")
            elif (free := shutil.disk_usage(tempfile.gettempdir()).free) < FREE_BYTES:
                left_out.append(
                    f"{name}: {free / 1e9:.0f} GB are free for it, of the {FREE_BYTES / 1e9:.0f} it may take"
                )
            else:
                with temporary_folder("versions") as folder, timed(f"{name}, by {python}"):
                    rows.append(run_one(folder, python, version, bounds, tests))
    except CheckError as error:
        print(f"make versions: {error}", file=sys.stderr)
        return 1
    print(table(rows, left_out))
    if not rows:
        print("make versions: nothing was run", file=sys.stderr)
    return status(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
