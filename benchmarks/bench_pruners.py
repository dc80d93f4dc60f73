"""What pruners save on contracts, and what they lose: each replayed over the learning curves of one search.

    python benchmarks/bench_pruners.py record WORK --contracts FOLDER [--layers 2]      (or DRYFIT_CONTRACTS=FOLDER)
    python benchmarks/bench_pruners.py [replay] [--curves FILE] [--orders 200] [--beside 1]
    python benchmarks/bench_pruners.py startup [--orders 400]

``record`` is one study without a pruner: random configurations of a space of seven keys, every one of them trained
to its end, and validated several times an epoch. Run again it goes on; what is complete is written to ``--curves``.
``replay`` gives these curves to dryfit's own pruning verdicts, validation by validation, as if the trials ran in some
order, so many at a time; a trial that is pruned takes no further epoch, and the next one begins. Over many orders:
what share of all epochs was not trained, how often the best configuration was complete, and how far the best score of
the complete ones lies below that of all, at the end and once half of all epochs were trained. No sampler learns from
what was pruned here: the configurations are the same for all pruners. ``startup`` asks how many complete trials the
median is to wait for, in searches of 6, 12 and 24 of these configurations.
"""

import argparse
import csv
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measured import contract_files, run
from transformers import AutoModel, AutoTokenizer

import dryfit
from dryfit.ledger.state import History
from dryfit.meta.checkpoint_files import model_folder
from dryfit.search.pruning import Rules, judge
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import PatientOf, PrunerName, SearchSettings
from dryfit.settings.tables import ModelSettings
from dryfit.settings.trial import MetricPoint, Outcome, TrialRecord

CURVES = Path(__file__).parents[1] / "docs" / "measurements" / "pruner-curves.csv"
Curve = tuple[MetricPoint, ...]

PRUNERS = {
    "none": SearchSettings(pruner=PrunerName.NONE),
    "median": SearchSettings(pruner=PrunerName.MEDIAN),
    "median, from 3 complete trials": SearchSettings(pruner=PrunerName.MEDIAN, pruner_startup_trials=3),
    "percentile 25": SearchSettings(pruner=PrunerName.PERCENTILE),
    "ASHA": SearchSettings(pruner=PrunerName.ASHA),
    "ASHA, reduction 2": SearchSettings(pruner=PrunerName.ASHA, reduction=2),
    "ASHA, from the first validation": SearchSettings(pruner=PrunerName.ASHA, warmup_reports=0),
    "Hyperband": SearchSettings(pruner=PrunerName.HYPERBAND),
    "Hyperband, reduction 2": SearchSettings(pruner=PrunerName.HYPERBAND, reduction=2),
    "Hyperband, from the first validation": SearchSettings(pruner=PrunerName.HYPERBAND, warmup_reports=0),
    "patient, of median": SearchSettings(pruner=PrunerName.PATIENT),
    "patient, of ASHA": SearchSettings(pruner=PrunerName.PATIENT, patient_of=PatientOf.ASHA),
}

STUDY = """[study]
name = "curves"
task = "criteria"
metric = "f1_macro"
trials = {trials}
seed = 1

[data]
train = "{train}"
validation = "{validation}"
train_limit = {rows}
validation_limit = {validation_rows}

[model]
name = "{model}"

[train]
epochs = {epochs}
evals_per_epoch = 2
max_length = {length}
precision = "auto"

[sched]
warmup_ratio = 0.1

[search]
sampler = "random"
pruner = "none"
mirror = "none"

[runtime]
parallel = 2

[execution]
threads = 1

[space]
"optim.lr" = {{low = 1e-4, high = 2e-3, log = true}}
"optim.head_lr_factor" = [1.0, 5.0, 20.0]
"optim.weight_decay" = [0.0, 0.01, 0.1]
"train.batch_size" = [8, 16]
"sched.name" = ["linear", "cosine"]
"head.pooling" = ["cls", "mean"]
"head.dropout" = {{low = 0.0, high = 0.3, step = 0.1}}
"""


