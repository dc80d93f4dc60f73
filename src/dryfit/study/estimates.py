"""What a training needs with given parameters, for the tools that choose them: what was asked before is read again."""

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from dryfit.ledger.folder import shared_traces
from dryfit.settings.errors import ConfigError
from dryfit.settings.files import read_cached, write_cached
from dryfit.settings.rehearsal_messages import RehearsalAnswer, ScriptEnd
from dryfit.settings.trial import Scalar
from dryfit.settings.version import PACKAGE_FOLDER, code_fingerprint
from dryfit.settings.wire import canonical_json
from dryfit.study.rehearsals import (
    PreparedRehearsal,
    RehearsalOptions,
    prepare,
    prepare_function,
    read_command,
    run_prepared,
)

Target: TypeAlias = str | os.PathLike[str] | Callable[..., object]

_KNOWN: Final = frozenset({ScriptEnd.FINISHED, ScriptEnd.STOPPED, ScriptEnd.OUT_OF_MEMORY})
"""Ends that another run would have too."""
_READ = frozenset({".py", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg"})
"""Files beside a script that change what it does."""
_PLACE: Final = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
_MOST_FILES = 20_000
_MOST_BYTES = 1 << 20
"""Of larger files only size and time count: they are data."""
_SEEN_BY_SCRIPTS = ("PYTORCH", "TORCH", "CUDA", "HF_", "TRANSFORMERS", "ACCELERATE", "PYTHONPATH", "OMP_")
"""Beginnings of the variables that libraries read."""


def estimate(
    target: Target,
    params: Mapping[str, Scalar] | None = None,
    *,
    device: str | None = None,
    steps: int | None = None,
    python: str | os.PathLike[str] | None = None,
) -> RehearsalAnswer:
    """Return what a training takes with some parameters, as :func:`dryfit.rehearse` does; asked again, at once.

    The answer is kept beside the recorded traces, keyed by the code (the script's folder, or the function's), the
    command, the parameters, the device, the interpreter and its packages, and the variables that libraries read.

    Args:
        target: A script, or a command line as after `dryfit rehearse` in which ``{name}`` stands for a parameter; what
            has no place there follows as ``--name value`` (True: ``--name``; False and None: nothing). Or a function
            that another process can import: it gets the parameters by name.
        params: The parameters.
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...; None: this machine's first GPU.
        steps: Optimizer steps after which it is ended; None: three, or two of over 100 000 allocations each.
        python: The interpreter that runs a script; None: that of the active environment, or this one.

    Raises:
        ConfigError: The device or the command is wrong, or a parameter's name is none of an argument.
        ObjectiveError: No other process can import the function.
        ChildError: The answer cannot be read.
    """
    options = RehearsalOptions(device, steps, python=None if python is None else os.fspath(python))
    given = dict(params or {})
    if callable(target):
        if python is not None:
            raise ConfigError("estimating a function", f"python = {python!s}", "none: a function is run by this one")
        prepared = prepare_function(target, options, parameters=given)
        code = Path(getattr(target, "__code__").co_filename).parent  # noqa: B009  # a function has one
    else:
        command = read_command(_words(target, given))
        prepared = prepare(command, options)
        code = Path(command.script).absolute().parent if command.script is not None else Path.cwd()
    file = _file(prepared, code)
    kept = None if file is None else read_cached(file, RehearsalAnswer)
    if kept is not None:
        return kept
    answer = run_prepared(prepared)
    if file is not None and answer.end in _KNOWN and answer.memory is not None:
        write_cached(file, answer)
    return answer


def fits(
    target: Target,
    params: Mapping[str, Scalar] | None = None,
    *,
    device: str | None = None,
    steps: int | None = None,
    python: str | os.PathLike[str] | None = None,
) -> bool:
    """Whether a training with some parameters is known to fit a device; False too where that is unknown.

    Args and errors are those of :func:`estimate`.
    """
    return estimate(target, params, device=device, steps=steps, python=python).fits


def _words(target: str | os.PathLike[str], given: dict[str, Scalar]) -> list[str]:
    """Return the command line of a target with its parameters.

    Raises:
        ConfigError: A name cannot be an argument's, or the command has a place for which there is no parameter.
    """
    path = os.fspath(target)
    try:
        words = [path] if Path(path).exists() or not isinstance(target, str) else shlex.split(path)
    except ValueError as error:
        raise ConfigError("estimating a script", f"{path}: {error}", "a command line, quoted as in a shell") from error
    lacking = sorted({name for word in words for name in _PLACE.findall(word)} - given.keys())
    if lacking:
        raise ConfigError("estimating a script", f"no parameter for {{{lacking[0]}}}", "a value for each place")
    placed: set[str] = set()
    for name, value in given.items():
        if not name or name.startswith("-") or any(character.isspace() or character in "{}=" for character in name):
            raise ConfigError("estimating a script", f"a parameter {name!r}", "the name of an argument, without dashes")
        for index, word in enumerate(words):
            if f"{{{name}}}" in word:
                words[index] = word.replace(f"{{{name}}}", str(value))
                placed.add(name)
    for name, value in given.items():
        if name not in placed and value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def _file(prepared: PreparedRehearsal, code: Path) -> Path | None:
    """Return where the answer to a rehearsal is kept; None where too many files may change it."""
    fingerprint = _code_of(code)
    if fingerprint is None:
        return None
    environment = prepared.surroundings.environment
    asked = {
        "request": prepared.request.model_dump(mode="json"),
        "additions": dict(prepared.surroundings.additions),
        "environment": {name: environment[name] for name in environment if name.startswith(_SEEN_BY_SCRIPTS)},
        "folder": str(Path.cwd()),
        "code": fingerprint,
        "packages": _packages(prepared.surroundings.python or Path(sys.executable)),
        "dryfit": _own_code(),
    }
    key = hashlib.sha256(canonical_json(asked).encode()).hexdigest()
    return shared_traces(os.environ, Path.home()).parent / "estimates" / f"{key}.json"


@cache
def _own_code() -> str:
    return code_fingerprint(PACKAGE_FOLDER)


def _packages(python: Path) -> list[str]:
    """Return the interpreter and the packages of its environment, with their versions."""
    found = python.parent.parent.glob("lib*/python*/*-packages/*.dist-info")
    return [str(python), *sorted(path.name for path in found)]


def _code_of(folder: Path) -> str | None:
    """Hash the files in a folder that change what its scripts do; None where they are too many to look at."""
    digest, seen = hashlib.sha256(), 0
    for place, folders, names in os.walk(folder):
        seen += len(folders) + len(names)
        if seen > _MOST_FILES:
            return None
        folders[:] = sorted(name for name in folders if not _is_left_out(Path(place, name)))
        for path in (Path(place, name) for name in sorted(names)):
            if path.suffix in _READ and path.is_file():
                facts = path.stat()
                digest.update(f"{path.relative_to(folder)} {facts.st_size}\n".encode())
                small = facts.st_size <= _MOST_BYTES
                digest.update(path.read_bytes() if small else str(facts.st_mtime_ns).encode())
    return digest.hexdigest()


def _is_left_out(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _LEFT_OUT or (folder / "pyvenv.cfg").exists()
