"""The commands ``plan`` and ``calibrate``: the memory that trials will take, and a device's measured constants."""

from pathlib import Path
from typing import Annotated

import typer

from dryfit.cli.options import JsonOption, QuietOption, SetOption, notes
from dryfit.core.errors import ConfigError, ExitStatus
from dryfit.core.settings.choices import BuiltInTask


def plan(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; its data may be absent.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A study file that comes with dryfit.")] = None,
    task: Annotated[BuiltInTask | None, typer.Option(help="Of the preset, where it is for several.")] = None,
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
    from dryfit.cli.output import answer

    request = api.plan_input(study, device=device, overrides=overrides or (), preset=preset, task=task)
    if request.searched:
        if ladder is not None:
            raise ConfigError("planning a search space", "--ladder or --no-ladder", "them for a single trial only")
        planned = api.plan_combinations(request, notes(quiet=quiet))
        fits = planned.fits
    else:
        planned = api.plan_trial(request, notes(quiet=quiet), ladder=preset is not None if ladder is None else ladder)
        fits = planned.verdict.fits
    answer(planned, as_json=as_json)
    raise typer.Exit(ExitStatus.DONE if fits else ExitStatus.ANSWER_IS_NO)


def calibrate(
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cuda or cuda:N.")] = "cuda:0",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what training steps take of this machine's GPU, so that plans for it are surer."""
    import dryfit.api as api
    from dryfit.cli.output import answer

    answer(api.calibrate(device, quick=quick, on_note=notes(quiet=quiet)), as_json=as_json)
