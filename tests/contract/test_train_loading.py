"""Trials load exactly: no `from_pretrained` for weights on their way, and a report of where each tensor came from."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import tiny
import trials
from dryfit.gpu.private_apis.torch_modes import MODES
from dryfit.meta.checkpoint_files import model_identity
from dryfit.settings.check_messages import LoadReport, TensorOrigin
from dryfit.settings.errors import ChangedError, LoadError
from dryfit.settings.private_names import require
from dryfit.settings.training_messages import StopReason
from dryfit.training.model import build_model
from dryfit.training.start import start_training
from trials import ScriptedChannel


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


@pytest.fixture(scope="module", autouse=True)
def known_names() -> None:
    """Private names are tried once a process: not while a test has put something in the place of torch's own."""
    require("loading a model", MODES)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("weights were loaded by a library that goes on when some are missing")


def test_start_validation_resume_and_best_weights_load_exactly(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(safetensors.torch, "load_model", refuse)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", refuse)
    trial = trials.small(tmp_path / "trial", encoder=model, train={"evals_per_epoch": 2})
    first, _ = trial.run(stop_at=3)
    assert first.stopped_by is StopReason.REQUEST
    trial.run()

    report = LoadReport.model_validate_json((tmp_path / "trial" / "load.json").read_text())
    origins = report.origins()
    stored = load_file(model / "model.safetensors")
    kept = {f"encoder.{key}": key for key in stored if not key.startswith("pooler.")}
    assert report.from_file == kept
    assert {name for name, origin in origins.items() if origin is TensorOrigin.RANDOM} == {
        "head.1.weight",
        "head.1.bias",
    }
    assert set(report.constructed) == {"encoder.embeddings.position_ids", "encoder.embeddings.token_type_ids"}
    assert len(origins) == len(report.from_file) + len(report.random) + len(report.constructed) + len(report.tied)


def test_the_head_depends_on_the_trials_seed_and_on_nothing_else(tmp_path: Path, model: Path) -> None:
    found = []
    for name, seed, noise in (("one", 3, 0), ("same", 3, 99), ("other", 4, 0)):
        trial = trials.small(tmp_path / name, encoder=model, optim={"lr": 1e-12})
        trial.seed = seed
        torch.manual_seed(noise)
        trial.run()
        found.append(trial.best_weights()["head.1.weight"])
    assert torch.allclose(found[0], found[1], atol=1e-9)
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_an_offloaded_model_is_refused_before_the_first_step(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offloaded(*args: object, **kwargs: object) -> torch.nn.Module:
        whole = build_model(*args, **kwargs)
        cpu_offload(whole.encoder, execution_device=torch.device("cpu"))
        return whole

    monkeypatch.setattr("dryfit.training.model.build_model", offloaded)
    trial = trials.small(tmp_path / "trial", encoder=model)
    with pytest.raises(LoadError, match="training trial 0: 37 tensors are on meta") as caught:
        trial.run()
    assert "activation checkpointing" in caught.value.hint
    assert not list((tmp_path / "trial").rglob("best"))


def test_a_checkpoint_that_lacks_a_weight_stops_the_trial(tmp_path: Path, model: Path) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    trial = trials.small(tmp_path / "trial", encoder=model)
    with pytest.raises(LoadError, match=r"1 missing \(encoder\.layer\.0\.output\.dense\.weight\)"):
        trial.run()
    assert not (tmp_path / "trial" / "load.json").exists()


def test_a_model_that_has_changed_since_the_session_began_is_refused(tmp_path: Path, model: Path) -> None:
    trial = trials.small(tmp_path, encoder=model)
    request = trial.request()
    name = request.config.settings.model.name
    now = model_identity(request.config.settings.model)
    for revisions in ({}, {"another": "folder-0"}, {name: now}):
        start_training(request.model_copy(update={"revisions": revisions}), ScriptedChannel(tmp_path))
    with pytest.raises(ChangedError, match="its files have changed since the study was started") as caught:
        start_training(request.model_copy(update={"revisions": {name: "folder-0"}}), ScriptedChannel(tmp_path))
    assert "dryfit resume" in caught.value.hint
