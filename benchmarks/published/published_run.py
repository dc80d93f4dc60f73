"""Rehearse scripts whose memory others measured and published, unmodified, one after the other.

``make published PEFT=... TIMM=...`` takes git repositories, runs the rows of ``rows.csv`` at their commits, and adds
each to ``predictions.jsonl``. It does not read what was measured (``measured.csv``): that is for ``compare.py``, after
the predictions are committed. A row with a prediction by the same model of the machine is not run again.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PREDICTIONS = HERE / "predictions.jsonl"
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "strangers"))

from published_list import FAMILIES, Row, counters, rows_of  # noqa: E402
from published_stacks import here, own, versions_of  # noqa: E402
from strangers import dryfit_commit, surroundings  # noqa: E402

from throwaway import CheckError, Environment  # noqa: E402

LIMIT_S = 300
MODEL = ("gpu", "settings/devices.py", "settings/device_reach.py")
"""What decides a prediction, in ``src/dryfit``: files and folders."""


def model_of_machine() -> str:
    """Return a digest of the sources that decide a prediction."""
    source = ROOT / "src" / "dryfit"
    files = [file for name in MODEL for file in ((source / name).rglob("*.py") if "." not in name else [source / name])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


def records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the newest prediction of each row."""
    if not path.exists():
        return {}
    lines = path.read_text("utf-8").splitlines()
    return {record["row"]: record for record in map(json.loads, lines)}


def first_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the oldest prediction of each row that has counters: none of a later one was made without knowing."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {record["row"]: record for record in reversed([*map(json.loads, lines)]) if record.get("counters")}


class Field:
    """Folders of a run, outside the tree."""

    def __init__(self, out: Path, sources: dict[str, str], own_versions: bool = False) -> None:
        self.out, self.sources, self.own_versions = out, sources, own_versions
        for folder in ("home", "hf", "logs", "checkouts"):
            (out / folder).mkdir(parents=True, exist_ok=True)

    def why_not(self, row: Row) -> str:
        """Return why a row cannot be run here; empty where it can."""
        family = FAMILIES[row.family]
        if family.source and not self.sources.get(family.source):
            return f"no repository: {family.source}=FOLDER"
        if self.own_versions:
            return ""
        missing = [name for name in family.packages if importlib.util.find_spec(name) is None]
        return f"no package {', '.join(missing)}" if missing else ""

    def stack(self, row: Row) -> Environment:
        """Return the environment of a row, with its own versions where they are asked for."""
        requires = FAMILIES[row.family].requires
        if self.own_versions and requires:
            return own(row.pins, requires, self.out / "environments")
        return here()

    def checkout(self, row: Row) -> Path:
        """Return a clone at the row's commit, on a branch ``main``, as the scripts want it."""
        family = FAMILIES[row.family]
        folder = self.out / "checkouts" / f"{family.source or 'own'}-{row.commit[:8]}"
        if not family.source:
            folder.mkdir(exist_ok=True)
        elif not folder.exists():
            clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", self.sources[family.source], str(folder)]
            subprocess.run(clone, check=True)
            subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "-B", "main", row.commit], check=True)
        return folder

    def lay(self, row: Row, python: Path) -> Path:
        """Make the row's inputs by the interpreter that runs it, and return the folder where it runs."""
        family, folder = FAMILIES[row.family], self.checkout(row) / FAMILIES[row.family].folder
        for spec in family.makes:
            argv = [str(python), str(HERE / "published_inputs.py"), str(self.out), *row.filled(spec).split()]
            done = subprocess.run(
                argv, cwd=folder, env=self.environment(row), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{spec}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        if family.overlay:
            name, values = family.overlay
            path = folder / row.filled(name)
            before = subprocess.run(
                ["git", "-C", str(folder), "show", f"HEAD:./{row.filled(name)}"],
                capture_output=True,
                text=True,
                check=False,
            )
            path.write_text(json.dumps((json.loads(before.stdout) if before.returncode == 0 else {}) | values))
        return folder

    def environment(self, row: Row) -> dict[str, str]:
        """Return the environment of a row: caches outside the tree, no network."""
        copy = self.checkout(row)
        path = [str(copy / folder) for folder in FAMILIES[row.family].path]
        return surroundings(self.out, path) | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def predict(row: Row, field: Field, limit_s: float) -> dict[str, Any]:
    """Rehearse one row and return its record, without its name."""
    if why := field.why_not(row):
        return {"not_run": why}
    try:
        stack = field.stack(row)
        folder = field.lay(row, stack.python)
    except (OSError, RuntimeError, CheckError, subprocess.CalledProcessError) as error:
        return {"not_run": f"its inputs could not be made: {error}"}
    family = FAMILIES[row.family]
    argv = [str(Path(sys.executable).with_name("dryfit")), "rehearse", "--json", "--device", row.device]
    argv += [
        "--timeout",
        f"{limit_s:g}",
        "--python",
        str(stack.python),
        *family.options.split(),
        *shlex.split(row.filled(family.command, str(HERE))),
    ]
    name = row.name.replace("/", "-").replace(" ", "_")
    out, err = field.out / "logs" / f"{name}.json", field.out / "logs" / f"{name}.log"
    began = time.monotonic()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            argv, cwd=folder, env=field.environment(row), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )
        ended = _wait(process, limit_s)
    text, log = out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace")
    answer = json.loads(text) if text.strip().startswith("{") else {}
    # What a script of PEFT logged stands, also where the time was over while it or the rehearsal ended.
    found = counters(row.family, answer, log) if not ended or row.family == "image-gen" else {}
    took = {
        "seconds": round(time.monotonic() - began),
        "torch": answer.get("torch"),
        "stack": versions_of(stack, row.pins),
    }
    record = took | {"counters": found}
    record["step_time"] = step_time_of(answer)
    return record if found else record | {"why": ended or reason(answer, log)}


