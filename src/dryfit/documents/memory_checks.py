"""A check of GPU memory as lines and tables, as JSON, and as Markdown for a pull request."""

import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final

from dryfit.documents.document import Block, Document, Line, counted, document_of, json_of, shortened
from dryfit.documents.pages import BLUE, GREY, Figure, Page, Section, axis, bars, text
from dryfit.documents.rehearsals import timeline_figure
from dryfit.settings.memory_check import CheckVerdict, Kept, LineChange, MemoryCheck, RunCheck
from dryfit.settings.text import Table, gib, printable

_STYLES: Final = {
    CheckVerdict.WITHIN: "green",
    CheckVerdict.NEW: "green",
    CheckVerdict.SHRANK: "green",
    CheckVerdict.UNKNOWN: "yellow",
}
_MOST_LINES: Final = 10
_MOST_TILES: Final = 6
_LONGEST_CODE: Final = 60
_HELD_HEADS: Final = ("held at the peak", "of", "line", "code")
MARKDOWN_HEAD: Final = "### GPU memory"
"""With which the Markdown of each check begins."""
_LINE_HEADS: Final = ("line", "code", "of", "before", "after", "difference")


@json_of.register
def check_json(check: MemoryCheck) -> dict[str, object]:
    """Return a check as ``check --json`` prints it."""
    runs = [
        {
            **one.model_dump(mode="json", exclude={"lines", "before", "after"}),
            "before": _kept_json(one.before),
            "after": _kept_json(one.after),
            "lines": [
                {**line.model_dump(mode="json"), "difference_bytes": line.difference_bytes} for line in one.lines
            ],
        }
        for one in check.runs
    ]
    return {"schema": 1, "exit_status": int(check.exit_status), "runs": runs, "updated": check.updated}


def _kept_json(kept: Kept | None) -> dict[str, object] | None:
    return None if kept is None else kept.model_dump(mode="json", exclude={"lines"})


@document_of.register
def check_document(check: MemoryCheck) -> Document:
    """Return a check as lines, the runs that need action with what changed by line."""
    blocks: list[Block] = []
    for one in check.runs:
        blocks.append(Line(_headline(one), _STYLES.get(one.verdict, "red")))
        blocks += [f"  {text}" for text in (*_versions(one), *one.reasons)]
        if one.lines and one.verdict is not CheckVerdict.WITHIN:
            blocks += [Table(_LINE_HEADS, tuple(_cells(line) for line in one.lines[:_MOST_LINES]))]
        elif one.verdict in (CheckVerdict.OVER, CheckVerdict.NO_FIT) and one.after is not None:
            blocks += [f"  peak at {one.peak_line}  {shortened(one.peak_code.strip(), _LONGEST_CODE)}".rstrip()]
            blocks += [_held(one.after)]
    blocks += (
        [f"{counted(len(check.updated), 'baseline')} written: {', '.join(check.updated)}"] if check.updated else []
    )
    return Document(tuple(blocks))


def check_markdown(check: MemoryCheck) -> str:
    """Return a check as Markdown: a table of all runs, and of each that changed its lines."""
    heads = ("run", "device", "", "needs", "budget", "peak before", "peak now")
    rows = [
        (
            one.name,
            one.device.name,
            f"**{one.verdict}**" if one.verdict not in _STYLES else str(one.verdict),
            gib(one.after.required_bytes) if one.after and one.fits is not None else "-",
            gib(one.budget_bytes),
            _mib(one.before.allocated_bytes) if one.before else "-",
            _mib(one.after.allocated_bytes) if one.after else "-",
        )
        for one in check.runs
    ]
    parts = [f"{MARKDOWN_HEAD}\n", _markdown(heads, rows)]
    for one in check.runs:
        said = [*_versions(one), *one.reasons]
        if said or one.lines:
            parts += [f"\n**{_cell(one.name)}** on {_cell(one.device.name)}: {_cell('; '.join(said))}\n"]
        if one.lines:
            parts += [_markdown(_LINE_HEADS, [_cells(line) for line in one.lines[:_MOST_LINES]])]
    return "\n".join(parts) + "\n"


