"""On a CUDA device: what is planned for is the device that is there.

python -m pytest tests/gpu -m gpu
"""

from pathlib import Path

import pytest
import torch

from dryfit.settings.memory_terms import VerdictKind
from dryfit.training.resolve import device_specs
from study_runs import fold, run, write_study


def test_the_device_that_is_there() -> None:
    spec = device_specs(torch.cuda.device_count())[0]
    _, total_bytes = torch.cuda.mem_get_info(0)
    assert spec.name == torch.cuda.get_device_name(0)
    assert spec.capacity_bytes == total_bytes
    assert spec.capability == torch.cuda.get_device_capability(0)


def test_a_study_plans_every_trial_and_observes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_study(tmp_path / "study", trials=3, search='sampler = "random"')
    done = run("tune", tmp_path / "study", "--set", "execution.device=cuda")
    assert done.returncode == 0, done.stderr
    for trial in fold(tmp_path / "study").trials:
        assert trial.plan is not None
        assert trial.plan.answer.verdict is VerdictKind.FITS, trial.plan.answer.reasons
        assert trial.plan.answer.device.name == torch.cuda.get_device_name(0)
        assert trial.observed is not None and trial.observed.allocated_bytes
    assert "largest observed / planned" in run("show", tmp_path / "study").stdout


def test_what_the_limit_forbids_is_refused_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limits = "max_refused_in_a_row = 2"
    write_study(tmp_path / "study", execution='memory_limit = "64MiB"\ndevice = "cuda"', runtime=limits)
    done = run("tune", tmp_path / "study")
    assert done.returncode == 1, done.stderr
    assert "the last 2 trials were refused: none fits" in done.stderr
    assert not any(trial.attempts for trial in fold(tmp_path / "study").trials)
