"""The figures of a trained model: its reliability, and precision over recall with the thresholds in use."""

from collections.abc import Callable, Sequence

from dryfit.core.jobs.analysis import CalibrationBin, PrecisionRecall
from dryfit.reporting.html.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, text

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_UNIT = {"range": [-0.02, 1.02], "zeroline": False}


def reliability_figure(bins: Sequence[CalibrationBin]) -> Figure:
    """Plot the share of answers that came true over their mean probability (DeGroot and Fienberg 1983)."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [0, 1],
            "y": [0, 1],
            "name": "calibrated",
            "line": {"color": GREY, "dash": "dot"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [one.p for one in bins],
            "y": [one.share for one in bins],
            "name": "the model",
            "customdata": [one.count for one in bins],
            "hovertemplate": "probability %{x:.3f}<br>came true %{y:.3f}<br>%{customdata} times<extra></extra>",
            "line": {"color": BLUE},
            "marker": {"size": 7},
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "mean probability"}, **_UNIT},
        "yaxis": {"title": {"text": "share that came true"}, **_UNIT},
    }
    return {"data": data, "layout": layout}


def precision_recall_figure(curves: Sequence[PrecisionRecall], name_of: Callable[[int], str]) -> Figure:
    """Plot precision over recall of each class, and where its answers lie.

    Args:
        curves: Of some classes.
        name_of: Returns what a class is called.
    """
    data: list[Figure] = []
    for at, curve in enumerate(curves):
        color, name = _COLORS[at % len(_COLORS)], text(f"class {name_of(curve.label)}")
        line = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": list(curve.recalls),
            "y": list(curve.precisions),
            "text": [f"{threshold:.4f}" for threshold in curve.thresholds],
            "hovertemplate": f"{name} above %{{text}}<br>recall %{{x:.3f}}<br>precision %{{y:.3f}}<extra></extra>",
            "line": {"color": color, "width": 2},
        }
        in_use = f"{name}, answered above {curve.threshold:.4f}"
        point = {
            "type": "scatter",
            "mode": "markers",
            "name": in_use,
            "x": [curve.recall],
            "y": [curve.precision],
            "hovertemplate": f"{in_use}<br>recall %{{x:.3f}}<br>precision %{{y:.3f}}<extra></extra>",
            "marker": {"color": color, "size": 11, "symbol": "diamond"},
        }
        data += [line, point]
    layout = {
        "xaxis": {"title": {"text": "recall"}, **_UNIT},
        "yaxis": {"title": {"text": "precision"}, **_UNIT},
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}
