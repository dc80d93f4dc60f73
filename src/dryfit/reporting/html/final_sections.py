"""The sections of a report about the models that were trained of a study: what each does well and badly."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from dryfit.core.errors import FileError
from dryfit.core.jobs.analysis import ANALYSIS_FILE, Analysis, ClassAnalysis, PartScores, SpanAnalysis, WorstRow
from dryfit.core.regular_files import read_bounded
from dryfit.core.text.words import printable
from dryfit.reporting.html.analysis_plots import precision_recall_figure, reliability_figure
from dryfit.reporting.html.plots import Figure
from dryfit.reporting.html.sections import Section
from dryfit.reporting.terminal.tables import Table, counted, number_text
from dryfit.store.layout import FinalLayout, StudyLayout

_MOST_MODELS: Final = 3
_MOST_CONFUSED: Final = 20
_MOST_BYTES: Final = 4 << 20


def final_sections(layout: StudyLayout) -> list[Section]:
    """Return a section for each of the models that were trained last; one that cannot be read says so."""
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
        tables=tuple(_tables(analysis)),
        notes=tuple(notes),
    )


def _charts(found: ClassAnalysis) -> list[Figure]:
    drawn = [curve for curve in found.curves if curve.thresholds]
    return [
        *([reliability_figure(found.calibration)] if found.calibration else []),
        *([precision_recall_figure(drawn)] if drawn else []),
    ]


Tables = list[tuple[str, Table]]


def _tables(analysis: Analysis) -> Tables:
    overall = Table(("metric", "value"), tuple((name, number_text(x)) for name, x in analysis.overall.scores.items()))
    tables = [("", overall)] if overall.rows else []
    if analysis.classes is not None:
        tables += _of_classes(analysis.classes)
    if analysis.spans is not None:
        tables.append(("Rows with and without a span", _of_spans(analysis.spans)))
    if analysis.texts is not None and analysis.texts.asked:
        counts = (str(analysis.texts.asked), str(analysis.texts.exact))
        tables.append(("Generated answers", Table(("answers", "exactly as wanted"), (counts,))))
    for head, parts in (("criterion", analysis.criteria), ("group", analysis.groups)):
        if parts:
            tables.append((f"By {head}", _by_part(head, parts)))
    for part in (analysis.classes, analysis.spans, analysis.texts):
        if part is not None and part.worst:
            tables.append(("Worst rows", _worst(part.worst)))
    return tables


def _of_classes(found: ClassAnalysis) -> Tables:
    rows = tuple(
        (
            str(one.label),
            *map(number_text, (one.precision, one.recall, one.f1)),
            *map(str, (one.support, one.answered, one.right)),
        )
        for one in found.scores
    )
    tables = [("", Table(("class", "precision", "recall", "F1", "rows", "answered", "right"), rows))]
    if 1 < len(found.confusion) <= _MOST_CONFUSED:
        heads = ("right class, by answer", *(str(one.label) for one in found.scores))
        counts = zip(found.scores, found.confusion, strict=True)
        tables.append(("Confusion", Table(heads, tuple((str(one.label), *map(str, of)) for one, of in counts))))
    if found.ece is not None:
        caption = f"Calibration: expected error {number_text(found.ece)}"
        bins = tuple(
            (f"{one.low:.3f} to {one.high:.3f}", str(one.count), number_text(one.p), number_text(one.share))
            for one in found.calibration
        )
        tables.append((caption, Table(("probability", "answers", "mean", "share that came true"), bins)))
    if found.curves:
        curves = tuple(
            (str(one.label), *map(number_text, (one.threshold, one.precision, one.recall, one.average_precision)))
            for one in found.curves
        )
        tables.append(("Thresholds", Table(("class", "above", "precision", "recall", "average precision"), curves)))
    return tables


def _of_spans(found: SpanAnalysis) -> Table:
    rows = (("has a span", found.found, found.missed), ("has none", found.invented, found.left))
    heads = ("row", "answered with a span", "answered with none")
    return Table(heads, tuple((name, str(said), str(none)) for name, said, none in rows))


def _by_part(head: str, parts: Sequence[PartScores]) -> Table:
    names = tuple(parts[0].scores)
    rows = tuple(
        (printable(one.name), str(one.rows), *(number_text(one.scores.get(name)) for name in names)) for one in parts
    )
    return Table((head, "rows", *names), rows)


def _worst(rows: Sequence[WorstRow]) -> Table:
    names = tuple(rows[0].values)
    cells = tuple(
        (
            printable(one.id),
            one.right or "-",
            one.answered or "-",
            *(number_text(one.values.get(name)) for name in names),
        )
        for one in rows
    )
    return Table(("id", "right", "answered", *names), cells)
