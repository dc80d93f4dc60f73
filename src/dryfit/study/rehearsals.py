"""Rehearse a training script, or a function, on a GPU that is not there."""

import importlib.util
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import yaml

from dryfit.documents.pages import refuse_foreign, render
from dryfit.documents.rehearsals import rehearsal_page
from dryfit.ledger.folder import shared_traces
from dryfit.processes.node import device_of
from dryfit.processes.rehearsal_process import (
    OnOutput,
    RehearsalInterrupted,
    RehearsalSurroundings,
    broke,
    run_rehearsal,
    user_python,
)
from dryfit.processes.rehearsal_stem import shared_imports
from dryfit.processes.rehearsed_command import ScriptCommand, parse_command
from dryfit.settings.bracket import Tried
from dryfit.settings.choices import Emitted
from dryfit.settings.device_answers import DeviceAnswer, DeviceAnswers
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError, ObjectiveError
from dryfit.settings.files import write_text_atomic, writing
from dryfit.settings.ladder import ArgumentChange, climb
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, Effect, VerdictKind
from dryfit.settings.rehearsal_messages import (
    REHEARSED_VARIABLE,
    SNAPSHOT,
    STAND_INS,
    TRACE,
    OutOfMemory,
    PricedArguments,
    RehearsalAnswer,
    RehearsalRequest,
    ScriptEnd,
)
from dryfit.settings.run_costs import Prices, given_price, price_file, with_costs
from dryfit.settings.study_file_reading import read_toml
from dryfit.settings.text import gib
from dryfit.settings.trial import Scalar
from dryfit.study.own_functions import Role, caller_paths, function_name

DEFAULT_TIMEOUT_S = 1800.0
_MOST = 1_000_000_000
_MOST_CONFIG_BYTES = 1 << 20
_VIEW_MARKS = {
    SNAPSHOT: (b"\x8c\x08segments", "memory snapshot"),  # how a pickle of a table with this first key begins
    TRACE: (b'{"traceEvents": [', "trace"),
}
_SCRIPT_SUFFIXES = (".py", ".pyw")


def drop(_output: bytes) -> None:
    """Leave out what is printed: a second time, it is nothing new."""


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """How a script is rehearsed.

    Attributes:
        device: As of ``dryfit plan``; None: this machine's first GPU.
        steps: Optimizer steps after which it is ended; None: three, or two long ones.
        ranks: Size of its process group; None: as its launcher says, or as the script starts them, else 1.
        ladder: Price changes of its ``TrainingArguments`` by rehearsing with them.
        timeout_s: Most seconds until the first optimizer step has ended.
        keep_caches: Let what libraries download and prepare stay in their caches.
        on_output: Called with what it prints.
        on_note: Called with a line about what is being done.
        python: The interpreter that runs the script; None: that of the active environment, or dryfit's own.
        snapshot: File of PyTorch's memory snapshot; None: none is written.
        trace: File of the Chrome trace; None: none is written.
        train_steps: Optimizer steps of the whole run; None: as many as the script says.
        prices: What its hours are charged by; None: by nothing.
        given: Packages that are taken to be installed, by the names of their stand-ins, and files of own rows.
    """

    device: str | None = None
    steps: int | None = None
    ranks: int | None = None
    worst_batch: bool = True
    ladder: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    keep_caches: bool = False
    on_output: OnOutput = drop
    on_note: Callable[[str], None] = lambda _: None
    python: str | None = None
    snapshot: str | os.PathLike[str] | None = None
    trace: str | os.PathLike[str] | None = None
    train_steps: int | None = None
    prices: Prices | None = None
    given: tuple[str, ...] = ()
    surroundings: RehearsalSurroundings = field(default_factory=lambda: RehearsalSurroundings(dict(os.environ)))


