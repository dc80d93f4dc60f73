"""The best trials of another study as points: what the space can draw of them, and what is said of the rest."""

import json

import pytest

from dryfit.search.changes import not_taken, take_points
from dryfit.search.space import Space
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.trial import Outcome
from ledgers import Script, begun

SPACE = {
    "optim.lr": {"low": 1e-5, "high": 1e-3, "log": True},
    "optim.name": ["adamw", "sgd"],
    "optim.beta2": {"low": 0.9, "high": 0.99, "when": {"optim.name": "adamw"}},
    "train.epochs": [1, 2, 3],
}


def space() -> Space:
    return Space.from_config(StudyConfig.model_validate_json(json.dumps({"space": SPACE})))


def other() -> Script:
    script = begun()
    script.complete(0, {"optim.lr": 1e-4, "head.pooling": "cls"}, [0.5])
    script.complete(1, {"optim.lr": 0.5, "optim.name": "sgd"}, [0.9])
    script.ask(2, {"optim.lr": 2e-4})
    script.finish(2, Outcome.FAILED)
    script.complete(3, {"optim.lr": 3e-4, "train.epochs": 3}, [0.7])
    script.complete(4, {"optim.lr": 3e-4, "train.epochs": 3}, [0.6])
    return script


def test_the_best_come_first_and_what_lies_outside_is_said() -> None:
    taken = take_points(other().state(), 3, "/a:top3", space())
    # Keys that trials of the other study did not draw have the values of its file: here the defaults.
    assert taken.points == (
        {"optim.name": "sgd", "train.epochs": 2},
        {"optim.lr": 3e-4, "optim.name": "adamw", "train.epochs": 3},
    )
    assert taken.notes == (
        "trying 2 point(s) first: trials 1, 3, 4 of /a:top3, the best by f1_macro",
        "optim.lr of its trials 1 is unknown or outside [space]: the sampler draws it",
        "optim.beta2 of its trials 3, 4 is unknown or outside [space]: the sampler draws it",
    )
    everything = take_points(other().state(), 100, "/a:top100", space())
    assert everything.points[:2] == taken.points and len(everything.points) == 3
    assert everything.notes[-1] == "searched there and not here, so left out: head.pooling"


def test_a_study_with_nothing_to_take_is_refused() -> None:
    empty = begun()
    with pytest.raises(ConfigError, match="no complete trial"):
        take_points(empty.state(), 1, "/a:top1", space())
    narrow = StudyConfig.model_validate_json(json.dumps({"space": {"optim.lr": [1.0]}}))
    with pytest.raises(ConfigError, match=r"no value of its best trials lies in \[space\]"):
        take_points(other().state(), 9, "/a:top9", Space.from_config(narrow))


def test_a_study_that_exists_says_that_it_takes_no_more() -> None:
    assert not_taken("/a:top1", "/a:top1") == ()
    (text,) = not_taken("/a:top1", "")
    assert "this began without it" in text and "[[search.enqueue]]" in text
