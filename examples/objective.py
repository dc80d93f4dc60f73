"""Search the settings of a function of your own: here a small logistic regression, in plain Python.

    python examples/objective.py

Stop it whenever you like and start it again: it goes on. ``dryfit status noisy_moons-study`` looks at it meanwhile.
"""

import json
import math
import random

import dryfit

STEPS = 60


def rows(count: int, seed: int) -> list[tuple[list[float], int]]:
    """Two noisy arcs: a label, and features of which a linear model can tell it roughly."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        label, angle = draw.randrange(2), draw.uniform(0, math.pi)
        x = math.cos(angle) + label + draw.gauss(0, 0.2)
        y = math.sin(angle) * (1 - 2 * label) + draw.gauss(0, 0.2)
        found.append(([1.0, x, y, x * y], label))
    return found


def probability(weights: list[float], features: list[float]) -> float:
    """Of label 1."""
    score = sum(w * x for w, x in zip(weights, features, strict=True))
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))


def noisy_moons(trial: dryfit.Trial) -> float | None:
    """Train by gradient descent, and return the loss on rows that were not trained on."""
    train, validation = rows(200, seed=1), rows(200, seed=2)
    rate, decay = trial.params["rate"], trial.params["decay"]
    step, weights, loss = 0, [0.0] * 4, math.inf
    saved = trial.checkpoint_dir / "state.json"
    if saved.exists():  # an earlier attempt was killed: go on from there
        step, weights, loss = json.loads(saved.read_text())
    while step < STEPS:
        gradient = [0.0] * 4
        for features, label in train:
            error = probability(weights, features) - label
            gradient = [g + error * x / len(train) for g, x in zip(gradient, features, strict=True)]
        weights = [w - rate * (g + decay * w) for w, g in zip(weights, gradient, strict=True)]
        step += 1
        if step % 10 == 0:
            right = [abs(1 - label - probability(weights, features)) for features, label in validation]
            loss = -sum(math.log(max(share, 1e-12)) for share in right) / len(right)
            stop = trial.report(loss, step)  # before the checkpoint: a kill between the two then loses no report
            temporary = saved.with_suffix(".tmp")
            temporary.write_text(json.dumps([step, weights, loss]))
            temporary.replace(saved)  # in one step: a kill leaves the old state or the new one
            trial.checkpointed(step)
            if stop:
                return None  # pruned, or asked to stop: the checkpoint is written
    return loss


if __name__ == "__main__":
    result = dryfit.tune(
        objective=noisy_moons,
        space={"rate": {"low": 0.01, "high": 10.0, "log": True}, "decay": {"low": 0.0, "high": 0.1}},
        trials=20,
        search={"pruner": "median"},
        runtime={"parallel": 2},
    )
    print(result.summary.best)
