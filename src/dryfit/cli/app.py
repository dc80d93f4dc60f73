"""The command line. Nothing is imported before a command needs it: ``dryfit --help`` answers at once."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dryfit.core.errors import ConfigError, DryfitError, ExitStatus
from dryfit.core.platforms import refuse_unsupported_platform
from dryfit.core.settings import Task
from dryfit.core.version import VERSION

if TYPE_CHECKING:
    from dryfit.api import TuneResult

app = typer.Typer(
    name="dryfit",
    help="Dry-fit every trial before it touches the GPU: fine-tuning searches that lose no trial.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file.")
]
TrialsOption = Annotated[int | None, typer.Option("--trials", min=1, help="The study's total of trials.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY_DIR", help="A study's folder, or its study.toml.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    del version


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made when absent.")],
    task: Annotated[Task, typer.Option(help="What the model learns.")] = Task.CRITERIA,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a commented study.toml and a small synthetic data set."""
    import dryfit.api as api

    for path in api.init(folder, task=task, force=force):
        typer.echo(path)
    typer.echo(f"search with: dryfit tune {folder / 'study.toml'}", err=True)


@app.command()
def plan(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; its data may be absent.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A study file that comes with dryfit.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="rtx4090, a100-80, 24GiB, ...; default: this machine's GPU.")
    ] = None,
    overrides: SetOption = None,
    ladder: Annotated[
        bool | None,
        typer.Option("--ladder/--no-ladder", help="Price every change (slower); default: of a preset, or a refusal."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say whether trials fit a device, without a GPU; exit status 1 where they do not, or it is unknown."""
    import dryfit.api as api
    from dryfit.cli.output import print_json, print_plan, print_space
    from dryfit.report.plan_view import plan_view, space_view
    from dryfit.study.plans import plan_one, plan_space

    def on_note(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    asked = api.plan_input(study, device=device, overrides=overrides or (), preset=preset)
    if asked.searched:
        if ladder is not None:
            raise ConfigError("planning a search space", "--ladder or --no-ladder", "them for a single trial only")
        found = plan_space(asked, on_note)
        print_json(space_view(found)) if as_json else print_space(found)
        fits = found.fits
    else:
        answer = plan_one(asked, on_note, ladder=preset is not None if ladder is None else ladder)
        print_json(plan_view(answer)) if as_json else print_plan(answer)
        fits = answer.verdict.fits
    raise typer.Exit(ExitStatus.DONE if fits else ExitStatus.ANSWER_IS_NO)


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cuda or cuda:N.")] = "cuda:0",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what training steps take of this machine's GPU, so that plans for it are surer."""
    import dryfit.api as api
    from dryfit.cli.output import print_calibration, print_json
    from dryfit.report.calibrations import calibration_view

    def on_note(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    found = api.calibrate(device, quick=quick, on_note=on_note)
    print_json(calibration_view(found)) if as_json else print_calibration(found)


@app.command()
def tune(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder.")],
    trials: TrialsOption = None,
    overrides: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the study lives.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Search, or go on with a search. Ctrl-C once: checkpoint and stop; twice: now."""
    import dryfit.api as api
    from dryfit.cli.live import watching

    with watching(quiet=quiet) as observer:
        observers = [observer] if observer is not None else []
        result = api.tune(study, overrides=overrides or (), trials=trials, folder=folder, observers=observers)
    _finish(result, as_json=as_json)


@app.command()
def resume(
    study: StudyArgument,
    trials: TrialsOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with a study as it was last run."""
    import dryfit.api as api
    from dryfit.cli.live import watching

    with watching(quiet=quiet) as observer:
        observers = [observer] if observer is not None else []
        result = api.resume(study, overrides=overrides or (), trials=trials, observers=observers)
    _finish(result, as_json=as_json)


@app.command()
def status(study: StudyArgument, as_json: JsonOption = False) -> None:
    """Print how far a study is, whether it runs or not."""
    import dryfit.api as api
    from dryfit.cli.output import print_json, print_status

    if as_json:
        print_json(api.status(study))
    else:
        print_status(api.status(study), api.owner(study))


@app.command()
def show(
    study: StudyArgument,
    trial: Annotated[int | None, typer.Argument(min=0, help="Tell this trial's story.")] = None,
) -> None:
    """Print the trials of a study, or everything known of one."""
    import dryfit.api as api
    from dryfit.cli.output import print_study
    from dryfit.report.tables import trial_story

    state, layout = api.open_study(study), api.layout_of(study)
    if trial is None:
        print_study(state, layout, trials=True)
    else:
        typer.echo("\n".join(trial_story(api.trial_of(state, trial), layout)))


@app.command()
def stop(
    study: StudyArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for checkpoints.")] = False,
) -> None:
    """Ask a running study to checkpoint and stop."""
    import dryfit.api as api

    owner = api.stop(study, now=now)
    if owner is None:
        typer.echo("nobody runs this study", err=True)
        raise typer.Exit(ExitStatus.ANSWER_IS_NO)
    typer.echo(f"asked process {owner} to stop", err=True)


@app.command()
def load(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model, a trial's best weights, an adapter.")],
    check: Annotated[bool, typer.Option("--check", help="Look at it; no weight is read.")] = False,
    task: Annotated[str | None, typer.Option(help="As in dryfit.load; default: what the folder says.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code that comes with the model.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a checkpoint can be loaded (--check); exit status 1 where it cannot."""
    import dryfit.api as api
    from dryfit.cli.output import print_health, print_json

    if not check:
        raise ConfigError(
            f"loading {folder}",
            "a command cannot keep a model",
            allowed=f'dryfit.load("{folder}") in Python',
            hint=f"dryfit load --check {folder} says whether that would work",
        )
    health = api.check(folder, task=task, trust=trust)
    if as_json:
        print_json(health)
    else:
        print_health(health)
    if not health.healthy:
        raise typer.Exit(ExitStatus.ANSWER_IS_NO)


@app.command()
def schema() -> None:
    """Print the JSON schema of a study file."""
    from dryfit.config.schema_json import study_json_schema

    typer.echo(json.dumps(study_json_schema(), indent=2))


def _finish(result: "TuneResult", *, as_json: bool) -> None:
    import dryfit.api as api
    from dryfit.cli.output import print_advice, print_end, print_json, print_study

    if as_json:
        print_json(result.summary)
    else:
        print_study(api.open_study(result.folder), api.layout_of(result.folder), trials=True)
        print_end(result)
    print_advice(result)
    raise typer.Exit(result.status)


def main() -> None:
    """Run the command line; every error ends with its own exit status."""
    try:
        refuse_unsupported_platform()
        app()
    except DryfitError as error:
        from dryfit.cli.output import print_error

        print_error(error)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(ExitStatus.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # the outermost frame: a bug of ours must end with its own status
        from dryfit.cli.output import print_bug

        print_bug(error)
        sys.exit(ExitStatus.BUG)


if __name__ == "__main__":
    main()
