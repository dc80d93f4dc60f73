"""The timeline figure: all attempts over wall-clock time, a row for each device or slot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dryfit.core.sharding.device_groups import HERE, cpu_of, place_in_words
from dryfit.reporting.html.plots import BLUE, GREY, ORANGE, RED, Figure, text
from dryfit.reporting.terminal.tables import duration_text, shortened, time_text
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptEnd, AttemptState, SessionState

_LOOKS = {
    AttemptEnd.RESULT: ("with a result", BLUE),
    AttemptEnd.FAILED: ("failed", RED),
    AttemptEnd.LOST: ("lost with its control process", ORANGE),
    AttemptEnd.RUNNING: ("running", GREY),
}
_LONG_PAUSE = 0.05
"""Pauses between sessions longer than this share of the time worked are cut out of the axis."""
_MOST_TICKS = 6
_HOUR_S = 3600
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, *(_HOUR_S * n for n in (1, 2, 3, 6, 12, 24, 48, 168)))
_MANY = 500
"""With more bars, edges would hide them."""
_EDGE = "rgba(127,127,127,0.6)"


@dataclass(frozen=True, slots=True)
class WorkAxis:
    """Wall-clock time with the long pauses between sessions cut out, in seconds.

    Attributes:
        spans: The intervals of Unix time that are drawn, in order.
        gap_s: The width of the gap that stands for a pause.
    """

    spans: tuple[tuple[float, float], ...]
    gap_s: float

    @classmethod
    def of(cls, sessions: Sequence[SessionState]) -> "WorkAxis":
        """Make the axis of some sessions; those with only short pauses between them share an interval."""
        worked_s = sum(session.last_at_s - session.opened_at_s for session in sessions)
        spans: list[tuple[float, float]] = []
        for session in sessions:
            if spans and session.opened_at_s - spans[-1][1] <= _LONG_PAUSE * worked_s:
                spans[-1] = (spans[-1][0], session.last_at_s)
            else:
                spans.append((session.opened_at_s, session.last_at_s))
        return cls(tuple(spans), _LONG_PAUSE / 2 * worked_s)

    def at(self, at_s: float) -> float:
        """Return where a time is drawn; a time in a pause, at the end of the interval before it."""
        drawn_s = 0.0
        for index, (begin_s, end_s) in enumerate(self.spans):
            if at_s <= end_s or index == len(self.spans) - 1:
                return drawn_s + max(0.0, at_s - begin_s)
            following_s = self.spans[index + 1][0]
            if at_s < following_s:
                return drawn_s + end_s - begin_s
            drawn_s += end_s - begin_s + self.gap_s
        return 0.0

    def ticks(self) -> list[tuple[float, str]]:
        """Return the labelled positions: the start of each interval with its date, and round times within it."""
        length_s = sum(end_s - begin_s for begin_s, end_s in self.spans) + self.gap_s * len(self.spans)
        step_s = next((step_s for step_s in _STEPS_S if length_s / step_s <= _MOST_TICKS), _STEPS_S[-1])
        starts = [(begin_s, _clock(begin_s, step_s) + _date(begin_s)) for begin_s, _ in self.spans]
        rounds = [
            (float(at * step_s), _clock(at * step_s, step_s))
            for begin_s, end_s in self.spans
            for at in range(math.floor(begin_s / step_s) + 1, math.floor(end_s / step_s) + 1)
        ]
        shown: list[tuple[float, str]] = []
        for at_s, name in (*starts, *rounds):
            drawn_s = self.at(at_s)
            if all(abs(drawn_s - other_s) >= 0.75 * length_s / _MOST_TICKS for other_s, _ in shown):
                shown.append((drawn_s, name))
        return sorted(shown)


def _clock(at_s: float, step_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S" if step_s < 60 else "%H:%M")


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("<br>%Y-%m-%d")


def timeline_figure(state: StudyState) -> Figure:
    """Plot every attempt as a bar from its placement to its end."""
    axis = WorkAxis.of(state.sessions)
    placed = lanes(state.attempts)
    rows = sorted({row for _, row in placed}, key=_natural)
    data: list[Figure] = []
    for end, (name, color) in _LOOKS.items():
        bars = [(attempt, row) for attempt, row in placed if attempt.end is end]
        if bars:
            data.append(_bars(name, color, bars, axis))
    ticks = axis.ticks()
    layout: Figure = {
        "barmode": "overlay",
        "xaxis": {
            "title": {"text": "time (UTC)"},
            "tickvals": [at_s for at_s, _ in ticks],
            "ticktext": [name for _, name in ticks],
            "tickangle": 0,
        },
        "yaxis": {"type": "category", "categoryarray": rows[::-1], "categoryorder": "array", "automargin": True},
        "height": 160 + 34 * len(rows),
        "hovermode": "closest",
        "shapes": [_session(session, axis) for session in state.sessions],
    }
    return {"data": data, "layout": layout}


def lanes(attempts: Sequence[AttemptState]) -> list[tuple[AttemptState, str]]:
    """Return each attempt with the name of its timeline row: its device, numbered where attempts ran side by side."""
    busy: dict[str, list[float]] = {}
    placed: list[tuple[AttemptState, str, int]] = []
    for attempt in sorted(attempts, key=lambda attempt: (attempt.placed_at_s, attempt.trial)):
        place = "slot" if attempt.place == cpu_of(HERE) else place_in_words(attempt.place)
        ends = busy.setdefault(place, [])
        lane = next((at for at, end_s in enumerate(ends) if end_s <= attempt.placed_at_s), len(ends))
        ends[lane : lane + 1] = [attempt.end_s]
        placed.append((attempt, place, lane))
    alone = {place for place, ends in busy.items() if len(ends) == 1 and place != "slot"}
    return [(attempt, place if place in alone else f"{place} {lane + 1}") for attempt, place, lane in placed]


def _bars(name: str, color: str, bars: Sequence[tuple[AttemptState, str]], axis: WorkAxis) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [round(axis.at(attempt.placed_at_s), 3) for attempt, _ in bars],
        "x": [round(axis.at(attempt.end_s) - axis.at(attempt.placed_at_s), 3) for attempt, _ in bars],
        "y": [row for _, row in bars],
        "text": [_hover(attempt) for attempt, _ in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "line": {"width": 0.5, "color": color if len(bars) > _MANY else _EDGE}},
        "width": 0.7,
    }


def _hover(attempt: AttemptState) -> str:
    lines = [f"trial {attempt.trial}, attempt {attempt.number}: {_LOOKS[attempt.end][0]}"]
    lines.append(f"{time_text(attempt.placed_at_s)}, {duration_text(attempt.time_s)}")
    if attempt.failure is not None:
        lines.append(f"{attempt.failure.kind}: {text(shortened(attempt.failure.sentence, 120))}")
    return "<br>".join(lines)


def _natural(row: str) -> tuple[str, int]:
    head, _, number = row.rpartition(" ")
    return (head, int(number)) if number.isdigit() else (row, 0)


def _session(session: SessionState, axis: WorkAxis) -> Figure:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": axis.at(session.opened_at_s),
        "x1": axis.at(session.last_at_s),
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 1, "color": "rgba(127,127,127,0.5)", "dash": "dot"},
        "fillcolor": "rgba(127,127,127,0.10)",
    }
