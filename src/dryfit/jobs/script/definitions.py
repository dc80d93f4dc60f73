"""Child job SCRIPT_ARGUMENTS: run a script up to where it parses its command line, and read what the parser defines."""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.diagnostics import ScriptArgument, ScriptArgumentsRequest, ScriptArgumentsResult
from dryfit.core.text.script_command import CommandTemplate
from dryfit.core.user_code import script_file
from dryfit.core.wire import Phase
from dryfit.jobs.own.objective import beating
from dryfit.jobs.own.own_line import OwnLine
from dryfit.jobs.script.actions import DefinedArguments
from dryfit.jobs.script.target import described, run_script

_TRAINING_ARGUMENTS: Final = "transformers.training_args"
_DOING: Final = "reading which arguments the script takes"


class _ParsedError(BaseException):
    """Ends a script at its parser. Not an ``Exception``: scripts catch those."""

    def __init__(self, result: ScriptArgumentsResult) -> None:
        super().__init__()
        self.result = result


def read_arguments(body: ScriptArgumentsRequest, channel: ChildChannel) -> ScriptArgumentsResult:
    """Read the arguments of a script; it is run until its first parser is asked to parse, and no further.

    Raises:
        ObjectiveError: There is no such script, its parser refuses the command, or it asks no parser.
    """
    command, folder = CommandTemplate.parse(body.command), Path(body.folder)
    described(body.command, folder)
    channel.send(Phase(name="load"))
    parser: Any = argparse.ArgumentParser
    parse, defined = parser.parse_known_args, DefinedArguments()
    defined.install()

    def intercepted(self: argparse.ArgumentParser, args: Sequence[str] | None = None, *more: Any, **named: Any) -> Any:
        if not self.add_help:  # it looks for a word or two, such as a file of settings, before the script's own parser
            return parse(self, args, *more, **named)
        words = command.words if args is None else args
        given = parse(self, list(words))[0]
        trainer = _trainer_fields(self)
        found = tuple(_arguments(defined.of(vars(given)), given, words, trainer))
        raise _ParsedError(ScriptArgumentsResult(arguments=found, makes_trainer=bool(trainer)))

    parser.parse_known_args = intercepted
    parser.error = _refuse
    try:
        with beating(channel), OwnLine(str(script_file(body.command, folder))):
            run_script(command, folder, command.words)
    except _ParsedError as parsed:
        return parsed.result
    except SystemExit as error:
        raise ObjectiveError(_DOING, f"it ended by sys.exit({error.code!r}) before it parsed any") from error
    finally:
        parser.parse_known_args = parse
    raise ObjectiveError(
        _DOING,
        "it has run to its end and asked no argparse or HfArgumentParser",
        "a script that parses its command line by one of them",
        "write the study file by hand: docs/script.md",
    )


def _refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ObjectiveError(
        _DOING, f"its parser says: {message}", "arguments that it accepts", "write them after --, as for the script"
    )


def _arguments(
    actions: Sequence[argparse.Action], given: argparse.Namespace, words: Sequence[str], trainer: frozenset[str]
) -> Iterator[ScriptArgument]:
    for action in actions:
        option = next((name for name in action.option_strings if name.startswith("--")), None)
        option = option or next(iter(action.option_strings), None)
        several = action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 0)
        if option is None or several or action.dest in ("help", argparse.SUPPRESS):
            continue
        named = any(word == name or word.startswith(f"{name}=") for word in words for name in action.option_strings)
        yield ScriptArgument(
            option=option,
            kind=_kind(action),
            default=_plain(action.default),
            given=_plain(getattr(given, action.dest, None)) if named else None,
            choices=tuple(value for choice in action.choices or () if (value := _plain(choice)) is not None),
            of_trainer=action.dest in trainer,
        )


def _kind(action: argparse.Action) -> Any:
    """Return what an argument's values are: by its type, or by its default where the type is a function of its own."""
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return "choice"
    default = action.default
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float")):
        if action.type is kind or (action.type not in (int, float, str, None) and type(default) is kind):
            return name
    return "text"


def _plain(value: object) -> bool | int | float | str | None:
    if isinstance(value, Enum):
        value = value.value
    return value if isinstance(value, bool | int | float | str) and value != argparse.SUPPRESS else None


def _trainer_fields(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the names of the fields of transformers' ``TrainingArguments`` that a parser fills; mostly none."""
    types = cast("Sequence[Any]", getattr(parser, "dataclass_types", ()))
    bases = (base for one in types if isinstance(one, type) for base in inspect.getmro(one))
    return frozenset(
        name
        for base in bases
        if base.__module__ == _TRAINING_ARGUMENTS
        for name in getattr(base, "__dataclass_fields__", ())
    )
