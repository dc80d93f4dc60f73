"""What a suggestion costs: CPU time for each sampler after 1 000 and 5 000 trials, with one goal and with two.

    python benchmarks/bench_suggest.py [--rounds 9] [--trials 1000 5000]

The space has fourteen keys in three groups of conditions. Each suggestion is made as a study's loop makes it, from the
whole history. The first one is shown apart: it imports what a sampler needs and, for nsga2, selects the parents of all
generations, which are kept from then on.
"""

import argparse
import json
import random
import time

from measured import spread

from dryfit.config.schema import SamplerName, SearchSettings, StudyConfig
from dryfit.core.settings import Direction
from dryfit.core.trial import Outcome, TrialRecord
from dryfit.search.samplers import REFUSALS
from dryfit.search.space import Space
from dryfit.search.suggest import suggest

SEED = 1
SPACE = {
    "model.name": ["bert", "roberta", "deberta"],
    "train.batch_size": [
        {"choices": [16, 32, 64], "when": {"model.name": "bert"}},
        {"choices": [8, 16, 32], "when": {"model.name": ["roberta", "deberta"]}},
    ],
    "optim.lr": {"low": 1e-6, "high": 1e-3, "log": True},
    "optim.weight_decay": {"low": 0.0, "high": 0.3},
    "optim.layer_decay": {"low": 0.6, "high": 1.0},
    "sched.name": ["linear", "cosine", "constant"],
    "sched.warmup_ratio": {"low": 0.0, "high": 0.3},
    "head.pooling": ["cls", "mean", "max"],
    "head.layers": {"low": 0, "high": 3},
    "head.hidden": {"choices": [128, 256, 512], "when": {"head.layers": [1, 2, 3]}},
    "head.activation": {"choices": ["gelu", "relu", "tanh"], "when": {"head.layers": [1, 2, 3]}},
    "head.dropout": {"low": 0.0, "high": 0.5},
    "loss.label_smoothing": {"low": 0.0, "high": 0.2},
    "train.epochs": {"low": 2, "high": 8},
}
GOALS = (Direction.MAXIMIZE, Direction.MINIMIZE)


def history(space: Space, count: int) -> list[TrialRecord]:
    """Trials at random points, with values that depend on them and pull two ways; one in ten was refused."""
    draw = random.Random(SEED)
    records: list[TrialRecord] = []
    for number in range(count):
        point = suggest(
            space, [], search=SearchSettings(sampler=SamplerName.RANDOM), directions=GOALS, points=(), seed=SEED,
            number=number,
        )  # fmt: skip
        dropout, decay = point.params["head.dropout"], point.params["optim.weight_decay"]
        assert isinstance(dropout, float) and isinstance(decay, float)
        value, other = decay - dropout**2 + draw.gauss(0, 0.05), decay + draw.gauss(0, 0.05)
        refused = draw.random() < 0.1
        records.append(
            TrialRecord(number, point.internal, point.distributions, Outcome.REFUSED)
            if refused
            else TrialRecord(number, point.internal, point.distributions, Outcome.COMPLETE, value, also=(other,))
        )
    return records


def one_goal(records: list[TrialRecord]) -> list[TrialRecord]:
    """The same history without the second goal."""
    return [TrialRecord(one.number, one.params, one.distributions, one.outcome, one.value) for one in records]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 5000])
    options = parser.parse_args()
    space = Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": SPACE})))
    records = history(space, max(options.trials))
    print("sampler   goals  trials  first      CPU ms a suggestion: median (smallest to largest)")
    for sampler in REFUSALS:
        search = SearchSettings(sampler=sampler)
        for directions in (GOALS[:1], GOALS):
            told = records if len(directions) > 1 else one_goal(records)
            for count in options.trials:
                costs_ms: list[float] = []
                for number in range(count, count + options.rounds + 1):
                    began_s = time.process_time()
                    suggest(
                        space, told[:count], search=search, directions=directions, points=(), seed=SEED, number=number
                    )
                    costs_ms.append(1000 * (time.process_time() - began_s))
                first_ms, *rest_ms = costs_ms
                print(f"{sampler:8s}  {len(directions):5d}  {count:6d}  {first_ms:7.1f}    {spread(rest_ms)}")


if __name__ == "__main__":
    main()
