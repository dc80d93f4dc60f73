"""The points of a space that take least memory: with them refused, every point that can be drawn is."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.ledger.state import History
from dryfit.search.enqueued import SmallestPoints
from dryfit.search.samplers import SamplerInput, suggest, suggest_at
from dryfit.search.space import Space
from dryfit.settings.choices import Direction
from dryfit.settings.memory_key import FEWER_IS_LESS, IRRELEVANT, MORE_IS_LESS, NEUTRAL, SET_OR_UNSET
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.tables import LoraSettings

LR = {"low": 1e-5, "high": 1e-2, "log": True}
PER_POOLING = [
    {"choices": [8, 16], "when": {"head.pooling": "cls"}},
    {"low": 2, "high": 64, "when": {"head.pooling": ["mean", "max"]}},
]


def config(table: dict[str, Any]) -> StudyConfig:
    search = {"sampler": "random", "defaults_first": False}
    return StudyConfig.model_validate_json(json.dumps({"space": table, "search": search}))


def smallest(table: dict[str, Any]) -> SmallestPoints:
    found = SmallestPoints.of(Space.from_config(config(table)))
    assert found is not None
    return found


def test_every_known_order_is_of_a_key_that_decides_memory() -> None:
    adapters = {f"lora.{name}" for name in LoraSettings.model_fields}
    assert FEWER_IS_LESS | MORE_IS_LESS <= {*SEARCHABLE, *adapters}
    assert not (FEWER_IS_LESS | MORE_IS_LESS) & (IRRELEVANT | NEUTRAL.keys() | SET_OR_UNSET)
    assert not FEWER_IS_LESS & MORE_IS_LESS


@pytest.mark.parametrize(
    ("table", "points"),
    [
        ({}, [{}]),
        ({"optim.lr": LR, "sched.name": ["linear", "cosine"]}, [{}]),
        ({"train.batch_size": [64, 16, 32], "optim.lr": LR}, [{"train.batch_size": 16}]),
        ({"train.max_length": {"low": 64, "high": 512}}, [{"train.max_length": 64}]),
        ({"regularization.freeze_layers": [0, 6, 3]}, [{"regularization.freeze_layers": 6}]),
        ({"head.dropout": [0.1, 0.0, 0.5]}, [{"head.dropout": 0.0}]),
        ({"head.dropout": {"low": 0.1, "high": 0.5}}, [{"head.dropout": 0.1}]),
        (
            {"optim.name": ["adamw", "sgd"], "train.batch_size": [4, 8]},
            [{"optim.name": "adamw", "train.batch_size": 4}, {"optim.name": "sgd", "train.batch_size": 4}],
        ),
        (
            {"head.pooling": ["cls", "mean", "max"], "train.batch_size": PER_POOLING},
            [
                {"head.pooling": "cls", "train.batch_size": 8},
                {"head.pooling": "mean", "train.batch_size": 2},
                {"head.pooling": "max", "train.batch_size": 2},
            ],
        ),
        (
            {"train.batch_size": [4, 8], "head.layers": [{"choices": [1, 2], "when": {"train.batch_size": 8}}]},
            [{"train.batch_size": 4}, {"train.batch_size": 8, "head.layers": 1}],
        ),
    ],
)
def test_the_smallest_points_of_a_space(table: dict[str, Any], points: list[dict[str, Any]]) -> None:
    assert list(smallest(table).points) == points


@pytest.mark.parametrize(
    "table",
    [
        {"model.name": [f"model-{index}" for index in range(65)]},
        {"span.doc_stride": {"low": 1, "high": 400}},
        {
            "optim.name": ["adamw", "adafactor", "sgd", "lion", "radam"],
            "head.pooling": ["cls", "mean", "max", "attention"],
            "head.activation": ["gelu", "relu", "tanh", "silu"],
        },
    ],
)
def test_of_too_many_combinations_nothing_is_known(table: dict[str, Any]) -> None:
    assert SmallestPoints.of(Space.from_config(config(table))) is None


def test_a_refused_trial_rules_out_what_takes_no_less_and_nothing_else() -> None:
    found = smallest({"optim.name": ["adamw", "sgd"], "train.batch_size": [4, 8], "head.dropout": [0.0, 0.1]})
    small = {"train.batch_size": 4, "head.dropout": 0.0}
    assert len(found.without({"optim.name": "adamw", "train.batch_size": 8, "head.dropout": 0.0}).points) == 2
    assert len(found.without({"optim.name": "adamw", "train.batch_size": 4, "head.dropout": 0.1}).points) == 2
    assert len(found.without({"train.batch_size": 4, "head.dropout": 0.0}).points) == 2
    (left,) = found.without({"optim.name": "adamw", "optim.lr": 0.1, **small}).points
    assert left == {"optim.name": "sgd", **small}
    assert found.without({"optim.name": "adamw", **small}).without({"optim.name": "sgd", **small}).points == ()


TABLE: dict[str, Any] = {
    "optim.lr": LR,
    "head.pooling": ["cls", "mean", "max"],
    "train.batch_size": PER_POOLING,
    "train.max_length": {"low": 64, "high": 512, "step": 64},
    "regularization.freeze_layers": {"low": 0, "high": 6},
    "head.dropout": {"low": 0.0, "high": 0.5},
}


@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_takes_no_less_than_a_smallest_point(seed: int) -> None:
    """By a memory model that grows with every key as it is known to; each combination has its own offset."""
    draw = random.Random(seed)
    space, offsets = Space.from_config(config(TABLE)), {name: draw.random() for name in ("cls", "mean", "max")}
    weights = [draw.random() for _ in range(4)]

    def takes(point: dict[str, Any]) -> float:
        grows = (
            point["train.batch_size"],
            point["train.max_length"],
            6 - point["regularization.freeze_layers"],
            point["head.dropout"] != 0.0,
        )
        return 100 * offsets[point["head.pooling"]] + sum(w * value for w, value in zip(weights, grows, strict=True))

    study = config(TABLE)
    drawn = [
        suggest(
            space, [], search=study.search, directions=(Direction.MAXIMIZE,), points=(), seed=seed, number=number
        ).params
        for number in range(10)
    ]
    points = smallest(TABLE).points
    assert min(map(takes, drawn)) >= min(takes(dict(point)) for point in points)
    inputs = SamplerInput(space, History(()), study.search, (Direction.MAXIMIZE,), seed, 3)
    wanted = suggest_at(inputs, points[1])
    assert wanted.params.items() >= points[1].items() and wanted.enqueued == {}