@dataclass(frozen=True)
class Replayed:
    """One search over recorded curves.

    Attributes:
        saved: Share of all epochs that was not trained.
        kept_best: Whether a trial with the best score of all is complete.
        loss: How far the best score of the complete trials lies below the best of all.
        loss_at_half: The same when half of the epochs that all trials would take were trained.
        pruned: Trials that were pruned.
    """

    saved: float
    kept_best: bool
    loss: float
    loss_at_half: float
    pruned: int


def score(curve: Curve) -> float:
    """Return a trial's value: its best validation."""
    return max(point.value for point in curve)


def replay(curves: Sequence[Curve], order: Sequence[int], search: SearchSettings, beside: int) -> Replayed:
    """Let a pruner judge recorded trials.

    The next validation is always that of the running trial that has the fewest epochs since it was begun, so trials
    that run side by side are equally fast.

    Args:
        curves: All validations of each configuration.
        order: Which configuration each trial has.
        search: The pruner.
        beside: How many run at a time.
    """
    rules = Rules(search, Direction.MAXIMIZE, "curves", max(map(len, curves)))
    whole, best = sum(curve[-1].epoch for curve in curves), max(map(score, curves))
    past, waiting = History(), list(enumerate(order))
    running: dict[int, tuple[float, TrialRecord, Curve]] = {}
    complete, pruned, trained, clock = [-math.inf], 0, 0.0, 0.0
    half: float | None = None
    while waiting or running:
        while waiting and len(running) < beside:
            number, which = waiting.pop(0)
            running[number] = clock, TrialRecord(number, {}, {}), curves[which]
            past.put(running[number][1])
        number = min(running, key=lambda one: (running[one][0] + _next(*running[one][1:]).epoch, one))
        began, record, curve = running.pop(number)
        point = _next(record, curve)
        clock = began + point.epoch
        trained += point.epoch - (record.reports[-1].epoch if record.reports else 0.0)
        if half is None and trained > whole / 2:
            half = max(complete)
        record = replace(record, reports=(*record.reports, point))
        past.put(record)
        verdict = judge(past, number, rules, last=len(record.reports) == len(curve))
        record = replace(record, system_attrs={**record.system_attrs, **verdict.system_attrs})
        if verdict.proceed and len(record.reports) < len(curve):
            past.put(record)
            running[number] = began, record, curve
        elif verdict.proceed:
            complete.append(score(curve))
            past.put(replace(record, outcome=Outcome.COMPLETE, value=complete[-1]))
        else:
            pruned += 1
            past.put(replace(record, outcome=Outcome.PRUNED))
    last = max(complete)
    return Replayed(1 - trained / whole, last == best, best - last, best - (last if half is None else half), pruned)


def _next(record: TrialRecord, curve: Curve) -> MetricPoint:
    """Return the next validation of a running trial."""
    return curve[len(record.reports)]


def write_curves(study: Path, file: Path) -> int:
    """Write the validations of a study's complete trials; return how many trials these are."""
    trials = [one for one in dryfit.open_study(study).trials if one.outcome is Outcome.COMPLETE]
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["trial", "report", "step", "epoch", "value", "params"])
        for trial in trials:
            words = " ".join(f"{key}={value}" for key, value in trial.params.items())
            for point in trial.reports:
                writer.writerow([trial.number, point.n, point.step, f"{point.epoch:g}", f"{point.value:.6f}", words])
    return len(trials)


def read_curves(file: Path) -> list[Curve]:
    """Read what was written."""
    found: dict[str, list[MetricPoint]] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            point = MetricPoint(int(row["report"]), int(row["step"]), float(row["epoch"]), float(row["value"]), {})
            found.setdefault(row["trial"], []).append(point)
    return [tuple(points) for points in found.values()]