def rehearse(
    target: str | os.PathLike[str] | Callable[[], object],
    *,
    device: str | None = None,
    arguments: Sequence[str] = (),
    steps: int | None = None,
    ranks: int | None = None,
    worst_batch: bool = True,
    ladder: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    keep_caches: bool = False,
    python: str | os.PathLike[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    train_steps: int | None = None,
    price: str | float | None = None,
    prices: str | os.PathLike[str] | None = None,
    with_packages: Sequence[str] = (),
) -> RehearsalAnswer:
    """Run a training script or function, unmodified, in a process of its own on a GPU that is not there.

    Its data are real, its model is not: the answer says where its memory peaks, by line of its code, and whether the
    device has that much. What it would write elsewhere is left out and listed.

    Args:
        target: Path of a script, or a function without arguments that another process can import.
        device: ``rtx4090``, ``a100-80``, ``24GiB``, ...; None: this machine's first GPU.
        arguments: The script's own arguments.
        steps: Optimizer steps after which it is ended; None: three, or two of over 100 000 allocations each.
        ranks: Size of the process group of which it is rank 0; None: as many as it starts by itself, else one.
        worst_batch: Look for the largest batch of its data, and train on it first.
        ladder: Price changes of its ``TrainingArguments`` where it makes one; each is another rehearsal.
        timeout_s: Most seconds until the first optimizer step has ended.
        keep_caches: Let what libraries download and prepare stay in their caches.
        python: The interpreter that runs a script; None: that of the active environment, or this one. A function is
            run by this one.
        snapshot: A file to write: PyTorch's memory snapshot, for pytorch.org/memory_viz.
        trace: A file to write: a Chrome trace, for Perfetto.
        train_steps: Optimizer steps of the whole run, for its hours; None: as many as the script says.
        price: What an hour of the device costs: ``1.80`` or ``"1.80USD"``.
        prices: A file of prices by device.
        with_packages: Packages that are not installed here and have a stand-in: they are taken to be there. A Python
            file in their place has rows of your own (:func:`dryfit.register`).

    Returns:
        The answer; that of a script that failed by itself has its traceback, and ``ran`` False where nothing was seen.

    Raises:
        ConfigError: The device or an option is wrong, there is no such script, or there is no GPU and none was named.
        ObjectiveError: No other process can import the function.
        ChildError: The answer cannot be read.
    """
    chosen = None if python is None else os.fspath(python)
    doing = RehearsalOptions(device, steps, ranks, worst_batch, ladder, timeout_s, keep_caches, python=chosen)
    doing = replace(doing, snapshot=snapshot, trace=trace, train_steps=train_steps, given=tuple(with_packages))
    doing = replace(doing, prices=read_prices(None if price is None else str(price), prices))
    return _rehearse_target(target, arguments, doing)


def _rehearse_target(
    target: str | os.PathLike[str] | Callable[[], object], arguments: Sequence[str], doing: RehearsalOptions
) -> RehearsalAnswer:
    if not callable(target):
        command = ScriptCommand(script=os.fspath(target), arguments=tuple(arguments))
        return rehearse_command(command, doing)
    if doing.python is not None:
        raise ConfigError("rehearsing a function", f"python = {doing.python!r}", "none: a function is run by this one")
    if arguments:
        raise ConfigError("rehearsing a function", f"arguments = {list(arguments)!r}", "none: a function takes none")
    return run_prepared(prepare_function(target, doing))


def read_prices(price: str | None, file: str | os.PathLike[str] | None) -> Prices | None:
    """Return the user's prices: one for the device, or those of a file; None: none were given.

    Raises:
        ConfigError: Both were given, or one is wrong.
    """
    if price is not None and file is not None:
        raise ConfigError("reading prices", "a price and a file of prices", "one of them")
    today = datetime.now(UTC).date()
    if price is not None:
        return given_price(price, today)
    return price_file(Path(file).expanduser(), today) if file is not None else None


def with_run(answer: RehearsalAnswer, options: RehearsalOptions) -> RehearsalAnswer:
    """Return an answer with the hours and the cost of the whole run, as far as they are known."""
    return with_costs(answer, options.train_steps, options.prices)


def why_no_cost(answer: RehearsalAnswer, options: RehearsalOptions) -> str:
    """Return why there is no cost though there are prices; empty: there is one, or nothing was asked for."""
    run, name = answer.run, answer.device.name
    if options.prices is None or (run is not None and run.cost is not None):
        return ""
    if options.prices.of(answer.device) is None:
        return f"no cost: the prices have none of {name}"
    if answer.work is None or answer.work.step_time is None:
        return f"no cost: the time of a step on {name} is not known"
    return "no cost: how many steps the run makes is not known; --train-steps N tells it"


@dataclass(frozen=True, slots=True)
class RehearsalTarget:
    """What is run: one of the three."""

    script: str | None = None
    module: str | None = None
    function: str | None = None
    arguments: tuple[str, ...] = ()


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read the command line of a training script; accelerate's config files are read as it would.

    Raises:
        ConfigError: As of :func:`~dryfit.processes.rehearsed_command.parse_command`; a config file is wrong.
    """
    return parse_command(words, _accelerate_config)


@dataclass(slots=True)
class PreparedRehearsal:
    """A rehearsal that can be started, on any device.

    Attributes:
        request: Its ranks become those that the script starts by itself, where nobody named a number.
        has_eight_bit: Whether the optimizers of bitsandbytes are there.
    """

    request: RehearsalRequest
    surroundings: RehearsalSurroundings
    options: RehearsalOptions
    has_eight_bit: bool
    has_ranks: bool = False
    """Whether the user or a launcher said how many ranks there are; else the script may ask for more."""
    _smallest: RehearsalAnswer | None = None

    def run(
        self, *, loud: bool = False, views: Mapping[str, Path] = MappingProxyType({}), **changes: Any
    ) -> RehearsalAnswer:
        """Rehearse with some fields of the request changed; only where it is ``loud`` its output is passed on."""
        output = self.options.on_output if loud else drop
        answer = run_rehearsal(self.request.model_copy(update=changes), self.surroundings, output, views=views)
        ranks = answer.ranks_wanted
        if not self.request.ranks < ranks <= _MOST or self.has_ranks:
            return answer
        self.options.on_note(f"the script starts {ranks} ranks by itself; rehearsing it as the first of {ranks}")
        self.request = self.request.model_copy(update={"ranks": ranks})
        return self.run(loud=loud, views=views, **changes)

    def without_limit(self, device: DeviceSpec, others: tuple[DeviceSpec, ...] = ()) -> RehearsalAnswer:
        """Rehearse on a device that has room for everything."""
        self.options.on_note("it did not get through; rehearsing on a device without a limit, to see how much it needs")
        return self.run(device=device, others=others, unlimited=True)

    def with_smallest_sizes(self, device: DeviceSpec) -> RehearsalAnswer:
        """Rehearse, once, with the smallest sizes of what depends on values, on a device that has room for all."""
        if self._smallest is None:
            self.options.on_note("sizes depend on values that nobody knows; rehearsing with the smallest ones too")
            self._smallest = self.run(device=device, unlimited=True, smallest_sizes=True)
        return self._smallest


def prepare(command: ScriptCommand, options: RehearsalOptions, device: DeviceSpec | None = None) -> PreparedRehearsal:
    """Return the rehearsal of a command line.

    Args:
        device: None: that of the options.

    Raises:
        ConfigError: As of :func:`rehearse`.
    """
    if command.script is not None:
        _demand_script(command.script)
    start = options.surroundings
    named = None if options.python is None else Path(options.python)
    python, remark = user_python(named, start.environment)
    if remark:
        options.on_note(remark)
    surroundings = replace(start, additions=command.environment, python=None if python is None else python.path)
    target = RehearsalTarget(command.script, command.module, None, command.arguments)
    request = _request(options, device or _device(options), target, options.ranks or command.ranks or 1)
    has_eight_bit = _has_eight_bit() if python is None else python.has_eight_bit
    has_ranks = (options.ranks or command.ranks) is not None
    return PreparedRehearsal(request, surroundings, options, has_eight_bit, has_ranks)


def prepare_function(
    function: Callable[..., object], options: RehearsalOptions, parameters: Mapping[str, Scalar] | None = None
) -> PreparedRehearsal:
    """Return the rehearsal of a function.

    Args:
        parameters: What it is called with, by name.

    Raises:
        ConfigError: As of :func:`rehearse`.
        ObjectiveError: No other process can import it.
    """
    name, folder = function_name(function, Role("the function to rehearse", "def train(): ..."))
    place = f"{folder}/{name}" if folder else str(name)
    surroundings = replace(options.surroundings, import_paths=tuple(caller_paths()))
    request = _request(options, _device(options), RehearsalTarget(function=place), options.ranks or 1)
    request = request.model_copy(update={"parameters": dict(parameters or {})})
    return PreparedRehearsal(request, surroundings, options, _has_eight_bit(), options.ranks is not None)


def rehearse_command(command: ScriptCommand, options: RehearsalOptions) -> RehearsalAnswer:
    """Rehearse a command line.

    Raises:
        ConfigError: As of :func:`rehearse`.
        ChildError: The answer cannot be read.
    """
    return run_prepared(prepare(command, options))


def write_rehearsal(answer: RehearsalAnswer, file: Path | str, title: str) -> Path:
    """Write an HTML page about a rehearsal; it needs no network and no other file. An earlier page is replaced.

    Args:
        title: The heading: what was rehearsed.

    Raises:
        ConfigError: The file is there and is no page of dryfit's, or it cannot be written.
    """
    target = Path(file).expanduser().absolute()
    refuse_foreign(target)
    with writing(target, own=False):
        write_text_atomic(target, render(rehearsal_page(answer, title)), durable=False)
    return target


def _device(options: RehearsalOptions) -> DeviceSpec:
    return demand_cuda(device_of(options.device))


def demand_cuda(spec: DeviceSpec) -> DeviceSpec:
    """Return a device that scripts can be rehearsed on.

    Raises:
        ConfigError: It has no CUDA.
    """
    if spec.kind is not DeviceKind.CUDA:
        raise ConfigError("choosing a device to rehearse on", f"{spec.name}", "a CUDA device: rtx4090, a100-80, 24GiB")
    return spec


def _demand_script(script: str) -> None:
    path = Path(script)
    if path.suffix.lower() == ".ipynb":
        hint = f"make a script of it: jupyter nbconvert --to script {shlex.quote(script)}"
        raise ConfigError("looking for the script to rehearse", f"{script} is a notebook", "a Python script", hint)
    if path.is_dir() and (path / "__main__.py").is_file():
        return
    if not path.is_file():
        found = f"{script} is a folder without __main__.py" if path.is_dir() else f"there is no file {script}"
        hint = "options of dryfit come before the script; a module is named with -m" if not path.suffix else ""
        raise ConfigError("looking for the script to rehearse", found, "a Python script", hint)
    if path.suffix not in _SCRIPT_SUFFIXES and not _reads_as_python(path):
        raise ConfigError("looking for the script to rehearse", f"{script} is no Python script", "a Python script")


def _reads_as_python(path: Path) -> bool:
    """Whether a file without the suffix of a script begins as one: by its first line, or as text."""
    with path.open("rb") as file:
        head = file.readline(256)
    return not head.startswith(b"#!") or b"python" in head


def _request(options: RehearsalOptions, device: DeviceSpec, target: RehearsalTarget, ranks: int) -> RehearsalRequest:
    doing = "reading the options of a rehearsal"
    asked = {"steps": options.steps, "ranks": ranks, "timeout": options.timeout_s, "train steps": options.train_steps}
    for name, value in asked.items():
        if value is not None and not 0 < value <= _MOST:
            raise ConfigError(doing, f"{name} = {value}", f"a number above zero, at most {_MOST}")
    if REHEARSED_VARIABLE in os.environ:
        raise ObjectiveError(
            "starting a rehearsal",
            "this process is itself a rehearsal, and its script has come to dryfit.rehearse again",
            hint='write `if __name__ == "__main__":` above the call of dryfit.rehearse',
        )
    return RehearsalRequest(
        script=target.script,
        module=target.module,
        function=target.function,
        arguments=target.arguments,
        device=device,
        ranks=ranks,
        steps=options.steps,
        worst_batch=options.worst_batch,
        timeout_s=options.timeout_s,
        calibration_dir=str(shared_traces(os.environ, Path.home()).parent),
        keep_caches=options.keep_caches,
        given=tuple(map(_given, options.given)),
        scratch_dir="",
        answer_file="",
    )


def _given(name: str) -> str:
    """Return the name of a stand-in, or a file of own rows, absolute.

    Raises:
        ConfigError: It is neither.
    """
    if name in STAND_INS:
        return name
    if name.endswith(".py") and Path(name).is_file():
        return str(Path(name).absolute())
    allowed = f"{', '.join(STAND_INS)}, or a Python file with rows of your own"
    raise ConfigError("reading --with", repr(name), allowed)


def _has_eight_bit() -> bool:
    """Whether the optimizers of bitsandbytes are here."""
    return importlib.util.find_spec("bitsandbytes") is not None


def run_prepared(prepared: PreparedRehearsal) -> RehearsalAnswer:
    """Rehearse, without a limit too where that is needed, and climb the ladder if it is asked for."""
    with shared_imports():
        answer = _with_views(prepared)
        try:
            whole = with_bounds(with_needs(answer, prepared), prepared)
            return with_run(with_ladder(whole, prepared), prepared.options)
        except RehearsalInterrupted:
            raise RehearsalInterrupted(answer) from None


def _with_views(prepared: PreparedRehearsal) -> RehearsalAnswer:
    """Rehearse, and write the files for viewers; earlier ones are removed, so that none of another run stays.

    Raises:
        ConfigError: There is no such folder, or the file is there and is none of this kind.
    """
    options = prepared.options
    named = {SNAPSHOT: options.snapshot, TRACE: options.trace}
    views = {name: Path(file).expanduser().absolute() for name, file in named.items() if file is not None}
    for name, target in views.items():
        refuse_foreign(target, *_VIEW_MARKS[name])
        with writing(target, own=False):
            target.unlink(missing_ok=True)
    answer = prepared.run(loud=True, views=views)
    for target in views.values():
        if not target.is_file():
            options.on_note(f"{target} was not written: the script ended before anything could be seen")
    return answer


def lacks_needs(answer: RehearsalAnswer) -> bool:
    """Whether an answer does not tell what the script needs: the device had no room for the whole of it."""
    return answer.end is ScriptEnd.OUT_OF_MEMORY or broke(answer)


def with_needs(answer: RehearsalAnswer, prepared: PreparedRehearsal) -> RehearsalAnswer:
    """Return an answer with what the script needs, for which it may be rehearsed without a limit."""
    return joined(answer, prepared.without_limit(answer.device)) if lacks_needs(answer) else answer


def with_bounds(answer: RehearsalAnswer, prepared: PreparedRehearsal) -> RehearsalAnswer:
    """Return an answer with what the script needs at least, where sizes that depend on values make it too large."""
    if answer.verdict is not VerdictKind.REFUSED or answer.memory is None or not answer.sized_by_values:
        return answer
    least = prepared.with_smallest_sizes(answer.device)
    if least.memory is None or not least.went_through:
        reason = (
            f"sizes depend on values that nobody knows; with the largest it needs {gib(answer.memory.required_bytes)}"
        )
        return answer.model_copy(update={"verdict": VerdictKind.UNKNOWN, "reasons": (reason,)})
    known_bytes = least.memory.required_bytes if least.memory.least_bytes is None else least.memory.least_bytes
    more_bytes = answer.memory.overhead_bytes - least.memory.overhead_bytes
    least_bytes = min(known_bytes + more_bytes, answer.memory.required_bytes)
    memory = answer.memory.model_copy(update={"least_bytes": least_bytes})
    between = memory.between(answer.device.capacity_bytes, "values that nobody knows")
    if between is None:  # it runs out of memory though the whole would have room
        return answer
    return answer.model_copy(update={"memory": memory, "verdict": between[0], "reasons": (between[1],)})


def with_ladder(answer: RehearsalAnswer, prepared: PreparedRehearsal) -> RehearsalAnswer:
    """Return an answer with the changes that were rehearsed until it is known which of them fits, where asked for."""
    options = prepared.options
    if not options.ladder or not answer.went_through or answer.fits:
        return answer
    priced: list[PricedArguments] = []

    def rehearse_with(change: ArgumentChange) -> Tried:
        options.on_note(f"rehearsing with {' '.join(change.words)}")
        other = prepared.run(device=answer.device, overrides=change.values)
        known = other.memory if other.end in (ScriptEnd.FINISHED, ScriptEnd.STOPPED) else None
        required_bytes = known.required_bytes if known is not None else None
        priced.append(
            PricedArguments(
                arguments=change.words,
                change=str(change),
                effect=change.effect,
                required_bytes=required_bytes,
                fits=other.fits,
            )
        )
        return Tried(other.fits, required_bytes)

    best = climb(answer, rehearse_with, allow=Effect.SEMANTICS, has_eight_bit=prepared.has_eight_bit)
    helps = best is not None and best.effect is not Effect.SEMANTICS and answer.verdict is VerdictKind.REFUSED
    verdict = VerdictKind.FITS_WITH if helps else answer.verdict
    ordered = sorted(priced, key=lambda one: best is None or one.arguments != best.words)  # the recommended one first
    return answer.model_copy(update={"ladder": tuple(ordered), "verdict": verdict})


def joined(answer: RehearsalAnswer, unlimited: RehearsalAnswer) -> RehearsalAnswer:
    """Return an answer that ended out of memory with what is known of the same script on a device without a limit."""
    if not unlimited.went_through or unlimited.memory is None:
        return answer
    if not answer.went_through:
        short = unlimited.verdict is VerdictKind.REFUSED
        note = "on the device itself the process broke, so the line where memory runs out is not known"
        return unlimited.model_copy(
            update={
                "verdict": VerdictKind.REFUSED if short else VerdictKind.UNKNOWN,
                "reasons": unlimited.reasons if short else answer.reasons,
                "out_of_memory": answer.out_of_memory,
                "notes": (*unlimited.notes, note) if short else unlimited.notes,
            }
        )
    known = ("memory", "at_least", "work", "run", "sent", "host", "worst_batch", "muted", "unknown", "notes", "assumed")
    capacity_bytes = answer.device.capacity_bytes
    short_bytes = unlimited.memory.required_bytes - capacity_bytes
    verdict, reason = unlimited.memory.between(capacity_bytes) or (answer.verdict, "")
    return answer.model_copy(
        update={name: getattr(unlimited, name) for name in (*known, "sized_by_values")}
        | {
            "verdict": verdict,
            "reasons": (reason,) if reason else answer.reasons,
            "shortfall_bytes": max(0, short_bytes),
            "rehearsal_s": answer.rehearsal_s + unlimited.rehearsal_s,
            "host_peak_bytes": max(answer.host_peak_bytes, unlimited.host_peak_bytes),
        }
    )


def _accelerate_config(file: str | None) -> Mapping[str, Any]:
    """Read a config file of ``accelerate launch``; of None the user's default, empty where there is none.

    Raises:
        ConfigError: It cannot be read, or is no table.
    """
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    path = Path(file or Path(home) / "accelerate" / "default_config.yaml").expanduser()
    if file is None and not path.is_file():
        return {}
    doing = f"reading accelerate's config {path}"
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ConfigError(doing, "it is larger than 1 MiB", "a config file")
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            doing, re.sub(r"\s+", " ", str(error)), "YAML or JSON, as `accelerate config` writes it"
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(doing, f"it holds a {type(table).__name__}", "a table of keys")
    return cast("dict[str, Any]", table)


# Rehearse a command for several devices: once for those on which it does the same.
#
# Devices of one compute capability have the same kernels and workspaces. The largest of them is rehearsed, and the
# recording replayed on the others. Two things need a further rehearsal: a script that asks what distinguishes devices,
# and an allocation that a device refuses, because a script may catch that error. Of devices that refuse at the same
# line one is rehearsed: if the script does not catch it there, it ends there on the others too.


def rehearse_devices(command: ScriptCommand, options: RehearsalOptions, devices: Sequence[DeviceSpec]) -> DeviceAnswers:
    """Rehearse a command for several devices; each answer is that of a rehearsal for this device alone.

    Args:
        options: ``device`` is not looked at.
        devices: Each once; none: this machine's first GPU.

    Raises:
        ConfigError: As of :func:`~dryfit.study.rehearsals.rehearse`.
        ChildError: An answer cannot be read.
    """
    began_s = time.monotonic()
    devices = devices or (device_of(None),)
    prepared = prepare(command, options, demand_cuda(devices[0]))
    shared = _Shared(prepared)
    interrupted = False
    try:
        with shared_imports():
            for group in _groups(map(demand_cuda, devices)):
                shared.rehearse(group)
    except RehearsalInterrupted as error:
        interrupted = True
        shared.keep_seen(error.answer)
    known = [shared.found[one.name] for one in devices if one.name in shared.found]
    found = tuple(replace(one, answer=with_run(one.answer, options)) for one in known)
    return DeviceAnswers(found, shared.rehearsals, time.monotonic() - began_s, interrupted)


def request_table(form: Emitted | None, file: Path | None) -> dict[str, dict[str, str]]:
    """Read what a cluster calls its devices: ``a100-80 = { gres = "a100", constraint = "gpu80gb" }``.

    Returns:
        By the names of :func:`~dryfit.settings.devices.device_names`; empty where the form needs none.

    Raises:
        ConfigError: The form and the file do not go together, or the file is wrong.
    """
    doing = "making a request of a device"
    if (form is Emitted.SBATCH) is not (file is not None):
        raise ConfigError(doing, "--emit-table and --emit sbatch one without the other", "both, or neither")
    if file is None:
        return {}
    hint = 'a100-80 = { gres = "a100", constraint = "gpu80gb" }'
    found: dict[str, dict[str, str]] = {}
    for text, named in read_toml(file, "a table of devices", hint).items():
        words = cast("dict[str, object]", named) if isinstance(named, dict) else {}
        if not words or words.keys() - {"gres", "constraint"} or not all(_is_word(one) for one in words.values()):
            raise ConfigError(f"reading {file}", f"{text} = {named!r}", "gres and constraint, words of Slurm", hint)
        found[parse_device(text).name] = {key: str(one) for key, one in words.items()}
    return found


def _is_word(value: object) -> bool:
    """Whether a value can stand in a Slurm script as it is."""
    return isinstance(value, str) and re.fullmatch(r"[\w.:&-]+", value) is not None


def _groups(devices: Iterable[DeviceSpec]) -> list[list[DeviceSpec]]:
    """Return devices with the same kernels together, the largest of each group first."""
    groups: dict[tuple[int, int], list[DeviceSpec]] = defaultdict(list)
    for device in devices:
        groups[device.capability].append(device)
    return [sorted(group, key=lambda one: -one.capacity_bytes) for group in groups.values()]


@dataclass(slots=True)
class _Shared:
    """Rehearses groups of devices.

    Attributes:
        found: Answers by the name of the device.
        rehearsals: How many processes were needed.
    """

    prepared: PreparedRehearsal
    found: dict[str, DeviceAnswer] = field(default_factory=dict[str, DeviceAnswer])
    rehearsals: int = 0

    def rehearse(self, group: Sequence[DeviceSpec]) -> None:
        """Find the answers of devices with the same kernels."""
        first, *rest = group
        others = tuple(rest)
        self._tell(group)
        recording = limited = self.prepared.run(device=first, others=others, loud=True)
        refusing: list[RehearsalAnswer] = []
        if lacks_needs(limited):
            self.rehearsals += 1
            recording = self.prepared.without_limit(first, others)
            refusing.append(limited)
        whole = joined(limited, recording) if recording is not limited else limited
        self._keep(whole, first.name)
        known = {one.device.name: one for one in recording.others}
        for device in rest:
            shared = known.get(device.name)
            if not limited.ran and not limited.killed_by:
                self._keep(limited.model_copy(update={"device": device}), first.name)
            elif shared is None:
                self._alone(device, recording.apart)
            elif not shared.out_of_memory:
                self._keep(shared, first.name)
            else:
                self._refused(shared, first, refusing)

    def _refused(self, shared: RehearsalAnswer, first: DeviceSpec, refusing: list[RehearsalAnswer]) -> None:
        """Find the answer of a device that refuses an allocation of the recording."""
        (error,) = shared.out_of_memory
        needs = shared.model_copy(update={"out_of_memory": ()})
        same = next((one for one in refusing if _ends_at(one, error)), None)
        if same is not None:
            self._keep(joined(_elsewhere(same, shared.device, error, needs), needs), same.device.name)
            return
        self._tell([shared.device])
        limited = self.prepared.run(device=shared.device)
        refusing.append(limited)
        self._keep(joined(limited, needs) if lacks_needs(limited) else limited, shared.device.name)

    def _alone(self, device: DeviceSpec, why: str) -> None:
        self._tell([device])
        limited = self.prepared.run(device=device)
        self.rehearsals += lacks_needs(limited)
        self._keep(with_needs(limited, self.prepared), device.name, why)

    def _keep(self, answer: RehearsalAnswer, recorded_on: str, why: str = "") -> None:
        alone = with_bounds(answer.model_copy(update={"others": (), "apart": ""}), self.prepared)
        whole = with_ladder(alone, self.prepared)
        self.found[whole.device.name] = DeviceAnswer(whole, recorded_on, why)

    def keep_seen(self, answer: RehearsalAnswer) -> None:
        """Keep what an interrupted rehearsal has seen, of the devices that share its recording too."""
        for one in (answer, *answer.others):
            if one.memory is not None and one.device.name not in self.found:
                alone = one.model_copy(update={"others": (), "apart": ""})
                self.found[one.device.name] = DeviceAnswer(alone, answer.device.name)

    def _tell(self, devices: Sequence[DeviceSpec]) -> None:
        names = ", ".join(one.name for one in devices)
        self.prepared.options.on_note(f"rehearsing for {names}")
        self.rehearsals += 1


def _ends_at(limited: RehearsalAnswer, error: OutOfMemory) -> bool:
    """Whether a rehearsal ended, uncaught, by an error at the same place, of code that can be told."""
    if limited.end is not ScriptEnd.OUT_OF_MEMORY or len(limited.out_of_memory) != 1 or not error.source:
        return False
    (own,) = limited.out_of_memory
    return (own.line, own.source, own.phase) == (error.line, error.source, error.phase)


def _elsewhere(
    limited: RehearsalAnswer, device: DeviceSpec, error: OutOfMemory, needs: RehearsalAnswer
) -> RehearsalAnswer:
    """Return the answer of a rehearsal that ran out of memory as that of another device, which does so there too."""
    (own,) = limited.out_of_memory
    return limited.model_copy(
        update={
            "device": device,
            "out_of_memory": (error,),
            "reasons": (error.message.partition(". GPU 0")[0],),
            "traceback": limited.traceback.replace(own.message, error.message),
            "confidence": needs.confidence,
        }
    )
