"""Whether reading a window of the history costs quality: dryfit's TPE against Optuna's own, on public functions.

    python benchmarks/bench_quality.py [--trials 800] [--seeds 20] [--jobs 2] [--out quality.csv] [--sides Optuna]

Both with the same options (multivariate, grouped, 10 random trials first) and the same budgets; Optuna as its users
call it, with a study in memory. Regret is what the best value so far lies above the function's minimum. A row of the
table compares, after some of the trials, 20 searches with 20: quartiles of the regret, and the p of a two-sided
Mann-Whitney test that neither tends to be the lower. The window drops trials from the 701st on. Searches are kept in
--out as they are done, and not repeated; --sides and --cases run some of them only. Sources of the functions:
Surjanovic and Bingham, Virtual Library of Simulation Experiments.
"""

import argparse
import csv
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from scipy.stats import mannwhitneyu

from dryfit.ledger.state import History
from dryfit.search.samplers import suggest
from dryfit.search.space import Distribution, Param, Space
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SearchSettings
from dryfit.settings.trial import Outcome, TrialRecord

STARTUP = 10
SIDES = ("dryfit", "Optuna")

_ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
_A = np.array(
    [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
)
_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)

Values = Mapping[str, Any]


def numbers(values: Values) -> np.ndarray:
    """The coordinates of a point, in order of their names."""
    return np.array([values[name] for name in sorted(values)])


def branin(values: Values) -> float:
    x, y = numbers(values)
    bent = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return float(bent**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10)


def hartmann(values: Values) -> float:
    return float(-_ALPHA @ np.exp(-(_A * (numbers(values) - _P) ** 2).sum(axis=1)))


def rastrigin(values: Values) -> float:
    x = numbers(values)
    return float(10 * len(x) + (x**2 - 10 * np.cos(2 * math.pi * x)).sum())


def rosenbrock(values: Values) -> float:
    x = numbers(values)
    return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())


def ackley(values: Values) -> float:
    x = numbers(values)
    far, waves = math.sqrt((x**2).mean()), np.cos(2 * math.pi * x).mean()
    return float(-20 * math.exp(-0.2 * far) - math.exp(waves) + 20 + math.e)


def conditional(values: Values) -> float:
    """Three known functions, each with parameters of its own, behind a choice; a small number adds to all of them."""
    match values["which"]:
        case "branin":
            value = branin({"0": values["x0"], "1": values["x1"]}) - BRANIN
        case "hartmann":
            value = 10 * (hartmann({name: values[name] for name in values if name.startswith("h")}) - HARTMANN)
        case _:
            value = rastrigin({name: values[name] for name in values if name.startswith("r")}) / 4
    return value + abs(math.log10(values["scale"]) + 2) + 0.5 * (values["layers"] - 2) ** 2


BRANIN, HARTMANN = 0.39788735772973816, -3.322368011415515


def box(prefix: str, count: int, low: float, high: float) -> dict[str, Distribution]:
    """A cube."""
    return {f"{prefix}{index}": FloatDistribution(low, high) for index in range(count)}


@dataclass(frozen=True)
class Case:
    """A function, its space and its minimum; ``under`` names what each value of ``which`` brings with it."""

    function: Callable[[Values], float]
    always: dict[str, Distribution]
    least: float
    under: dict[str, dict[str, Distribution]]

    @property
    def space(self) -> Space:
        """The space as dryfit has it."""
        params = [Param(name, name, one) for name, one in self.always.items()]
        for which, names in self.under.items():
            params += [Param(name, name, one, (("which", (which,)),)) for name, one in names.items()]
        return Space(tuple(params))


