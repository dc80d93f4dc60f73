"""Rehearse strangers' scripts, unmodified, one after the other, and write docs/strangers.md.

``make strangers DIR=FOLDER`` runs the rows of ``rows.toml`` whose repository is checked out in FOLDER, each a folder
of the repository's name at the commit that the list names (a checkout without ``.git`` says it in a file ``.commit``).
Copies of the checkouts, inputs and results lie in OUT (FOLDER/strangers). A row that has a result by the same dryfit is
not run again; one without a result in OUT keeps its line of the page.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "strangers.md"
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

from strangers_cpu import Spent  # noqa: E402
from strangers_list import LIMIT_CPU_S, Row, kind_of, raised, reason, rows_of  # noqa: E402
from strangers_page import render, with_table  # noqa: E402

from throwaway import CheckError, make_environment  # noqa: E402

WALL_S = 5 * LIMIT_CPU_S
"""A row is judged by its CPU seconds, whatever else the machine does; after so many of the clock it is ended anyway."""

LONGEST_TEXT = 4000
CAPS = {"by_line": 8, "by_module": 0, "timeline": 0, "muted": 12, "unknown": 12, "steps": 12, "ladder": 4}
"""Of these lists of an answer so many entries are kept."""


def listed() -> tuple[Row, ...]:
    """Return the rows of the list."""
    return rows_of(tomllib.loads((HERE / "rows.toml").read_text("utf-8")))


def dryfit_commit() -> str:
    """Return the last commit that changed dryfit, marked where something is changed since."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "log", "-1", "--format=%h", "--", "src/dryfit"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "src/dryfit"], capture_output=True, text=True, check=False
    ).stdout
    return commit.stdout.strip() + ("+changes" if changed.strip() else "")


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout; empty where there is none."""
    if (checkout / ".commit").exists():
        return (checkout / ".commit").read_text().strip()
    if not (checkout / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def is_there(package: str) -> bool:
    """Whether a module can be imported, or a distribution of the versions that a requirement allows is installed."""
    wanted = Requirement(package)
    if not wanted.specifier:
        return importlib.util.find_spec(package) is not None
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


class Field:
    """Folders of a run: checkouts as they are, and beside them what rows write."""

    def __init__(self, checkouts: Path, out: Path) -> None:
        self.checkouts, self.working, self.results = checkouts, out / "W", out / "rows.jsonl"
        self.logs, self.environments = out / "logs", out / "environments"
        for folder in (self.working / "checkouts", self.working / "home", self.logs, self.environments):
            folder.mkdir(parents=True, exist_ok=True)

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the newest record of each row."""
        if not self.results.exists():
            return {}
        lines = self.results.read_text("utf-8").splitlines()
        return {record["row"]: record for record in map(json.loads, lines)}

    def why_not(self, row: Row) -> str:
        """Return why a row cannot be run here; empty where it can."""
        source = self.checkouts / row.checkout
        if not source.is_dir():
            return f"no checkout of {row.repository}"
        if commit_of(source) != row.commit:
            return (
                f"the checkout of {row.repository} is at {commit_of(source)[:8] or 'no commit'}, not {row.commit[:8]}"
            )
        missing = [name for name in row.packages if not is_there(name)]
        return f"no package {', '.join(missing)}" if missing else ""

    def lay(self, row: Row) -> Path:
        """Copy the row's checkout, make its inputs, and return the folder where it runs."""
        copy = self.working / "checkouts" / row.checkout
        if not copy.exists():
            ignored = shutil.ignore_patterns(".git")
            shutil.copytree(self.checkouts / row.checkout, copy, symlinks=True, ignore=ignored)
        folder = copy / row.folder
        for spec in row.makes:
            argv = [sys.executable, str(HERE / "stranger_inputs.py"), str(self.working), *spec.split()]
            done = subprocess.run(
                argv, cwd=folder, env=self.environment(row), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{spec}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return folder

    def interpreter(self, row: Row) -> Path:
        """Return the interpreter of a row: of an environment with its versions, and the rest from here.

        Raises:
            CheckError: A version could not be installed.
        """
        if not row.versions:
            return Path(sys.executable)
        home = self.environments / hashlib.sha256(" ".join(row.versions).encode()).hexdigest()[:12]
        if not (home / "made").exists():
            shutil.rmtree(home, ignore_errors=True)
            made = make_environment(home)
            made.install("--no-deps", *row.versions)
            (packages,) = home.glob("lib/python*/site-packages")
            (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
            (home / "made").touch()
        return home / "bin" / "python"

    def environment(self, row: Row) -> dict[str, str]:
        """Return the environment of a row: caches in the working folder, no network."""
        copy = self.working / "checkouts" / row.checkout
        path = [str(HERE / "at_start"), *(str(copy / folder) for folder in row.path)]
        return surroundings(self.working, path) | {
            "TIKTOKEN_CACHE_DIR": str(self.working / "tiktoken"),
            "TORCH_HOME": str(self.working / "torch"),
            "STRANGERS_MADE": str(self.working),
            **dict(pair.split("=", 1) for pair in row.variables),
        }


def surroundings(folder: Path, path: Sequence[str]) -> dict[str, str]:
    """Return the environment of a stranger's script: without a network, its home and its hub in a folder.

    Args:
        path: Folders to import from, before those of this process.
    """
    return os.environ | {
        "HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH", "")])),
    }