def table(curves: Sequence[Curve], orders: int, beside: Sequence[int]) -> str:
    """Return markdown: a row for each pruner and number of trials at a time."""
    lines = [
        "| pruner | at a time | epochs saved (quartiles) | pruned | best kept | score lost | at half of all epochs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    drawn = [random.Random(seed).sample(range(len(curves)), len(curves)) for seed in range(orders)]
    for name, search in PRUNERS.items():
        for count in beside:
            found = [replay(curves, order, search, count) for order in drawn]
            low, middle, high = statistics.quantiles([one.saved for one in found], n=4)
            lines.append(
                f"| {name} | {count} | {middle:.0%} ({low:.0%} to {high:.0%}) |"
                f" {statistics.mean(one.pruned for one in found):.1f} |"
                f" {statistics.mean(one.kept_best for one in found):.0%} |"
                f" {statistics.mean(one.loss for one in found):.4f} |"
                f" {statistics.mean(one.loss_at_half for one in found):.4f} |"
            )
    scores = sorted(map(score, curves), reverse=True)
    told = f"{len(curves)} curves, {orders} orders; best scores {', '.join(f'{one:.3f}' for one in scores[:5])}"
    return "\n".join([*lines, "", f"{told}; median {statistics.median(scores):.3f}, worst {scores[-1]:.3f}"])


def startup_table(curves: Sequence[Curve], draws: int, sizes: Sequence[int] = (6, 12, 24)) -> str:
    """Return markdown: what the median saves and loses, by the complete trials it waits for and a search's size."""
    head = " | ".join(f"{size} trials: saved, lost, best kept" for size in sizes)
    lines = [f"| `pruner_startup_trials` | {head} |", "|---|" + "--:|" * len(sizes)]
    drawn = {size: [random.Random(seed).sample(curves, size) for seed in range(draws)] for size in sizes}
    for waited in (2, 3, 4, 5):
        search = SearchSettings(pruner=PrunerName.MEDIAN, pruner_startup_trials=waited)
        cells: list[str] = []
        for size in sizes:
            found = [replay(some, range(size), search, 1) for some in drawn[size]]
            saved, lost = statistics.mean(one.saved for one in found), statistics.mean(one.loss for one in found)
            cells.append(f"{saved:.0%}, {lost:.4f}, {statistics.mean(one.kept_best for one in found):.0%}")
        lines.append(f"| {waited} | {' | '.join(cells)} |")
    return "\n".join(lines)


def first_layers(count: int, folder: Path) -> Path:
    """Write the packaged encoder with its first layers alone; return its folder."""
    whole = model_folder(ModelSettings(name="minilm"))
    AutoModel.from_pretrained(whole, num_hidden_layers=count).save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder.resolve()


def record(options: argparse.Namespace) -> None:
    """Run the study, or go on with it, and write its curves."""
    data = contract_files(options.contracts)
    if data is None:
        return
    options.work.mkdir(parents=True, exist_ok=True)
    study = options.work / "study.toml"
    names = ("trials", "rows", "validation_rows", "epochs", "length")
    if not study.exists():
        model = "minilm" if options.layers is None else first_layers(options.layers, options.work / "model")
        filled = STUDY.format(**{name: getattr(options, name) for name in names}, **data, model=model)
        study.write_text(filled, encoding="utf-8")
    command = [sys.executable, "-m", "dryfit.documents.command_line", "tune", str(options.work), "--quiet"]
    cost = run([*command, "--trials", str(options.trials)], options.work / "log")
    count = write_curves(options.work, options.curves)
    print(f"{count} curves in {options.curves}; this time {cost.wall_s:.0f} s, {cost.cpu_s:.0f} CPU s")


def main(words: Sequence[str] | None = None) -> None:
    """Record, or replay what was recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", nargs="?", choices=("record", "replay", "startup"), default="replay")
    parser.add_argument("work", nargs="?", type=Path)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--beside", type=int, nargs="+", default=[1])
    parser.add_argument("--contracts", default=os.environ.get("DRYFIT_CONTRACTS"))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--layers", type=int, help="so many of MiniLM's layers, the first; unset: all")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--validation-rows", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args(words)
    if options.action == "record":
        if options.work is None:
            parser.error("WORK is needed")
        record(options)
    elif options.action == "startup":
        print(startup_table(read_curves(options.curves), options.orders))
    else:
        print(table(read_curves(options.curves), options.orders, options.beside))


if __name__ == "__main__":
    main()
