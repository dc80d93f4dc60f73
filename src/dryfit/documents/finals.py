"""Output of ``dryfit train``, and the analysis of a trained model."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from dryfit.documents.document import (
    Answer,
    Block,
    Document,
    Line,
    View,
    counted,
    document_of,
    measured_text,
    params_text,
)
from dryfit.documents.pages import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, Section, axis, scatter, text
from dryfit.ledger.folder import FinalLayout, StudyLayout
from dryfit.settings.errors import FileError
from dryfit.settings.files import read_bounded
from dryfit.settings.text import Table, number_text
from dryfit.settings.training_messages import ANALYSIS_FILE, Analysis, CalibrationBin, ClassAnalysis, PrecisionRecall
from dryfit.settings.trial import Scalar
from dryfit.tasks.analysis import analysis_tables


class TrainedModel(Answer):
    """A trial's configuration, trained once more.

    Attributes:
        value: The study's metric on validation now; None if validation was trained on.
        validation: Metrics on validation.
        test: Metrics on test; None if the data has no such split.
        rows: Number of rows of each split, and of those trained on as ``trained``; empty of the user's own code.
        analysis: What the model does well and badly on test, or on validation where there are no test rows.
        judgement: Whether it beats the strongest baseline of the study, in sentences; empty where none is known.
        searched: The trial's value in the search; None if it has none.
        step: The optimizer step of the weights.
        steps: Optimizer steps done.
        folder: The saved model, or what the user's own code has left; None if only its scores were asked for, or it has
            left nothing.
    """

    study: str
    metric: str
    with_validation: bool
    value: float | None
    validation: dict[str, float] | None
    test: dict[str, float] | None
    rows: dict[str, int]
    analysis: Analysis | None = None
    judgement: tuple[str, ...] = ()
    trial: int
    seed: int
    searched: float | None
    step: int
    steps: int
    folder: str | None


class SeedSpread(View):
    """Statistics over seeds; ``std`` is the sample standard deviation (n - 1), None for a single value."""

    count: int
    mean: float
    std: float | None
    min: float
    max: float


class SeedRun(View):
    """A configuration's values with one seed, or why there are none."""

    seed: int
    validation: float | None = None
    test: float | None = None
    error: str | None = None


class TopConfiguration(View):
    """One of the best configurations of the search, and its values with several seeds."""

    rank: int
    trial: int
    params: dict[str, Scalar]
    searched: float
    validation: SeedSpread | None
    test: SeedSpread | None
    runs: tuple[SeedRun, ...]


class TopTable(Answer):
    """The best configurations of a study, each trained with several seeds; the best of the search first."""

    study: str
    metric: str
    seeds: tuple[int, ...]
    complete: bool
    configurations: tuple[TopConfiguration, ...]


