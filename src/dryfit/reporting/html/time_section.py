"""Where the time of a study went, as a stacked bar and a table with the timeline of a report page."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dryfit.reporting.html.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure
from dryfit.reporting.html.sections import Section
from dryfit.reporting.html.time_spent import WORK, Spent, TimeSpent
from dryfit.reporting.terminal.tables import Table, duration_text

_COLORS: Final = {
    Spent.TRAINING: BLUE,
    Spent.VALIDATING: GREEN,
    Spent.WORKING: BLUE,
    Spent.PREPARING: ORANGE,
    Spent.STARTING: RED,
    Spent.LOADING: PURPLE,
    Spent.SAVING: "#b8860b",
    Spent.ENDING: "#5b6570",
    Spent.IDLE: GREY,
}


def with_time(sections: Sequence[Section], spent: TimeSpent) -> tuple[Section, ...]:
    """Return the sections of a page with where the time went added to its timeline, if it has one."""
    if not spent.total_s:
        return tuple(sections)
    return tuple(_added(section, spent) if section.anchor == "timeline" else section for section in sections)


def _added(section: Section, spent: TimeSpent) -> Section:
    text = (
        f"The second bar is the time of all slots together, {duration_text(spent.total_s)}: {spent.beside_work:.1%} of"
        " it is neither training nor validating. A slot is room for one trial."
    )
    return replace(
        section,
        texts=(*section.texts, text),
        charts=(*section.charts, spent_figure(spent)),
        tables=(("Where the time went", spent_table(spent)), *section.tables),
    )


def spent_table(spent: TimeSpent) -> Table:
    """Return a row for each way in which time was spent, work first."""
    rows = [(kind, duration_text(spent.seconds[kind]), f"{spent.share(kind):.1%}") for kind in _kinds(spent)]
    return Table(("slots were", "time", "share"), tuple(rows))


def spent_figure(spent: TimeSpent) -> Figure:
    """Plot the same as one stacked bar."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": re.split("[:,]", kind)[0],
            "x": [round(spent.seconds[kind], 3)],
            "y": ["all slots"],
            "text": [f"{kind}: {duration_text(spent.seconds[kind])} ({spent.share(kind):.1%})"],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": _COLORS[kind]},
        }
        for kind in _kinds(spent)
    ]
    layout: Figure = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds, of all slots together"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "automargin": True},
        "height": 300,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def _kinds(spent: TimeSpent) -> list[Spent]:
    """Return what took time: work first, then the most first."""
    found = [kind for kind in Spent if spent.seconds[kind] > 0]
    return sorted(found, key=lambda kind: (kind not in WORK, -spent.seconds[kind]))
