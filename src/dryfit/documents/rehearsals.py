"""A rehearsal as lines and tables, the verdict first, as a page with its timeline, and as JSON."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final

from dryfit.documents.document import Block, Document, Line, counted, document_of, duration_text, json_of, shortened
from dryfit.documents.memory_tables import EFFECTS, VERDICT_STYLES, memory_table, requirement_table
from dryfit.documents.pages import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Figure,
    Page,
    Section,
    axis,
    bars,
    region,
    scatter,
    text,
)
from dryfit.processes.wall import WALLS
from dryfit.settings.choices import Wall
from dryfit.settings.memory_terms import MemoryCategory, StepPhase, VerdictKind
from dryfit.settings.rehearsal_messages import (
    HostTensors,
    Interval,
    LargestBatch,
    LineBytes,
    OutOfMemory,
    PricedArguments,
    RehearsalAnswer,
    RehearsalMemory,
    RunCost,
    RunTime,
    StepTime,
    StepWork,
    TimelinePoint,
)
from dryfit.settings.text import Table, gib, shown_by

_SHOWN_SHARE, _SHOWN_KINDS = 0.03, 4
_MEMORY: Final = tuple(name for name in RehearsalMemory.model_fields if name != "timeline")
_WORK: Final = tuple(StepWork.model_fields)
_OF_A_PLAN: Final[dict[str, object]] = {
    "host_bytes": None,  # of a plan; what a script offloads is told as ``host``
    "execution": None,
    "fallbacks": (),
    "eval_batches": (),
    "cut": None,
    "cannot_cut": "",
}
"""Keys of a plan that a script has not; all others of a plan it has too."""


@json_of.register
def rehearsal_json(answer: RehearsalAnswer, *, with_timeline: bool = False) -> dict[str, object]:
    """Return a rehearsal as ``rehearse --json`` prints it; unknown values are null.

    The memory and the work of a step stand beside the rest; ``ended`` is also ``end``, and ``fits`` is null where it is
    not known.
    """
    rest = answer.model_dump(exclude={"v", "memory", "work", "sent", "rehearsal_s", "killed_by", "others", "apart"})
    memory = answer.memory
    return {
        "schema": 2,
        **rest,
        **_OF_A_PLAN,
        **{name: getattr(memory, name, None) for name in _MEMORY},
        **{name: getattr(answer.work, name, None) for name in _WORK},
        "timeline": memory.timeline if memory is not None and with_timeline else None,
        "fits": None if answer.verdict is VerdictKind.UNKNOWN else answer.fits,
        "ended": answer.end,
        "hours": answer.run.hours if answer.run is not None else None,
        "ran": answer.ran,
        "capacity_bytes": answer.device.capacity_bytes,
        "planner_s": answer.rehearsal_s,
        "sent_bytes": answer.sent,
    }


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
            reasons = list(answer.reasons) or ["no reason was given"]
            memory = answer.memory
            if memory is not None and not answer.went_through:
                known_bytes = memory.required_bytes if memory.least_bytes is None else memory.least_bytes
                reasons.append(f"it needs at least {gib(known_bytes)}{each}, {device}")
            elif memory is not None and memory.least_bytes is not None:
                reasons.append(device)
            return f"rehearsal unknown: {'; '.join(reasons)}    [REHEARSE-UNKNOWN]"
        case VerdictKind.REFUSED | VerdictKind.FITS_WITH:
            best = recommended(answer)
            instead = f"; it fits with {shlex.join(best.arguments)}" if best is not None else ""
            return f"rehearsal does not fit: {_needs(answer)}{each}, {device}{instead}    [REHEARSE-NOFIT]"
        case VerdictKind.FITS:
            return f"rehearsal fits: {_needs(answer)}{each}, {device}"


def _needs(answer: RehearsalAnswer) -> str:
    """Return what the script needs; of one that met an out-of-memory error, only what it needs at least is known."""
    memory = answer.memory
    if memory is None:
        return "the script takes no memory of it" if answer.fits else "the script runs out of memory"
    if answer.verdict is VerdictKind.FITS:
        most = "at most " if memory.least_bytes is not None or answer.sized_by_values else ""
        return f"the script needs {most}{gib(memory.required_bytes)}"
    if memory.least_bytes is not None:
        return f"the script needs at least {gib(memory.least_bytes)}"
    known_bytes = answer.device.capacity_bytes + answer.shortfall_bytes
    if answer.at_least or known_bytes > memory.required_bytes:
        return f"the script needs at least {gib(max(known_bytes, memory.required_bytes))}"
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
    """Return the memory at the peak by line, largest first: the script's line, and its code or the library's line."""
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


_SMALLER = 0.95
"""Below this share of the timed batch the mean one is told apart."""
_ROUND = 100
_KNOWN = {
    "measured": "was measured",
    "power-limited": "at its power limit was measured",
    "guessed": "is a guess, so the interval is wide",
    "calibrated": "was set by your own measurement",
}


def step_time_lines(time: StepTime, device: str) -> list[str]:
    """Return how long a step takes, where the time goes, and how well that is known."""
    kinds = [f"{name} {share:.0%}" for name, share in time.by_kind.items() if share >= _SHOWN_SHARE][:_SHOWN_KINDS]
    about = f", about {_seconds(time.estimate_s)}" if time.launch_bound_high_s is None else ""
    interval = f"{_seconds(time.low_s)} to {_seconds(time.high_s)} (80 %){about} on {device}"
    lines = [f"step time     {interval}: {', '.join(kinds)}; the GPU is busy {time.busy_share:.0%} of it"]
    known = f"what {device} reaches {_KNOWN[time.level]} ({time.basis})"
    lines.append(f"              {known}; not counted: {', '.join(time.not_counted)}")
    if time.assumed:
        lines.append(f"              assumed, and compared with no measurement: {'; '.join(time.assumed)}")
    if time.launch_bound_high_s is not None:
        lines.append(
            "              many small kernels: the host may decide; the upper end is that of one five times slower"
        )
    return lines


def run_lines(run: RunTime, device: str) -> list[str]:
    """Return how long the whole run takes and what it costs, or what to say so that this is known."""
    loader = _loader_text(run)
    if run.steps is None:
        epoch = f"{run.epoch_steps} steps an epoch" if run.epoch_steps else "the number of steps is not known"
        return [f"run           {epoch}; --train-steps N tells the hours of a run", *loader]
    steps = f"{run.steps} steps ({run.source})"
    if run.hours is None:
        return [f"run           {steps}; without the time of a step on {device} its hours are not known", *loader]
    lines = [f"run           {steps}: {hours_text(run.hours)}"]
    if run.cost is not None:
        cost = run.cost
        age = ", a price older than 90 days" if cost.is_old else ""
        rate = f"{cost.per_hour:.2f} an hour as of {cost.as_of}{age}"
        lines.append(f"cost          {cost_text(cost)} (80 %), about {_amount(cost.estimate)}; {rate}")
    if run.batch_share is not None and run.batch_share < _SMALLER:
        lines.append(f"              hours by the mean batch: {run.batch_share:.0%} of the elements of the timed one")
    return [*lines, *loader]


def _loader_text(run: RunTime) -> list[str]:
    if run.batches_per_s is None:
        return []
    workers = f"; the script asks for {counted(run.workers, 'worker')}" if run.workers else ""
    return [f"              the loader made {_rate(run.batches_per_s)} batches/s here in one process{workers}"]


def _rate(per_s: float) -> str:
    return f"{per_s:.2g}" if per_s < _ROUND else f"{per_s:.0f}"


_UNITS: Final = (("h", 1), ("min", 60), ("s", 3600))


def hours_text(hours: Interval) -> str:
    """Return hours with their interval: ``2.1 to 2.9 h (80 %), about 2.5 h``; short ones in minutes or seconds."""
    unit, per_hour = next((one for one in _UNITS if hours.estimate * one[1] >= 1), _UNITS[-1])
    low, estimate, high = (_rate(each * per_hour) for each in (hours.low, hours.estimate, hours.high))
    return f"{low} to {high} {unit} (80 %), about {estimate} {unit}"


def cost_text(cost: RunCost) -> str:
    """Return what a run costs: ``4.00 to 5.20 USD``."""
    return f"{_amount(cost.low)} to {_amount(cost.high)}{f' {cost.currency}' if cost.currency else ''}"


def _amount(amount: float) -> str:
    return f"{amount:.2f}" if amount < _ROUND else f"{amount:,.0f}".replace(",", " ")


def step_time_cell(work: StepWork | None) -> str:
    """Return the interval of a step's time for a table; empty where it is not known."""
    time = work.step_time if work is not None else None
    return "" if time is None else f"{_seconds(time.low_s)} to {_seconds(time.high_s)}"


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
        if answer.work.step_time is not None:
            lines += step_time_lines(answer.work.step_time, answer.device.name)
    timed = answer.work is not None and answer.work.step_time is not None
    if answer.run is not None and (timed or answer.run.source == "--train-steps"):
        lines += run_lines(answer.run, answer.device.name)
    if answer.sent:
        kinds = ", ".join(f"{name} {gib(size)}" for name, size in answer.sent.items())
        lines.append(f"a rank sends  {kinds} a step")
    if answer.host is not None and answer.host.held_bytes:
        lines.append(f"host memory   {host_text(answer.host, answer.ranks)}")
    if answer.wall is not None:
        lines.append(f"files         {WALLS[answer.wall]}")
    for muted in answer.muted[:_MOST_NOTES]:
        size = f", {gib(muted.bytes)}" if muted.bytes is not None else ""
        where = f": {muted.where}" if muted.where else ""
        lines.append(f"left out      {muted.what}{where}{size}")
    if len(answer.muted) > _MOST_NOTES:
        lines.append(f"              and {len(answer.muted) - _MOST_NOTES} more (--json lists them)")
    lines += [f"assumed       {one}" for one in answer.assumed]
    return [*lines, *unknown_lines(answer), *(f"note          {note}" for note in answer.notes)]


