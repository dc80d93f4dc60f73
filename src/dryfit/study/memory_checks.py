"""``dryfit check``: the GPU memory of scripts, held against budgets and against what was kept of an earlier rehearsal.

``gpu-memory.toml`` names the runs. ``.dryfit/NAME.json`` beside that file is the baseline of a run: the peak on each
device and what holds it, by source line. Nothing in a baseline depends on the machine or on time.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from dryfit.documents.memory_checks import MARKDOWN_HEAD, check_document, check_markdown, check_page
from dryfit.documents.pages import refuse_foreign, render
from dryfit.processes.rehearsal_stem import shared_imports
from dryfit.processes.rehearsed_command import ScriptCommand
from dryfit.settings.devices import parse_device
from dryfit.settings.errors import ConfigError, DryfitError
from dryfit.settings.files import read_bounded, write_text_atomic, writing
from dryfit.settings.memory_check import Baseline, CheckVerdict, HeldLine, Kept, LineChange, MemoryCheck, RunCheck
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, VerdictKind
from dryfit.settings.rehearsal_messages import RehearsalAnswer
from dryfit.settings.study_file_reading import read_toml
from dryfit.settings.tables import Settings
from dryfit.settings.text import did_you_mean, few, gib, parse_bytes, shown_by
from dryfit.settings.wire import parse_json
from dryfit.study.rehearsals import (
    DEFAULT_TIMEOUT_S,
    RehearsalOptions,
    RehearsalSurroundings,
    read_command,
    rehearse_devices,
)

FILE: Final = "gpu-memory.toml"
FOLDER: Final = ".dryfit"
_MOST_BYTES: Final = 1 << 24
_LEAST_SHARE: Final = 1e-4
"""Share of the peak below which a line is not kept: a baseline is small, and reads well in a diff."""
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")
_PACKAGES: Final = "/site-packages/"
_LONGEST_CODE: Final = 200


def _listed(value: object) -> object:
    return (
        (value,) if isinstance(value, str) else tuple(cast("list[object]", value)) if isinstance(value, list) else value
    )


class Run(Settings):
    """A table ``[run.NAME]``.

    Attributes:
        command: As after ``dryfit rehearse``; paths are relative to the file's folder, in which it runs.
        budget: The most that the run may need of a device, with a unit; None: what the device has.
        tolerance: By how much the peak may exceed the baseline, in per cent.
    """

    command: Annotated[str, Field(min_length=1)]
    device: Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]
    budget: str | None = None
    tolerance: str = "1 %"
    ranks: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    worst_batch: bool = True
    timeout_s: Annotated[float, Field(gt=0)] = DEFAULT_TIMEOUT_S


class RunsFile(Settings):
    """The file of runs."""

    run: Annotated[dict[Annotated[str, Field(pattern=f"^{_NAME}$")], Run], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How runs are checked.

    Attributes:
        names: The runs; empty: all of the file.
        update: Write what was found as the baseline.
        page: An HTML file to write; an earlier page is replaced, other files are refused.
        table: The same in Markdown.
        surroundings: What the processes of rehearsals are started with.
    """

    file: Path = Path(FILE)
    names: Sequence[str] = ()
    update: bool = False
    on_note: Callable[[str], None] = lambda _: None
    on_output: Callable[[bytes], None] = lambda _: None
    page: Path | None = None
    table: Path | None = None
    surroundings: RehearsalSurroundings | None = None


def check_memory(
    names: Sequence[str] = (), *, file: Path | str = FILE, update: bool = False, on_note: Callable[[str], None] = print
) -> MemoryCheck:
    """Rehearse the runs of ``gpu-memory.toml``, and hold their memory against budgets and baselines.

    Args:
        names: The runs; none: all of the file.
        update: Write what was found as the baseline; each run is rehearsed twice, and must take the same both times.

    Raises:
        ConfigError: The file, a baseline or a device is wrong, or there is no run of such a name.
    """
    return check_runs(CheckOptions(Path(file), names, update, on_note))


