"""Search a Trainer over a night in which everything is killed again and again: no finished work is lost.

    python examples/overnight.py --trials 20 --kills 5 --model_name_or_path google-bert/bert-base-uncased

The study is that of ``train_classifier.py``, an unchanged script with a Trainer. ``dryfit tune`` is killed by SIGKILL,
as the kernel does where memory ends; the kernel ends its trials with it. The same command goes on from their
checkpoints. Start this program again, and it goes on too.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import dryfit

DRYFIT = Path(sys.executable).with_name("dryfit")
SCRIPT = Path(__file__).with_name("train_classifier.py")
EVENTS = 12
"""A kill comes after so many further events of the study: a trial that begins, a report, a checkpoint."""

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("overnight"))
parser.add_argument("--trials", type=int, default=20)
parser.add_argument("--kills", type=int, default=5)
own, of_the_script = parser.parse_known_args()

if not own.folder.exists():
    dryfit.init_script(own.folder, str(SCRIPT), ["--eval_strategy", "epoch", *of_the_script])
ledger = own.folder / "ledger.jsonl"


def events() -> int:
    """How many events have been written: a line each."""
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


for kill in range(own.kills):
    until = events() + EVENTS
    study = subprocess.Popen([DRYFIT, "tune", own.folder, "--trials", str(own.trials), "--quiet"])
    while study.poll() is None and events() < until:
        time.sleep(0.05)
    study.kill()
    if study.wait() == 0:
        break
    print(f"kill {kill + 1}: {events()} events are safe")
subprocess.run([DRYFIT, "tune", own.folder, "--trials", str(own.trials), "--quiet"], check=True)

attempts = [len(trial.attempts) for trial in dryfit.open_study(own.folder).trials]
print(f"{len(attempts)} trials in {sum(attempts)} attempts; the best: {dryfit.status(own.folder).best}")