def step_time_of(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a rehearsal says of a step's seconds, without what is the same for each row of a card."""
    told = answer.get("step_time")
    return told and {name: told[name] for name in ("estimate_s", "low_s", "high_s", "level", "by_kind")}


def reason(answer: dict[str, Any], log: str) -> str:
    """Return in one line why a rehearsal has no counters."""
    said = [line for line in log.splitlines() if line.startswith(("encountered an error", "Error", "error"))]
    raised = [line for line in str(answer.get("traceback") or "").splitlines() if line.strip()]
    return (said or raised or [str(answer.get("ended") or "no answer")])[-1].strip()[:300]


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> str:
    """Wait for a rehearsal; return why it was ended, empty where it ended by itself."""
    try:
        process.wait(limit_s)
        return ""
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return f"over {limit_s:g} s"


def run(rows: Sequence[Row], field: Field, predictions: Path, limit_s: float, until: float = float("inf")) -> None:
    """Rehearse the rows that have no prediction by this model, one after the other, until a time of the clock."""
    known = records(predictions)
    for row in rows:
        model, before = model_of_machine(), known.get(row.name)
        is_known = before and not before.get("not_run") and (before.get("model"), before["key"]) == (model, row.key)
        if is_known and (not field.own_versions or before.get("own_versions")):
            continue
        if time.time() > until:
            print("no time for more rows", flush=True)
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        made_by = {"dryfit": dryfit_commit(), "model": model, "when": now, "own_versions": field.own_versions}
        record = {"row": row.name, "key": row.key} | made_by | predict(row, field, limit_s)
        with predictions.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        print(row.name, record.get("counters") or record.get("not_run") or record.get("why"), flush=True)


def main() -> None:
    """Predict rows, all, those of families or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for checkouts, inputs and logs")
    for source in sorted({family.source for family in FAMILIES.values()} - {""}):
        parser.add_argument(f"--{source.lower()}", default=os.environ.get(source, ""), help="a git repository")
    parser.add_argument("--families", default="", help="with commas between them; default: all")
    parser.add_argument("--rows", default="", help="names with commas between them, run in that order; default: all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="most seconds for a row (%(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--own-versions", action="store_true", help="in environments with each row's own versions")
    given = parser.parse_args()
    rows = rows_of((HERE / "rows.csv").read_text("utf-8"))
    if given.families:
        rows = tuple(row for row in rows if row.family in given.families.split(","))
    if given.rows:
        by_name = {row.name: row for row in rows}
        if unknown := [name for name in given.rows.split(",") if name not in by_name]:
            parser.error(f"no rows {', '.join(unknown)}")
        rows = tuple(by_name[name] for name in given.rows.split(","))
    sources = {family.source: getattr(given, family.source.lower()) for family in FAMILIES.values() if family.source}
    until = time.time() + 60 * given.minutes
    run(rows, Field(given.out.resolve(), sources, given.own_versions), given.predictions, given.limit, until)


if __name__ == "__main__":
    main()