@shared_imports()
def check_runs(options: CheckOptions) -> MemoryCheck:
    """Check runs as :func:`check_memory` does.

    Raises:
        ConfigError: As there; or a file that would be written is there and is none of dryfit's.
    """
    _keep_foreign(options)
    file = options.file.expanduser().absolute()
    runs = {name: _Ready.of(name, run, file.parent) for name, run in _chosen(_runs(file), options.names, file).items()}
    baselines = {name: _baseline(file.parent / FOLDER / f"{name}.json") for name in runs}
    found: list[RunCheck] = []
    updated: list[str] = []
    for name, ready in runs.items():
        options.on_note(f"rehearsing {name} on {', '.join(ready.devices)}")
        of_run = _checked(ready, baselines[name], options)
        found += of_run
        if options.update and all(one.verdict is not CheckVerdict.UNKNOWN and one.after for one in of_run):
            kept = {one.device.name: one.after for one in of_run if one.after is not None}
            _write(file.parent / FOLDER / f"{name}.json", Baseline(command=ready.run.command, devices=kept))
            updated.append(name)
    check = MemoryCheck(runs=tuple(found), updated=tuple(updated))
    _write_shown(check, options)
    return check


@dataclass(frozen=True, slots=True)
class _Ready:
    """A run whose texts were read."""

    name: str
    run: Run
    folder: Path
    words: tuple[str, ...]
    devices: dict[str, DeviceSpec]
    budget_bytes: int | None
    tolerance: float

    @classmethod
    def of(cls, name: str, run: Run, folder: Path) -> "_Ready":
        doing = f"reading [run.{name}]"
        percent = _PERCENT.fullmatch(run.tolerance.strip())
        if percent is None:
            raise ConfigError(doing, f"tolerance = {run.tolerance!r}", 'per cent of the baseline: "1 %"')
        try:
            words = tuple(shlex.split(run.command))
            devices = {text: parse_device(text) for text in run.device}
            budget_bytes = None if run.budget is None else parse_bytes(run.budget)
        except ValueError as error:
            raise ConfigError(doing, f"command = {run.command!r}: {error}", "a command line") from error
        except DryfitError as error:
            raise ConfigError(doing, error.found, error.allowed, error.hint) from error
        if len({device.name for device in devices.values()}) < len(run.device):
            raise ConfigError(doing, f"device = {list(run.device)}", "each device once")
        return cls(name, run, folder, words, devices, budget_bytes, float(percent[1]) / 100)

    def rehearsed(self, devices: Sequence[DeviceSpec], options: CheckOptions) -> list[RehearsalAnswer]:
        """Rehearse it for devices, in the folder of its file."""
        run, start = self.run, options.surroundings or RehearsalOptions().surroundings
        doing = RehearsalOptions(
            steps=run.steps,
            ranks=run.ranks,
            worst_batch=run.worst_batch,
            timeout_s=run.timeout_s,
            on_output=options.on_output,
            surroundings=replace(start, folder=self.folder),
        )
        seen = rehearse_devices(self._command(), doing, devices)
        if seen.interrupted:
            raise KeyboardInterrupt
        return [one.answer for one in seen.answers]

    def _command(self) -> ScriptCommand:
        with chdir(self.folder):  # a config file of accelerate is found from there, as its script is
            command = read_command(self.words)
        return command if command.script is None else replace(command, script=str(self.folder / command.script))


def _checked(ready: _Ready, baseline: Baseline | None, options: CheckOptions) -> list[RunCheck]:
    """Check a run on its devices; where that matters, a second rehearsal shows whether it is deterministic."""
    replaced = options.update and baseline is not None and baseline.command != ready.run.command
    against = None if replaced else baseline
    devices = list(ready.devices.values())
    answers = ready.rehearsed(devices, options)
    found = [judged(ready, answer, device, against) for answer, device in zip(answers, devices, strict=True)]
    doubtful = [one for one in found if one.after and (options.update or one.verdict is CheckVerdict.GREW)]
    if not doubtful:
        return found
    again = ready.rehearsed([one.device for one in doubtful], options)
    pairs = zip(doubtful, again, strict=True)
    known = {one.device.name: _same(one, kept_of(answer, ready.folder)) for one, answer in pairs}
    return [known.get(one.device.name, one) for one in found]


