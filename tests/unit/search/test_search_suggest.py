import json
import logging
import random
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.ledger.state import History
from dryfit.search.history_view import best_spread
from dryfit.search.samplers import SamplerInput, Suggestion, TpeMemory, suggest, suggest_at
from dryfit.search.space import SmallestPoints, Space
from dryfit.settings.choices import Direction
from dryfit.settings.memory_key import FEWER_IS_LESS, IRRELEVANT, MORE_IS_LESS, NEUTRAL, SET_OR_UNSET
from dryfit.settings.study_file import SamplerName, SearchSettings, StudyConfig
from dryfit.settings.study_file_text import SEARCHABLE
from dryfit.settings.tables import LoraSettings
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, TrialRecord

LR_AND_DECAY = {"optim.lr": {"low": 1e-6, "high": 1.0, "log": True}, "optim.weight_decay": {"low": 0.0, "high": 1.0}}

IN_PROCESS = [sampler for sampler in SamplerName if sampler is not SamplerName.GP]
"""The samplers that need no process of their own."""


def space(table: dict[str, object]) -> Space:
    return Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": table})))


def settings(**changes: object) -> SearchSettings:
    return SearchSettings.model_validate_json(json.dumps({"defaults_first": False, **changes}))


def ask(made: Space, history: list[TrialRecord], search: SearchSettings, **more: object) -> Suggestion:
    given = {"directions": (Direction.MINIMIZE,), "points": (), "seed": 7, "number": len(history), **more}
    return suggest(made, history, search=search, **given)  # type: ignore[arg-type]


def finished(number: int, point: Suggestion, value: float | None, outcome: Outcome = Outcome.COMPLETE) -> TrialRecord:
    return TrialRecord(number, point.internal, point.distributions, outcome, value)


def loss(params: dict[str, Scalar]) -> float:
    lr, decay = params["optim.lr"], params["optim.weight_decay"]
    assert isinstance(lr, float) and isinstance(decay, float)
    return (np.log10(lr) + 3) ** 2 + 5 * (decay - 0.3) ** 2


def run(made: Space, search: SearchSettings, trials: int, seed: int) -> list[TrialRecord]:
    history: list[TrialRecord] = []
    for number in range(trials):
        point = ask(made, history, search, seed=seed)
        history.append(finished(number, point, loss(point.params)))
    return history


def test_random_reads_no_history() -> None:
    made = space(LR_AND_DECAY)
    search = settings(sampler="random")
    history = run(made, search, 15, seed=7)
    assert ask(made, history, search) == ask(made, [], search, number=15)


def read_by_tpe(made: Space, history: list[TrialRecord], directions: tuple[Direction, ...]) -> set[int]:
    """Numbers of the trials that TPE reads: each has a learning rate of its own."""
    memory = History(history).projected("read", lambda: TpeMemory(made, directions, refused=True))
    numbers = {record.params["optim.lr"]: record.number for record in history}
    return {numbers[trial.params["optim.lr"]] for trial in memory.trials([])}


def test_tpe_with_several_goals_reads_the_whole_front_of_a_long_history() -> None:
    """Of 1 000 trials it reads 700 at most: the best by both goals, wherever they stand, and the last."""
    made = space(LR_AND_DECAY)
    both = (Direction.MINIMIZE, Direction.MINIMIZE)
    history = [
        replace(record, also=(float(record.params["optim.weight_decay"] or 0),))
        for record in run(made, settings(sampler="random"), 1000, seed=7)
    ]
    best = set(best_spread(np.array([record.values for record in history]), 50).tolist())
    read = read_by_tpe(made, history, both)
    assert read == best | set(range(350, 1000))
    assert len(best - set(range(350, 1000))) > 5
    told = ask(made, history, settings(), directions=both)
    rest = [replace(record, outcome=Outcome.FAILED) if record.number not in read else record for record in history]
    assert told == ask(made, rest, settings(), directions=both)
    assert told != ask(made, history, settings(), directions=(Direction.MINIMIZE, Direction.MAXIMIZE))
    refused = [replace(record, outcome=Outcome.REFUSED, value=None, also=()) for record in history[:710]]
    assert ask(made, refused, settings(), directions=both).params.keys() == LR_AND_DECAY.keys()


def test_startup_counts_the_whole_history_and_only_what_is_told() -> None:
    made = space(LR_AND_DECAY)
    history = run(made, settings(sampler="random"), 260, seed=7)
    at_random = ask(made, [], settings(sampler="random"), number=260)
    assert ask(made, history, settings(startup_trials=261)) == at_random
    assert ask(made, history, settings(startup_trials=260)) != at_random
    failed = [replace(record, outcome=Outcome.FAILED, value=None) for record in history]
    assert ask(made, failed, settings(startup_trials=1)) == at_random


