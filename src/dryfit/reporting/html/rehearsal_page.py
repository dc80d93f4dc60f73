"""The page about a rehearsal: memory over time with phases, and what is held at its peak, by line and module."""

import time
from collections.abc import Iterator, Sequence

from dryfit.core.jobs.memory import StepPhase, VerdictKind
from dryfit.core.jobs.rehearsal import LineBytes, RehearsalAnswer, RehearsalMemory, TimelinePoint
from dryfit.core.text.units import gib
from dryfit.reporting.html.page import Page
from dryfit.reporting.html.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, text
from dryfit.reporting.html.sections import Section
from dryfit.reporting.html.verdict import StudyVerdict
from dryfit.reporting.terminal.plan_tables import memory_table, requirement_table
from dryfit.reporting.terminal.rehearsal_tables import (
    error_lines,
    fact_lines,
    headline,
    ladder_lines,
    ladder_table,
    largest,
    lines_table,
    modules,
    modules_table,
    peak_lines,
    place_text,
    steps_table,
    trust_text,
)

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
        verdict=StudyVerdict(headline(answer).partition("    [")[0] + ".", ""),
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
        "xaxis": {"title": {"text": "allocations and frees"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "hovermode": "closest",
        "shapes": [_band_shape(start, end, phase) for start, end, phase in bands],
    }
    occurring = {phase for _, _, phase in bands}
    legend = [_legend_entry(phase) for phase in _PHASE_COLORS if phase in occurring]
    return {"data": [*_curves(points, capacity_bytes), *legend], "layout": layout}


def _curves(points: Sequence[TimelinePoint], capacity_bytes: int) -> list[Figure]:
    events = [point.event for point in points]
    curve: Figure = {"type": "scatter", "mode": "lines", "x": events}
    return [
        curve
        | {
            "name": "allocated",
            "y": [point.allocated_bytes / _GIB for point in points],
            "text": [_hover(point) for point in points],
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"shape": "hv", "color": BLUE, "width": 1.5},
            "fill": "tozeroy",
            "fillcolor": "rgba(57,135,201,0.25)",
        },
        curve
        | {
            "name": "reserved",
            "y": [point.reserved_bytes / _GIB for point in points],
            "hoverinfo": "skip",
            "line": {"shape": "hv", "color": GREY, "width": 1},
        },
        curve
        | {
            "name": "device",
            "x": [events[0], events[-1]],
            "y": [capacity_bytes / _GIB] * 2,
            "hoverinfo": "skip",
            "line": {"color": RED, "width": 1.5, "dash": "dash"},
        },
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
    return {
        "type": "scatter",
        "mode": "markers",
        "name": str(phase),
        "x": [None],
        "y": [None],
        "marker": {"symbol": "square", "size": 10, "color": _PHASE_COLORS[phase], "opacity": 0.5},
    }


def _band_shape(start: int, end: int, phase: StepPhase) -> Figure:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": start,
        "x1": end,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 0},
        "fillcolor": _PHASE_COLORS[phase],
        "opacity": 0.12,
    }


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
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [size / _GIB for _, size, _ in ordered],
        "y": list(range(len(ordered))),  # labels may be equal, bars are not to be put together
        "text": [text(gib(size)) for _, size, _ in ordered],
        "customdata": [said or text(label) for label, _, said in ordered],
        "hovertemplate": "%{text}<br>%{customdata}<extra></extra>",
        "marker": {"color": BLUE},
        "cliponaxis": False,
    }
    labels = [text(label) for label, _, _ in ordered]
    layout = {
        "xaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "yaxis": {"automargin": True, "tickvals": list(range(len(labels))), "ticktext": labels},
        "height": 120 + 24 * len(ordered),
        "showlegend": False,
    }
    return {"data": [bars], "layout": layout}
