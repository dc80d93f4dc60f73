"""The contract job: a 6-trial search against a plain Trainer script, the winner reported once on the test rows.

    python benchmarks/bench_contracts.py --contracts FOLDER     (or DRYFIT_CONTRACTS=FOLDER)

Both train on the first 800 rows and are scored on the first 400 validation rows. The interval is a bootstrap over
contracts (rows of one contract are not independent): 2 000 resamples, 95 %.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from class_baselines import baseline_classes, f1_macro, labels, read_rows
from measured import contract_files, run
from sklearn.metrics import f1_score
from transformers import AutoTokenizer

import dryfit

HERE = Path(__file__).parent
RESAMPLES = 2000
TRAIN_ROWS, VALIDATION_ROWS = 800, 400  # as examples/contracts.toml has them


@dataclass(frozen=True)
class TestRows:
    """Rows that no search has read: as their file has them, their labels, and the contract each is from."""

    rows: list[dict]
    truth: np.ndarray
    groups: np.ndarray

    @classmethod
    def read(cls, path: str) -> "TestRows":
        rows = read_rows(path)
        return cls(rows, labels(rows), np.array([row["group"] for row in rows]))


def predict(folder: Path, rows: list[dict], max_length: int) -> np.ndarray:
    """Classes of the rows, by a trial's weights."""
    model, tokenizer = dryfit.load(folder), AutoTokenizer.from_pretrained(folder)
    guesses: list[int] = []
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        batch = tokenizer(
            [row["criterion"] for row in part],
            [row["text"] for row in part],
            truncation="only_second",
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            guesses += model(**batch).argmax(-1).tolist()
    return np.array(guesses)


def interval(test: TestRows, guesses: list[np.ndarray]) -> list[np.ndarray]:
    """Macro F1 of each set of guesses in every resample of the contracts."""
    draw = np.random.default_rng(0)
    members = [np.flatnonzero(test.groups == group) for group in np.unique(test.groups)]
    scores: list[list[float]] = [[] for _ in guesses]
    for _ in range(RESAMPLES):
        rows = np.concatenate([members[index] for index in draw.integers(len(members), size=len(members))])
        for out, guess in zip(scores, guesses, strict=True):
            out.append(float(f1_score(test.truth[rows], guess[rows], average="macro")))
    return [np.array(values) for values in scores]


def line(name: str, validation: float, test: TestRows, guess: np.ndarray, resampled: np.ndarray) -> str:
    low, high = np.percentile(resampled, [2.5, 97.5])
    score = f1_score(test.truth, guess, average="macro")
    return f"{name}: validation {validation:.3f}, test {score:.3f} (95 % interval {low:.3f} to {high:.3f})"


def print_baselines(data: dict[str, str], train_rows: int, validation_rows: int) -> None:
    """Print what needs no model: fitted on the training rows that the searches read, on the rows that score them."""
    test, validation = TestRows.read(data["test"]), read_rows(data["validation"], validation_rows)
    found = baseline_classes(read_rows(data["train"], train_rows), [validation, test.rows])
    resampled = interval(test, [said for _, said in found.values()])
    for (name, (on_validation, on_test)), scores in zip(found.items(), resampled, strict=True):
        print(line(name, f1_macro(validation, on_validation), test, on_test, scores))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contracts", default=os.environ.get("DRYFIT_CONTRACTS"))
    parser.add_argument("--keep", help="folder that stays, and where a later run goes on; a temporary one if absent")
    options = parser.parse_args()
    data = contract_files(options.contracts)
    if data is None:
        return
    print_baselines(data, TRAIN_ROWS, VALIDATION_ROWS)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.keep or temporary)
        work.mkdir(parents=True, exist_ok=True)
        script = [sys.executable, str(HERE / "plain.py"), "--out", str(work / "plain"), "--test", data["test"]]
        script += ["--train", data["train"], "--validation", data["validation"]]
        script += ["--train-limit", str(TRAIN_ROWS), "--validation-limit", str(VALIDATION_ROWS)]
        plain = run(script, work / "plain.log") if not (work / "plain" / "result.json").exists() else "done before"
        example = HERE.parent / "examples" / "contracts.toml"
        search = [
            sys.executable,
            "-m",
            "dryfit.documents.command_line",
            "tune",
            str(example),
            "--dir",
            str(work / "study"),
        ]
        search += ["--set", f"data.train={data['train']}", "--set", f"data.validation={data['validation']}"]
        ours = run(search, work / "search.log")
        summary = dryfit.status(work / "study")
        assert summary.best is not None
        test = TestRows.read(data["test"])
        guesses = [
            np.load(work / "plain" / "test.npy"),
            predict(work / "study" / "trials" / f"{summary.best.number:04d}" / "best", test.rows, 160),
        ]
        resampled = interval(test, guesses)
        validation = json.loads((work / "plain" / "result.json").read_text(encoding="utf-8"))["validation"]
        print(line("plain script", validation, test, guesses[0], resampled[0]), f"; {plain}")
        print(line("dryfit, best of 6", summary.best.value, test, guesses[1], resampled[1]), f"; {ours}")
        low, high = np.percentile(resampled[1] - resampled[0], [2.5, 97.5])
        print(f"difference on test: 95 % interval {low:+.3f} to {high:+.3f}; winner {summary.best.params}")


if __name__ == "__main__":
    main()
