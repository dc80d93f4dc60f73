"""A search as people write it: Optuna's TPE and median pruner around the HF Trainer, in one process.

python benchmarks/plain_optuna.py SEARCH.json
"""

import sys
from typing import Any

import optuna
from plain_trials import Data, Search, train


def drawn(trial: optuna.Trial, key: str, choices: Any) -> Any:
    """Draw one key."""
    if isinstance(choices, list):
        return trial.suggest_categorical(key, choices)
    return trial.suggest_float(key, choices["low"], choices["high"], log="log" in choices, step=choices.get("step"))


def search_all(search: Search) -> optuna.Study:
    """Run the search."""
    data = Data.read(search)

    def objective(trial: optuna.Trial) -> float:
        params = {key: drawn(trial, key, choices) for key, choices in search.space.items()}

        def hear(n: int, value: float) -> None:
            trial.report(value, n)
            if trial.should_prune():
                raise optuna.TrialPruned

        return train(search, data, trial.number, params, hear)

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=search.startup_trials),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=search.pruner_startup_trials, n_warmup_steps=search.warmup_reports
        ),
    )
    study.optimize(objective, n_trials=search.trials)
    return study


if __name__ == "__main__":
    search_all(Search.read(sys.argv[1]))
