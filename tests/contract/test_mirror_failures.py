"""Failures and memory in the Optuna mirror: asked for as a user would, by ``optuna.load_study``."""

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from study_runs import fold, run_here

WAYS = ["fine", "out of memory", "assert", "illegal access", "wrong device", "nan", "poor"]
STUDY = f"""
[study]
name = "ways"
task = "objective"
trials = {len(WAYS)}

[objective]
function = "fit.py:objective"

[space]
way = {WAYS}

[search]
sampler = "random"
pruner = "median"
pruner_startup_trials = 1
enqueue = [{", ".join(f'{{way = "{way}"}}' for way in WAYS)}]

[runtime]
max_failed_in_a_row = 100
retries = 0
"""

FUNCTION = '''
class OutOfMemoryError(RuntimeError):
    """As torch has it."""


class AcceleratorError(RuntimeError):
    """As torch has it."""


OutOfMemoryError.__module__ = AcceleratorError.__module__ = "torch"

ERRORS = {
    "out of memory": OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.12 GiB is "
        "free."
    ),
    "assert": AcceleratorError(
        "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"
    ),
    "illegal access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "wrong device": RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    ),
}


def objective(trial):
    way = trial.params["way"]
    if way in ERRORS:
        raise ERRORS[way]
    if way == "nan":
        return float("nan")
    value = 100.0 if way == "poor" else 1.0
    for step in range(5):
        if trial.report(value, step):
            break
    return value
'''


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, FrozenTrial]]:
    """One trial of each way, in real processes, as Optuna sees them."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "study.toml").write_text(STUDY, encoding="utf-8")
    (folder / "fit.py").write_text(FUNCTION, encoding="utf-8")
    done = run_here("tune", folder, "--quiet")
    assert done.returncode == 0, done.stderr
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    study = optuna.load_study(study_name="ways", storage=storage)
    found = {str(trial.user_attrs["params"]["way"]): trial for trial in study.trials}
    assert list(found) == WAYS
    return folder, found


@pytest.mark.parametrize(
    ("way", "state", "kind"),
    [
        ("fine", TrialState.COMPLETE, None),
        ("out of memory", TrialState.FAIL, "oom_device"),
        ("assert", TrialState.FAIL, "device_assert"),
        ("illegal access", TrialState.FAIL, "native_crash"),
        ("wrong device", TrialState.FAIL, "user_code"),
        ("nan", TrialState.PRUNED, "nonfinite"),
        ("poor", TrialState.PRUNED, None),
    ],
)
def test_states_and_kinds(
    ways: tuple[Path, dict[str, FrozenTrial]], way: str, state: TrialState, kind: str | None
) -> None:
    folder, found = ways
    trial = found[way]
    assert (trial.state, trial.user_attrs.get("failure_kind")) == (state, kind)
    ours = fold(folder).trials[trial.number]
    assert trial.user_attrs["outcome"] == ours.outcome
    assert trial.user_attrs["attempts"] == len(ours.attempts)
    assert trial.user_attrs["seed"] == ours.seed


def test_errors_of_cuda_can_be_asked_for(ways: tuple[Path, dict[str, FrozenTrial]]) -> None:
    _, found = ways
    asked = {way: trial for way, trial in found.items() if trial.user_attrs["cuda_error"]}
    assert list(asked) == ["out of memory", "assert", "illegal access"]
    said = {way: trial.user_attrs["cuda_error_msg"] for way, trial in asked.items()}
    assert said["out of memory"].startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert said["assert"].startswith("CUDA error: device-side assert triggered")
    assert said["illegal access"].startswith("CUDA error: an illegal memory access was encountered")
    assert {way: trial.user_attrs["cuda_error_type"] for way, trial in asked.items()} == {
        "out of memory": "torch.OutOfMemoryError",
        "assert": "torch.AcceleratorError",
        "illegal access": "builtins.RuntimeError",
    }
    assert all("cuda_error_msg" not in trial.user_attrs for way, trial in found.items() if way not in asked)


def test_reasons_of_prunings_can_be_asked_for(ways: tuple[Path, dict[str, FrozenTrial]]) -> None:
    _, found = ways
    reasons = {
        way: trial.user_attrs["prune_reason"] for way, trial in found.items() if "prune_reason" in trial.user_attrs
    }
    assert list(reasons) == ["nan", "poor"]
    assert reasons["nan"].startswith("nonfinite: ")
    assert "worse than the median of 1 trials" in reasons["poor"]
