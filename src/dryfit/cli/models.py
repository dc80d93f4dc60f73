"""The command ``load``, which says whether a checkpoint can be loaded."""

from pathlib import Path
from typing import Annotated

import typer

from dryfit.cli.options import JsonOption
from dryfit.core.errors import ConfigError, ExitStatus


def load(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model, a trial's best weights, an adapter.")],
    check: Annotated[bool, typer.Option("--check", help="Look at it; no weight is read.")] = False,
    task: Annotated[str | None, typer.Option(help="As in dryfit.load; default: what the folder says.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own code, or its task's.")] = False,
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
