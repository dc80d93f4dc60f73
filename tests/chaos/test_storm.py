"""Storms of kills: exactly the trials asked for, each complete, once, with the values of a study nobody disturbed."""

import random
from pathlib import Path

import pytest

from chaos import Storm, assert_undisturbed, chosen_seed, failures
from dryfit.settings.errors import FailureKind
from study_runs import fold, objective_study, run, write_study

RUNTIME = "parallel = 2\nretries = 100"
CHILD_S = (0.05, 0.2)


def walks(folder: Path, trials: int, seed: int) -> Path:
    folder.mkdir()
    study = objective_study("walk", study=f"trials = {trials}\nseed = {seed}", runtime=RUNTIME)
    (folder / "study.toml").write_text(study, encoding="utf-8")
    return folder


def encoders(folder: Path, trials: int, seed: int) -> Path:
    file = write_study(folder, trials=trials, search='sampler = "random"', runtime=RUNTIME)
    file.write_text(file.read_text(encoding="utf-8").replace("seed = 11", f"seed = {seed}"), encoding="utf-8")
    return folder


def weather(folder: Path, undisturbed: Path, trials: int, seed: int, control_s: tuple[float, float]) -> None:
    """Run one study in peace and its twin in a storm, and compare them."""
    assert run("tune", undisturbed, "--quiet").returncode == 0
    storm = Storm(folder, random.Random(seed), child_s=CHILD_S, control_s=control_s)
    storm.run()
    print(f"killed: {dict(storm.killed)}")
    assert_undisturbed(folder, undisturbed, trials)
    assert storm.killed["child"] > 0 and storm.killed["control"] + storm.killed["server"] > 0
    state = fold(folder)
    assert max(len(trial.attempts) for trial in state.trials) > 1
    # Whoever was killed was started again, and whoever was lost with another's death was not even counted.
    assert {kind for kind, _ in failures(state)} <= {FailureKind.KILLED, FailureKind.LOST}
    assert {action for _, action in failures(state)} <= {"retry"}


@pytest.mark.parametrize(
    ("trials", "control_s"),
    [
        pytest.param(60, (2.0, 4.0), marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
        pytest.param(300, (10.0, 20.0), marks=[pytest.mark.chaos_long, pytest.mark.timeout(14400)]),
    ],
)
def test_a_storm_over_functions_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int, control_s: tuple[float, float]
) -> None:
    seed = chosen_seed()
    folder, undisturbed = (walks(tmp_path / name, trials, seed) for name in ("study", "undisturbed"))
    monkeypatch.setenv("STEP_PAUSE_S", "0.01")
    weather(folder, undisturbed, trials, seed, control_s)


@pytest.mark.parametrize(
    ("trials", "control_s"),
    [
        pytest.param(3, (4.0, 8.0), marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
        pytest.param(20, (10.0, 20.0), marks=[pytest.mark.chaos_long, pytest.mark.timeout(14400)]),
    ],
)
def test_a_storm_over_encoders_changes_nothing(tmp_path: Path, trials: int, control_s: tuple[float, float]) -> None:
    seed = chosen_seed()
    folder, undisturbed = (encoders(tmp_path / name, trials, seed) for name in ("study", "undisturbed"))
    weather(folder, undisturbed, trials, seed, control_s)