CASES = {
    "Branin": Case(branin, {"x": FloatDistribution(-5, 10), "y": FloatDistribution(0, 15)}, BRANIN, {}),
    "Hartmann, 6 dimensions": Case(hartmann, box("h", 6, 0, 1), HARTMANN, {}),
    "Rastrigin, 5 dimensions": Case(rastrigin, box("r", 5, -5.12, 5.12), 0.0, {}),
    "Rosenbrock, 4 dimensions": Case(rosenbrock, box("x", 4, -5, 10), 0.0, {}),
    "Ackley, 8 dimensions": Case(ackley, box("x", 8, -32.768, 32.768), 0.0, {}),
    "conditional, 13 keys": Case(
        conditional,
        {
            "which": CategoricalDistribution(["branin", "hartmann", "rastrigin"]),
            "scale": FloatDistribution(1e-5, 1e1, log=True),
            "layers": IntDistribution(0, 6),
        },
        0.0,
        {
            "branin": {"x0": FloatDistribution(-5, 10), "x1": FloatDistribution(0, 15)},
            "hartmann": box("h", 6, 0, 1),
            "rastrigin": box("r", 3, -5.12, 5.12),
        },
    ),
}


def search_ours(case: Case, trials: int, seed: int) -> list[float]:
    """The values in order."""
    space, past, search = case.space, History(), SearchSettings(startup_trials=STARTUP)
    found: list[float] = []
    for number in range(trials):
        drawn = suggest(
            space, past, search=search, directions=(Direction.MINIMIZE,), points=(), seed=seed, number=number
        )
        found.append(case.function(drawn.params))
        past.put(TrialRecord(number, drawn.internal, drawn.distributions, Outcome.COMPLETE, found[-1]))
    return found


def search_stock(case: Case, trials: int, seed: int) -> list[float]:
    """The values in order."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=STARTUP)
    study = optuna.create_study(sampler=sampler)

    def draw(trial: optuna.Trial, name: str, one: Distribution) -> Any:
        match one:
            case CategoricalDistribution():
                return trial.suggest_categorical(name, one.choices)
            case IntDistribution():
                return trial.suggest_int(name, one.low, one.high)
            case _:
                return trial.suggest_float(name, one.low, one.high, log=one.log)

    def objective(trial: optuna.Trial) -> float:
        values = {name: draw(trial, name, one) for name, one in case.always.items()}
        for name, one in case.under.get(values.get("which", ""), {}).items():
            values[name] = draw(trial, name, one)
        return case.function(values)

    study.optimize(objective, n_trials=trials)
    return [trial.value for trial in study.trials]


def regrets(name: str, side: str, seed: int, trials: int, at: list[int]) -> list[float]:
    """The regret of one search after some of its trials."""
    search = search_ours if side == "dryfit" else search_stock
    values = search(CASES[name], trials, seed)
    return [min(values[:count]) - CASES[name].least for count in at]


def table(done: dict[tuple[str, str, int], list[float]], at: list[int]) -> None:
    """Print what was found."""
    print("function                  trials  dryfit: median (quartiles)      Optuna: median (quartiles)      p")
    for name in CASES:
        for index, count in enumerate(at):
            sides = [
                [found[index] for (case, who, _), found in done.items() if (case, who) == (name, side)]
                for side in SIDES
            ]
            if min(map(len, sides)) < 2:
                continue
            cells = [
                "{1:9.4g} ({0:.3g} to {2:.3g})".format(*np.percentile(side, [25, 50, 75])).ljust(30) for side in sides
            ]
            p = mannwhitneyu(*sides).pvalue
            searches = f"{len(sides[0])} and {len(sides[1])} searches"
            print(f"{name:24s}  {count:6d}  {cells[0]}  {cells[1]}  {p:.2f}   ({searches})")


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file of the runs that are done; it is added to")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    at = sorted({options.trials // 4, options.trials // 2, options.trials})
    done: dict[tuple[str, str, int], list[float]] = {}
    if options.out and options.out.exists():
        with options.out.open(newline="") as file:
            for name, side, seed, trials, *found in csv.reader(file):
                if int(trials) == options.trials and int(seed) < options.seeds:
                    done[name, side, int(seed)] = [float(value) for value in found]
    wanted = [(name, side, seed) for seed in range(options.seeds) for name in options.cases for side in options.sides]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(regrets, *run, options.trials, at): run for run in wanted if run not in done}
        for future in as_completed(runs):
            name, side, seed = runs[future]
            done[name, side, seed] = future.result()
            if options.out:
                with options.out.open("a", newline="") as file:
                    csv.writer(file).writerow([name, side, seed, options.trials, *future.result()])
    table(done, at)


if __name__ == "__main__":
    main()
