"""The commands ``report`` and ``export``: a study as a page, a table or an Optuna storage, a model for transformers."""

from pathlib import Path
from typing import Annotated

import typer

from dryfit.cli.options import StudyArgument, notes
from dryfit.core.settings.choices import ExportFormat


def report(
    study: StudyArgument,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: report/index.html in the study.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Make one HTML page about a study: what is best, how sure, what failed."""
    import webbrowser

    import dryfit.api as api

    path = api.write_report(study, file)
    typer.echo(path)
    if show and not webbrowser.open(path.as_uri()):
        typer.echo("no browser could be opened", err=True)


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A study's (csv, optuna), or a model's (the other formats).")
    ],
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")],
    file: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: in report/ of the study, or beside the model."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own code, or its task's.")] = False,
) -> None:
    """Write all trials as CSV or an Optuna storage, or a model as plain transformers loads it."""
    import dryfit.api as api

    typer.echo(api.export(folder, to, file, trust=trust, on_note=notes(quiet=False)))
