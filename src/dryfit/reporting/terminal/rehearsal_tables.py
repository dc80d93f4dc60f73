"""The tables and lines that ``dryfit rehearse`` prints, the verdict first."""

import shlex
from collections import Counter
from collections.abc import Sequence

from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.rehearsal import (
    LargestBatch,
    LineBytes,
    OutOfMemory,
    PricedArguments,
    RehearsalAnswer,
    RehearsalMemory,
    StepWork,
)
from dryfit.core.text.units import gib
from dryfit.core.wall.places import WALLS, Wall
from dryfit.reporting.terminal.plan_tables import EFFECTS
from dryfit.reporting.terminal.tables import Table, counted, duration_text, shortened

_MOST_LINES = 12
_MOST_MODULES = 8
_MOST_STEPS = 8
_MOST_NOTES = 8
_PACKAGES = "/site-packages/"
_LONGEST_CODE = 60
_PEAK_KEPT = 0.98
"""Lines are listed until they hold so much of the peak."""


def headline(answer: RehearsalAnswer) -> str:
    """Return the verdict in one line, with its numbers; and that files were less than walled in, if they were."""
    return _verdict(answer) + (f"; {WALLS[answer.wall]}" if answer.wall is Wall.REDIRECT else "")


def _verdict(answer: RehearsalAnswer) -> str:
    each = f" on each of {answer.ranks} devices" if answer.ranks > 1 else ""
    device = f"device has {gib(answer.device.capacity_bytes)} ({answer.device.name})"
    if not answer.ran:
        return f"rehearsal could not run: {'; '.join(answer.reasons) or 'no reason was given'}"
    match answer.verdict:
        case VerdictKind.UNKNOWN:
            return f"rehearsal unknown: {'; '.join(answer.reasons) or 'no reason was given'}    [REHEARSE-UNKNOWN]"
        case VerdictKind.REFUSED | VerdictKind.FITS_WITH:
            best = recommended(answer)
            instead = f"; it fits with {shlex.join(best.arguments)}" if best is not None else ""
            return f"rehearsal refused: {_needs(answer)}{each}, {device}{instead}    [REHEARSE-NOFIT]"
        case VerdictKind.FITS:
            return f"rehearsal fits: {_needs(answer)}{each}, {device}"


def _needs(answer: RehearsalAnswer) -> str:
    """Return what the script needs; of one that met an out-of-memory error, only what it needs at least is known."""
    memory = answer.memory
    if memory is None:
        return "the script takes no memory of it" if answer.fits else "the script runs out of memory"
    if answer.verdict is VerdictKind.FITS:
        return f"the script needs {gib(memory.required_bytes)}"
    known_bytes = answer.device.capacity_bytes + answer.shortfall_bytes
    if known_bytes > memory.required_bytes:
        return f"the script needs at least {gib(known_bytes)}"
    return f"the script needs {gib(memory.required_bytes)}"


def place_text(line: str, code: str, source: str) -> str:
    """Return where something happens: the script's line with its code, and the library's line that it leads to."""
    own = f"{short_path(line)}  {shortened(code.strip(), _LONGEST_CODE)}".rstrip() if line else ""
    inner = short_path(source) if source != line else ""
    return "  in ".join(part for part in (own, inner) if part)


def short_path(place: str) -> str:
    """Return ``path:number`` as a reader knows it: of a library from its package on."""
    return place.rpartition(_PACKAGES)[2]


def peak_lines(memory: RehearsalMemory) -> list[str]:
    """Return where memory peaks: phase, module and operator, and the line with its code."""
    at = memory.peak_at
    lines = [f"peak at {', '.join(part for part in (str(at.phase), at.module, at.op) if part)}"]
    place = place_text(memory.peak_line, memory.peak_code, memory.peak_source)
    return [*lines, f"  {place}"] if place else lines


