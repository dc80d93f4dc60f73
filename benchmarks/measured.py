"""What the benchmarks share: running a command as a whole process tree, and medians."""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What a process and all it waited for has cost."""

    cpu_s: float
    wall_s: float


def contract_files(folder: str | None) -> dict[str, str] | None:
    """The file of each split of the contract rows; None, and said so, where they are not at hand."""
    if not folder:
        print("contract rows not at hand (--contracts FOLDER or DRYFIT_CONTRACTS): skipped")
        return None
    return {split: str(Path(folder) / f"{split}.jsonl") for split in ("train", "validation", "test")}


def run(command: Sequence[str], log: Path) -> Cost:
    """Run a command to its end; its output goes to ``log``.

    Raises:
        RuntimeError: It failed.
    """
    began_s = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}, see {log}")
    return Cost(cpu_s=usage.ru_utime + usage.ru_stime, wall_s=time.perf_counter() - began_s)


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median with minimum and maximum."""
    return f"{statistics.median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g})"