def host_text(host: HostTensors, ranks: int) -> str:
    """Return the host memory that a rank holds in tensors, and what all ranks of the machine hold together."""
    pinned = f" ({gib(host.pinned_bytes)} pinned)" if host.pinned_bytes else ""
    whole = f"; {ranks} ranks hold {gib(ranks * host.held_bytes)}" if ranks > 1 else ""
    return f"a rank holds {gib(host.held_bytes)} of tensors{pinned}, at most {gib(host.peak_bytes)}{whole}"


def unknown_lines(answer: RehearsalAnswer) -> list[str]:
    """Return unknown values with the lines that read them, where a script may take another branch."""
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


def accuracy_text(answer: RehearsalAnswer) -> str:
    """Return how right answers of this kind were where somebody measured; empty where nothing was."""
    memory = answer.memory
    if memory is None or answer.at_least or answer.ranks > 1:
        return ""
    known = json.loads(files("dryfit.documents").joinpath("accuracy.json").read_text(encoding="utf-8"))
    is_timm = "timm" in answer.libraries and "transformers" not in answer.libraries
    told = known["peft" if MemoryCategory.ADAPTERS in memory.by_category else "timm" if is_timm else "scripts"]
    if is_timm and "same" in told:
        parts = [f"the batch that fits was right in {told['same']} of {told['rows']}, too large in {told['larger']}"]
    else:
        parts = [
            f"{counter} within {most} % in {told[counter]} of {told[f'of {counter}']}"
            for counter, most in (("allocated", 1), ("reserved", 5))
        ]
    return f"how right     {told['what']}: {', '.join(parts)} (docs/accuracy.md)"


