"""What TPE loses by asking for eight trials before it knows how any of them ends, on public functions.

    python benchmarks/bench_side_by_side.py [--trials 96] [--seeds 20] [--beside 8] [--jobs 2] [--out FILE]

Three ways to run the same number of trials: one at a time; eight at a time, as dryfit does it, where the sampler sees
the running ones as running (a constant liar keeps it from asking for the same again); and eight at a time with a
sampler that does not see them. Trials take as long as each other, but for a fifth, by a seed, so they end in changing
order. Regret and functions are those of bench_quality.py; the p of a two-sided Mann-Whitney test is against one at a
time. Searches are kept in ``--out`` as they are done, and not repeated.
"""

import argparse
import csv
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from enum import StrEnum
from pathlib import Path

import numpy as np
from bench_quality import CASES, STARTUP, Case
from scipy.stats import mannwhitneyu

from dryfit.ledger.state import History
from dryfit.search.samplers import suggest
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings
from dryfit.settings.trial import Outcome, TrialRecord


class Way(StrEnum):
    """How trials run."""

    ALONE = "one at a time"
    BESIDE = "side by side"
    BLIND = "side by side, running ones unseen"


Run = tuple[str, Way, int]


def search(case: Case, way: Way, seed: int, trials: int, beside: int) -> list[float]:
    """Return the values of a search in the order in which its trials ended."""
    space, settings, lengths = case.space, SearchSettings(startup_trials=STARTUP), random.Random(seed)
    past, ended = History(), list[TrialRecord]()
    running: dict[int, tuple[float, TrialRecord, float]] = {}
    values, clock, number = list[float](), 0.0, 0
    while len(values) < trials:
        while number < trials and len(running) < (1 if way is Way.ALONE else beside):
            seen = History(ended) if way is Way.BLIND else past
            drawn = suggest(
                space, seen, search=settings, directions=(Direction.MINIMIZE,), points=(), seed=seed, number=number
            )
            record = TrialRecord(number, drawn.internal, drawn.distributions)
            past.put(record)
            running[number] = clock + lengths.uniform(0.9, 1.1), record, case.function(drawn.params)
            number += 1
        first = min(running, key=lambda one: running[one][0])
        clock, record, value = running.pop(first)
        done = TrialRecord(first, record.params, record.distributions, Outcome.COMPLETE, value)
        past.put(done)
        ended.append(done)
        values.append(value)
    return values


def regrets(name: str, way: Way, seed: int, trials: int, beside: int) -> list[float]:
    """Return the regret after a third, two thirds and all of a search's trials."""
    values = search(CASES[name], way, seed, trials, beside)
    return [min(values[:count]) - CASES[name].least for count in _counts(trials)]


def _counts(trials: int) -> list[int]:
    return [trials // 3, 2 * trials // 3, trials]


def table(done: dict[Run, list[float]], trials: int, beside: int) -> str:
    """Return markdown: median and quartiles of the regret, and p against one at a time."""
    heads = [str(way).replace("side by side", f"{beside} at a time") for way in Way]
    lines = [f"| function | trials | {' | '.join(heads)} |", "|---|--:|--:|--:|--:|"]
    for name in CASES:
        for index, count in enumerate(_counts(trials)):
            found = [[one[index] for (case, how, _), one in done.items() if (case, how) == (name, way)] for way in Way]
            if min(map(len, found)) < 2:
                continue
            cells = ["{1:.3g} ({0:.3g} to {2:.3g})".format(*np.percentile(one, [25, 50, 75])) for one in found]
            cells[1:] = [
                f"{cell}; p {mannwhitneyu(one, found[0]).pvalue:.2f}"
                for cell, one in zip(cells[1:], found[1:], strict=True)
            ]
            lines.append(f"| {name if not index else ''} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--beside", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file of the searches that are done; it is added to")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(words)
    sizes = options.trials, options.beside
    done: dict[Run, list[float]] = {}
    if options.out and options.out.exists():
        with options.out.open(newline="") as file:
            for name, way, seed, trials, beside, *found in csv.reader(file):
                if (int(trials), int(beside)) == sizes:
                    done[name, Way(way), int(seed)] = [float(value) for value in found]
    wanted = [(name, way, seed) for seed in range(options.seeds) for name in options.cases for way in Way]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(regrets, *one, *sizes): one for one in wanted if one not in done}
        for future in as_completed(runs):
            done[runs[future]] = future.result()
            if options.out:
                with options.out.open("a", newline="") as file:
                    csv.writer(file).writerow([*runs[future], *sizes, *future.result()])
    print(table(done, *sizes))


if __name__ == "__main__":
    main()
