"""On a CUDA device: children of the fork server make their contexts cleanly, in every precision, side by side.

python -m pytest tests/gpu -m gpu
"""

from pathlib import Path

import pytest

from dryfit.settings.trial import Outcome
from study_runs import ends, fold, run, write_study


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_trials_side_by_side_on_one_card(tmp_path: Path, precision: str) -> None:
    write_study(tmp_path / "study", trials=4, search='sampler = "random"', runtime="parallel = 2")
    done = run("tune", tmp_path / "study", "--set", f"train.precision={precision}", "--set", "execution.device=cuda")
    assert done.returncode == 0, done.stderr
    state = fold(tmp_path / "study")
    assert state.counts[Outcome.COMPLETE] == 4
    assert state.resolved is not None
    assert state.resolved.device == "cuda"
    assert all(attempt.device == "here/0" for trial in state.trials for attempt in trial.attempts)
    assert all(len(trial.attempts) == 1 for trial in state.trials)


def test_a_repeated_study_repeats_its_parameters(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / name, trials=2, search='sampler = "random"')
        assert run("tune", tmp_path / name, "--set", "execution.device=cuda").returncode == 0
    first, second = ends(tmp_path / "one"), ends(tmp_path / "two")
    assert [end.params for end in first] == [end.params for end in second]
    for one, two in zip(first, second, strict=True):
        assert one.value == pytest.approx(two.value, abs=0.2)