@document_of.register
def _(answer: RehearsalAnswer) -> Document:
    return rehearsal_document(answer, ladder=bool(answer.ladder))


shown_by(RehearsalAnswer, document_of)


def rehearsal_document(answer: RehearsalAnswer, *, ladder: bool) -> Document:
    """Return the verdict on a script, where its memory peaks and what holds it; with ``ladder`` what would fit."""
    if not answer.ran:
        unknown = (Line(line, aside=True) for line in unknown_lines(answer))
        return Document((Line(headline(answer), "red", aside=True), *unknown))
    memory = answer.memory
    style = VERDICT_STYLES[VerdictKind.REFUSED if answer.verdict is VerdictKind.FITS_WITH else answer.verdict]
    blocks: list[Block] = [Line(headline(answer), style), *(peak_lines(memory) if memory is not None else [])]
    blocks += error_lines(answer.out_of_memory)
    if memory is not None:
        tables = (
            requirement_table(answer.device, memory),
            memory_table(memory),
            steps_table(memory),
            lines_table(memory),
            modules_table(memory),
        )
        blocks += [block for table in tables if table.rows for block in ("", table)]
        blocks.append("")
    blocks += fact_lines(answer)
    if ladder and not answer.fits:
        blocks += [*([ladder_table(answer.ladder)] if answer.ladder else []), *ladder_lines(answer)]
    proved = accuracy_text(answer)
    return Document((*blocks, Line(trust_text(answer), "dim"), *([Line(proved, "dim")] if proved else [])))


