"""Commands on models, memory, data and the machine."""

import codecs
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, cast

import typer

from dryfit.documents.command_options import (
    JsonOption,
    QuietOption,
    SetOption,
    StudyArgument,
    answer,
    notes,
    number_or_text,
)
from dryfit.settings.choices import BuiltInTask, Emitted, ExportFormat
from dryfit.settings.devices import parse_devices
from dryfit.settings.errors import ConfigError, ExitStatus
from dryfit.study.import_options import Format, ImportOptions

if TYPE_CHECKING:
    from dryfit.settings.memory_terms import DeviceSpec
    from dryfit.study.importing import ImportSummary
    from dryfit.study.rehearsals import RehearsalOptions


# The commands ``doctor``, which checks the machine and a study before anything runs, and ``bug-report``.


_PriceOption = Annotated[
    str | None, typer.Option("--price", metavar="AMOUNT", help="Of the device an hour, today: 1.80 or 1.80USD.")
]
_PriceFile = Annotated[
    Path | None, typer.Option("--prices", metavar="FILE", help="Prices by device, each with its day.")
]


def doctor(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY.toml", help="A study file, or its folder; none: the machine alone.")
    ] = None,
    overrides: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the study lives.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="That memory and hours are told of; default: this machine's.")
    ] = None,
    price: _PriceOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check this machine and a study: every row, batch and model. Exit status 1 where a check fails."""
    asked = {"device": device, "price": price}
    examine(study, overrides or (), folder, machine=True, as_json=as_json, quiet=quiet, **asked)


def examine(
    study: Path | None,
    overrides: Sequence[str],
    folder: Path | None,
    *,
    machine: bool,
    as_json: bool,
    quiet: bool,
    device: str | None = None,
    price: str | None = None,
) -> NoReturn:
    """Print each check as it ends, then exit: with status 1 if a check failed.

    Args:
        machine: Whether to check the machine too.
        device: That own code is rehearsed for; None: this machine's.
        price: Of that device an hour; None: no cost is told.
        quiet: Print only checks that ask for action.
    """
    import dryfit.study.functions as api
    from dryfit.documents.command_output import print_finding
    from dryfit.documents.findings import verdict_document

    diagnosis = api.doctor(
        study,
        overrides=overrides,
        folder=folder,
        machine=machine,
        device=device,
        price=price,
        on_note=notes(quiet=quiet),
        on_finding=lambda finding: None if as_json else print_finding(finding, quiet=quiet),
    )
    answer(diagnosis, as_json=as_json, document=verdict_document(diagnosis))
    raise typer.Exit(ExitStatus.DONE if diagnosis.healthy else ExitStatus.ANSWER_IS_NO)


def bug_report(
    study: Annotated[
        Path | None, typer.Argument(metavar="STUDY_DIR", help="A study's folder, or its study.toml; none: the machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The archive to write.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write an archive to attach to a report: versions, checks, settings, last events and logs, without your texts."""
    import dryfit.study.functions as api

    answer(api.bug_report(study, out, on_note=notes(quiet=quiet)), as_json=as_json)


# The command ``import``, which turns data sets of other formats into rows.


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
    import dryfit.study.functions as api
    from dryfit.documents.document import Document

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


# The commands on models, ``train``, ``compare``, ``predict``, ``load``, ``push``, and ``report`` and ``export``.


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
    import dryfit.study.functions as api

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
    if done.model is None:
        typer.echo("stopped; the same command goes on", err=True)
    else:
        answer(done.model, as_json=as_json)
    raise typer.Exit(done.status)


