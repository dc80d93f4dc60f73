"""The figures of a report as plotly's JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dryfit.documents.document import (
    duration_text,
    shortened,
    time_text,
    value_text,
)
from dryfit.documents.pages import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, axis, bars, region, scatter, text
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptEnd, AttemptState, SessionState, TrialState
from dryfit.search.importance import Importances
from dryfit.search.space import from_text, public_name
from dryfit.settings.choices import Direction
from dryfit.settings.devices import HERE, cpu_of, place_in_words
from dryfit.settings.text import number_text
from dryfit.settings.trial import MetricPoint, Outcome, Scalar, better

MOST_CURVES = 60
MOST_CURVE_POINTS = 200
_BEST_CURVES = 20
MOST_SLICES = 6
_FEW_TICKS = 10
_MOST_HOVERED_PARAMS = 1000
"""With more trials, hover texts leave the parameters out, which would add megabytes to the page."""


def _whole(span: float) -> Figure:
    """Return the settings of an axis of whole numbers: over a short span plotly would put ticks between them."""
    return {"dtick": 1} if span <= _FEW_TICKS else {}


def history_figure(state: StudyState) -> Figure:
    """Plot the value of each trial, the best so far, and the trials without a value."""
    named = len(state.present) <= _MOST_HOVERED_PARAMS
    goal = text(state.goals[0].name)
    best = _best_so_far(state.present, state.direction)
    complete = state.complete
    pruned = [
        trial
        for trial in state.present
        if trial.outcome is Outcome.PRUNED and trial.last_value is not None and math.isfinite(trial.last_value)
    ]
    data = [
        _markers("complete", complete, [trial.score for trial in complete], BLUE, "circle", named=named),
        _markers("pruned (last value)", pruned, [trial.last_value for trial in pruned], ORANGE, "x", named=named),
        scatter(
            (trial.number for trial in state.present),
            best,
            name="best so far",
            line={"shape": "hv", "color": GREEN, "width": 2},
        ),
    ]
    for name, outcome, color, symbol in (
        ("failed", Outcome.FAILED, RED, "line-ns-open"),
        ("refused", Outcome.REFUSED, PURPLE, "line-ns-open"),
        ("cancelled", Outcome.CANCELLED, GREY, "line-ns-open"),
        ("not finished", None, GREY, "circle-open"),
    ):
        trials = [trial for trial in state.present if trial.outcome is outcome]
        trace = _markers(name, trials, [0.03] * len(trials), color, symbol, named=named)
        data.append(trace | {"yaxis": "y2", "marker": {**trace["marker"], "opacity": 1, "line": {"width": 2}}})
    layout = {
        "xaxis": axis("trial", rangemode="tozero", **_whole(len(state.present))),
        "yaxis": axis(goal),
        # Trials without a value are marks at the foot of the figure, whatever the values above are.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "hovermode": "closest",
    }
    return {"data": [trace for trace in data if trace["x"]], "layout": layout}


def _best_so_far(trials: Sequence[TrialState], direction: Direction) -> list[float | None]:
    """Return the best score up to each trial; None before the first score."""
    best: float | None = None
    scores: list[float | None] = []
    for trial in trials:
        score = trial.score
        if score is not None and (best is None or better(score, best, direction)):
            best = score
        scores.append(best)
    return scores


def _markers(
    name: str, trials: Sequence[TrialState], values: Sequence[float | None], color: str, symbol: str, *, named: bool
) -> Figure:
    look = {"color": color, "symbol": symbol, "size": 7, "opacity": 0.85}
    texts = [_hover(trial, named=named) for trial in trials]
    numbers = (trial.number for trial in trials)
    return scatter(numbers, values, name=name, mode="markers", hover="%{text}", text=texts, marker=look)


def _hover(trial: TrialState, *, named: bool) -> str:
    shown = trial.value if trial.value is not None else trial.last_value
    head = f"trial {trial.number}: {trial.outcome or 'not finished'}, {number_text(shown)}"
    params = [f"{text(name)} = {text(value_text(value))}" for name, value in trial.params.items()] if named else []
    return "<br>".join([head, *params])


def front_figure(state: StudyState) -> Figure:
    """Plot the complete trials by their first two goals, with the Pareto front marked."""
    known = [trial for trial in state.complete if trial.also and math.isfinite(trial.also[0])]
    named = len(known) <= _MOST_HOVERED_PARAMS
    on_front = {trial.number for trial in state.front}
    first, second = state.goals[0], state.goals[1]
    data = [
        _markers(name, trials, [trial.also[0] for trial in trials], color, "circle", named=named)
        | {"x": [trial.score for trial in trials], "marker": {"color": color, "size": size}}
        for name, trials, color, size in (
            ("dominated", [trial for trial in known if trial.number not in on_front], GREY, 6),
            ("Pareto front", [trial for trial in known if trial.number in on_front], GREEN, 9),
        )
    ]
    axes = {
        "xaxis": axis(f"{text(first.name)} ({first.direction})"),
        "yaxis": axis(f"{text(second.name)} ({second.direction})"),
    }
    return {"data": [trace for trace in data if trace["x"]], "layout": axes}


def importance_figure(importances: Importances) -> Figure:
    """Plot a bar for each parameter, the most important on top."""
    params = importances.params[::-1]
    shares = bars(
        (param.share for param in params),
        (text(param.name) for param in params),
        hover="%{y}: %{x:.3f} (%{customdata} trials)",
        color=BLUE,
        text=[f"{param.share:.0%}" for param in params],
        customdata=[param.trials for param in params],
        cliponaxis=False,
    )
    layout = {
        "xaxis": axis("share of all importances", tickformat=".0%", rangemode="tozero"),
        "yaxis": {"automargin": True, "type": "category"},
        "height": 120 + 26 * len(params),
        "showlegend": False,
    }
    return {"data": [shares], "layout": layout}


def slice_figure(state: StudyState, name: str) -> Figure:
    """Plot the scores of the complete trials over their values of a parameter."""
    trials = [trial for trial in state.complete if name in trial.params]
    values = [trial.params[name] for trial in trials]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    xaxis = axis(text(name), type="linear" if numeric else "category")
    if numeric and name in _logarithmic(state):
        xaxis |= {"type": "log", "exponentformat": "power"}
    whole = [value for value in values if isinstance(value, int)]
    if whole and len(whole) == len(values) and xaxis["type"] == "linear":
        xaxis |= _whole(max(whole) - min(whole))
    look = {"colorscale": [[0, "#c3d4e4"], [1, BLUE]], "size": 6, "line": {"width": 0.5, "color": BLUE}}
    points = scatter(
        values if numeric else (text(_shown(value)) for value in values),
        (trial.score for trial in trials),
        name="",
        mode="markers",
        hover="%{text}<br>%{x}",
        text=[f"trial {trial.number}: {number_text(trial.score)}" for trial in trials],
        marker={"color": [trial.number for trial in trials], **look},
    )
    layout = {"xaxis": xaxis, "yaxis": axis(text(state.goals[0].name)), "showlegend": False, "height": 280}
    return {"data": [points], "layout": layout}


def _logarithmic(state: StudyState) -> frozenset[str]:
    """Return the parameters that were drawn on a logarithmic scale."""
    kinds = {(name, text) for trial in state.trials for name, text in trial.distributions.items()}
    return frozenset(public_name(name) for name, text in kinds if getattr(from_text(text), "log", False))


def _shown(value: Scalar) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def curves_figure(state: StudyState) -> tuple[Figure, str]:
    """Plot the validations over optimizer steps; also return a note on what is left out, if anything."""
    with_curve = [trial for trial in state.present if any(math.isfinite(point.value) for point in trial.reports)]
    shown = _chosen(state, with_curve)
    best = state.ranked[0].number if state.ranked else None
    data = [_curve(trial, best=best) for trial in sorted(shown, key=lambda trial: trial.number == best)]
    last_step = max((point.step for trial in shown for point in trial.reports), default=0)
    layout = {
        "xaxis": axis("optimizer step", rangemode="tozero", **_whole(last_step)),
        "yaxis": axis(text(state.goals[0].name)),
        "hovermode": "closest",
        "showlegend": False,
    }
    notes: list[str] = []
    if len(shown) < len(with_curve):
        notes.append(
            f"Shown are {len(shown)} of {len(with_curve)} trials: the best {_BEST_CURVES}, those not finished, "
            "and others at even distances over the whole search."
        )
    if any(len(trial.reports) > MOST_CURVE_POINTS for trial in shown):
        notes.append(f"Of longer curves, {MOST_CURVE_POINTS} validations at even distances are drawn, ends included.")
    return {"data": data, "layout": layout}, " ".join(notes)


def _chosen(state: StudyState, trials: Sequence[TrialState]) -> list[TrialState]:
    """Return the trials whose curves are drawn: the best, the unfinished, and an even selection of the others."""
    if len(trials) <= MOST_CURVES:
        return list(trials)
    first = {trial.number for trial in state.ranked[:_BEST_CURVES]}
    unfinished = [trial.number for trial in trials if trial.outcome is None]
    first |= set(unfinished[: MOST_CURVES - _BEST_CURVES])
    rest = [trial for trial in trials if trial.number not in first]
    kept = {trial.number for trial in evenly(rest, MOST_CURVES - len(first))} | first
    return [trial for trial in trials if trial.number in kept]


def _curve(trial: TrialState, *, best: int | None) -> Figure:
    points: Sequence[MetricPoint] = evenly(trial.reports, MOST_CURVE_POINTS)
    colors = {Outcome.COMPLETE: BLUE, Outcome.PRUNED: ORANGE, Outcome.FAILED: RED}
    is_best = trial.number == best
    color = GREEN if is_best else colors.get(trial.outcome, GREY) if trial.outcome else GREY
    return scatter(
        (point.step for point in points),
        (point.value if math.isfinite(point.value) else None for point in points),
        name=f"trial {trial.number}",
        mode="lines+markers" if len(points) < 30 else "lines",
        hover=f"trial {trial.number} ({trial.outcome or 'not finished'})<br>step %{{x}}: %{{y:.4f}}",
        line={"color": color, "width": 3 if is_best else 1.2},
        marker={"size": 6 if is_best else 4},
        opacity=1.0 if is_best else 0.55,
    )


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items at even distances, the first and the last included."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def memory_figure(state: StudyState) -> Figure | None:
    """Plot observed over planned peaks with the line of equality; None if no trial has both."""
    known = [trial for trial in state.present if trial.planned_bytes and trial.observed_bytes]
    if not known:
        return None
    planned = [_in_gib(trial.planned_bytes) for trial in known]
    observed = [_in_gib(trial.observed_bytes) for trial in known]
    most = 1.05 * max(*planned, *observed)
    data = [
        scatter([0, most], [0, most], name="as planned", line={"color": GREY, "dash": "dot"}),
        scatter(
            planned,
            observed,
            name="trials",
            mode="markers",
            hover="%{text}<br>planned %{x:.2f} GiB<br>observed %{y:.2f} GiB",
            text=[f"trial {trial.number}" for trial in known],
            marker={"color": BLUE, "size": 7, "opacity": 0.85},
        ),
    ]
    axes = {f"{way}axis": axis(f"{what} peak, GiB", rangemode="tozero") for way, what in _PEAKS}
    return {"data": data, "layout": axes}


_PEAKS = (("x", "planned"), ("y", "observed"))


def _in_gib(size_bytes: int | None) -> float:
    return round((size_bytes or 0) / 2**30, 4)


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
        worked_s = sum(session.work_s for session in sessions)
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
    time = WorkAxis.of(state.sessions)
    placed = lanes(state.attempts)
    rows = sorted({row for _, row in placed}, key=_natural)
    data: list[Figure] = []
    for end, (name, color) in _LOOKS.items():
        ended = [(attempt, row) for attempt, row in placed if attempt.end is end]
        if ended:
            data.append(_bars(name, color, ended, time))
    ticks = time.ticks()
    layout: Figure = {
        "barmode": "overlay",
        "xaxis": axis(
            "time (UTC)", tickvals=[at_s for at_s, _ in ticks], ticktext=[name for _, name in ticks], tickangle=0
        ),
        "yaxis": {"type": "category", "categoryarray": rows[::-1], "categoryorder": "array", "automargin": True},
        "height": 160 + 34 * len(rows),
        "hovermode": "closest",
        "shapes": [_session(session, time) for session in state.sessions],
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


def _bars(name: str, color: str, placed: Sequence[tuple[AttemptState, str]], time: WorkAxis) -> Figure:
    edge = {"width": 0.5, "color": color if len(placed) > _MANY else _EDGE}
    return bars(
        (round(time.at(attempt.end_s) - time.at(attempt.placed_at_s), 3) for attempt, _ in placed),
        (row for _, row in placed),
        hover="%{text}",
        color=color,
        name=name,
        base=[round(time.at(attempt.placed_at_s), 3) for attempt, _ in placed],
        text=[_attempt_hover(attempt) for attempt, _ in placed],
        textposition="none",
        width=0.7,
    ) | {"marker": {"color": color, "line": edge}}


def _attempt_hover(attempt: AttemptState) -> str:
    lines = [f"trial {attempt.trial}, attempt {attempt.number}: {_LOOKS[attempt.end][0]}"]
    lines.append(f"{time_text(attempt.placed_at_s)}, {duration_text(attempt.time_s)}")
    if attempt.failure is not None:
        lines.append(f"{attempt.failure.kind}: {text(shortened(attempt.failure.sentence, 120))}")
    return "<br>".join(lines)


def _natural(row: str) -> tuple[str, int]:
    head, _, number = row.rpartition(" ")
    return (head, int(number)) if number.isdigit() else (row, 0)


def _session(session: SessionState, time: WorkAxis) -> Figure:
    line = {"width": 1, "color": "rgba(127,127,127,0.5)", "dash": "dot"}
    return region(time.at(session.opened_at_s), time.at(session.last_at_s), "rgba(127,127,127,0.10)", line=line)


# The template engine escapes every text. A content security policy allows no request, and only the scripts of this
# file, by their hashes.
