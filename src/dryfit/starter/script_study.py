"""The study file of a training script: its command with placeholders, and a space of the arguments that it takes."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dryfit.config.freeze import toml_value
from dryfit.core.errors import ConfigError
from dryfit.core.jobs.diagnostics import ScriptArgument, ScriptArgumentsResult
from dryfit.core.settings.choices import SCRIPT_TASK, TRAINER_METRIC
from dryfit.core.text.script_command import OF_THE_TRIAL, Value, shown

_RATES: Final = re.compile(r"(^|_)(lr|learning_rate)$")
_BATCH: Final = re.compile(r"^(per_device_)?(train_)?batch_size$")
_RANGES: Final = {
    "weight_decay": (0.0, 0.1),
    "warmup_ratio": (0.0, 0.2),
    "label_smoothing_factor": (0.0, 0.2),
    "adam_beta1": (0.8, 0.95),
    "adam_beta2": (0.95, 0.999),
}
_SCHEDULES: Final = ("linear", "cosine", "constant_with_warmup")
_EPOCHS: Final = re.compile(r"^(num_)?(train_)?epochs$")
_DROPOUT: Final = re.compile(r"dropout")
_OF_TRAINER: Final = frozenset(
    {
        *("learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "label_smoothing_factor", "max_grad_norm"),
        *("lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
        *("adam_beta1", "adam_beta2", "neftune_noise_alpha"),
    }
)
"""Of the many arguments of a Trainer those that change what is learned."""

_NEVER: Final = re.compile(
    r"seed|path|dir$|file|name|device|rank|worker|thread|port|log|save|eval|verbos|debug|cache|token$|version|resume|"
    r"max_.*samples|(^|_)(max_)?steps$"
)
"""What is searched by nobody, by its name."""


@dataclass(frozen=True, slots=True)
class SearchedArgument:
    """An argument that can be searched.

    Attributes:
        name: In ``[space]``, and between the braces of the placeholder.
        words: What the command has for it.
        values: Its value in ``[space]``, as TOML.
        remark: Its type and default, in words.
        at_once: It is searched unless the user says otherwise.
    """

    name: str
    words: tuple[str, ...]
    values: str
    remark: str
    at_once: bool


def script_toml(name: str, script: str, words: Sequence[str], folder: str, found: ScriptArgumentsResult) -> str:
    """Return a study file.

    Args:
        name: The study's.
        script: The script, as the command has it: its path from the folder it is run in, or ``-m`` and a module.
        words: Its arguments, as the user gave them.
        folder: The folder that it is run in, seen from the study file.
        found: What its parser defines.

    Raises:
        ConfigError: None of its arguments can be searched.
    """
    every = [one for argument in found.arguments if (one := searched_argument(argument)) is not None]
    active = [one for one in every if one.at_once] or every[:1]
    if not active:
        raise ConfigError(
            f"writing a study of {script}",
            "its parser defines no argument that can be searched",
            "a number, a choice or a flag",
            "write the study file by hand: docs/script.md",
        )
    command = " ".join([script, *map(_quoted, _with_placeholders(words, active))])
    lines = [
        f"# A study of {script}. Every argument that can be searched is below, with its type and default.",
        "# Check it with `dryfit doctor`, search with `dryfit tune`; docs/script.md says what a script may do.",
        "",
        "[study]",
        f"name = {toml_value(name)}",
        f'task = "{SCRIPT_TASK}"',
        *_goal(found.makes_trainer),
        "trials = 20",
        "",
        "[script]",
        f"folder = {toml_value(folder)}  # where it is run, seen from this file",
        f"command = {toml_value(command)}",
        "",
        "[space]",
        *(f"{one.name} = {one.values}  # {one.remark}" for one in active),
    ]
    others = [one for one in every if one not in active]
    if others:
        lines += ["", "# To search one of these, uncomment it and add its placeholder to the command:"]
        lines += [f"# {one.name} = {one.values}  # {' '.join(one.words)}: {one.remark}" for one in others]
    return "\n".join([*lines, ""])


def _goal(makes_trainer: bool) -> list[str]:
    if makes_trainer:
        return [
            f'metric = "{TRAINER_METRIC}"  # a name in the evaluations of its Trainer',
            "# with --eval_strategy epoch in the command, poor trials are pruned while they train",
        ]
    return ['metric = "value"  # of dryfit.report(value, step=...) in the script', 'direction = "minimize"']


def searched_argument(argument: ScriptArgument) -> SearchedArgument | None:
    """Return the search range of an argument; None if it is not usually searched.

    A range lies around the value that the command line gives, or else the default.
    """
    name = argument.option.lstrip("-").replace("-", "_")
    if not name.isidentifier() or name in OF_THE_TRIAL or _NEVER.search(name):
        return None
    if argument.of_trainer and name not in _OF_TRAINER:
        return None
    values = _values(name, argument)
    if values is None:
        return None
    flag = argument.kind == "flag"
    default = "no default" if argument.default is None else f"default {shown(argument.default)}"
    known = (_RATES, _BATCH, _DROPOUT)
    return SearchedArgument(
        name=name,
        words=(f"{{{name}}}",) if flag else (argument.option, f"{{{name}}}"),
        values=values,
        remark=f"{argument.kind}, {default}",
        at_once=name in ("weight_decay", "warmup_ratio") or any(one.search(name) for one in known),
    )


def _values(name: str, argument: ScriptArgument) -> str | None:
    value: Value = argument.default if argument.given is None else argument.given
    if name == "lr_scheduler_type" and argument.of_trainer:
        return toml_value(list(_SCHEDULES))
    if argument.choices:
        return toml_value(list(argument.choices))
    match argument.kind:
        case "flag":
            return toml_value(["", argument.option])
        case "bool":
            return toml_value([True, False])
        case "text" | "choice":
            return toml_value([value]) if isinstance(value, str) and value else None
        case "float" | "int":
            return _range(name, value, whole=argument.kind == "int")


def _range(name: str, value: Value, *, whole: bool) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        return None
    if _BATCH.match(name):
        return toml_value(sorted({max(1, int(value) // 2), int(value), int(value) * 2}))
    if name in _RANGES or (_DROPOUT.search(name) and value < 1):
        low, high = _RANGES.get(name, (0.0, 0.5))
        return f"{{low = {low}, high = {max(high, float(value))}}}"
    if _EPOCHS.match(name):
        return toml_value(sorted({max(1, int(value) // 2), int(value), int(value) * 2}))
    if whole:
        return f"{{low = {max(1, int(value) // 2)}, high = {max(2, int(value) * 2)}}}"
    if value == 0:
        return "{low = 0.0, high = 1.0}"
    return f"{{low = {_rounded(value / 10)}, high = {_rounded(value * 10)}, log = true}}"


def _rounded(value: float) -> str:
    return repr(float(f"{value:.3g}"))


def _with_placeholders(words: Sequence[str], searched: Sequence[SearchedArgument]) -> Iterator[str]:
    """Yield the words of a command with placeholders for values that it gives, and for those that it does not."""
    left = {one.words[0]: one for one in searched if len(one.words) > 1}
    flags = {f"--{one.name}": one for one in searched if len(one.words) == 1}
    rest, given = list(words), set[str]()
    while rest:
        word = rest.pop(0)
        option, equals, _ = word.partition("=")
        plain = f"--{option.lstrip('-').replace('-', '_')}"
        one = left.get(option) or flags.get(plain)
        if one is None:
            yield word
            continue
        given.add(one.name)
        if len(one.words) == 1:
            yield one.words[0]
        elif equals:
            yield f"{option}={one.words[1]}"
        else:
            yield from one.words
            del rest[:1]
    for one in searched:
        if one.name not in given:
            yield from one.words


def _quoted(word: str) -> str:
    """Return a word as a shell would have it; braces need no quotes here."""
    return word if re.fullmatch(r"[\w@%+=:,./{}-]+", word) else shlex.quote(word)
