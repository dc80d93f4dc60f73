"""The figure of all processes over wall-clock time: a row for each device or slot, sessions in the background."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dryfit.report.plots import BLUE, GREY, ORANGE, RED, Figure, text
from dryfit.report.records import AttemptEnd, AttemptRow, StudyRecords, lanes
from dryfit.report.tables import duration_text
from dryfit.store.replay import SessionState

_LOOKS = {
    AttemptEnd.RESULT: ("with a result", BLUE),
    AttemptEnd.FAILED: ("failed", RED),
    AttemptEnd.LOST: ("lost with its control process", ORANGE),
    AttemptEnd.RUNNING: ("running", GREY),
}
_LONG_PAUSE = 0.05
"""Pauses between sessions above this share of the time worked are cut out of the axis."""


def timeline_figure(records: StudyRecords) -> Figure:
    """Every attempt as a bar from its placement to its end."""
    placed = lanes(records.attempts)
    rows = sorted({row for _, row in placed}, key=_natural)
    data: list[Figure] = []
    for end, (name, color) in _LOOKS.items():
        bars = [(attempt, row) for attempt, row in placed if attempt.end is end]
        if bars:
            data.append(_bars(name, color, bars))
    layout: Figure = {
        "barmode": "overlay",
        "xaxis": {"type": "date", "title": {"text": "time (UTC)"}, "rangebreaks": _pauses(records.sessions)},
        "yaxis": {"type": "category", "categoryarray": rows[::-1], "categoryorder": "array", "automargin": True},
        "height": 150 + 34 * len(rows),
        "hovermode": "closest",
        "shapes": [_session(session) for session in records.sessions],
    }
    return {"data": data, "layout": layout}


def _bars(name: str, color: str, bars: Sequence[tuple[AttemptRow, str]]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [when(attempt.started_s) for attempt, _ in bars],
        # On an axis of dates a length is in milliseconds; at least one, or nothing would be drawn.
        "x": [max(1.0, round(attempt.seconds * 1000)) for attempt, _ in bars],
        "y": [row for _, row in bars],
        "text": [_hover(attempt) for attempt, _ in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "line": {"width": 0.5, "color": "rgba(127,127,127,0.6)"}},
        "width": 0.7,
    }


def _hover(attempt: AttemptRow) -> str:
    lines = [f"trial {attempt.trial}, attempt {attempt.attempt}: {_LOOKS[attempt.end][0]}"]
    lines.append(f"{when(attempt.started_s)[11:19]}, {duration_text(attempt.seconds)}")
    if attempt.kind is not None:
        sentence = attempt.sentence if len(attempt.sentence) <= 120 else attempt.sentence[:119] + "…"
        lines.append(f"{attempt.kind}: {text(sentence)}")
    return "<br>".join(lines)


def _natural(row: str) -> tuple[str, int]:
    head, _, number = row.rpartition(" ")
    return (head, int(number)) if number.isdigit() else (row, 0)


def _session(session: SessionState) -> Figure:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": when(session.opened_at_s),
        "x1": when(session.last_at_s),
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 1, "color": "rgba(127,127,127,0.5)", "dash": "dot"},
        "fillcolor": "rgba(127,127,127,0.10)",
    }


def _pauses(sessions: Sequence[SessionState]) -> list[dict[str, Any]]:
    """Long stretches without any session."""
    worked_s = sum(session.last_at_s - session.opened_at_s for session in sessions)
    return [
        {"bounds": [when(before.last_at_s), when(after.opened_at_s)]}
        for before, after in zip(sessions, sessions[1:], strict=False)
        if after.opened_at_s - before.last_at_s > max(1.0, _LONG_PAUSE * worked_s)
    ]


def when(at_s: float) -> str:
    """A moment as plotly takes it: UTC, with milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
