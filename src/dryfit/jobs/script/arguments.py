"""Which of a command's searched arguments a script uses: parsers refuse, skip or keep them, and code reads them or not.

Parsers are Python's ``argparse`` and, on top of it, ``HfArgumentParser`` of transformers. Of a script that reads
``sys.argv`` by other means, nothing is known and nothing is said.
"""

import argparse
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NoReturn, final

from dryfit.core.errors import ObjectiveError
from dryfit.core.text.script_command import OUTPUT_OPTIONS, Value
from dryfit.jobs.script.actions import DefinedArguments
from dryfit.virtual.import_hooks import when_imported

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
