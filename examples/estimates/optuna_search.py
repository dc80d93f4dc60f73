"""Optuna: what would not fit the card is not trained, and the sampler learns to keep away from it."""

from pathlib import Path

import optuna

import dryfit

SCRIPT = Path(__file__).with_name("train.py")
CARD = "2GiB"


def objective(trial: optuna.Trial) -> float:
    params = {"width": trial.suggest_int("width", 10_000, 6_000_000, log=True), "rows": 64}
    answer = dryfit.estimate(SCRIPT, params, device=CARD)
    assert answer.memory is not None
    trial.set_user_attr("over_gib", (answer.memory.required_bytes - answer.device.capacity_bytes) / 2**30)
    if not answer.fits:
        raise optuna.TrialPruned
    return 1 / params["width"]  # train here


def over(trial: optuna.trial.FrozenTrial) -> tuple[float]:
    return (trial.user_attrs["over_gib"],)


if __name__ == "__main__":
    sampler = optuna.samplers.TPESampler(seed=0, constraints_func=over)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=4)
    for trial in study.trials:
        print(trial.state.name, trial.params["width"], f"{trial.user_attrs['over_gib']:+.2f} GiB")
