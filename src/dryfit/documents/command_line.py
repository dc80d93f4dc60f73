"""The command line ``dryfit``. Commands import their modules when they run, so ``dryfit --help`` is fast."""

import os
import sys
from typing import Annotated

import typer

from dryfit.documents import commands, study_commands
from dryfit.documents import commands as importing
from dryfit.documents.command_options import safe_streams
from dryfit.processes.process import end_by_signals_alone
from dryfit.settings.errors import DryfitError, ExitStatus, MachineError
from dryfit.settings.installed import missing_package, version_lines
from dryfit.settings.version import refuse_unsupported_platform

_DOING = "running this command"
_NO_THREAD = "can't start new thread"
_NO_ROOM_TO_LOAD = "failed to map segment"
"""What the dynamic linker says of a library that the limit on memory leaves no room for."""

app = typer.Typer(
    name="dryfit",
    help="Dry-fit every trial before it touches the GPU: fine-tuning searches that lose no trial.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it, and what it stands on.")
    ] = False,
) -> None:
    del version


for command in (
    study_commands.init,
    importing.import_rows,
    commands.doctor,
    commands.bug_report,
    commands.rehearse,
    commands.check,
    commands.plan,
    commands.calibrate,
    study_commands.tune,
    study_commands.resume,
    study_commands.status,
    study_commands.show,
    study_commands.agent,
    study_commands.nodes,
    commands.report,
    commands.export,
    study_commands.stop,
    commands.train,
    commands.compare,
    commands.predict,
    commands.load,
    commands.push,
    study_commands.schema,
):
    settings = commands.CONTEXT if command in (commands.rehearse, commands.calibrate) else None
    epilog = study_commands.PRESET_LINES if command is study_commands.init else None
    app.command("import" if command is importing.import_rows else None, context_settings=settings, epilog=epilog)(
        command
    )


def main() -> None:
    """Run the command line, and exit with the status of the error, if any."""
    with safe_streams():
        _run()


def _lack(error: BaseException | None) -> MachineError | None:
    """Return what this process has too little of, if an error, or one behind it, says so."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or (isinstance(error, ImportError) and _NO_ROOM_TO_LOAD in text):
            return MachineError(_DOING, "there is too little memory for it", hint="raise its limit (`ulimit -v`)")
        if isinstance(error, RuntimeError) and text == _NO_THREAD:
            hint = "raise the limit on processes (`ulimit -u`), or on memory (`ulimit -v`)"
            return MachineError(_DOING, "no further thread can be started", hint=hint)
        error = error.__cause__ or error.__context__
    return None


def _run() -> None:
    try:
        refuse_unsupported_platform()
        end_by_signals_alone()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # this process computes nothing: a thread a core is a waste
        app(prog_name="dryfit")  # also of `python -m dryfit.documents.command_line`: completion asks by this name
    except DryfitError as error:
        from dryfit.documents.command_output import print_error

        print_error(error)
        sys.exit(error.exit_status)
    except OSError as error:
        from dryfit.documents.command_output import print_machine_error

        print_machine_error(error)
        sys.exit(ExitStatus.CANNOT_RUN)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # the outermost frame: a bug of ours must end with its own status
        lack = missing_package(error) or _lack(error)
        if lack is not None:
            sys.stderr.write(f"error: {lack}\n")
            sys.exit(lack.exit_status)
        from dryfit.documents.command_output import print_bug

        print_bug(error)
        sys.exit(ExitStatus.BUG)


if __name__ == "__main__":
    main()
