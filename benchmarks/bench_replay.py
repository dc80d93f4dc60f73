"""What a long ledger costs to replay: CPU seconds and memory of reading it, of taking it over, and of the commands.

    python benchmarks/bench_replay.py [--trials 1000 5000]

Each figure is of a process of its own. Target at 5 000 trials: 2 s, and 100 MiB more than before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import long_study
import psutil
from measured import run

from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import Ledger
from dryfit.ledger.replay import StudyState
from dryfit.study.session import read_study

WAYS = ("read", "take over")


def cost(way: str, folder: Path) -> None:
    """Replay in this process and print what it took, as JSON."""
    layout, process = StudyLayout(folder), psutil.Process()
    before_bytes, began_s = process.memory_info().rss, time.process_time()
    if way == "read":
        state = read_study(layout)
    else:
        state = StudyState()
        Ledger(layout.ledger, apply=state.apply).close()
    cpu_s = time.process_time() - began_s
    more_bytes = process.memory_info().rss - before_bytes
    print(json.dumps({"cpu_s": cpu_s, "mib": more_bytes / 2**20, "trials": len(state.trials)}))


def commands(folder: Path, trials: int) -> None:
    """Time the commands that look at the study."""
    for words in (["status"], ["show", str(trials // 2)], ["report"]):
        taken = run(
            [sys.executable, "-m", "dryfit.documents.command_line", words[0], str(folder), *words[1:]],
            folder / "commands.log",
        )
        print(
            f"  dryfit {words[0]:7s} {taken.cpu_s:5.2f} s CPU, {taken.wall_s:5.2f} s wall, start included", flush=True
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        cost(options.child[0], Path(options.child[1]))
        return
    for trials in options.trials:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "study"
            told = long_study.script(trials)
            told.write(folder)
            size_mib = (folder / "ledger.jsonl").stat().st_size / 2**20
            print(f"{trials} trials, {len(told.events)} events, {size_mib:.1f} MiB")
            for way in WAYS:
                command = [sys.executable, __file__, "--child", way, str(folder)]
                found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                assert found["trials"] == trials
                print(f"  {way:14s} {found['cpu_s']:5.2f} s CPU, {found['mib']:5.1f} MiB more", flush=True)
            commands(folder, trials)


if __name__ == "__main__":
    main()
