"""Plans held against a GPU: one command for a machine that has one.

    python benchmarks/gpu_memory.py --out gpu-memory [--minutes 25] [--only 'bert-base*'] [--parallel 4]

Each configuration is planned in a process that sees no device, then run (loading, three steps with a validation before
the last, a checkpoint) in a fresh process on the GPU with random weights; nothing is downloaded. Results are appended
to OUT/results.jsonl, so the same command goes on where it was stopped; what failed is tried again with --again. The
tables are printed and written to OUT/report.md. Plans use the built-in constants: no calibration of this machine.

--dry plans and prints without a device. --parallel runs several configurations side by side on one device, which
spoils the context sizes of the single runs: the one in the heading is measured alone.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_memory_tables as tables
from gpu_memory_cases import Entry, entries, parse

from dryfit.settings.devices import parse_device
from dryfit.settings.memory_terms import DeviceSpec

STAGE_LIMIT_S = 900
SETTLED = ("ok", "survived", "oom", "too large")
MIB = 2**20


@dataclass
class Ledger:
    """Results as lines of JSON; the last line of a configuration and stage counts."""

    path: Path
    found: tables.Results = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                self._keep(json.loads(line))
            except json.JSONDecodeError:
                continue  # torn when an earlier run was killed

    def add(self, line: dict[str, Any]) -> None:
        with self.lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        self.found.setdefault(line["name"], {})[line["stage"]] = line


@dataclass
class Room:
    """Device memory, lent to those who run side by side."""

    free_bytes: int
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size_bytes: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.free_bytes >= size_bytes)
            self.free_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        with self.changed:
            self.free_bytes += size_bytes
            self.changed.notify_all()


@dataclass
class Run:
    """One call of this script."""

    options: argparse.Namespace
    ledger: Ledger
    ends_s: float
    spec: DeviceSpec | None = None
    room: Room | None = None

    def stage(self, name: str, stage: str, line: str, *, sees_device: bool) -> dict[str, Any] | None:
        """Run a stage in a process of its own, or take its earlier result; None where time is up."""
        known = self.ledger.found.get(name, {}).get(stage)
        if known is not None and (known["status"] in SETTLED or not self.options.again):
            return known
        if time.monotonic() > self.ends_s:
            return None
        began_s = time.monotonic()
        folder = self.options.out / "work" / f"{name}.{stage}"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--stage", stage, "--line", line, "--out", str(self.options.out)]
        command += ["--into", str(folder / "result.json"), *(["--dry"] if self.options.dry else [])]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if not sees_device:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        (folder / "result.json").unlink(missing_ok=True)
        why = ""
        try:
            with (folder / "log.txt").open("w", encoding="utf-8") as log:
                subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=STAGE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            why = f"took more than {STAGE_LIMIT_S} s"
        if (folder / "result.json").exists():
            found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        else:
            said = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            found = {"status": "failed", "why": why or (said[-1] if said else "no output")}
        found |= {"name": name, "stage": stage, "wall_s": round(time.monotonic() - began_s, 1)}
        self.ledger.add(found)
        print(f"{name:<60} {stage:<10} {found['status']:<10} {found['wall_s']:>6.1f} s", flush=True)
        return found

    def configuration(self, entry: Entry) -> None:
        """Plan, run, compare, and run again near the smallest cap."""
        name, line = entry.case.name, entry.line
        plan = self.stage(name, "plan", line, sees_device=False)
        if self.options.dry or plan is None or plan["status"] != "ok" or self.spec is None or self.room is None:
            return
        needed = plan["peak_reserved_bytes"] + plan["overhead_bytes"] + 512 * MIB
        if needed > self.spec.capacity_bytes:
            self.ledger.add({"name": name, "stage": "run", "status": "too large", "why": f"{needed / 2**30:.1f} GiB"})
            return
        self.room.take(needed)
        try:
            ran = self.stage(name, "run", line, sees_device=True)
            if entry.is_capped:
                self.stage(name, "cap-above", line, sees_device=True)
                self.stage(name, "cap-below", line, sees_device=True)
        finally:
            self.room.give(needed)
        if entry.keeps_history and ran is not None and ran["status"] == "ok":
            self.stage(name, "compare", line, sees_device=False)

    def all(self) -> None:
        """The machine, the kernels, every configuration."""
        probed = self.stage("machine", "probe", "", sees_device=not self.options.dry)
        if probed is None or probed["status"] != "ok":
            raise SystemExit(f"no device can be used: {(probed or {}).get('why', 'time is up')}; --dry needs none")
        self.spec = DeviceSpec.model_validate(probed["device"], strict=False)
        self.room = Room(int(self.spec.capacity_bytes * 0.95))
        self.stage("machine", "kernels", "", sees_device=not self.options.dry)
        with ThreadPoolExecutor(self.options.parallel) as pool:
            asked = [pool.submit(self.configuration, entry) for entry in chosen(self.options)]
            for one in asked:
                one.result()


def chosen(options: argparse.Namespace) -> list[Entry]:
    """The configurations asked for."""
    if options.lines:
        text = options.lines.read_text(encoding="utf-8").strip().splitlines()
        found = [parse(line) for line in text]
    else:
        found = entries()
    return [entry for entry in found if fnmatch.fnmatch(entry.case.name, options.only)]


def report(results: tables.Results) -> str:
    """All tables, as Markdown that reads as text."""
    machine = results.get("machine", {})
    probed, kernels = machine.get("probe", {}), machine.get("kernels", {})
    rows = tables.compared(results)
    heading = f"torch {probed.get('torch')}, transformers {probed.get('transformers')}, {probed.get('device')}"
    parts = ["# Planned and observed memory", heading]
    if "context_bytes" in probed:
        first, other = (tables.mib(size) for size in probed["workspace_bytes"])
        context = tables.mib(probed["context_bytes"])
        parts.append(f"Context {context} MiB; cuBLAS workspace {first} MiB (main thread), {other} MiB (autograd's).")
    if rows:
        parts += ["## Errors", tables.group_table(rows), "## Configurations", tables.case_table(rows)]
    if any("compare" in stages for stages in results.values()):
        parts += ["## Allocation by allocation", tables.history_table(results)]
    if any("cap-above" in stages for stages in results.values()):
        parts += ["## At the smallest cap", tables.cap_table(results)]
    if "rows" in kernels:
        parts += ["## Kernels", tables.kernel_table(kernels["rows"])]
    planned = sum(stages.get("plan", {}).get("status") == "ok" for stages in results.values())
    parts += [
        f"{planned} configurations planned, {len(rows)} of them run.",
        "## Not done",
        tables.trouble_table(results),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-memory"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after so long")
    parser.add_argument("--only", default="*", help="names to run, as in a shell")
    parser.add_argument("--lines", type=Path, help="a file of configurations in place of the built-in ones")
    parser.add_argument("--parallel", type=int, default=1, help="configurations side by side")
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--dry", action="store_true", help="plans only")
    parser.add_argument("--device", default="h200", help="what --dry plans for")
    for hidden in ("--stage", "--line", "--into"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.stage:
        import gpu_memory_stages

        gpu_memory_stages.run(options.stage, options.line, options.out, Path(options.into), dry=options.dry)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.dry:
        (options.out / "device.json").write_text(parse_device(options.device).model_dump_json(), encoding="utf-8")
    run = Run(options, Ledger(options.out / "results.jsonl"), time.monotonic() + options.minutes * 60)
    try:
        run.all()
    finally:
        text = report(run.ledger.found)
        (options.out / "report.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
