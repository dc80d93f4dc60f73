"""What a report costs: seconds and megabytes for a study of 5 000 trials, made of a ledger that never ran."""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import dryfit
import ledgers

TRIALS = 5000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        study = ledgers.eventful(TRIALS).write(Path(folder) / "study")
        ledger_mib = (study / "ledger.jsonl").stat().st_size / 2**20
        print(f"{TRIALS} trials, ledger {ledger_mib:.1f} MiB")
        for name, make in (
            ("report", lambda: dryfit.write_report(study)),
            ("export csv", lambda: dryfit.export(study, "csv")),
            ("export optuna", lambda: dryfit.export(study, "optuna")),
        ):
            begin_s = time.perf_counter()
            path = make()
            print(f"{name}: {time.perf_counter() - begin_s:.1f} s, {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
