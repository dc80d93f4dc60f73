"""What is said of arguments that a script does not use."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.errors import ObjectiveError
from dryfit.training.script_arguments import ArgumentReads

OPTIONS = {"lr": "--learning-rate", "wd": "--wd"}


@pytest.fixture
def reads(monkeypatch: Any) -> Iterator[ArgumentReads]:
    """A watch over two arguments, taken off again."""
    parser_class = argparse.ArgumentParser
    for cls, name in ((parser_class, "parse_known_args"), (parser_class, "error"), (argparse.Action, "__init__")):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    monkeypatch.setattr("dryfit.training.script_arguments.when_imported", lambda *_: None)
    watch = ArgumentReads(OPTIONS, {"lr": 0.1, "wd": 0.0}, "/trial")
    watch.install()
    yield watch
    ArgumentReads({}, {}).install()


def parser(*names: str, **more: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(**more)
    for name in names:
        made.add_argument(name, type=float, default=1.0)
    return made


def test_what_is_read_is_not_mentioned(reads: ArgumentReads) -> None:
    found = parser("--learning-rate", "--wd").parse_args(["--learning-rate", "0.1", "--wd=0"])
    assert reads.notes() == [
        "nothing in the script has read --learning-rate and --wd: the search over it has no effect"
    ]
    assert found.learning_rate == 0.1
    assert reads.notes() == ["nothing in the script has read --wd: the search over it has no effect"]
    assert repr(found) == "Namespace(learning_rate=0.1, wd=0.0)"
    assert reads.notes() == []


def test_all_at_once_is_all(reads: ArgumentReads) -> None:
    assert vars(parser("--learning-rate", "--wd").parse_args([])) == {"learning_rate": 1.0, "wd": 1.0}
    assert reads.notes() == []


def test_an_own_namespace_says_nothing(reads: ArgumentReads) -> None:
    class Own(argparse.Namespace):
        pass

    assert isinstance(parser("--wd").parse_args(["--wd", "1"], Own()), Own)
    assert reads.notes() == []


def test_what_no_parser_knows_is_told(reads: ArgumentReads) -> None:
    first, rest = parser("--config", add_help=False).parse_known_args(["--wd=2", "--learning-rate", "3"])
    assert (first.config, rest) == (1.0, ["--wd=2", "--learning-rate", "3"])
    found, _ = parser("--wd").parse_known_args(rest)
    assert found.wd == 2.0
    assert reads.notes() == ["the script's parser does not know --learning-rate: the search over it has no effect"]
    with pytest.raises(ObjectiveError, match="unrecognized arguments: --learning-rate 3"):
        parser("--wd").parse_args(rest)


def test_values_that_a_trainer_has_otherwise(reads: ArgumentReads) -> None:
    assert reads.other_values(argparse.Namespace(learning_rate=0.1, other=1), {}) == []
    (said,) = reads.other_values(argparse.Namespace(learning_rate=5e-5, wd=0), {})
    assert said.startswith("--learning-rate is 0.1, and learning_rate of the Trainer's arguments is 5e-05")
    planned = argparse.Namespace(learning_rate=5e-5)
    assert reads.other_values(planned, {"learning_rate": 0.1}) == []  # its plan has changed it


def test_an_output_folder_that_nobody_names_is_the_trials(reads: ArgumentReads) -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--output_dir", type=Path, default="out")
    made.add_argument("--other", default="out")
    assert vars(made.parse_args([])) == {"output_dir": Path("/trial"), "other": "out"}
    assert vars(parser("--wd").parse_args([])) == {"wd": 1.0}
