"""The commands on models, ``train``, ``compare``, ``predict``, ``load``, ``push``, and ``report`` and ``export``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dryfit.cli.options import JsonOption, QuietOption, StudyArgument, answer, notes, number_or_text
from dryfit.core.errors import ConfigError, ExitStatus
from dryfit.core.settings.choices import ExportFormat

if TYPE_CHECKING:
    from dryfit.reporting.finals import TrainedModel

_BEST = "best"
_DEVICES = ("auto", "cpu", "cuda")


def train(
    study: StudyArgument,
    trial: Annotated[
        str,
        typer.Option(metavar="best|N", help="Whose configuration; best: by study.metric."),
    ] = _BEST,
    with_validation: Annotated[
        bool, typer.Option("--with-validation", help="Train on train and validation together.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the trial's own, which repeats it.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="MODEL_DIR", help="Copy the saved model to a new folder.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="With -o: LoRA adapters merged into their base, for plain transformers.")
    ] = False,
    top: Annotated[
        int | None, typer.Option(min=1, help="Instead: run so many of the best trials by study.metric ...")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="... with so many seeds each.")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="Unsupervised, for a debugger.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a trial's configuration once more, score it once on test, save the model. Ctrl-C: repeat to go on."""
    import dryfit.api as api

    several = {"--trial": trial != _BEST, "--seed": seed is not None, "-o": out is not None}
    several |= {"--with-validation": with_validation, "--in-process": in_process, "--merge": merge}
    if merge and out is None:
        raise ConfigError("merging adapters", "--merge does not come without -o", "--merge -o MODEL_DIR")
    if (top is None) != (seeds is None):
        raise ConfigError("training the best trials", "--top and --seeds do not come alone", "both, or none")
    on_note = notes(quiet=quiet)
    if top is not None and seeds is not None:
        _refuse("--top", several)
        outcome = api.train_top(study, top=top, seeds=seeds, on_note=on_note)
        answer(outcome.table, as_json=as_json)
        raise typer.Exit(outcome.status)
    chosen = number_or_text(trial)
    if in_process:
        _refuse("--in-process", {"-o": out is not None, "--with-validation": with_validation, "--json": as_json})
        command = api.in_process(study, trial=chosen, seed=seed)
        os.execv(command[0], command)
    done = api.train(
        study, trial=chosen, with_validation=with_validation, seed=seed, out=out, merged=merge, on_note=on_note
    )
    _print_model(done.model, as_json=as_json)
    raise typer.Exit(done.status)


def compare(
    study: StudyArgument,
    top: Annotated[int, typer.Option(help="So many of the best trials by study.metric: 2 to 20.")],
    seeds: Annotated[int, typer.Option(help="So many seeds each: at least 2.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train the best trials with several seeds and say whether they really differ. Ctrl-C: repeat to go on."""
    import dryfit.api as api

    done = api.compare(study, top=top, seeds=seeds, on_note=notes(quiet=quiet))
    if done.comparison is None:
        typer.echo("stopped; the same command goes on with the runs that are left", err=True)
    else:
        answer(done.comparison, as_json=as_json)
    raise typer.Exit(done.status)


def _print_model(model: "TrainedModel | None", *, as_json: bool) -> None:

    if model is None:
        typer.echo("stopped; the same command goes on", err=True)
    else:
        answer(model, as_json=as_json)


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="What `train` saved, or a trial's best weights.")],
    source: Annotated[str, typer.Argument(metavar="ROWS", help="A .jsonl, .csv or .parquet file, or hub:NAME:SPLIT.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.jsonl", help="One line a row, in order.")],
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Rows at once.")] = 64,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own code, or its task's.")] = False,
    allow_bad: Annotated[bool, typer.Option("--allow-bad", help="Exit 0 although rows are bad.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Predict rows with a trained model; exit status 1 where rows are bad (each has a line that says why)."""
    import dryfit.api as api
    from dryfit.reporting.document import Document

    if device not in _DEVICES:
        raise ConfigError("choosing a device", f"--device {device}", ", ".join(_DEVICES))
    done = api.predict(
        model, source, out, batch=batch, device=device, force=force, trust=trust, on_note=notes(quiet=quiet)
    )
    answer(done, as_json=as_json, document=Document((f"{done.rows} rows, {done.bad} of them bad: {out}",)))
    raise typer.Exit(ExitStatus.ANSWER_IS_NO if done.bad and not allow_bad else ExitStatus.DONE)


def _refuse(option: str, others: dict[str, bool]) -> None:
    """Refuse the options in ``others`` that are given beside ``option``, which would ignore them."""
    given = [name for name, is_given in others.items() if is_given]
    if given:
        raise ConfigError(f"reading {option}", f"{', '.join(given)} beside it", f"{option} without")


def load(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model, a trial's best weights, an adapter.")],
    check: Annotated[bool, typer.Option("--check", help="Look at it; no weight is read.")] = False,
    task: Annotated[str | None, typer.Option(help="As in dryfit.load; default: what the folder says.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own code, or its task's.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a checkpoint can be loaded (--check); exit status 1 where it cannot."""
    import dryfit.api as api

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
    from dryfit.reporting.document import Document

    pushed = api.push(model, repo, public=public, dry_run=dry_run)
    files = (f"{size / 2**20:9.1f} MiB  {name}" for name, size in pushed.sizes.items())
    last = f"sent: {pushed.url}" if pushed.url else f"nothing was sent; {pushed.repo} would get these files"
    answer(pushed, as_json=as_json, document=Document((*files, last)))


def report(
    study: StudyArgument,
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: report/index.html in the study.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Make one HTML page about a study: what is best, how sure, what failed."""
    import webbrowser

    import dryfit.api as api

    path = api.write_report(study, file)
    typer.echo(path)
    if show and not webbrowser.open(path.as_uri()):
        typer.echo("no browser could be opened", err=True)


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A study's (csv, optuna), or a model's (the other formats).")
    ],
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")],
    file: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: in report/ of the study, or beside the model."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the model's own code, or its task's.")] = False,
) -> None:
    """Write all trials as CSV or an Optuna storage, or a model as plain transformers loads it."""
    import dryfit.api as api

    typer.echo(api.export(folder, to, file, trust=trust, on_note=notes(quiet=False)))