def compare(
    study: StudyArgument,
    top: Annotated[int, typer.Option(help="So many of the best trials by study.metric: 2 to 20.")],
    seeds: Annotated[int, typer.Option(help="So many seeds each: at least 2.")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train the best trials with several seeds and say whether they really differ. Ctrl-C: repeat to go on."""
    import dryfit.study.functions as api

    done = api.compare(study, top=top, seeds=seeds, on_note=notes(quiet=quiet))
    if done.comparison is None:
        typer.echo("stopped; the same command goes on with the runs that are left", err=True)
    else:
        answer(done.comparison, as_json=as_json)
    raise typer.Exit(done.status)


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
    import dryfit.study.functions as api
    from dryfit.documents.document import Document

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
    import dryfit.study.functions as api

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
    import dryfit.study.functions as api
    from dryfit.documents.document import Document

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

    import dryfit.study.functions as api

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
    import dryfit.study.functions as api

    typer.echo(api.export(folder, to, file, trust=trust, on_note=notes(quiet=False)))


# The commands ``plan``, ``calibrate`` and ``rehearse``: the memory that trials or anyone's script will take.


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
    price: _PriceOption = None,
    prices: _PriceFile = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say whether trials fit a device, without a GPU, and how long they take; exit status 1 where not, or unknown."""
    import dryfit.study.functions as api
    from dryfit.study.rehearsals import read_prices

    charged = read_prices(price, prices)
    request = api.plan_input(study, device=device, overrides=overrides or (), preset=preset, task=task, prices=charged)
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


CONTEXT: Final[dict[str, Any]] = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script is the script's own, options too; ``-m`` begins the command line of a module."""

_KEPT = 1 << 14
"""Characters of the script's last output that are kept, to find its traceback in."""


_CommandLine = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT ARGS...", help="A script, -m MODULE, torchrun ..., or accelerate launch ..."),
]
_Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="DEVICE", help="rtx4090, 24GiB, ..., several with commas, or all; default: this machine's."
    ),
]
_Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Devices: it runs as rank 0 of so many; default: its launcher's.")
]


_Python = Annotated[
    str | None,
    typer.Option("--python", metavar="PATH", help="Interpreter of the script; default: the active environment's."),
]