_PHASE_COLORS = {
    StepPhase.LOAD: GREY,
    StepPhase.FORWARD: BLUE,
    StepPhase.BACKWARD: ORANGE,
    StepPhase.CLIP: "#b59f00",
    StepPhase.OPTIMIZER: GREEN,
    StepPhase.EVALUATE: PURPLE,
    StepPhase.SAVE: RED,
}
_VERDICTS = {
    VerdictKind.FITS: "fits",
    VerdictKind.FITS_WITH: "does not fit",
    VerdictKind.REFUSED: "does not fit",
    VerdictKind.UNKNOWN: "unknown",
}
_MOST_BARS = 20
_MOST_BANDS = 400
_GIB = 2**30


def rehearsal_page(answer: RehearsalAnswer, title: str, made_at_s: float | None = None) -> Page:
    """Return the page about a rehearsal.

    Args:
        title: What was rehearsed.
        made_at_s: Unix time; None: now.
    """
    return Page(
        title=title,
        subtitle=f"{answer.device.name}, {gib(answer.device.capacity_bytes)}; {trust_text(answer)}",
        verdict=headline(answer).partition("    [")[0] + ".",
        tiles=tuple(_tiles(answer)),
        sections=tuple(_sections(answer)),
        source="a rehearsal without a GPU",
        made_at_s=time.time() if made_at_s is None else made_at_s,
        kind="dryfit rehearse",
    )


def _tiles(answer: RehearsalAnswer) -> Iterator[tuple[str, str]]:
    yield "verdict", _VERDICTS[answer.verdict] if answer.ran else "could not run"
    memory = answer.memory
    if memory is not None:
        yield "peak allocated", gib(memory.peak_allocated_bytes)
        yield "peak reserved", gib(memory.peak_reserved_bytes)
        yield "required", gib(memory.required_bytes)
    yield "device", gib(answer.device.capacity_bytes)


def _sections(answer: RehearsalAnswer) -> Iterator[Section]:
    memory = answer.memory
    errors = tuple(error_lines(answer.out_of_memory))
    if memory is not None:
        places = tuple(peak_lines(memory))
        if memory.timeline:
            charts = (timeline_figure(memory.timeline, answer.device.capacity_bytes),)
            note = "Point at the curve: the module and the line that took or gave back memory there."
            yield Section("time", "Memory over time", texts=places, warnings=errors, charts=charts, notes=(note,))
        yield Section(
            "peak",
            "What is held at the peak",
            texts=() if memory.timeline else places,
            charts=tuple(_holders(memory)),
            tables=(("by line", lines_table(memory)), ("by module", modules_table(memory))),
        )
        parts = [("", requirement_table(answer.device, memory)), ("", memory_table(memory))]
        if memory.steps:
            parts.append(("", steps_table(memory)))
        yield Section("required", "What the device must have", tables=tuple(parts))
    if answer.ladder:
        yield Section(
            "ladder", "What would fit", texts=tuple(ladder_lines(answer)), tables=(("", ladder_table(answer.ladder)),)
        )
    facts = tuple(fact_lines(answer))
    if facts or not answer.went_through:
        warnings = () if memory is not None else errors
        yield Section("facts", "What else is known", texts=facts, warnings=warnings, code=answer.traceback)


