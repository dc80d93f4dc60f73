"""Options and arguments that several commands share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dryfit.reporting.document import Document

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file.")
]
TrialsOption = Annotated[int | None, typer.Option("--trials", min=1, help="The study's total of trials.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY_DIR", help="A study's folder, or its study.toml.")]


def number_or_text(text: str) -> int | str:
    """Return a whole number that is written in digits as a number, any other text as it is."""
    return int(text) if text.isascii() and text.isdigit() else text


def answer(result: object, *, as_json: bool, document: "Document | None" = None) -> None:
    """Print the answer of a command: as one JSON object, or as a document.

    Args:
        document: What is shown of it; None: what the module of the answer says.
    """
    from dryfit.cli.output import show
    from dryfit.reporting.document import document_of, json_text

    if as_json:
        sys.stdout.write(json_text(result) + "\n")
    else:
        show(document_of(result) if document is None else document)


def notes(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line of progress on stderr, or ignores it if ``quiet``."""

    def on_note(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    return on_note
