"""The commands ``report`` and ``export``, which write a study as a page, a table or an Optuna storage."""

from pathlib import Path
from typing import Annotated

import typer

from dryfit.cli.options import StudyArgument
from dryfit.reporting.data.formats import ExportFormat


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
    study: StudyArgument,
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")],
    file: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: in report/ of the study."),
    ] = None,
) -> None:
    """Write all trials as CSV, or as an Optuna storage."""
    import dryfit.api as api

    typer.echo(api.export(study, to, file))
