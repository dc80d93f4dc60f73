"""The figures of a report as plotly's JSON. The page sets the colours of text, axes and background.

Texts are escaped here, because plotly interprets some HTML tags in labels.
"""

import html
import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import MetricPoint, Outcome, Scalar, better
from dryfit.reporting.terminal.tables import number_text, value_text
from dryfit.search.sampling.importance import Importances
from dryfit.search.space.params import from_text, public_name
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

Figure: TypeAlias = dict[str, Any]
"""``{"data": [...], "layout": {...}}``, as plotly.js takes it."""

BLUE, ORANGE, RED, PURPLE, GREY, GREEN = "#3987c9", "#e08a1e", "#d64541", "#9a6fc4", "#8c95a0", "#2f9e6e"
"""Distinguishable with red-green colour blindness, and readable on white and on black."""

MOST_CURVES = 60
MOST_CURVE_POINTS = 200
_BEST_CURVES = 20
MOST_SLICES = 6
_FEW_TICKS = 10
_MOST_HOVERED_PARAMS = 1000
"""With more trials, hover texts leave the parameters out, which would add megabytes to the page."""


def text(value: object) -> str:
    """Escape a text for plotly's labels."""
    return html.escape(str(value), quote=False)


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
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [trial.number for trial in state.present],
            "y": best,
            "line": {"shape": "hv", "color": GREEN, "width": 2},
            "hoverinfo": "skip",
        },
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
        "xaxis": {"title": {"text": "trial"}, "rangemode": "tozero", **_whole(len(state.present))},
        "yaxis": {"title": {"text": goal}},
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
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [trial.number for trial in trials],
        "y": list(values),
        "text": [_hover(trial, named=named) for trial in trials],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "symbol": symbol, "size": 7, "opacity": 0.85},
    }


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
        "xaxis": {"title": {"text": f"{text(first.name)} ({first.direction})"}},
        "yaxis": {"title": {"text": f"{text(second.name)} ({second.direction})"}},
    }
    return {"data": [trace for trace in data if trace["x"]], "layout": axes}


def importance_figure(importances: Importances) -> Figure:
    """Plot a bar for each parameter, the most important on top."""
    params = importances.params[::-1]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [param.share for param in params],
        "y": [text(param.name) for param in params],
        "text": [f"{param.share:.0%}" for param in params],
        "customdata": [param.trials for param in params],
        "hovertemplate": "%{y}: %{x:.3f} (%{customdata} trials)<extra></extra>",
        "marker": {"color": BLUE},
        "cliponaxis": False,
    }
    layout = {
        "xaxis": {"tickformat": ".0%", "rangemode": "tozero", "title": {"text": "share of all importances"}},
        "yaxis": {"automargin": True, "type": "category"},
        "height": 120 + 26 * len(params),
        "showlegend": False,
    }
    return {"data": [bars], "layout": layout}


def slice_figure(state: StudyState, name: str) -> Figure:
    """Plot the scores of the complete trials over their values of a parameter."""
    trials = [trial for trial in state.complete if name in trial.params]
    values = [trial.params[name] for trial in trials]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    xaxis: dict[str, Any] = {"title": {"text": text(name)}, "type": "linear" if numeric else "category"}
    if numeric and name in _logarithmic(state):
        xaxis |= {"type": "log", "exponentformat": "power"}
    whole = [value for value in values if isinstance(value, int)]
    if whole and len(whole) == len(values) and xaxis["type"] == "linear":
        xaxis |= _whole(max(whole) - min(whole))
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": values if numeric else [text(_shown(value)) for value in values],
        "y": [trial.score for trial in trials],
        "text": [f"trial {trial.number}: {number_text(trial.score)}" for trial in trials],
        "hovertemplate": "%{text}<br>%{x}<extra></extra>",
        "marker": {
            "color": [trial.number for trial in trials],
            "colorscale": [[0, "#c3d4e4"], [1, BLUE]],
            "size": 6,
            "line": {"width": 0.5, "color": BLUE},
        },
    }
    layout = {
        "xaxis": xaxis,
        "yaxis": {"title": {"text": text(state.goals[0].name)}},
        "showlegend": False,
        "height": 280,
    }
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
        "xaxis": {"title": {"text": "optimizer step"}, "rangemode": "tozero", **_whole(last_step)},
        "yaxis": {"title": {"text": text(state.goals[0].name)}},
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
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) < 30 else "lines",
        "name": f"trial {trial.number}",
        "x": [point.step for point in points],
        "y": [point.value if math.isfinite(point.value) else None for point in points],
        "line": {"color": color, "width": 3 if is_best else 1.2},
        "marker": {"size": 6 if is_best else 4},
        "opacity": 1.0 if is_best else 0.55,
        "hovertemplate": f"trial {trial.number} ({trial.outcome or 'not finished'})<br>step %{{x}}: %{{y:.4f}}"
        "<extra></extra>",
    }


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
        {
            "type": "scatter",
            "mode": "lines",
            "x": [0, most],
            "y": [0, most],
            "name": "as planned",
            "line": {"color": GREY, "dash": "dot"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": planned,
            "y": observed,
            "name": "trials",
            "text": [f"trial {trial.number}" for trial in known],
            "hovertemplate": "%{text}<br>planned %{x:.2f} GiB<br>observed %{y:.2f} GiB<extra></extra>",
            "marker": {"color": BLUE, "size": 7, "opacity": 0.85},
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "planned peak, GiB"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "observed peak, GiB"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def _in_gib(size_bytes: int | None) -> float:
    return round((size_bytes or 0) / 2**30, 4)