def test_failed_and_cancelled_trials_do_not_move_a_suggestion() -> None:
    made = space(LR_AND_DECAY)
    history = run(made, settings(), 30, seed=7)
    odd = [replace(record, number=record.number + 30) for record in history]
    told = ask(made, history, settings(), number=90)
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        more = [*history, *(replace(record, outcome=outcome, value=None) for record in odd)]
        assert ask(made, more, settings(), number=90) == told
    more = [*history, *(replace(record, outcome=None, value=None) for record in odd)]
    assert ask(made, more, settings(), number=90) != told  # running ones push the next point away
    more = [*history, *(replace(record, outcome=Outcome.REFUSED, value=None) for record in odd)]
    assert ask(made, more, settings(), number=90) != told


def test_later_trials_do_not_move_a_suggestion() -> None:
    made = space(LR_AND_DECAY)
    history = run(made, settings(), 30, seed=7)
    assert ask(made, history, settings(), number=20) == ask(made, history[:20], settings(), number=20)


@pytest.mark.parametrize(
    ("sampler", "goals"),
    [(each, goals) for each in IN_PROCESS for goals in (1, 2) if (each, goals) != (SamplerName.CMAES, 2)],
)
@pytest.mark.parametrize("value", [nan, None, float("inf"), float("-inf")])
def test_odd_values_break_nothing(value: float | None, goals: int, sampler: SamplerName) -> None:
    made = space(LR_AND_DECAY)
    history = [replace(record, also=(0.5,) * (goals - 1)) for record in run(made, settings(), 20, seed=7)]
    points = (MetricPoint(0, 1, 1.0, 0.5, {}), MetricPoint(1, 2, 2.0, nan, {}))
    history += [replace(record, number=20 + record.number, value=value) for record in history]
    history += [
        replace(record, number=40 + record.number, outcome=Outcome.PRUNED, value=None, also=(), reports=points[:count])
        for record in history[:20]
        for count in (1 + record.number % 2,)
    ]
    odd = settings(sampler=sampler, **({"population_size": 4} if sampler is SamplerName.NSGA2 else {}))
    chosen = ask(made, history, odd, directions=(Direction.MINIMIZE,) * goals)
    assert all(made.cases(name)[0].contains(value) for name, value in chosen.params.items())


def test_a_widened_range_still_learns_from_old_trials() -> None:
    old = space({"optim.lr": {"low": 0.1, "high": 0.2}})
    history = [finished(n, ask(old, [], settings(sampler="random"), number=n), 0.0) for n in range(30)]
    new = space({"optim.lr": {"low": 1e-6, "high": 10.0}})
    assert new.read(history[0].params) == history[0].params
    with_history, without = ask(new, history, settings()), ask(new, [], settings(), number=30)
    assert with_history != without
    narrowed = space({"optim.lr": {"low": 0.15, "high": 0.2}})
    assert narrowed.read({"optim.lr": 0.12}) == {}


def test_a_renumbered_case_is_read_by_value_and_condition() -> None:
    case = {"choices": [8, 16], "when": {"model.name": "a"}}
    other = {"choices": [4, 8], "when": {"model.name": "b"}}
    old = space({"model.name": ["a", "b"], "train.batch_size": [case, other]})
    new = space({"model.name": ["a", "b"], "train.batch_size": [other, case]})
    assert old.read({"model.name": "a", "train.batch_size#0": 8}) == {"model.name": "a", "train.batch_size#0": 8}
    assert new.read({"model.name": "a", "train.batch_size#0": 8}) == {"model.name": "a", "train.batch_size#1": 8}
    assert new.read({"model.name": "c", "train.batch_size#0": 8}) == {}


def test_global_random_state_is_neither_read_nor_touched() -> None:
    made = space(LR_AND_DECAY)
    history = run(made, settings(), 20, seed=7)
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    one = ask(made, history, settings())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
    random.seed(2)
    np.random.seed(2)
    assert ask(made, history, settings()) == one


def test_only_our_studies_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    made = space(LR_AND_DECAY)
    logger = logging.getLogger("optuna.storages._in_memory")
    logging.getLogger("optuna").addHandler(caplog.handler)
    try:
        ask(made, [], settings(), number=1)
        assert not caplog.records
        logger.info("A new study created in memory with name: somebody's")
        assert len(caplog.records) == 1
    finally:
        logging.getLogger("optuna").removeHandler(caplog.handler)


# ---- the points of a space that take least memory: with them refused, every point that can be drawn is

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
