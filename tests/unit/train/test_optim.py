from pathlib import Path

import pytest
import torch

import tiny
from dryfit.core.settings import HeadSettings, OptimSettings, SchedSettings
from dryfit.meta.pretrained import load_encoder
from dryfit.meta.source import FolderSource
from dryfit.tasks.heads import EncoderWithHead, HeadSpec, freeze
from dryfit.train.optim import make_optimizer, make_schedule, parameter_groups


@pytest.fixture
def model(tmp_path: Path) -> EncoderWithHead:
    encoder, _ = load_encoder(FolderSource.of(tiny.model(tmp_path / "model")))
    return EncoderWithHead(encoder, HeadSpec(HeadSettings(layers=1), num_outputs=2))


def by_name(model: EncoderWithHead, optim: OptimSettings) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, optim)
        for parameter in group["params"]
    }


def test_every_trainable_parameter_is_in_one_group(model: EncoderWithHead) -> None:
    freeze(model, 1)
    groups = parameter_groups(model, OptimSettings(layer_decay=0.5))
    found = [parameter for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {parameter for parameter in model.parameters() if parameter.requires_grad}


def test_norms_and_biases_do_not_decay(model: EncoderWithHead) -> None:
    for name, (_, decay) in by_name(model, OptimSettings(weight_decay=0.3)).items():
        free = name.endswith("bias") or "LayerNorm" in name
        assert decay == (0.0 if free else 0.3), name


def test_learning_rates_fall_from_the_head_down(model: EncoderWithHead) -> None:
    found = by_name(model, OptimSettings(lr=1.0, layer_decay=0.5, head_lr_factor=3.0))
    want = {
        "head.": 3.0,
        "encoder.encoder.layer.1.": 0.5,
        "encoder.encoder.layer.0.": 0.25,
        "encoder.embeddings.": 0.125,
    }
    for prefix, rate in want.items():
        rates = {lr for name, (lr, _) in found.items() if name.startswith(prefix)}
        assert rates == {rate}, prefix


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464]),
    ],
)
def test_schedules(model: EncoderWithHead, name: str, rates: list[float]) -> None:
    optimizer = make_optimizer(model, OptimSettings(lr=1.0, layer_decay=0.5))
    ratios = [group["lr"] for group in optimizer.param_groups]
    schedule = make_schedule(optimizer, SchedSettings(name=name, warmup_ratio=1 / 3), 6)
    for rate in rates:
        assert schedule.get_last_lr() == pytest.approx([rate * ratio for ratio in ratios], abs=1e-4)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_one_step_of_each_optimizer_moves_the_weights(model: EncoderWithHead, name: str) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    make_optimizer(model, OptimSettings(name=name, lr=1e-3)).step()
    moved = [key for key, value in model.named_parameters() if not torch.equal(before[key], value)]
    assert len(moved) == sum(1 for _ in model.parameters())
