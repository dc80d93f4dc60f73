"""The sections of a report about the models that were trained of a study: what each does well and badly."""

from pathlib import Path
from typing import Final

from pydantic import ValidationError

from dryfit.core.errors import FileError
from dryfit.core.jobs.analysis import ANALYSIS_FILE, Analysis, ClassAnalysis
from dryfit.core.regular_files import read_bounded
from dryfit.reporting.html.analysis_plots import precision_recall_figure, reliability_figure
from dryfit.reporting.html.plots import Figure
from dryfit.reporting.html.sections import Section
from dryfit.reporting.terminal.analysis_tables import analysis_tables
from dryfit.reporting.terminal.tables import counted
from dryfit.store.layout import FinalLayout, StudyLayout

_MOST_MODELS: Final = 3
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
        tables=tuple(analysis_tables(analysis)),
        notes=tuple(notes),
    )


def _charts(found: ClassAnalysis) -> list[Figure]:
    drawn = [curve for curve in found.curves if curve.thresholds]
    return [
        *([reliability_figure(found.calibration)] if found.calibration else []),
        *([precision_recall_figure(drawn, found.name)] if drawn else []),
    ]
