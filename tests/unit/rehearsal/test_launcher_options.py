"""The options of ``torchrun`` and ``accelerate launch`` that are known are those that the installed ones have."""

import argparse
from collections.abc import Callable

import pytest

from dryfit.processes import rehearsed_command

pytestmark = pytest.mark.heavy


def options(parser: argparse.ArgumentParser, *, with_value: bool) -> set[str]:
    """Long names, with underscores, of the options that take a value, or of those that take none."""
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    return {
        next(name for name in action.option_strings if name.startswith("--")).removeprefix("--").replace("-", "_")
        for action in actions
        if (action.nargs != 0) is with_value
    }


def torchrun() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def accelerate() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


@pytest.mark.parametrize(
    ("parser", "flags", "values", "families"),
    [
        (torchrun, rehearsed_command._TORCHRUN_FLAGS, rehearsed_command._TORCHRUN_VALUES, ()),
        (
            accelerate,
            rehearsed_command._ACCELERATE_FLAGS,
            rehearsed_command._ACCELERATE_VALUES,
            rehearsed_command._ACCELERATE_FAMILIES,
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_every_option_of_a_launcher_is_known(
    parser: Callable[[], argparse.ArgumentParser], flags: frozenset[str], values: frozenset[str], families: tuple[str]
) -> None:
    made = parser()
    assert options(made, with_value=False) <= flags
    others = {name for name in options(made, with_value=True) if not (families and name.startswith(families))}
    assert others <= values


def test_the_options_of_fsdp_and_their_defaults() -> None:
    made = accelerate()
    known = {name for name in options(made, with_value=True) if name.startswith("fsdp_")}
    assert known == set(rehearsed_command._FSDP)
    for name, (_, default) in rehearsed_command._FSDP.items():
        theirs = made.get_default(name)
        assert default == ("" if theirs is None else str(theirs)), name