def _same(found: RunCheck, again: Kept | None) -> RunCheck:
    """Return a check whose second rehearsal took as much, or that it cannot be judged."""
    if found.after is None or (again is not None and _peaks(again) == _peaks(found.after)):
        return found
    differing = changes(found.after, again) if again is not None else ()
    place = f"; they part at {differing[0].line}  {differing[0].code.strip()}" if differing else ""
    reason = f"two rehearsals of it take different memory: it is not deterministic{place}"
    return found.model_copy(update={"verdict": CheckVerdict.UNKNOWN, "reasons": (reason,), "lines": differing})


def judged(ready: _Ready, answer: RehearsalAnswer, device: DeviceSpec, baseline: Baseline | None) -> RunCheck:
    """Return what a rehearsal says of a run: against its device, its budget and its baseline, in this order."""
    after = kept_of(answer, ready.folder)
    before = None if baseline is None else baseline.devices.get(device.name)
    budget_bytes = min(device.capacity_bytes, ready.budget_bytes or device.capacity_bytes)
    memory = answer.memory
    if after is None or answer.verdict is VerdictKind.UNKNOWN or not answer.went_through:
        verdict, fits = CheckVerdict.UNKNOWN, None
        reasons = answer.reasons or ("the rehearsal saw no memory",)
    else:
        verdict, reasons = _verdict(answer, after, before, budget_bytes, ready.tolerance)
        fits = verdict not in (CheckVerdict.NO_FIT, CheckVerdict.OVER)
        if fits and baseline is not None and baseline.command != ready.run.command:
            verdict, before = CheckVerdict.UNKNOWN, None
            reasons = (f"the baseline is that of another command: {baseline.command}",)
    return RunCheck(
        name=ready.name,
        command=ready.run.command,
        device=device,
        verdict=verdict,
        fits=fits,
        budget_bytes=budget_bytes,
        before=before,
        after=after,
        other_versions=_other_versions(before, after),
        lines=changes(before, after) if before and after else (),
        reasons=reasons,
        peak_line=_place(memory.peak_line, ready.folder) if memory else "",
        peak_code=memory.peak_code if memory else "",
        answer=answer,
    )


def _verdict(
    answer: RehearsalAnswer, after: Kept, before: Kept | None, budget_bytes: int, tolerance: float
) -> tuple[CheckVerdict, tuple[str, ...]]:
    """Return the verdict of a rehearsal that went through, and why."""
    if answer.verdict in (VerdictKind.REFUSED, VerdictKind.FITS_WITH):
        return CheckVerdict.NO_FIT, (f"it needs {gib(after.required_bytes)} of {gib(answer.device.capacity_bytes)}",)
    if after.required_bytes > budget_bytes:
        return CheckVerdict.OVER, (f"it needs {gib(after.required_bytes)}, its budget is {gib(budget_bytes)}",)
    if before is None:
        return CheckVerdict.NEW, ()
    pairs = list(zip(("allocated", "reserved"), _peaks(before), _peaks(after), strict=True))
    grown = tuple(
        f"{what}: {old / 2**20:,.1f} MiB before, {new / 2**20:,.1f} now"
        for what, old, new in pairs
        if new > math.ceil(old * (1 + tolerance))
    )
    if grown:
        return CheckVerdict.GREW, grown
    if all(new < old * (1 - tolerance) for _, old, new in pairs):
        return CheckVerdict.SHRANK, ("`dryfit check --update` keeps that",)
    return CheckVerdict.WITHIN, ()


def kept_of(answer: RehearsalAnswer, folder: Path) -> Kept | None:
    """Return what is kept of a rehearsal; None where nothing was seen. Equal lines are one, the largest first."""
    memory = answer.memory
    if memory is None:
        return None
    held: Counter[tuple[str, str, str, str, MemoryCategory]] = Counter()
    for one in memory.by_line:
        code, inner = (text.strip()[:_LONGEST_CODE] for text in (one.code, one.source_code))
        held[_place(one.line, folder), code, _place(one.source, folder), inner, one.category] += one.bytes
    least_bytes = memory.peak_allocated_bytes * _LEAST_SHARE
    lines = [
        HeldLine(line=line, code=code, source=source, source_code=inner, category=category, bytes=size)
        for (line, code, source, inner, category), size in sorted(held.items(), key=lambda item: (-item[1], item[0]))
        if size >= least_bytes
    ]
    return Kept(
        allocated_bytes=memory.peak_allocated_bytes,
        reserved_bytes=memory.peak_reserved_bytes,
        required_bytes=memory.required_bytes,
        versions={"torch": answer.torch.partition("+")[0], **answer.libraries},  # a build for the CPU tells the same
        lines=tuple(lines),
    )


