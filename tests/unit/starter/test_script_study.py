"""The study file that is written of a script's arguments."""

from pathlib import Path
from typing import Any

import pytest

from dryfit.settings.check_messages import ScriptArgument, ScriptArgumentsResult
from dryfit.settings.errors import ConfigError
from dryfit.settings.study_file_reading import load_study_text
from dryfit.settings.user_code import CommandTemplate
from dryfit.study.template import script_toml, searched_argument


def argument(option: str, kind: Any, default: Any = None, **more: Any) -> ScriptArgument:
    return ScriptArgument(option=option, kind=kind, default=default, **more)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (argument("--learning_rate", "float", 5e-5), "{low = 5e-06, high = 0.0005, log = true}"),
        (argument("--lr", "float", 5e-5, given=1e-3), "{low = 0.0001, high = 0.01, log = true}"),
        (argument("--weight-decay", "float", 0.0), "{low = 0.0, high = 0.1}"),
        (argument("--hidden_dropout", "float", 0.1), "{low = 0.0, high = 0.5}"),
        (argument("--batch_size", "int", 8), "[4, 8, 16]"),
        (argument("--layers", "int", 0), "{low = 1, high = 2}"),
        (argument("--margin", "float", 0.0), "{low = 0.0, high = 1.0}"),
        (argument("--epochs", "int", 3), "[1, 3, 6]"),
        (argument("--shuffle", "flag", False), '["", "--shuffle"]'),
        (argument("--nesterov", "bool", False), "[true, false]"),
        (argument("--act", "choice", "relu", choices=("relu", "gelu")), '["relu", "gelu"]'),
        (argument("--pooling", "text", "mean"), '["mean"]'),
        (argument("--pooling", "text"), None),
        (argument("--margin", "float"), None),
        (argument("--seed", "int", 1), None),
        (argument("--data_path", "text", "x"), None),
        (argument("--number", "int", 1), None),
        (argument("--adam_epsilon", "float", 1e-8, of_trainer=True), None),
    ],
)
def test_what_is_searched_of_an_argument(given: ScriptArgument, values: str | None) -> None:
    found = searched_argument(given)
    assert (found.values if found is not None else None) == values


FOUND = ScriptArgumentsResult(
    arguments=(
        argument("--model", "text", "x"),
        argument("--lr", "float", 1e-3),
        argument("--hidden-dropout", "float", 0.1),
        argument("--margin", "float", 0.5),
        argument("--shuffle", "flag", False),
    ),
    makes_trainer=False,
)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "train.py --lr {lr} --hidden-dropout {hidden_dropout}"),
        (["--lr", "0.1", "a b"], "train.py --lr {lr} 'a b' --hidden-dropout {hidden_dropout}"),
        (
            ["--hidden-dropout=0.3", "--lr=2", "--margin", "1"],
            "train.py --hidden-dropout={hidden_dropout} --lr={lr} --margin 1",
        ),
    ],
)
def test_the_command_keeps_what_is_not_searched(words: list[str], command: str) -> None:
    text = script_toml("own", "train.py", words, "..", FOUND)
    config = load_study_text(text, Path("own.toml"), ()).config
    assert config.script is not None and config.script.command == command
    assert set(config.space) == {"lr", "hidden_dropout"} == CommandTemplate.parse(command).placeholders
    assert "# margin = {low = 0.05, high = 5.0, log = true}  # --margin {margin}: float, default 0.5" in text
    assert '# shuffle = ["", "--shuffle"]  # {shuffle}: flag, default False' in text


def test_a_script_without_an_argument_to_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="defines no argument that can be searched"):
        script_toml("own", "train.py", [], "..", ScriptArgumentsResult(arguments=(), makes_trainer=False))
