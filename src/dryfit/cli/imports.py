"""The command ``import``, which turns data sets of other formats into rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dryfit.cli.options import JsonOption, QuietOption, answer, notes, number_or_text
from dryfit.core.errors import ConfigError, ExitStatus
from dryfit.importers.options import Format, ImportOptions

if TYPE_CHECKING:
    from dryfit.importers.writing import ImportSummary

FormatArgument = Annotated[Format, typer.Argument(help="How the data set is written down.")]
SourcesArgument = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Its file; redsm5: posts and annotations; hub: its name.")
]
OutOption = Annotated[
    Path, typer.Option("-o", "--out", metavar="DIR|FILE.jsonl", help="Into a folder rows are split by group.")
]
MapOption = Annotated[
    list[str] | None, typer.Option("--map", metavar="FIELD=COLUMN", help="glue, hub: the column of a field.")
]
LabelsOption = Annotated[
    str | None, typer.Option(metavar="NAME,NAME,...", help="glue, hub: names of the classes, from class 0 on.")
]
NoHeaderOption = Annotated[bool, typer.Option("--no-header", help="glue: columns are called 1, 2, ...")]
CriteriaOption = Annotated[Path | None, typer.Option(metavar="FILE", help="redsm5: lines SYMPTOM: what it is.")]
PassageOption = Annotated[
    int | None, typer.Option(metavar="N", help="contractnli: from so many on a passage ends. Default: 900.")
]
NegativesOption = Annotated[
    str | None,
    typer.Option(metavar="N|all", help="Rows with label 0 for each of label 1. Default: contractnli 1, redsm5 all."),
]
ValidationOption = Annotated[
    float | None, typer.Option(metavar="SHARE", help="Into a folder: share of the groups. Default: 0.2.")
]
TestOption = Annotated[float | None, typer.Option(metavar="SHARE", help="Into a folder: the same. Default: 0.")]
SeedOption = Annotated[int | None, typer.Option(min=0, metavar="N", help="Into a folder: of the split. Default: 0.")]


def import_rows(
    form: FormatArgument,
    sources: SourcesArgument,
    out: OutOption,
    columns: MapOption = None,
    labels: LabelsOption = None,
    no_header: NoHeaderOption = False,
    criteria: CriteriaOption = None,
    passage_chars: PassageOption = None,
    negatives: NegativesOption = None,
    validation: ValidationOption = None,
    test: TestOption = None,
    split_seed: SeedOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    allow_bad: Annotated[bool, typer.Option("--allow-bad", help="Exit 0 although something does not fit.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make rows of a data set; exit status 1 where something in it does not fit (each has a line that says why)."""
    import dryfit.api as api
    from dryfit.reporting.document import Document

    given: dict[str, object] = {
        "columns": _column_of(columns) if columns is not None else None,
        "labels": [name.strip() for name in labels.split(",")] if labels is not None else None,
        "header": False if no_header else None,
        "criteria": criteria,
        "passage_chars": passage_chars,
        "negatives": number_or_text(negatives) if negatives is not None else None,
        "validation": validation,
        "test": test,
        "split_seed": split_seed,
    }
    # Only the options given: one that a format does not read is an error.
    options = cast("ImportOptions", {name: value for name, value in given.items() if value is not None})
    done = api.import_rows(form, *sources, out=out, force=force, on_note=notes(quiet=quiet), **options)
    answer(done, as_json=as_json, document=Document(tuple(_lines(done))))
    raise typer.Exit(ExitStatus.ANSWER_IS_NO if done.rejected and not allow_bad else ExitStatus.DONE)


def _column_of(pairs: list[str]) -> dict[str, str]:
    """Parse ``FIELD=COLUMN`` pairs."""
    columns: dict[str, str] = {}
    for pair in pairs:
        field, _, column = pair.partition("=")
        if not column or field in columns:
            given = f"--map {pair}" + (f" beside {field}={columns[field]}" if field in columns else "")
            raise ConfigError("reading the column map", given, "FIELD=COLUMN, each field once")
        columns[field] = column
    return columns


def _lines(done: "ImportSummary") -> Iterator[str]:
    for file in done.files:
        labels = ", ".join(f"{count} of label {label}" for label, count in file.labels.items())
        yield f"{file.file}: {file.rows} rows in {file.groups} groups; {labels}"
    if done.left_out:
        yield f"left out: {done.left_out} rows with label 0 (--negatives)"
    if done.rejected:
        yield f"{done.rejected} do not fit: {done.rejected_file}"