def error_lines(errors: Sequence[OutOfMemory]) -> list[str]:
    """Return the out-of-memory errors that were raised, and whether the script went on."""
    lines: list[str] = []
    for error in errors:
        then = "the script caught it and went on" if error.caught else "the script did not catch it"
        place = place_text(error.line, error.code, error.source)
        lines.append(
            f"out of memory in step {error.step}, {error.phase}: {gib(error.requested_bytes)} asked for; {then}"
        )
        lines += [f"  {place}"] if place else []
    return lines


def lines_table(memory: RehearsalMemory) -> Table:
    """Return what is held at the peak by line, largest first: the script's line, and its code or the library's line."""
    rows = [
        (
            gib(held.bytes),
            str(held.category),
            short_path(held.line) or "-",
            f"in {short_path(held.source)}"
            if held.source not in ("", held.line)
            else shortened(held.code.strip(), _LONGEST_CODE) or "-",
            held.module or "-",
        )
        for held in largest(memory)
    ]
    return Table(("held at the peak", "of", "line", "code", "module"), tuple(rows))


def largest(memory: RehearsalMemory, most: int = _MOST_LINES) -> list[LineBytes]:
    """Return the largest of what is held at the peak, until nearly all of it is named."""
    enough_bytes, held_bytes = _PEAK_KEPT * memory.peak_allocated_bytes, 0
    shown: list[LineBytes] = []
    for held in memory.by_line[:most]:
        if held_bytes >= enough_bytes:
            break
        shown.append(held)
        held_bytes += held.bytes
    return shown


def modules_table(memory: RehearsalMemory) -> Table:
    """Return what is held at the peak by the modules that made it, the largest first; ``*`` stands for any layer."""
    rows = tuple((name or "outside of modules", gib(size)) for name, size in modules(memory)[:_MOST_MODULES])
    return Table(("module", "held at the peak"), rows)


def modules(memory: RehearsalMemory) -> list[tuple[str, int]]:
    """Return modules with what they hold at the peak, equal modules of all layers in one, the largest first."""
    held: Counter[str] = Counter()
    for part in memory.by_line:
        held[part.module] += part.bytes
    return held.most_common()


def steps_table(memory: RehearsalMemory) -> Table:
    """Return the peak of each optimizer step, and what is left at its end."""
    shown = memory.steps[:_MOST_STEPS]
    rows = tuple((str(step.number), gib(step.peak_bytes), gib(step.end_bytes)) for step in shown)
    return Table(("step", "peak", "at its end"), rows)


def ladder_table(ladder: Sequence[PricedArguments]) -> Table:
    """Return a row for each change of the script's arguments that was rehearsed."""
    rows = [
        (
            priced.change,
            gib(priced.required_bytes) if priced.required_bytes is not None else "unknown",
            EFFECTS[priced.effect],
            "yes" if priced.fits else "no",
        )
        for priced in ladder
    ]
    return Table(("change", "needs", "effect", "fits"), tuple(rows))


def recommended(answer: RehearsalAnswer) -> PricedArguments | None:
    """Return the change that fits and comes first, if it keeps the experiment."""
    return next((priced for priced in answer.ladder if priced.fits and answer.verdict is VerdictKind.FITS_WITH), None)


def ladder_lines(answer: RehearsalAnswer) -> list[str]:
    """Return how to start the script so that it fits, in the names of its own arguments."""
    seen = answer.training_arguments
    if seen is None:
        return ["no ladder: the script made no transformers.TrainingArguments, whose names dryfit could tell you"]
    best = next((priced for priced in answer.ladder if priced.fits), None)
    if best is None:
        return ["nothing of the ladder fits"] if answer.ladder else []
    effect = f"({EFFECTS[best.effect]})"
    if seen.from_command_line:
        return [f"it fits with {effect}:", f"  {shlex.join(best.arguments)}"]
    return [f"it fits with these in the script's TrainingArguments {effect}:", f"  {keywords_text(best)}"]


def keywords_text(priced: PricedArguments) -> str:
    """Return arguments as they are written in Python."""
    names, values = priced.arguments[::2], priced.arguments[1::2]
    return ", ".join(f"{name.removeprefix('--')}={_literal(value)}" for name, value in zip(names, values, strict=True))


