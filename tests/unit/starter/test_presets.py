"""Presets: each is a legal study file, and its space can be searched."""

from pathlib import Path

import pytest

from dryfit.config.checks import Use
from dryfit.config.load import LoadedStudy, load_study_text
from dryfit.config.problems import SEARCHABLE
from dryfit.core.errors import ConfigError
from dryfit.core.settings import Precision, Task
from dryfit.search.space import Space
from dryfit.starter.preset import preset_names, preset_text

DATA = ("data.train=a.jsonl", "data.validation=b.jsonl")


def load(name: str, use: Use = Use.PLAN, overrides: tuple[str, ...] = ()) -> LoadedStudy:
    return load_study_text(preset_text(name), Path(f"preset {name}"), overrides, use)


def test_every_preset_is_legal() -> None:
    assert preset_names() == ("lora-7b-24gb", "supermax")
    for name in preset_names():
        config = load(name).config
        assert config.study.name == name
        Space.from_config(config)


def test_supermax_searches_every_key_and_can_be_trained() -> None:
    config = load("supermax", Use.TRAIN, DATA).config
    assert set(SEARCHABLE) - set(config.space) == {
        "model.revision",
        "model.trust_remote_code",
        "train.evals_per_epoch",
        "train.early_stopping",
    }
    assert config.study.trials == 5000
    space = Space.from_config(config)
    names = ("model.name", "train.max_length", "train.batch_size")
    points = space.points(names, 1000)
    assert points is not None and len(points) == 7 * 4 * 4
    assert {point["train.batch_size"] for point in points} == {8, 16, 32, 64}
    assert {point["train.max_length"] for point in points} == {128, 256, 384, 512}


def test_the_seven_billion_preset() -> None:
    config = load("lora-7b-24gb").config
    assert config.study.task is Task.CAUSAL_LM
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha, config.lora.base) == (128, 256.0, Precision.FP16)
    assert (config.train.batch_size, config.train.max_length, config.execution.micro_batch) == (16, 512, 1)
    assert config.execution.checkpointing is True
    with pytest.raises(ConfigError, match="planned, not trained yet"):
        load("lora-7b-24gb", Use.TRAIN, DATA)


def test_an_unknown_preset_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean lora-7b-24gb") as caught:
        preset_text("lora-7b-24g")
    assert "supermax" in caught.value.allowed