def changes(before: Kept, after: Kept) -> tuple[LineChange, ...]:
    """Return what differs by line, first what changed as the peak did, the largest difference first.

    Lines are the same by their file and their code.
    """
    sums = [Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()]
    shown: dict[tuple[str, ...], HeldLine] = {}
    knows_inner = all(any(one.source_code for one in kept.lines) for kept in (before, after))
    for held, kept in zip(sums, (before, after), strict=True):
        for line in kept.lines:
            one = line if knows_inner else line.model_copy(update={"source_code": ""})
            held[one.key] += one.bytes
            shown[one.key] = one
    old, new = sums
    found = [
        LineChange(
            line=one.line,
            code=one.code,
            source=one.source,
            source_code=one.source_code,
            category=one.category,
            before_bytes=old[key],
            after_bytes=new[key],
        )
        for key, one in shown.items()
        if old[key] != new[key]
    ]
    shrank = after.allocated_bytes < before.allocated_bytes

    def rank(one: LineChange) -> tuple[bool, int, str, str]:
        return (one.difference_bytes < 0) is not shrank, -abs(one.difference_bytes), one.line, one.category

    return tuple(sorted(found, key=rank))


def _peaks(kept: Kept) -> tuple[int, int]:
    return kept.allocated_bytes, kept.reserved_bytes


def _place(place: str, folder: Path) -> str:
    """Return ``path:number`` without what differs from machine to machine: relative, or from its package on."""
    return place.rpartition(_PACKAGES)[2].removeprefix(f"{folder}/")


def _other_versions(before: Kept | None, after: Kept | None) -> dict[str, tuple[str, str]]:
    if before is None or after is None:
        return {}
    pairs = {name: (old, after.versions.get(name, old)) for name, old in before.versions.items()}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _chosen(runs: Mapping[str, Run], names: Sequence[str], file: Path) -> dict[str, Run]:
    for name in names:
        if name not in runs:
            hint = did_you_mean(name, runs, f"its runs are: {few(runs)}")
            raise ConfigError(f"choosing runs of {file}", f"there is no run {name!r}", "names of its tables", hint)
    return {name: runs[name] for name in dict.fromkeys(names or runs)}


def _runs(file: Path) -> Mapping[str, Run]:
    hint = '[run.NAME] with command = "train.py" and device = "rtx4090"'
    return _validated(RunsFile, read_toml(file, "a file of runs", hint), f"reading {file}", hint).run


def _keep_foreign(options: CheckOptions) -> None:
    """Refuse to replace a file that is none of dryfit's.

    Raises:
        ConfigError: One is there.
    """
    if options.page is not None:
        refuse_foreign(options.page)
    if options.table is not None:
        refuse_foreign(options.table, MARKDOWN_HEAD.encode(), "table")


def _write_shown(check: MemoryCheck, options: CheckOptions) -> None:
    _keep_foreign(options)  # again: one may have come while it was rehearsed
    shown = [(options.page, lambda: render(check_page(check))), (options.table, lambda: check_markdown(check))]
    for file, made in shown:
        if file is not None:
            with writing(file, own=False):
                write_text_atomic(file, made(), durable=False)


def _baseline(file: Path) -> Baseline | None:
    doing, hint = f"reading the baseline {file}", "write it anew with `dryfit check --update`"
    try:
        value = parse_json(read_bounded(file, _MOST_BYTES, links=True).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise ConfigError(doing, str(error), "JSON, as dryfit wrote it", hint) from error
    return _validated(Baseline, value, doing, hint)


_Model = TypeVar("_Model", bound=BaseModel)


def _validated(kind: type[_Model], value: Any, doing: str, hint: str) -> _Model:
    try:
        return kind.model_validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(doing, f"{place}: {first['msg']}", hint=hint) from error


def _write(file: Path, baseline: Baseline) -> None:
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(baseline.model_dump(mode="json"), indent=1, ensure_ascii=False)
    write_text_atomic(file, text + "\n", durable=False)


shown_by(MemoryCheck, check_document)
