"""Compute parameter importances in a short-lived process, as that part of Optuna imports scikit-learn and scipy.

    python -m dryfit.search.sampling.importance_process < history.json > importances.json

It reads ``{"direction", "quantile", "trials": [{"params", "distributions", "value"}]}`` and writes
``{"importances": {name: share}}``. The method is Optuna's default, PED-ANOVA with conditional parameters
(Watanabe, Bansal and Hutter, IJCAI 2023, arXiv:2304.10255; its extension to conditions, arXiv:2601.20800).
"""

import json
import sys
import warnings
from functools import cache
from typing import Any, TextIO, cast

import optuna
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

_NAME = "importance"


def importances(history: dict[str, Any]) -> dict[str, float]:
    """Return the share of each parameter; the module's docstring describes the argument."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    storage = InMemoryStorage()
    study = optuna.create_study(study_name=_NAME, storage=storage, direction=history["direction"])
    study_id = storage.get_study_id_from_name(_NAME)
    for trial in cast("list[dict[str, Any]]", history["trials"]):
        storage.create_new_trial(study_id, _frozen(trial))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=history["quantile"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beside each number stands how many trials it is from
        return get_param_importances(study, evaluator=evaluator)


def _frozen(trial: dict[str, Any]) -> FrozenTrial:
    return FrozenTrial(
        number=-1,
        trial_id=-1,
        state=TrialState.COMPLETE,
        value=trial["value"],
        datetime_start=None,
        datetime_complete=None,
        params=trial["params"],
        distributions={name: _distribution(text) for name, text in trial["distributions"].items()},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
    )


@cache
def _distribution(text: str) -> BaseDistribution:
    return json_to_distribution(text)


def main(stdin: TextIO = sys.stdin, stdout: TextIO = sys.stdout) -> None:
    """Entry point of the process."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # this process does nothing else
    json.dump({"importances": importances(json.load(stdin))}, stdout)


if __name__ == "__main__":
    main()