def _literal(value: str) -> str:
    return value if value in ("True", "False", "None") or value.replace(".", "", 1).isdigit() else repr(value)


def batch_text(batch: LargestBatch) -> str:
    """Return the largest batch: ``input_ids 4 x 512; of 120 batches; trained on first``."""
    shapes = ", ".join(f"{name} {' x '.join(map(str, shape)) or 'scalar'}" for name, shape in batch.shapes.items())
    among = f"largest of {batch.seen} batch{'es' if batch.seen != 1 else ''}"
    if batch.of is not None and batch.of > batch.seen:
        among += f" looked at, of {batch.of}"
    return f"{shapes}; {among}; {'trained on first' if batch.fed_first else 'as the script feeds them'}"


def work_text(work: StepWork, device: str) -> str:
    """Return the arithmetic of a step, and the least time for it."""
    text = f"{_scaled(work.flops_per_step, 'FLOP')}, {_scaled(work.bytes_per_step, 'B')} read and written"
    if work.least_step_s is None:
        return f"{text}; no rates are known of {device}"
    return f"{text}; at least {_seconds(work.least_step_s)} on {device}" + (f" ({work.rates})" if work.rates else "")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration_text(seconds)


def _scaled(count: int, unit: str) -> str:
    """Return a count with a decimal prefix: ``1.5 TFLOP``."""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}{unit}"
    return f"{count} {unit}"


def fact_lines(answer: RehearsalAnswer) -> list[str]:
    """Return the lines below the tables: growth, worst batch, work, what was left out, what is unknown."""
    lines: list[str] = []
    memory = answer.memory
    if memory is not None and memory.growth is not None:
        growth = memory.growth
        lines.append(f"memory grows by {gib(growth.bytes_per_step)} a step; most of what is kept is made here:")
        lines.append(f"  {place_text(growth.line, growth.code, growth.source)}")
    if memory is not None and memory.evaluation_growth is not None:
        kept = memory.evaluation_growth
        lines.append(f"an evaluation keeps {gib(kept.bytes_per_batch)} of each batch; most of it is made here:")
        lines.append(f"  {place_text(kept.line, kept.code, kept.source)}")
    if answer.worst_batch is not None:
        lines.append(f"worst batch   {batch_text(answer.worst_batch)}")
    if answer.work is not None:
        lines.append(f"a step        {work_text(answer.work, answer.device.name)}")
    if answer.sent:
        kinds = ", ".join(f"{name} {gib(size)}" for name, size in answer.sent.items())
        lines.append(f"a rank sends  {kinds} a step")
    if answer.wall is not None:
        lines.append(f"files         {WALLS[answer.wall]}")
    for muted in answer.muted[:_MOST_NOTES]:
        size = f", {gib(muted.bytes)}" if muted.bytes is not None else ""
        where = f": {muted.where}" if muted.where else ""
        lines.append(f"left out      {muted.what}{where}{size}")
    if len(answer.muted) > _MOST_NOTES:
        lines.append(f"              and {len(answer.muted) - _MOST_NOTES} more (--json lists them)")
    return [*lines, *unknown_lines(answer), *(f"note          {note}" for note in answer.notes)]


def unknown_lines(answer: RehearsalAnswer) -> list[str]:
    """Return what could not be known, with the line that asked for it: a script may have gone another way there."""
    places = [place_text(one.line, one.code, "") for one in answer.unknown]
    return [
        f"unknown       {one.what}" + (f" at {place}" if place else "")
        for one, place in zip(answer.unknown, places, strict=True)
    ]


def trust_text(answer: RehearsalAnswer) -> str:
    """Return the confidence of a rehearsal, the version of torch, and what it took."""
    steps = len(answer.memory.steps) if answer.memory is not None else 0
    host = f", {gib(answer.host_peak_bytes)} of host memory" if answer.host_peak_bytes else ""
    took = f"{counted(steps, 'step')} rehearsed in {duration_text(answer.rehearsal_s)}{host}"
    return ", ".join(
        part for part in (str(answer.confidence), f"torch {answer.torch}" if answer.torch else "", took) if part
    )
