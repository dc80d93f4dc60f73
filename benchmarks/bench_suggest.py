"""What asking and telling costs: CPU time of a suggestion, and of the history taking in how its trial ended.

    python benchmarks/bench_suggest.py [--rounds 20] [--trials 1000 2000 5000]

Fifteen keys in three groups of conditions, one goal and two, each sampler; and Optuna's own TPE (multivariate, grouped)
on a study in memory that lives all along. The first suggestion is shown apart: it imports what a sampler needs and
goes through the whole history, as the first after a resumption does.
"""

import argparse
import random
import time
from collections.abc import Callable

import long_study
import optuna
from long_study import GOALS, SEED
from measured import spread

from dryfit.ledger.state import History
from dryfit.search.samplers import SEES_REFUSALS, suggest
from dryfit.search.space import Space, from_text
from dryfit.settings.choices import Direction
from dryfit.settings.study_file import SamplerName, SearchSettings
from dryfit.settings.trial import Outcome, TrialRecord

HEAD = "sampler   goals  trials   first      CPU ms to ask and tell: median (smallest to largest)"


def one_goal(records: list[TrialRecord]) -> list[TrialRecord]:
    """The same history without the second goal."""
    return [TrialRecord(one.number, one.params, one.distributions, one.outcome, one.value) for one in records]


def measured(name: str, goals: int, trials: int, rounds: int, step: Callable[[int], None]) -> None:
    """Time some steps after so many trials, and print a line."""
    costs_ms: list[float] = []
    for number in range(trials, trials + rounds + 1):
        began_s = time.process_time()
        step(number)
        costs_ms.append(1000 * (time.process_time() - began_s))
    first_ms, *rest_ms = costs_ms
    print(f"{name:8s}  {goals:5d}  {trials:6d}  {first_ms:7.1f}    {spread(rest_ms)}", flush=True)


def ours(space: Space, search: SearchSettings, records: list[TrialRecord], directions: tuple[Direction, ...]):
    """One step of ours."""
    past, draw = History(records), random.Random(SEED)

    def step(number: int) -> None:
        drawn = suggest(space, past, search=search, directions=directions, points=(), seed=SEED, number=number)
        past.put(TrialRecord(number, drawn.internal, drawn.distributions))
        value, other = long_study.values(drawn.params, draw)
        also = (other,) if len(directions) > 1 else ()
        past.put(TrialRecord(number, drawn.internal, drawn.distributions, Outcome.COMPLETE, value, also=also))

    return step


def stock(records: list[TrialRecord]):
    """One step of Optuna's, on the same history."""
    sampler = optuna.samplers.TPESampler(seed=SEED, multivariate=True, group=True)
    study, draw = optuna.create_study(sampler=sampler, direction="maximize"), random.Random(SEED)
    for record in records:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED if record.value is None else optuna.trial.TrialState.COMPLETE,
                params=record.params,
                distributions={name: from_text(text) for name, text in record.distributions.items()},
                value=record.value,
            )
        )

    def step(number: int) -> None:
        trial = study.ask()
        name = trial.suggest_categorical("model.name", ["bert", "roberta", "deberta"])
        case, sizes = (0, [16, 32, 64]) if name == "bert" else (1, [8, 16, 32])
        params = {
            "optim.weight_decay": trial.suggest_float("optim.weight_decay", 0.0, 0.3),
            "head.dropout": trial.suggest_float("head.dropout", 0.0, 0.5),
        }
        trial.suggest_categorical(f"train.batch_size#{case}", sizes)
        trial.suggest_float("optim.lr", 1e-6, 1e-3, log=True)
        trial.suggest_float("optim.layer_decay", 0.6, 1.0)
        trial.suggest_categorical("sched.name", ["linear", "cosine", "constant"])
        trial.suggest_float("sched.warmup_ratio", 0.0, 0.3)
        trial.suggest_categorical("head.pooling", ["cls", "mean", "max"])
        if trial.suggest_int("head.layers", 0, 3):
            trial.suggest_categorical("head.hidden", [128, 256, 512])
            trial.suggest_categorical("head.activation", ["gelu", "relu", "tanh"])
        trial.suggest_float("loss.label_smoothing", 0.0, 0.2)
        trial.suggest_int("train.epochs", 2, 8)
        trial.suggest_float("regularization.dropout", 0.0, 0.3)
        study.tell(trial, long_study.values(params, draw)[0])

    return step


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 2000, 5000])
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = long_study.space()
    records = long_study.records(space, max(options.trials))
    print(HEAD)
    for sampler in SEES_REFUSALS:
        if sampler is SamplerName.GP:
            continue  # its process takes a second to start, which a study waits for once
        search = SearchSettings(sampler=sampler)
        for directions in (GOALS[:1], GOALS)[: 1 if sampler is SamplerName.CMAES else 2]:
            told = records if len(directions) > 1 else one_goal(records)
            for count in options.trials:
                step = ours(space, search, told[:count], directions)
                measured(sampler, len(directions), count, options.rounds, step)
    for count in options.trials:
        measured("Optuna's", 1, count, options.rounds, stock(one_goal(records[:count])))


if __name__ == "__main__":
    main()
