"""The check of a model and its batches, in this process: what it finds in batches, weights and gradients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sick
import tiny
import trials
from dryfit.settings.check_messages import BatchCheckRequest, BatchCheckResult, ProbeRequest
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import TrialSettings
from dryfit.training import batch_check as checking
from dryfit.training import model as train_model
from dryfit.training import trainer as loop
from dryfit.training.batch_check import batch_check
from dryfit.training.resolve import probe
from trials import ScriptedChannel, Trial


def checked(
    trial: Trial, *, lengths: tuple[int, ...] = (32,), points: tuple[dict[str, Any], ...] = ()
) -> BatchCheckResult:
    request = trial.request()
    tables = [json.loads(trial.settings.model_dump_json()) for _ in points]
    for table, changes in zip(tables, points, strict=True):
        for name, value in changes.items():
            table[name.split(".")[0]][name.split(".")[1]] = value
    configs = tuple(
        request.config.model_copy(
            update={"settings": TrialSettings.model_validate_json(json.dumps(table)), "params": changes}
        )
        for table, changes in zip(tables, points, strict=True)
    )
    body = BatchCheckRequest(trial=request, lengths=lengths, points=configs)
    return batch_check(body, ScriptedChannel(trial.folder / "check"))


def test_a_good_model_walks_every_batch_and_does_a_step(tmp_path: Path) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"), execution={"micro_batch": 3})
    points = ({"loss.name": "focal", "head.pooling": "max"}, {"optim.name": "sgd", "head.pooling": "cls"})
    found = checked(trial, lengths=(16, 32), points=points)
    assert found.failures == ()
    assert {(walk.split, walk.max_length): (walk.rows, walk.batches) for walk in found.walks} == {
        ("train", 16): (40, 5),
        ("validation", 16): (20, 2),
        ("train", 32): (40, 5),
        ("validation", 32): (20, 2),
    }
    assert max(walk.longest for walk in found.walks if walk.max_length == 16) == 16
    step = found.step
    assert step is not None
    assert (step.rows, step.micro_batch, step.not_finite, step.untouched) == (8, 3, (), ())
    assert 0.3 < step.loss < 1.5 and step.step_s is not None
    assert step.length == max(walk.longest for walk in found.walks if walk.split == "train")
    assert [point.params for point in found.points] == list(points)
    assert all(point.step is not None and point.error is None for point in found.points)
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "data", "cache", "resolve", "check", "attempt-1"}


def test_frozen_layers_are_not_asked_for_gradients(tmp_path: Path) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"), regularization={"freeze_layers": 1})
    step = checked(trial).step
    assert step is not None and step.untouched == ()
    assert step.trainable < step.parameters


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gradients_that_are_not_finite_are_named(tmp_path: Path, precision: str) -> None:
    trial = trials.small(tmp_path, encoder=sick.nan_weights(tmp_path / "model"), train={"precision": precision})
    step = checked(trial).step
    assert step is not None
    assert step.loss != step.loss
    assert "head.1.weight" in step.not_finite


def test_parameters_without_a_gradient_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = train_model.build_model

    def with_an_idle_part(*args: Any, **kwargs: Any) -> Any:
        model = built(*args, **kwargs)
        model.encoder.idle = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(train_model, "build_model", with_an_idle_part)
    step = checked(trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"))).step
    assert step is not None
    assert step.untouched == ("encoder.idle.weight", "encoder.idle.bias")


def test_a_bias_whose_gradient_cancels_is_reached_and_a_dead_matrix_is_not() -> None:
    scores = torch.nn.Linear(4, 1).double()
    first, second = scores(torch.ones(2, 4, dtype=torch.float64))  # equal rows: their difference depends on nothing
    (first - second).sum().backward()
    assert scores.weight.grad is not None and scores.bias.grad is not None
    assert (scores.weight.grad.count_nonzero(), scores.bias.grad.count_nonzero()) == (0, 0)
    assert checking._is_dead(scores.weight.grad) and not checking._is_dead(scores.bias.grad)


@pytest.mark.parametrize(
    ("make", "stage", "said"),
    [
        (sick.shard_missing, "weights", "model-00002-of-00002.safetensors"),
        (sick.few_positions, "tokens, train.max_length = 32", "train.max_length is 32"),
        (sick.without_padding, "tokens, train.max_length = 32", "no padding token"),
        (sick.few_embeddings, "tokens, train.max_length = 32", "token id 24"),
    ],
)
def test_errors_are_part_of_the_answer(tmp_path: Path, make: Callable[[Path], Path], stage: str, said: str) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"))
    trial.request()  # its rows are checked with a model that is well
    make(tmp_path / "sick")
    model = trial.settings.model.model_copy(update={"name": str(tmp_path / "sick")})
    request = trial.request()
    settings = trial.settings.model_copy(update={"model": model})
    request = request.model_copy(update={"config": request.config.model_copy(update={"settings": settings})})
    body = BatchCheckRequest(trial=request, lengths=(32,))
    found = batch_check(body, ScriptedChannel(tmp_path / "check"))
    assert found is not None and found.step is None
    assert [one.stage for one in found.failures] == [stage]
    assert said in found.failures[0].error.found


def test_a_point_that_cannot_be_trained_hides_no_other(tmp_path: Path) -> None:
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"))
    found = checked(trial, points=({"regularization.freeze_layers": 9}, {"head.pooling": "max"}))
    bad, good = found.points
    assert bad.error is not None and "the encoder has 2" in bad.error.found
    assert good.step is not None


def test_where_the_device_has_no_room_fewer_rows_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = loop.backward_batch, []

    def small_device(*args: Any, micro_batch: Any, **kwargs: Any) -> Any:
        asked.append(micro_batch[0].rows)
        if micro_batch[0].rows > 2:
            raise torch.OutOfMemoryError("no room")
        return real(*args, micro_batch=micro_batch, **kwargs)

    monkeypatch.setattr(loop, "backward_batch", small_device)
    step = checked(trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"))).step
    assert step is not None and step.micro_batch == 2
    assert asked == [8, 4, 2, 2]


def test_a_probe_adds_up_on_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = probe(ProbeRequest(), ScriptedChannel(tmp_path / "none"))
    assert found is not None and (found.devices, found.trouble, found.bf16) == ((), "", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)

    def no_kernel(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(torch, "ones", no_kernel)
    found = probe(ProbeRequest(), ScriptedChannel(tmp_path / "old"))
    assert found is not None and found.devices == ()
    assert found.trouble == "cuda:0: CUDA error: no kernel image is available"


def test_a_limit_below_the_context_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise ConfigError("limiting the trial to 1 MiB of its device", "its CUDA context alone takes more")

    monkeypatch.setattr(checking, "prepare_device", refuse)
    found = checked(trials.small(tmp_path, encoder=tiny.model(tmp_path / "model")))
    assert [one.stage for one in found.failures] == ["device"] and found.walks == ()
