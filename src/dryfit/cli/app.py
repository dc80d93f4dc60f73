"""The command line ``dryfit``. Commands import what they need when they run, so ``dryfit --help`` answers at once."""

import sys
from typing import Annotated

import typer

from dryfit.cli import doctor, models, planning, reports, studies, training
from dryfit.cli import imports as importing
from dryfit.cli.streams import safe_streams
from dryfit.core.errors import DryfitError, ExitStatus
from dryfit.core.platforms import refuse_unsupported_platform
from dryfit.core.process import end_by_signals_alone
from dryfit.core.version import VERSION

app = typer.Typer(
    name="dryfit",
    help="Dry-fit every trial before it touches the GPU: fine-tuning searches that lose no trial.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


for command in (
    studies.init,
    importing.import_rows,
    doctor.doctor,
    planning.plan,
    planning.calibrate,
    studies.tune,
    studies.resume,
    studies.status,
    studies.show,
    reports.report,
    reports.export,
    studies.stop,
    training.train,
    training.predict,
    models.load,
    studies.schema,
):
    app.command("import" if command is importing.import_rows else None)(command)


def main() -> None:
    """Run the command line, and exit with the status of the error, if any."""
    with safe_streams():
        _run()


def _run() -> None:
    try:
        refuse_unsupported_platform()
        end_by_signals_alone()
        app()
    except DryfitError as error:
        from dryfit.cli.output import print_error

        print_error(error)
        sys.exit(error.exit_status)
    except OSError as error:
        from dryfit.cli.output import print_machine_error

        print_machine_error(error)
        sys.exit(ExitStatus.CANNOT_RUN)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # the outermost frame: a bug of ours must end with its own status
        from dryfit.cli.output import print_bug

        print_bug(error)
        sys.exit(ExitStatus.BUG)


if __name__ == "__main__":
    main()