def calibrate(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT ARGS...", help="Of --time: a training script.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cuda or cuda:N; of --measured any, such as l40s.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less.")] = False,
    time: Annotated[bool, typer.Option("--time", help="By a step of a script, so that step times are surer.")] = False,
    measured: Annotated[
        str | None, typer.Option("--measured", metavar="S", help="Seconds of its step, or transformers' results file.")
    ] = None,
    python: _Python = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what training steps take of this machine's GPU, so that plans for it are surer.

    With --time: how long a step of a script takes there, or took (--measured), so that step times are surer.
    """
    if not time:
        if command or measured is not None or python is not None:
            raise ConfigError("calibrating", "a script, --measured or --python without --time", "both, or neither")
        import dryfit.study.functions as api

        answer(api.calibrate(device or "cuda:0", quick=quick, on_note=notes(quiet=quiet)), as_json=as_json)
        return
    from dryfit.documents.device_answers import step_calibrated_document, step_calibrated_json
    from dryfit.study.rehearsals import RehearsalOptions
    from dryfit.study.step_calibrations import calibrate_steps

    if quick:
        raise ConfigError("calibrating", "--quick with --time", "one of them")
    passed = _PassedOn(quiet=quiet)
    chosen = RehearsalOptions(device=device, python=python, on_output=passed.add, on_note=notes(quiet=quiet))
    found = calibrate_steps(_demand_script(command, context), measured, chosen)
    answer(step_calibrated_json(found), as_json=as_json, document=step_calibrated_document(found))


_Largest = Annotated[
    str | None,
    typer.Option("--largest", metavar="NAME", help="Find the largest value that fits: --largest=--batch-size."),
]
_Emit = Annotated[
    Emitted | None, typer.Option("--emit", help="Print a request for the devices that fit: for SkyPilot, or Slurm.")
]
_Table = Annotated[
    Path | None, typer.Option("--emit-table", metavar="FILE", help="Of --emit sbatch: what the cluster calls devices.")
]
_Snapshot = Annotated[
    Path | None, typer.Option("--snapshot", metavar="FILE", help="Write a memory snapshot for memory_viz.")
]
_Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace, for Perfetto.")]
_TrainSteps = Annotated[
    int | None, typer.Option("--train-steps", min=1, metavar="N", help="Steps of the whole run, for its hours.")
]
_WithTimeline = Annotated[bool, typer.Option("--json-timeline", help="As --json, with memory over time in it.")]
_With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME", help="Take a package with a stand-in to be installed, or read own rows."),
]
_Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the timeline.")]
_Ladder = Annotated[
    bool, typer.Option("--ladder", help="Look for TrainingArguments that fit: each is another rehearsal.")
]
_WorstBatch = Annotated[
    bool, typer.Option("--worst-batch/--no-worst-batch", help="Train on the largest batch of the data first.")
]
_Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help="Optimizer steps to see; if not given three, or two long ones."),
]
_KeepCaches = Annotated[bool, typer.Option("--keep-caches", help="Let what libraries download stay in their caches.")]


def rehearse(
    context: typer.Context,
    command: _CommandLine = None,
    device: _Devices = None,
    steps: _Steps = None,
    ranks: _Ranks = None,
    ladder: _Ladder = False,
    worst_batch: _WorstBatch = True,
    html: _Html = None,
    snapshot: _Snapshot = None,
    trace: _Trace = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds until the first step.")] = 1800.0,
    keep_caches: _KeepCaches = False,
    given: _With = None,
    python: _Python = None,
    largest: _Largest = None,
    emit: _Emit = None,
    table: _Table = None,
    train_steps: _TrainSteps = None,
    price: _PriceOption = None,
    prices: _PriceFile = None,
    as_json: JsonOption = False,
    with_timeline: _WithTimeline = False,
    quiet: QuietOption = False,
) -> None:
    """Run a training script without a GPU, and say where its memory peaks and whether it fits.

    Exit status 1 where it does not fit (of several devices: on one of them) or that is unknown, 2 where nothing was
    seen of its memory.
    """
    import dryfit.study.rehearsals as api

    words = _demand_script(command, context)
    passed = _PassedOn(quiet=quiet)
    devices = parse_devices(device or ())
    several = len(devices) > 1 or emit is not None or largest is not None
    _refuse_of_one(several and {"--html": html, "--snapshot": snapshot, "--trace": trace, "--price": price})
    others = {"--emit": emit, "--ladder": ladder or None, "--train-steps": train_steps, "--prices": prices}
    _refuse_with_largest(largest is not None and others)
    first, said = (devices[0].name if devices else None), notes(quiet=quiet)
    options = api.RehearsalOptions(
        first, steps, ranks, worst_batch, ladder, timeout, keep_caches, on_output=passed.add, on_note=said
    )
    options = replace(options, python=python, snapshot=snapshot, trace=trace, given=tuple(given or ()))
    options = replace(options, train_steps=train_steps, prices=api.read_prices(price, prices))
    form = _Form(as_json or with_timeline, with_timeline, emit, table)
    if largest is not None:
        status = _largest(words, largest, options, devices, as_json=form.as_json)
    elif several:
        status = _rehearse_several(words, options, devices, form)
    else:
        status = _rehearse_one(words, options, passed, form, html)
    raise typer.Exit(status)


def _refuse_of_one(given: Mapping[str, object] | Literal[False]) -> None:
    """Refuse options that are about one rehearsal where there are several.

    Raises:
        ConfigError: One was given.
    """
    for name, value in (given or {}).items():
        if value is not None:
            hint = "--prices FILE has the price of each device" if name == "--price" else ""
            raise ConfigError("rehearsing", f"{name} with several devices, --emit or --largest", "one rehearsal", hint)


def _refuse_with_largest(given: Mapping[str, object] | Literal[False]) -> None:
    """Refuse options that say nothing of the largest value that fits.

    Raises:
        ConfigError: One was given.
    """
    if names := [name for name, value in (given or {}).items() if value is not None]:
        raise ConfigError("rehearsing", f"--largest with {', '.join(names)}", "one of them")


@dataclass(frozen=True, slots=True)
class _Form:
    """In which form a rehearsal is answered."""

    as_json: bool
    with_timeline: bool
    emit: Emitted | None
    table: Path | None


def _rehearse_one(
    command: list[str], options: "RehearsalOptions", passed: "_PassedOn", form: _Form, html: Path | None
) -> ExitStatus:
    import dryfit.study.rehearsals as api
    from dryfit.documents.rehearsals import rehearsal_document, rehearsal_json

    interrupted = False
    try:
        seen = api.rehearse_command(api.read_command(command), options)
    except api.RehearsalInterrupted as error:
        seen, interrupted = api.with_run(error.answer, options), True
    if why := api.why_no_cost(seen, options):
        options.on_note(why)
    if html is not None:
        api.write_rehearsal(seen, html, " ".join(command))
    if not seen.went_through:
        passed.add_traceback(seen.traceback)
    told = rehearsal_json(seen, with_timeline=form.with_timeline)
    answer(told, as_json=form.as_json, document=rehearsal_document(seen, ladder=options.ladder))
    if interrupted:
        return ExitStatus.INTERRUPTED
    return ExitStatus.DONE if seen.fits else ExitStatus.ANSWER_IS_NO if seen.ran else ExitStatus.CANNOT_RUN


def _largest(
    command: list[str], name: str, options: "RehearsalOptions", devices: "Sequence[DeviceSpec]", *, as_json: bool
) -> ExitStatus:
    from dryfit.documents.device_answers import largest_values_document, largest_values_json
    from dryfit.study.largest import largest_value

    values = largest_value(command, name, options, devices)
    answer(largest_values_json(values), as_json=as_json, document=largest_values_document(values))
    return ExitStatus.DONE if all(one.is_known for one in values) else ExitStatus.ANSWER_IS_NO


def _rehearse_several(
    command: list[str], options: "RehearsalOptions", devices: "Sequence[DeviceSpec]", form: _Form
) -> ExitStatus:
    import dryfit.study.rehearsals as api
    from dryfit.documents.device_answers import device_answers_document, device_answers_json, emitted
    from dryfit.study.rehearsals import rehearse_devices, request_table

    if form.emit is not None and form.as_json:
        raise ConfigError("rehearsing", "--emit with --json", "one of them")
    requests = request_table(form.emit, form.table)
    seen = rehearse_devices(api.read_command(command), options, devices)
    if form.emit is None:
        told = device_answers_json(seen, with_timeline=form.with_timeline)
        answer(told, as_json=form.as_json, document=device_answers_document(seen))
    else:
        text, left_out = emitted(seen, form.emit, requests)
        sys.stdout.write(text)
        if left_out:
            options.on_note(f"it fits on these too, which have no name there: {', '.join(left_out)}")
    if seen.interrupted:
        return ExitStatus.INTERRUPTED
    fits = bool(seen.fitting) if form.emit is not None else seen.fits
    return ExitStatus.DONE if fits else ExitStatus.ANSWER_IS_NO if seen.ran else ExitStatus.CANNOT_RUN


def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Runs of the file; none: all.")] = None,
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="The file of runs.")] = Path("gpu-memory.toml"),
    update: Annotated[bool, typer.Option("--update", help="Keep what is found as the baseline.")] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write it as Markdown too.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page: what grew, and the timeline.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Rehearse the runs of gpu-memory.toml: whether they fit their budgets, and whether and where they grew.

    Exit status 1 where one grew or does not fit, 2 where that is unknown.
    """
    import dryfit.study.memory_checks as api

    checked = api.check_runs(api.CheckOptions(file, names or (), update, notes(quiet=quiet), page=html, table=markdown))
    answer(checked, as_json=as_json)
    raise typer.Exit(checked.exit_status)


def _demand_script(command: list[str] | None, context: typer.Context) -> list[str]:
    """Return the script and its arguments.

    An option before it that is nearly one of the command's is refused: unknown ones are taken for the script's.

    Raises:
        ConfigError: It is one, and ``-m`` it is not; or there is no script.
    """
    if not command:
        raise ConfigError("rehearsing", "no script was given", "SCRIPT ARGS..., or -m MODULE ARGS...")
    name = command[0].partition("=")[0]
    known = [option for one in context.command.params for option in (*one.opts, *one.secondary_opts)]
    near = get_close_matches(name, known, n=1) if name.startswith("--") and name not in known else []
    if near:
        raise ConfigError(
            "rehearsing", f"there is no option {name}", "an option of rehearse", f"did you mean {near[0]}?"
        )
    return command


class _PassedOn:
    """Writes what the script prints on stderr, as it is: it is the user's own terminal, and progress bars move in it.

    Args:
        quiet: Write nothing but the traceback of a script that failed.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last = ""

    def add(self, data: bytes) -> None:
        """Write what has come."""
        text = self._decoder.decode(data)
        if text and not self._quiet:
            self._last = (self._last + text)[-_KEPT:]
            self._write(text)

    def add_traceback(self, traceback: str) -> None:
        """Write a traceback, unless the script has printed it already."""
        lines = traceback.rstrip().splitlines()
        if lines and lines[-1] not in self._last:
            self._write("\n".join((*lines, "")))

    @staticmethod
    def _write(text: str) -> None:
        getattr(sys.stderr, "write_raw", sys.stderr.write)(text)
        sys.stderr.flush()
