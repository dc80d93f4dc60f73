"""Arguments of a training script: which parsers define, and which of a command's it uses."""

import argparse
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, cast, final

from dryfit.gpu.import_hooks import when_imported
from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import ScriptArgument, ScriptArgumentsRequest, ScriptArgumentsResult
from dryfit.settings.errors import ObjectiveError
from dryfit.settings.user_code import OUTPUT_OPTIONS, CommandTemplate, Value, script_file
from dryfit.training.current_trial import OwnLine
from dryfit.training.objective import beating, described, run_script

# The arguments that parsers of ``argparse`` define, by its public means: each is an object of a public class.


@final
class DefinedArguments:
    """The arguments that are defined in this process from :meth:`install` on."""

    def __init__(self) -> None:
        self._defined: list[argparse.Action] = []

    def install(self) -> None:
        """Note each argument that is defined from now on, for good."""
        action: Any = argparse.Action
        initialise, defined = action.__init__, self._defined

        @functools.wraps(initialise)
        def noting(self: argparse.Action, *args: Any, **kwargs: Any) -> None:
            initialise(self, *args, **kwargs)
            defined.append(self)

        action.__init__ = noting

    def of(self, attributes: Container[str]) -> list[argparse.Action]:
        """Return the arguments, in their order, whose values are attributes of what a parser has returned."""
        return [action for action in self._defined if action.dest in attributes]


# Which of a command's searched arguments a script uses: parsers refuse, skip or keep them, and code reads them or
# not.
#
# Parsers are Python's ``argparse`` and, on top of it, ``HfArgumentParser`` of transformers. Of a script that reads
# ``sys.argv`` by other means, nothing is known and nothing is said.


_TRAINING_ARGUMENTS: Final = "transformers.training_args"
_FIELDS: Final = "__dataclass_fields__"


class _Namespace(argparse.Namespace):
    """What a parser returns, with a look at which attributes are read; all of them by ``vars`` and the like."""

    def __getattribute__(self, name: str) -> Any:
        for watch in _watches:
            watch.note_read(name)
        return super().__getattribute__(name)


_Namespace.__name__ = _Namespace.__qualname__ = "Namespace"  # as it prints itself


