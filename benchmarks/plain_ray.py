"""A search as people write it: Ray Tune with ASHA around the HF Trainer, a CPU core for each trial.

    python benchmarks/plain_ray.py SEARCH.json     (in an environment that has ray[tune], not dryfit)

Random search, which is what Ray Tune does unless told otherwise; ASHA as it comes but for its longest trial and the
validations before which nothing is pruned.
"""

import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
from plain_trials import METRIC, Data, Search, train
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def domain(choices: Any) -> Any:
    """What Ray draws a key from."""
    if isinstance(choices, list):
        return tune.choice(choices)
    if "log" in choices:
        return tune.loguniform(choices["low"], choices["high"])
    return tune.quniform(choices["low"], choices["high"], choices["step"])


def trial(config: dict[str, Any], search: Search, data: Data) -> None:
    """Train one configuration in a process of Ray's."""
    number = int(tune.get_context().get_trial_id().rsplit("_", 1)[-1])
    train(search, data, number, config, lambda n, value: tune.report({METRIC: value}))


def search_all(search: Search) -> None:
    """Run the search."""
    random.seed(search.seed)
    np.random.seed(search.seed)  # Ray draws by numpy's own generator
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    tuner = tune.Tuner(
        tune.with_parameters(trial, search=search, data=Data.read(search)),
        param_space={key: domain(choices) for key, choices in search.space.items()},
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=search.trials,
            scheduler=ASHAScheduler(max_t=search.reports, grace_period=search.warmup_reports + 1),
        ),
        run_config=tune.RunConfig(storage_path=str(Path(search.out).resolve() / "ray"), verbose=0),
    )
    errors = tuner.fit().errors
    ray.shutdown()
    if errors:
        raise SystemExit(f"{len(errors)} trials failed, the first with {errors[0]}")


if __name__ == "__main__":
    search_all(Search.read(sys.argv[1]))
