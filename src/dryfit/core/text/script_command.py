"""The command of a study's script: its words, their placeholders, and the values that a trial inserts."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

FOLDER: Final = "folder"
OF_THE_TRIAL: Final = frozenset({FOLDER, "seed", "number"})
"""Placeholders that no space has."""

OUTPUT_OPTIONS: Final = ("--output_dir", "--output-dir")
"""Options whose value is always the trial's folder."""

_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_INTERPRETERS: Final = re.compile(r"^(?:.*/)?python[0-9.]*$")
_LAUNCHERS: Final = ("torchrun", "accelerate", "deepspeed", "mpirun", "bash", "sh")

Value = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class CommandTemplate:
    """A script, or a module, with its arguments.

    Attributes:
        target: The script's path, or the module's name.
        is_module: It is run as by ``python -m``.
        words: The arguments, with placeholders such as ``{lr}``. Other braces are text.
    """

    target: str
    is_module: bool
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a command as a shell would split it; ``python`` before the script is left out.

        Raises:
            ValueError: It names no script, or a launcher that starts processes of its own.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {error}") from error
        if words and _INTERPRETERS.match(words[0]):
            words = words[1:]
        module = words[:1] == ["-m"]
        words = words[1:] if module else words
        if not words:
            raise ValueError("names no script")
        if words[0] in _LAUNCHERS:
            raise ValueError(f"begins with {words[0]}, which starts processes of its own")
        if not module and not words[0].endswith(".py"):
            raise ValueError(f"begins with {words[0]!r}, which is no Python script")
        return cls(words[0], module, tuple(words[1:]))

    @property
    def placeholders(self) -> frozenset[str]:
        """The names of the placeholders in the arguments."""
        return frozenset(name for word in self.words for name in _PLACEHOLDER.findall(word))

    @property
    def names_output(self) -> bool:
        """Whether the arguments name an output folder, which each trial replaces by its own."""
        return any(word.partition("=")[0] in OUTPUT_OPTIONS for word in self.words)

    def options(self) -> dict[str, str]:
        """Return the option that each searched placeholder is the value of, by the placeholder's name.

        One in a positional argument, or among several values, has none.
        """
        found: dict[str, str] = {}
        for before, word in zip(("", *self.words), self.words, strict=False):
            option, equals, _ = word.partition("=")
            given = option if equals and _is_option(option) else before if _is_option(before) else ""
            if given and "=" not in before:
                found |= dict.fromkeys(_PLACEHOLDER.findall(word), given)
        return {name: option for name, option in found.items() if name not in OF_THE_TRIAL}

    def arguments(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the arguments of one trial.

        Args:
            values: By the names of placeholders, those of :data:`OF_THE_TRIAL` among them. A word with one that is
                absent here, or None, is left out, with the option before it; so is a word that becomes empty.
        """
        return tuple(self._filled(values))

    def _filled(self, values: Mapping[str, Value]) -> Iterator[str]:
        held = ""  # an option whose value may be missing
        for word in self.words:
            names = _PLACEHOLDER.findall(word)
            missing = any(values.get(name) is None for name in names)
            if held:
                if missing and not _is_option(word):
                    held = ""
                    continue
                yield held
            taken, held = held, ""
            if taken in OUTPUT_OPTIONS and not _is_option(word):
                yield str(values[FOLDER])
                continue
            option, equals, _ = word.partition("=")
            if equals and option in OUTPUT_OPTIONS:
                yield f"{option}={values[FOLDER]}"
            elif missing:
                continue
            elif _is_option(word) and not names:
                held = word
            elif filled := _PLACEHOLDER.sub(lambda match: shown(values[match[1]]), word):
                yield filled
            elif not names:
                yield word
        if held:
            yield held


def shown(value: Value) -> str:
    """Format a value for a command line."""
    return repr(value) if isinstance(value, float) else str(value)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."