@final
class ArgumentReads:
    """Watches what becomes of searched arguments, in this process for good.

    Args:
        options: The option of each searched placeholder, by the placeholder's name.
        values: The trial's values, by the same names.
        folder: What an output folder is that the parser knows and the command does not name; None: leave it.
    """

    def __init__(self, options: Mapping[str, str], values: Mapping[str, Value], folder: str | None = None) -> None:
        self._folder = folder
        self._options = {option: name for name, option in options.items() if values.get(name) is not None}
        self._values = values
        self._unread: dict[str, str] = {}
        """The options that nobody has read, by the attribute that has their value."""
        self._left: dict[str, None] = {}
        """Those that some parser has left over."""
        self._known: set[str] = set()
        self._defined = DefinedArguments()
        self._depth = 0

    def install(self) -> None:
        """Watch from now on."""
        _watches[:] = [self]
        self._defined.install()
        parser: Any = argparse.ArgumentParser
        parser.parse_known_args = self._parsing(parser.parse_known_args)
        parser.error = _refuse
        when_imported("transformers.hf_argparser", self._wrap)

    def note_read(self, attribute: str) -> None:
        """Note that an attribute of parsed arguments was read."""
        if attribute == "__dict__":
            self._unread.clear()
        elif attribute in self._unread:
            del self._unread[attribute]

    def notes(self) -> list[str]:
        """Return what is to be said of arguments that have no effect."""
        notes: list[str] = []
        if unknown := [option for option in self._left if option not in self._known]:
            names = " and ".join(unknown)
            notes.append(f"the script's parser does not know {names}: the search over it has no effect")
        if self._unread:
            names = " and ".join(self._unread.values())
            notes.append(f"nothing in the script has read {names}: the search over it has no effect")
        return notes

    def other_values(self, arguments: Any, replaced: Mapping[str, object]) -> list[str]:
        """Return what is to be said of searched values that have not reached a Trainer's ``TrainingArguments``.

        Args:
            arguments: The Trainer's.
            replaced: Values that the trial's plan took the place of, by name.
        """
        notes: list[str] = []
        for option, name in self._options.items():
            field, value = option.lstrip("-").replace("-", "_"), self._values[name]
            if field not in vars(arguments):
                continue
            found = replaced.get(field, getattr(arguments, field))
            if not _same(found, value):
                notes.append(
                    f"{option} is {value}, and {field} of the Trainer's arguments is {found}: "
                    "the searched value has not reached it"
                )
        return notes

    def _parsing(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parse)
        def parsing(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1  # parsers of sub-commands are called inside
            try:
                namespace, rest = parse(parser, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                known = self._attributes(vars(namespace))
                self._set_folder(namespace)
                self._left |= {option: None for option in self._options if _among(option, rest)}
                self._known |= set(known.values())
                if type(namespace) is argparse.Namespace:
                    namespace.__class__ = _Namespace
                    self._unread |= known
            return namespace, rest

        return parsing

    def _set_folder(self, namespace: argparse.Namespace) -> None:
        """Give the output folder that the command leaves to its default: trials must not share one."""
        for action in self._defined.of(vars(namespace)) if self._folder is not None else ():
            if not set(OUTPUT_OPTIONS).isdisjoint(action.option_strings):
                made = action.type(str(self._folder)) if callable(action.type) else self._folder
                setattr(namespace, action.dest, made)

    def _attributes(self, parsed: Container[str]) -> dict[str, str]:
        """Return the searched options that a parser knows, by the attribute of what it has returned."""
        return {
            action.dest: option
            for action in self._defined.of(parsed)
            for option in self._options
            if any(_meant(option, known) for known in action.option_strings)
        }

    def _wrap(self, module: Any) -> None:
        """Look at the dataclasses that transformers' parser makes of a namespace, all of which it reads."""
        cls = module.HfArgumentParser
        parse = cls.parse_args_into_dataclasses

        @functools.wraps(parse)
        def parsing(parser: Any, *args: Any, **kwargs: Any) -> Any:
            filled = parse(parser, *args, **kwargs)
            for one in filled:
                searched = self._attributes(getattr(one, _FIELDS, ()))
                if searched and not any(base.__module__ == _TRAINING_ARGUMENTS for base in type(one).__mro__):
                    self._unread |= searched
                    _watch_fields(type(one))
            return filled

        cls.parse_args_into_dataclasses = parsing


_watches: list[ArgumentReads] = []


def _watch_fields(cls: Any) -> None:
    read = cls.__getattribute__

    def reading(self: Any, name: str) -> Any:
        for watch in _watches:
            watch.note_read(name)
        return read(self, name)

    cls.__getattribute__ = reading


def _refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
    """Say what the parser would print before it ends the process."""
    usage = " ".join(self.format_usage().split())
    raise ObjectiveError("parsing the script's command", message, usage[:600], "change script.command")


def _among(option: str, words: Sequence[str]) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in words)


def _meant(option: str, known: str) -> bool:
    """Whether an option, perhaps shortened, is one that a parser knows."""
    return known == option or (option.startswith("--") and known.startswith(option))


def _same(found: object, value: Value) -> bool:
    plain = getattr(found, "value", found)
    if isinstance(plain, bool) or isinstance(value, bool):
        return str(plain).lower() == str(value).lower()
    if isinstance(plain, int | float) and not isinstance(value, str):
        return float(plain) == float(value or 0.0)
    return str(plain) == str(value)


# Child job SCRIPT_ARGUMENTS: run a script up to where it parses its command line, and read what the parser defines.


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
    parser.error = _refuse_arguments
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


def _refuse_arguments(self: argparse.ArgumentParser, message: str) -> NoReturn:
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