def check_page(check: MemoryCheck, made_at_s: float | None = None) -> Page:
    """Return the page about a check: of each run what grew, beside the timeline of the rehearsal.

    Args:
        made_at_s: Unix time; None: now.
    """
    verdicts = Counter(one.verdict for one in check.runs)
    return Page(
        title="GPU memory",
        subtitle=", ".join(dict.fromkeys(one.name for one in check.runs)),
        verdict=", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) + ".",
        tiles=tuple((f"{one.name} on {one.device.name}", _peak_change(one)) for one in check.runs[:_MOST_TILES]),
        sections=tuple(_section(number, one) for number, one in enumerate(check.runs, 1)),
        source="rehearsals without a GPU",
        made_at_s=time.time() if made_at_s is None else made_at_s,
        kind="dryfit check",
    )


def _peak_change(one: RunCheck) -> str:
    if one.after is None:
        return str(one.verdict)
    if one.before is None:
        return gib(one.after.allocated_bytes)
    return f"{(one.after.allocated_bytes - one.before.allocated_bytes) / 2**20:+,.1f} MiB"


def _section(number: int, one: RunCheck) -> Section:
    memory = one.answer.memory if one.answer is not None else None
    charts = [_change_figure(one.lines[:_MOST_LINES])] if one.lines else []
    if memory is not None and memory.timeline:
        charts.append(timeline_figure(memory.timeline, one.device.capacity_bytes))
    if one.lines:
        tables = (("what changed", Table(_LINE_HEADS, tuple(_cells(line) for line in one.lines[:_MOST_LINES]))),)
    else:
        tables = (("", _held(one.after)),) if one.after else ()
    return Section(
        f"run-{number}",
        f"{one.name} on {one.device.name}",
        texts=(_headline(one), *_versions(one), *one.reasons),
        charts=tuple(charts),
        tables=tables,
    )


def _change_figure(lines: Sequence[LineChange]) -> Figure:
    """Plot what each line holds at the peak, in the baseline and now; the line that changed most on top."""
    ordered = list(lines)[::-1]
    ticks = list(range(len(ordered)))
    labels = [text(f"{(line.source or line.line or '-').rpartition('/')[2]} {line.category}") for line in ordered]
    hovers = [text(line.source_code or line.code) for line in ordered]
    sizes = (("baseline", GREY, "before_bytes"), ("now", BLUE, "after_bytes"))
    data = [
        bars(
            (getattr(line, size) / 2**30 for line in ordered),
            ticks,
            hover="%{text}",
            color=color,
            name=name,
            text=hovers,
            textposition="none",
        )
        for name, color, size in sizes
    ]
    layout = {
        "xaxis": axis("GiB held at the peak", rangemode="tozero"),
        "yaxis": {"automargin": True, "tickvals": ticks, "ticktext": labels},
        "height": 120 + 40 * len(ordered),
        "barmode": "group",
    }
    return {"data": data, "layout": layout}


def _headline(one: RunCheck) -> str:
    known = one.after if one.fits is not None else None  # else what was seen is a lower bound, or one of two
    needs = f": it needs {gib(known.required_bytes)} of {gib(one.budget_bytes)}" if known else ""
    return f"{one.name} on {one.device.name}  {one.verdict}{needs}"


def _versions(one: RunCheck) -> list[str]:
    changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in one.other_versions.items())
    return [f"other versions than the baseline's: {changed}"] if changed else []


def _cells(line: LineChange) -> tuple[str, ...]:
    of_library = line.source not in ("", line.line)
    inner = (
        f"in {line.source}  {shortened(line.source_code, _LONGEST_CODE)}".rstrip()
        if of_library
        else shortened(line.code, _LONGEST_CODE)
    )
    sizes = (_mib(line.before_bytes), _mib(line.after_bytes), f"{line.difference_bytes / 2**20:+,.1f} MiB")
    return (line.line or "-", inner or "-", str(line.category), *sizes)


def _held(kept: Kept) -> Table:
    rows = [
        (_mib(one.bytes), str(one.category), one.line or "-", shortened(one.code, _LONGEST_CODE)) for one in kept.lines
    ]
    return Table(_HELD_HEADS, tuple(rows[:_MOST_LINES]))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in table)


def _cell(text: str) -> str:
    """Return a text that is no markup within a cell: a script's code may hold anything."""
    plain = escape(printable(text), quote=False).replace("\n", " ").replace("\\", "\\\\").replace("|", "\\|")
    return plain if text.startswith("**") else plain.replace("`", "\\`").replace("[", "\\[").replace("@", "&#64;")
