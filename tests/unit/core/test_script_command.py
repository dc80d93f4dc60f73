"""The command of a script: what it names, and what a trial makes of it."""

from typing import Any

import pytest

from dryfit.settings.user_code import CommandTemplate

VALUES: dict[str, Any] = {"lr": 1e-5, "n": 3, "flag": True, "none": None, "folder": "/trial", "seed": 7, "number": 0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.py", ()),
        ("train.py --lr {lr}", ("--lr", "1e-05")),
        ("python3 train.py --lr={lr} x", ("--lr=1e-05", "x")),
        ("train.py --n {n} --flag {flag}", ("--n", "3", "--flag", "True")),
        ("train.py 'a b' --json '{\"a\": 1}'", ("a b", "--json", '{"a": 1}')),
        ("train.py --gone {gone} --none {none} x", ("x",)),
        ("train.py --gone={gone} {none} -x", ("-x",)),
        ("train.py --a --b {gone} --c", ("--a", "--c")),
        ("train.py --x -5 --y -.5", ("--x", "-5", "--y", "-.5")),
        ("train.py --output_dir runs --seed {seed}", ("--output_dir", "/trial", "--seed", "7")),
        ("train.py --output-dir=runs out/{number}", ("--output-dir=/trial", "out/0")),
        ("train.py --output_dir --x", ("--output_dir", "--x")),
        ("train.py '' {folder}/log", ("", "/trial/log")),
    ],
)
def test_words_of_a_trial(text: str, words: tuple[str, ...]) -> None:
    assert CommandTemplate.parse(text).arguments(VALUES) == words


def test_an_empty_value_leaves_its_word_out() -> None:
    assert CommandTemplate.parse("train.py {a} --b").arguments({"a": ""}) == ("--b",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no script"),
        ("python -m", "names no script"),
        ("train.sh --a", "'train.sh', which is no Python script"),
        ("torchrun --nproc 2 train.py", "torchrun, which starts processes of its own"),
        ("accelerate launch train.py", "accelerate, which starts"),
        ("train.py 'a", "cannot be split"),
    ],
)
def test_what_is_no_command(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CommandTemplate.parse(text)


def test_placeholders_and_their_options() -> None:
    command = CommandTemplate.parse(
        "-m package.train --lr {lr} --wd={wd} {place} --x a --y {folder} --z {a}/{b} --k=v {p}"
    )
    assert (command.target, command.is_module) == ("package.train", True)
    assert command.placeholders == {"lr", "wd", "place", "folder", "a", "b", "p"}
    assert command.options() == {"lr": "--lr", "wd": "--wd", "a": "--z", "b": "--z"}