def rehearse(row: Row, field: Field, limit_s: float) -> dict[str, Any]:
    """Rehearse one row and return its record, without its name."""
    if why := field.why_not(row):
        return {"not_run": why}
    try:
        folder, python = field.lay(row), field.interpreter(row)
    except (OSError, RuntimeError, CheckError) as error:
        return {"not_run": f"its inputs could not be made: {error}"}
    argv = [
        str(Path(sys.executable).with_name("dryfit")),
        "rehearse",
        "--json",
        "--device",
        row.device,
        "--python",
        str(python),
    ]
    argv += ["--timeout", f"{limit_s:g}", *row.options.split(), *row.words(str(field.working))]
    out, err = field.logs / f"{row.name}.json", field.logs / f"{row.name}.log"
    began, spent = time.monotonic(), Spent()
    with out.open("w") as stdout, err.open("w") as stderr:
        environment = field.environment(row)
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )
        ended = _wait(process, spent, limit_s)
    record = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(spent.seconds(), 1)}
    record |= {"status": process.returncode, "ended": ended}
    record["stderr"] = err.read_text("utf-8", "replace")[-LONGEST_TEXT:]
    text = out.read_text("utf-8", "replace")
    return record | ({"answer": kept(json.loads(text))} if text.strip().startswith("{") else {})


def _wait(process: subprocess.Popen[bytes], spent: Spent, limit_s: float) -> str:
    """Wait for a rehearsal, and interrupt it when its time is up; return how, empty where it ended by itself."""
    began, why = time.monotonic(), ""
    while not why:
        try:
            process.wait(1)
            return ""
        except subprocess.TimeoutExpired:
            if spent.seconds() > LIMIT_CPU_S:
                why = f"{LIMIT_CPU_S:g} CPU seconds"
            elif time.monotonic() - began > limit_s:
                why = f"{limit_s:g} s"
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
        return f"interrupted after {why}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"killed a minute after {why}"


def kept(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without what is long."""
    short = dict(answer)
    for name, most in CAPS.items():
        value = short.get(name)
        short[name] = value[:most] if isinstance(value, list) else None if most == 0 else value
    text = str(short.get("traceback") or "")
    short["traceback"] = text if len(text) <= LONGEST_TEXT else f"{raised(text)}\n...\n{text[-LONGEST_TEXT:]}"
    return short


def run(rows: Sequence[Row], field: Field, limit_s: float) -> None:
    """Rehearse the rows that have no result by this dryfit, one after the other."""
    known = field.records()
    for row in rows:
        commit, before = dryfit_commit(), known.get(row.name)
        if before and not before.get("not_run") and (before["dryfit"], before["key"]) == (commit, row.key):
            continue
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"row": row.name, "key": row.key, "dryfit": commit, "when": now} | rehearse(row, field, limit_s)
        with field.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        kind = kind_of(record)
        why = "" if "answer" in record and record["answer"].get("fits") is not None else f": {reason(record)}"
        took = f"{record.get('cpu_seconds', 0):.0f} CPU seconds in {record.get('seconds', 0):.0f} s"
        print(f"{row.name}: {kind}, {took}{why}", flush=True)


def main() -> None:
    """Run rows, all or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--out", type=Path, help="default: CHECKOUTS/strangers")
    parser.add_argument("--rows", default="", help="names with commas between them, run in that order; default: all")
    parser.add_argument("--limit", type=float, default=WALL_S, help="most seconds of the clock for a row (%(default)s)")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    parser.add_argument("--only-page", action="store_true", help="write the page of the results that there are")
    given = parser.parse_args()
    field = Field(given.checkouts.resolve(), (given.out or given.checkouts / "strangers").resolve())
    rows = listed()
    by_name = {row.name: row for row in rows}
    names = [name for name in given.rows.split(",") if name] or list(by_name)
    if unknown := set(names) - by_name.keys():
        parser.error(f"no rows {', '.join(sorted(unknown))}")
    if not given.only_page:
        run([by_name[name] for name in names], field, given.limit)
    if given.no_page:
        return
    page = PAGE.read_text("utf-8")
    table = render(rows, field.records(), working=str(field.working), page=page)
    PAGE.write_text(with_table(page, table), "utf-8")


if __name__ == "__main__":
    main()
