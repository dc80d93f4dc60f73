"""The commands ``doctor``, which checks the machine and a study before anything runs, and ``bug-report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dryfit.cli.options import JsonOption, QuietOption, SetOption, answer, notes
from dryfit.core.errors import ExitStatus


def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; none: the machine alone.")
    ] = None,
    overrides: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the study lives.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check this machine and a study: every row, batch and model. Exit status 1 where a check fails."""
    examine(study, overrides or (), folder, machine=True, as_json=as_json, quiet=quiet)


def examine(
    study: Path | None,
    overrides: Sequence[str],
    folder: Path | None,
    *,
    machine: bool,
    as_json: bool,
    quiet: bool,
) -> NoReturn:
    """Print each check as it ends, then exit: with status 1 if a check failed.

    Args:
        machine: Whether to check the machine too.
        quiet: Print only checks that ask for action.
    """
    import dryfit.api as api
    from dryfit.cli.output import print_finding
    from dryfit.reporting.findings import verdict_document

    diagnosis = api.doctor(
        study,
        overrides=overrides,
        folder=folder,
        machine=machine,
        on_note=notes(quiet=quiet),
        on_finding=lambda finding: None if as_json else print_finding(finding, quiet=quiet),
    )
    answer(diagnosis, as_json=as_json, document=verdict_document(diagnosis))
    raise typer.Exit(ExitStatus.DONE if diagnosis.healthy else ExitStatus.ANSWER_IS_NO)


def bug_report(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY_DIR", help="A study's folder, or its study.toml; none: the machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The archive to write.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write an archive to attach to a report: versions, checks, settings, last events and logs, without your texts."""
    import dryfit.api as api

    answer(api.bug_report(study, out, on_note=notes(quiet=quiet)), as_json=as_json)