def spread(values: Sequence[float | None]) -> SeedSpread | None:
    """Return the statistics of the finite values; None if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return SeedSpread(
        count=len(finite),
        mean=statistics.fmean(finite),
        std=statistics.stdev(finite) if len(finite) > 1 else None,
        min=min(finite),
        max=max(finite),
    )


def trained_lines(model: TrainedModel) -> list[str]:
    """Return a few lines on a trained model."""
    how = "train and validation together, for as long as the trial took to its best validation"
    if not model.with_validation:
        how = f"the weights of step {model.step} of {model.steps}, the best validation"
    if "trained" in model.rows:
        how = f"{how} ({model.rows['trained']} rows trained on)"
    else:  # by the user's own code, which may leave something else than its best weights
        how = f"the best value at step {model.step} of {model.steps}"
    lines = [f"trial {model.trial}, seed {model.seed}: {how}"]
    if model.searched is not None:
        lines.append(f"  {model.metric} on validation in the search: {number_text(model.searched)}")
    return [*lines, f"  model: {model.folder}"] if model.folder is not None else lines


def scores_table(model: TrainedModel) -> Table:
    """Return one row for each metric: its values on validation and test."""
    validation, test = model.validation or {}, model.test or {}
    rows = [(name, number_text(validation.get(name)), number_text(test.get(name))) for name in {**validation, **test}]
    return Table(("metric", "validation", "test"), tuple(sorted(rows)))


def top_table(table: TopTable) -> Table:
    """Return one row for each configuration."""
    heads = ("rank", "trial", "search", "seeds", "validation", "min", "max", "test", "min", "max", "parameters")
    rows = [
        (
            str(row.rank),
            str(row.trial),
            number_text(row.searched),
            f"{sum(run.validation is not None for run in row.runs)}/{len(table.seeds)}",
            *spread_cells(row.validation),
            *spread_cells(row.test),
            params_text(row.params),
        )
        for row in table.configurations
    ]
    return Table(heads, tuple(rows))


def spread_cells(spread: SeedSpread | None) -> tuple[str, str, str]:
    """Return mean with standard deviation, least and most; dashes where there is no value."""
    if spread is None:
        return "-", "-", "-"
    return measured_text(spread.mean, spread.std), number_text(spread.min), number_text(spread.max)


@document_of.register
def _(model: TrainedModel) -> Document:
    own = (*trained_lines(model), scores_table(model))
    return Document((*model.judgement, *own, *_analysis_blocks(model.analysis)))


def _analysis_blocks(analysis: Analysis | None) -> Iterator[Block]:
    if analysis is None:
        return
    yield from ("", f"on {analysis.split}")
    for _, caption, table in analysis_tables(analysis):
        yield from ([caption] if caption else [])
        yield table
    yield from (Line(note, aside=True) for note in analysis.notes)


@document_of.register
def _(table: TopTable) -> Document:
    """Return the best configurations over several seeds, and the runs that failed."""
    failed = [
        Line(f"trial {one.trial}, seed {run.seed}: {run.error}", aside=True)
        for one in table.configurations
        for run in one.runs
        if run.error is not None
    ]
    left = "stopped; the same command goes on with the runs that are left"
    return Document((top_table(table), *failed, *([] if table.complete else [Line(left, aside=True)])))


_COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_AT = "<br>recall %{x:.3f}<br>precision %{y:.3f}"
_UNIT: Figure = {"range": [-0.02, 1.02], "zeroline": False}


def reliability_figure(bins: Sequence[CalibrationBin]) -> Figure:
    """Plot the share of answers that came true over their mean probability (DeGroot and Fienberg 1983)."""
    data = [
        scatter([0, 1], [0, 1], name="calibrated", line={"color": GREY, "dash": "dot"}),
        scatter(
            (one.p for one in bins),
            (one.share for one in bins),
            name="the model",
            mode="lines+markers",
            hover="probability %{x:.3f}<br>came true %{y:.3f}<br>%{customdata} times",
            customdata=[one.count for one in bins],
            line={"color": BLUE},
            marker={"size": 7},
        ),
    ]
    axes = {"xaxis": axis("mean probability", **_UNIT), "yaxis": axis("share that came true", **_UNIT)}
    return {"data": data, "layout": axes}


def precision_recall_figure(curves: Sequence[PrecisionRecall], name_of: Callable[[int], str]) -> Figure:
    """Plot precision over recall of each class, and where its answers lie.

    Args:
        curves: Of some classes.
        name_of: Returns what a class is called.
    """
    data: list[Figure] = []
    for at, curve in enumerate(curves):
        color, name = _COLORS[at % len(_COLORS)], text(f"class {name_of(curve.label)}")
        line = scatter(
            curve.recalls,
            curve.precisions,
            name=name,
            hover=f"{name} above %{{text}}{_AT}",
            text=[f"{threshold:.4f}" for threshold in curve.thresholds],
            line={"color": color, "width": 2},
        )
        in_use, look = f"{name}, answered above {curve.threshold:.4f}", {"size": 11, "symbol": "diamond"}
        point = scatter([curve.recall], [curve.precision], name=in_use, mode="markers", hover=f"{in_use}{_AT}")
        data += [line, {**point, "marker": {"color": color, **look}}]
    axes = {"xaxis": axis("recall", **_UNIT), "yaxis": axis("precision", **_UNIT)}
    return {"data": data, "layout": {**axes, "hovermode": "closest"}}


_MOST_MODELS: Final = 3
_MOST_BYTES: Final = 4 << 20


def final_sections(layout: StudyLayout) -> list[Section]:
    """Return a section for each of the last trained models; an unreadable one has a note."""
    files = [FinalLayout(folder).model / ANALYSIS_FILE for folder in sorted(layout.finals.glob("*"))]
    known = sorted(((time_ns, path) for path in files if (time_ns := _written_ns(path)) is not None), reverse=True)
    return [_section(path, number) for number, (_, path) in enumerate(known[:_MOST_MODELS], start=1)]


def _written_ns(path: Path) -> int | None:
    """Return when a file was written; None where there is none, as of a model that is being replaced."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _section(path: Path, number: int) -> Section:
    name = path.parent.parent.name
    anchor, title = f"final-{number}", f"Trained model {name}"
    try:
        analysis = Analysis.model_validate_json(read_bounded(path, _MOST_BYTES))
    except (FileError, OSError, ValidationError) as error:
        return Section(anchor, title, warnings=(f"{path.name} cannot be read: {type(error).__name__}.",))
    rows = counted(analysis.rows, "row")
    chosen = "" if analysis.split == "test" else ", by which its weights were chosen: its numbers are optimistic"
    notes = list(analysis.notes)
    if analysis.classes is not None and len(analysis.classes.scores) < analysis.classes.classes:
        notes.append(f"Of {analysis.classes.classes} classes those with the most rows are listed.")
    return Section(
        anchor,
        title,
        texts=(f"What it does well and badly on {rows} of {analysis.split}{chosen}.",),
        charts=tuple(_charts(analysis.classes)) if analysis.classes is not None else (),
        tables=tuple((caption, table) for _, caption, table in analysis_tables(analysis)),
        notes=tuple(notes),
    )


def _charts(found: ClassAnalysis) -> list[Figure]:
    drawn = [curve for curve in found.curves if curve.thresholds]
    return [
        *([reliability_figure(found.calibration)] if found.calibration else []),
        *([precision_recall_figure(drawn, found.name)] if drawn else []),
    ]
