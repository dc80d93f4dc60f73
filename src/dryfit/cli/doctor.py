"""The commands ``doctor``, which checks the machine and a study before anything runs, and ``bug-report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dryfit.cli.options import JsonOption, QuietOption, SetOption, notes
from dryfit.core.errors import ConfigError, ExitStatus


def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; none: the machine alone.")
    ] = None,
    overrides: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the study lives.")] = None,
    drill: Annotated[
        bool, typer.Option("--drill", help="Instead: kill a tiny study of its own, and show that nothing is lost.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check this machine and a study: every row, batch and model. Exit status 1 where a check fails."""
    if drill:
        if study is not None or overrides or folder is not None:
            raise ConfigError("the drill", "a study, --set or --dir beside it", "--drill alone: it has its own study")
        _drill(as_json=as_json, quiet=quiet)
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
    from dryfit.cli.output import print_finding, print_json, print_verdict
    from dryfit.reporting.findings import diagnosis_view

    diagnosis = api.doctor(
        study,
        overrides=overrides,
        folder=folder,
        machine=machine,
        on_note=notes(quiet=quiet),
        on_finding=lambda finding: None if as_json else print_finding(finding, quiet=quiet),
    )
    print_json(diagnosis_view(diagnosis)) if as_json else print_verdict(diagnosis)
    raise typer.Exit(ExitStatus.DONE if diagnosis.healthy else ExitStatus.ANSWER_IS_NO)


def _drill(*, as_json: bool, quiet: bool) -> NoReturn:
    import dryfit.api as api
    from dryfit.cli.output import print_json, print_table
    from dryfit.reporting.findings import drill_line, drill_table, drill_view, kill_line

    on_note = notes(quiet=quiet)
    view = drill_view(api.drill(on_note=on_note, on_kill=lambda kill: on_note(kill_line(kill))))
    if as_json:
        print_json(view)
    else:
        print_table(drill_table(view))
        typer.echo(drill_line(view))
    raise typer.Exit(ExitStatus.DONE if view.passed else ExitStatus.ANSWER_IS_NO)


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
    from dryfit.cli.output import print_json, print_table
    from dryfit.reporting.findings import parts_table

    report = api.bug_report(study, out, on_note=notes(quiet=quiet))
    if as_json:
        print_json(report)
        return
    print_table(parts_table(report))
    typer.echo(report.file)
    typer.echo("read it before you give it away: your own code may write texts that look like messages", err=True)
