"""Find the largest value of an argument of a script with which it fits a device."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dryfit.processes.node import device_of
from dryfit.processes.rehearsal_stem import shared_imports
from dryfit.processes.rehearsed_command import ScriptCommand
from dryfit.settings.device_answers import DeviceAnswer
from dryfit.settings.errors import ConfigError
from dryfit.settings.largest_value import LargestValue, TriedValue, ValueEnd, found, next_value
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.text import did_you_mean
from dryfit.study.rehearsals import RehearsalOptions, drop, read_command, rehearse_devices

_STARTS = ("-m", "torchrun", "accelerate")


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a command, where it stands: ``--rows 8``, ``--rows=8``, ``train.rows=8``."""

    name: str
    command: ScriptCommand
    at: int
    joined: bool
    value: int

    def changed(self, value: int) -> ScriptCommand:
        """Return the command with another value."""
        words = list(self.command.arguments)
        words[self.at] = f"{self.name}={value}" if self.joined else str(value)
        return replace(self.command, arguments=tuple(words))


@shared_imports()
def largest_value(
    words: Sequence[str], name: str, options: RehearsalOptions, devices: Sequence[DeviceSpec]
) -> tuple[LargestValue, ...]:
    """Rehearse a command with other values of an argument, until the largest that fits each device is known.

    Args:
        words: The command line of the script.
        name: The argument, with its dashes if it has some.
        devices: Each once; none: this machine's first GPU.

    Raises:
        ConfigError: The command has no such argument, or once more; it is no whole number above zero; the script
            ignores it, or does not need more with more of it; it does not run as it is.
        KeyboardInterrupt: Ctrl-C came.
    """
    argument = _argument(words, name)
    devices = devices or (device_of(None),)
    tried: dict[str, dict[int, TriedValue]] = {one.name: {} for one in devices}
    while asked := _asked(argument, devices, tried):
        value = min(asked.values())
        options.on_note(f"rehearsing with {name} {value}")
        chosen = [one for one in devices if asked.get(one.name) == value]
        seen = rehearse_devices(argument.changed(value), options, chosen)
        if seen.interrupted:
            raise KeyboardInterrupt
        options = replace(options, on_output=drop)
        for one in seen.answers:
            tried[one.device.name][value] = told = _tried(value, one)
            if value == argument.value and told.end is ValueEnd.UNKNOWN:
                raise ConfigError(f"looking for the largest {name}", told.reason, "a command that can be rehearsed")
    return tuple(found(name, one, tried[one.name]) for one in devices)


def _asked(
    argument: _Argument, devices: Sequence[DeviceSpec], tried: Mapping[str, Mapping[int, TriedValue]]
) -> dict[str, int]:
    """Return the value to rehearse next of each device of which something is to be known."""
    values = {
        one.name: next_value(argument.name, argument.value, tried[one.name], one.capacity_bytes) for one in devices
    }
    return {name: value for name, value in values.items() if value is not None}


def _tried(value: int, one: DeviceAnswer) -> TriedValue:
    answer, memory = one.answer, one.answer.memory
    if one.fits is None:
        last = answer.traceback.strip().splitlines()[-1:]
        reason = "; ".join([*answer.reasons, *last]) or "no reason was given"
        return TriedValue(value, ValueEnd.UNKNOWN, reason=reason)
    end = ValueEnd.FITS if one.fits else ValueEnd.SHORT
    if memory is None or answer.at_least:
        return TriedValue(value, end)
    return TriedValue(value, end, memory.required_bytes, memory.peak_allocated_bytes)


def _argument(words: Sequence[str], name: str) -> _Argument:
    doing = f"looking for the largest {name or 'argument'}"
    given = [word for word in words if word == name or word.startswith(f"{name}=")]
    if not name or (not given and (name in _STARTS or name.endswith(".py") or Path(name).is_file())):
        hint = "write --largest=--batch-size before the script"
        raise ConfigError(doing, f"{name!r} is what is run, not an argument of it", "--largest=NAME", hint)
    command = read_command(words)
    arguments = command.arguments
    places = [(at, False) for at, word in enumerate(arguments) if word == name]
    places += [(at, True) for at, word in enumerate(arguments) if word.startswith(f"{name}=")]
    if not places:
        names = [word.partition("=")[0] for word in arguments if word.startswith("-") or "=" in word]
        hint = did_you_mean(name, names, "dashes are a part of the name, and the command must have it")
        raise ConfigError(doing, f"the command has no {name}", "an argument of the script", hint)
    if len(places) > 1:
        raise ConfigError(doing, f"{name} is given {len(places)} times", "an argument that is given once")
    ((at, joined),) = places
    at += not joined
    text = arguments[at].removeprefix(f"{name}=") if at < len(arguments) else "nothing"
    if re.fullmatch(r"0*[1-9][0-9]{0,8}", text) is None:
        raise ConfigError(doing, f"{name} is {text}", "a whole number above zero, below 1000000000")
    return _Argument(name, command, at, joined, int(text))