def timeline_figure(points: Sequence[TimelinePoint], capacity_bytes: int) -> Figure:
    """Plot allocated and reserved memory over the events of a rehearsal, with a band for each phase."""
    bands = _bands(points)
    layout = {
        "xaxis": axis("allocations and frees", rangemode="tozero"),
        "yaxis": axis("GiB", rangemode="tozero"),
        "hovermode": "closest",
        "shapes": [
            region(start, end, _PHASE_COLORS[phase], line={"width": 0}, opacity=0.12) for start, end, phase in bands
        ],
    }
    occurring = {phase for _, _, phase in bands}
    legend = [_legend_entry(phase) for phase in _PHASE_COLORS if phase in occurring]
    return {"data": [*_curves(points, capacity_bytes), *legend], "layout": layout}


def _curves(points: Sequence[TimelinePoint], capacity_bytes: int) -> list[Figure]:
    events = [point.event for point in points]
    reserved = (point.reserved_bytes / _GIB for point in points)
    size, line = [capacity_bytes / _GIB] * 2, {"color": RED, "width": 1.5, "dash": "dash"}
    return [
        scatter(
            events,
            (point.allocated_bytes / _GIB for point in points),
            name="allocated",
            hover="%{text}",
            text=[_hover(point) for point in points],
            line={"shape": "hv", "color": BLUE, "width": 1.5},
            fill="tozeroy",
            fillcolor="rgba(57,135,201,0.25)",
        ),
        scatter(events, reserved, name="reserved", line={"shape": "hv", "color": GREY, "width": 1}),
        scatter([events[0], events[-1]], size, name="device", line=line),
    ]


def _hover(point: TimelinePoint) -> str:
    parts = (
        f"{gib(point.allocated_bytes)} allocated, {gib(point.reserved_bytes)} reserved",
        f"step {point.step}, {point.phase}",
        point.module,
        place_text(point.line, "", point.source),
    )
    return "<br>".join(text(part) for part in parts if part)


def _legend_entry(phase: StepPhase) -> Figure:
    look = {"symbol": "square", "size": 10, "color": _PHASE_COLORS[phase], "opacity": 0.5}
    return scatter([None], [None], name=str(phase), mode="markers", marker=look)


def _bands(points: Sequence[TimelinePoint]) -> list[tuple[int, int, StepPhase]]:
    """Return the stretches of one phase: first event, first event of the next one, phase."""
    bands: list[tuple[int, int, StepPhase]] = []
    for before, after in zip(points, [*points[1:], points[-1]], strict=True):
        if bands and bands[-1][2] is before.phase:
            bands[-1] = (bands[-1][0], after.event, before.phase)
        else:
            bands.append((before.event, after.event, before.phase))
    return sorted(sorted(bands, key=lambda band: band[0] - band[1])[:_MOST_BANDS])


def _holders(memory: RehearsalMemory) -> Iterator[Figure]:
    if memory.by_line:
        yield _bars([(_label(held), held.bytes, _place(held)) for held in largest(memory, _MOST_BARS)])
    parts = modules(memory)[:_MOST_BARS]
    if parts:
        yield _bars([(name or "outside of modules", size, text(name)) for name, size in parts])


def _label(held: LineBytes) -> str:
    """Return a short name: the last part of the path with the line, of the library where the script only calls it."""
    place = held.source or held.line or held.module or "unknown"
    return f"{place.rpartition('/')[2]} {held.category}"


def _place(held: LineBytes) -> str:
    return "<br>".join(text(part) for part in (held.module, place_text(held.line, held.code, held.source)) if part)


def _bars(rows: Sequence[tuple[str, int, str]]) -> Figure:
    """Plot horizontal bars, the largest on top; each row has a label, bytes, and what is said of it, escaped."""
    ordered = list(rows)[::-1]
    held = bars(
        (size / _GIB for _, size, _ in ordered),
        range(len(ordered)),  # labels may be equal, bars are not to be put together
        hover="%{text}<br>%{customdata}",
        color=BLUE,
        text=[text(gib(size)) for _, size, _ in ordered],
        customdata=[said or text(label) for label, _, said in ordered],
        cliponaxis=False,
    )
    labels = [text(label) for label, _, _ in ordered]
    layout = {
        "xaxis": axis("GiB", rangemode="tozero"),
        "yaxis": {"automargin": True, "tickvals": list(range(len(labels))), "ticktext": labels},
        "height": 120 + 24 * len(ordered),
        "showlegend": False,
    }
    return {"data": [held], "layout": layout}
