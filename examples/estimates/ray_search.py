"""Ray Tune: each trial asks for the share of a GPU that it needs, so that small ones run side by side."""

from pathlib import Path

import ray
from ray import tune

import dryfit

SCRIPT = Path(__file__).with_name("train.py")
CARD = "24GiB"


def resources(config: dict[str, int]) -> tune.PlacementGroupFactory:
    answer = dryfit.estimate(SCRIPT, config, device=CARD)
    assert answer.memory is not None and answer.fits
    share = answer.memory.required_bytes / answer.device.capacity_bytes
    return tune.PlacementGroupFactory([{"CPU": 1, "GPU": round(share, 3)}])


def train(config: dict[str, int]) -> dict[str, float]:
    return {"loss": 1 / config["width"]}  # train here


if __name__ == "__main__":
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False)
    trainable = tune.with_resources(train, resources)
    space = {"width": tune.grid_search([1_000, 100_000]), "rows": 64}
    for result in tune.Tuner(trainable, param_space=space).fit():
        print("trained", result.config["width"], f"{resources(result.config).bundles[0]['GPU']:.3f} of a GPU")
