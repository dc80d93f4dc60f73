"""The commands ``load``, which says whether a checkpoint can be loaded, and ``push``, which sends one to a hub."""

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
    from dryfit.cli.output import answer

    if not check:
        raise ConfigError(
            f"loading {folder}",
            "a command cannot keep a model",
            allowed=f'dryfit.load("{folder}") in Python',
            hint=f"dryfit load --check {folder} says whether that would work",
        )
    health = api.check(folder, task=task, trust=trust)
    answer(health, as_json=as_json)
    if not health.healthy:
        raise typer.Exit(ExitStatus.ANSWER_IS_NO)


def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model that `dryfit train` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; made if need be.")],
    public: Annotated[bool, typer.Option("--public", help="Everyone may see a new repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send a trained model, its tokenizer and its card to a Hugging Face hub (HF_ENDPOINT, HF_TOKEN)."""
    import dryfit.api as api
    from dryfit.cli.output import answer
    from dryfit.reporting.document import Document

    pushed = api.push(model, repo, public=public, dry_run=dry_run)
    files = (f"{size / 2**20:9.1f} MiB  {name}" for name, size in pushed.sizes.items())
    last = f"sent: {pushed.url}" if pushed.url else f"nothing was sent; {pushed.repo} would get these files"
    answer(pushed, as_json=as_json, document=Document((*files, last)))
