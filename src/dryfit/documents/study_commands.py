"""The commands that work on studies: init, tune, resume, status, show, stop, agent, nodes, schema."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import typer

from dryfit.documents.command_options import (
    JsonOption,
    QuietOption,
    SetOption,
    StudyArgument,
    TrialsOption,
    answer,
    notes,
)
from dryfit.documents.commands import examine
from dryfit.settings.choices import DEFAULT_TASK, PRESETS, BuiltInTask
from dryfit.settings.errors import ConfigError, ExitStatus

if TYPE_CHECKING:
    from dryfit.study.functions import TuneResult


_ALL: Final[Literal["all"]] = "all"
_WIDEST: Final = max(map(len, PRESETS))
PRESET_LINES: Final = "\b\n" + "\n".join(
    ["Presets:", *(f"  {name:<{_WIDEST}}  {line}" for name, line in PRESETS.items())]
)
"""What comes after the help of ``init``, as it stands."""


def _task_or_all(text: str) -> str:
    """Return the name of a task, or of all."""
    if text not in (*BuiltInTask, _ALL):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join((*BuiltInTask, _ALL))}")
    return text


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made when absent.")],
    task: Annotated[
        str | None,
        typer.Option(
            parser=_task_or_all,
            metavar=f"[{'|'.join((*BuiltInTask, _ALL))}]",
            help=f"What the model learns; default: the preset's task, or {DEFAULT_TASK}. {_ALL}: a study of each.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One of the study files below; default: a small commented one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE|hub:NAME", help="Your own rows: .csv, .jsonl, .parquet. No synthetic data then."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of --data: the text.")] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of --data: the class, or the number.")] = None,
    criterion: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of --data: what is asked of it.")] = None,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of --data: what no split may cut.")] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your own training script; what it is run with follows after --."),
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="Of --script.")] = None,
) -> None:
    """Write a commented study.toml: of a small synthetic data set, of your own rows, or of a training script."""
    import dryfit.study.functions as api
    from dryfit.study.template import MODEL_FOLDER, STUDY_FILE

    columns = {"text": text, "label": label, "criterion": criterion, "group": group}
    given = {role: column for role, column in columns.items() if column is not None}
    if script is not None:
        others = {"--task": task, "--preset": preset, "--data": data, **{f"--{role}": "" for role in given}}
        if refused := [option for option, value in others.items() if value is not None]:
            raise ConfigError("writing a study of a script", f"{refused[0]} beside --script", "one of them")
        _hint(api.init_script(folder, script, words or (), force=force))
        return
    if words:
        raise ConfigError("writing a study", f"{words[0]!r} is given without --script", "--script FILE before it")
    if data is not None:
        if task == _ALL:
            raise ConfigError("writing a study of your own rows", f"--task {_ALL} is of synthetic ones", "one task")
        named = BuiltInTask(task) if task is not None else None
        file = _init_asking(folder, data, given, task=named, force=force, preset=preset)
        _hint(file)
        return
    if given:
        raise ConfigError("writing a study", f"--{next(iter(given))} is given without --data", "--data FILE beside it")
    one = BuiltInTask(task) if task is not None and task != _ALL else None
    written = api.init(folder, task=_ALL if task == _ALL else one, force=force, preset=preset)
    for path in written:
        typer.echo(path)
    if any(path.name == MODEL_FOLDER for path in written):
        typer.echo("the model is a toy: tiny, of random weights, with a tokenizer trained on these rows", err=True)
    studies = [path.parent if task == _ALL else path for path in written if path.name == STUDY_FILE]
    typer.echo(f"search with: dryfit tune {' '.join(map(str, studies))}", err=True)


def _hint(file: Path) -> None:
    typer.echo(file)
    typer.echo(f"check it with: dryfit doctor {file}; search with: dryfit tune {file}", err=True)


def _init_asking(
    folder: Path, data: str, columns: Mapping[str, str], *, task: BuiltInTask | None, force: bool, preset: str | None
) -> Path:
    """Write a study of the user's own rows; on a terminal, ask which column is meant where several may be.

    Raises:
        DryfitError: As :func:`dryfit.study.functions.init_rows`; also where it is not clear, and nobody can be asked.
    """
    import dryfit.study.functions as api
    from dryfit.study.own_data import AmbiguousError

    given, on_note = dict(columns), notes(quiet=False)
    while True:
        try:
            return api.init_rows(folder, data, columns=given, task=task, force=force, preset=preset, on_note=on_note)
        except AmbiguousError as error:
            if not (error.candidates and is_asked()):
                raise
            given[error.role] = _asked(error.role, error.candidates)


def is_asked() -> bool:
    """Return whether somebody sits at a terminal, who reads a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _asked(role: str, candidates: tuple[str, ...]) -> str:
    """Return the column that the user chooses, by its name or number."""
    for number, name in enumerate(candidates, start=1):
        typer.echo(f"  {number}: {name}", err=True)
    while True:
        answer: str = typer.prompt(f"which column is the {role}?", err=True)
        if answer in candidates:
            return answer
        if answer.isdigit() and 0 < int(answer) <= len(candidates):
            return candidates[int(answer) - 1]
        typer.echo(f"a name, or a number from 1 to {len(candidates)}", err=True)


def tune(
    studies: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY.toml...", help="A study file, or its folder; several run one after another."),
    ],
    trials: TrialsOption = None,
    overrides: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the study lives.")] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            "--nodes", metavar="listen|slurm:N|ray[:ADDRESS]", help="Replace nodes.launch: who starts agents elsewhere."
        ),
    ] = None,
    sbatch: Annotated[
        str | None, typer.Option(metavar="OPTIONS", help="Replace nodes.sbatch: more options of Slurm's sbatch.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the study as `doctor` does, print what --nodes submits; no trial.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Search, or go on with a search. Ctrl-C once: checkpoint and stop; twice: now."""
    import dryfit.study.functions as api
    from dryfit.documents.live_progress import watching

    changed = api.with_nodes(overrides or (), launch, sbatch)
    if len(studies) > 1:
        if given := ", ".join(name for name, is_given in (("--dir", folder), ("--dry-run", dry_run)) if is_given):
            raise ConfigError("starting several studies", f"{given} beside them", f"{given} with one study")
        _tune_all(studies, changed, trials, as_json=as_json, quiet=quiet)
    (study,) = studies
    if dry_run:
        if (submitted := api.submitted_text(study, overrides=changed, folder=folder)) and not as_json:
            typer.echo(submitted)
        examine(study, api.with_total(changed, trials), folder, machine=False, as_json=as_json, quiet=quiet)
    with watching(quiet=quiet) as observer:
        observers = [observer] if observer is not None else []
        result = api.tune(study, overrides=changed, trials=trials, folder=folder, observers=observers)
    _finish(result, as_json=as_json)


def resume(
    study: StudyArgument,
    trials: TrialsOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with a study as it was last run."""
    import dryfit.study.functions as api
    from dryfit.documents.live_progress import watching

    with watching(quiet=quiet) as observer:
        observers = [observer] if observer is not None else []
        result = api.resume(study, overrides=overrides or (), trials=trials, observers=observers)
    _finish(result, as_json=as_json)


def status(
    studies: Annotated[
        list[Path],
        typer.Argument(metavar="STUDY_DIR...", help="A study's folder, or its study.toml; several: a row each."),
    ],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until the study ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print how far a study is and what went wrong in it, whether it runs or not."""
    import dryfit.study.functions as api
    from dryfit.documents.live_progress import watch as watch_study
    from dryfit.documents.summary import owner_text, status_document

    if watch and as_json:
        raise ConfigError("looking at a study", "--watch and --json", "one of them: --json prints one object")
    if len(studies) > 1:
        if watch:
            raise ConfigError("looking at several studies", "--watch beside them", "--watch with one study")
        several = api.status_all(studies)
        answer(several, as_json=as_json)
        raise typer.Exit(several.status)
    (study,) = studies
    if watch:
        try:
            watch_study(api.follow(study))
        except KeyboardInterrupt:
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
    else:
        summary = api.status(study)
        answer(summary, as_json=as_json, document=status_document(summary, owner_text(api.owner(study))))


def show(
    study: StudyArgument,
    trial: Annotated[int | None, typer.Argument(min=0, help="Tell this trial's story.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the trials of a study, or everything known of one."""
    import dryfit.study.functions as api
    from dryfit.documents.command_output import show as show_document
    from dryfit.documents.summary import study_document

    if trial is not None:
        answer(api.story(study, trial), as_json=as_json)
        return
    if as_json:
        raise ConfigError(
            "showing a study",
            "--json without a trial",
            "the number of a trial",
            "`dryfit status --json` sums a study up",
        )
    show_document(study_document(api.open_study(study), api.layout_of(study)))


def stop(
    study: StudyArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for checkpoints.")] = False,
) -> None:
    """Ask a running study to checkpoint and stop."""
    import dryfit.study.functions as api

    owner = api.stop(study, now=now)
    if owner is None:
        typer.echo("nobody runs this study", err=True)
        raise typer.Exit(ExitStatus.ANSWER_IS_NO)
    typer.echo(f"asked process {owner} to stop", err=True)


def schema() -> None:
    """Print the JSON schema of a study file."""
    from dryfit.settings.study_file_text import study_json_schema

    typer.echo(json.dumps(study_json_schema(), indent=2))


def _tune_all(
    studies: Sequence[Path], overrides: Sequence[str], trials: int | None, *, as_json: bool, quiet: bool
) -> NoReturn:
    import dryfit.study.functions as api
    from dryfit.documents.live_progress import watching

    with watching(quiet=quiet) as display:
        hooks: dict[str, Any] = {}
        if display is not None:
            hooks = {"observers": [display], "on_turn": display.on_turn, "on_end": display.on_end}
        result = api.tune_all(studies, overrides=overrides, trials=trials, **hooks)
    answer(result.summary, as_json=as_json)
    raise typer.Exit(result.status)


def _finish(result: "TuneResult", *, as_json: bool) -> None:
    import dryfit.study.functions as api
    from dryfit.documents.command_output import end_document
    from dryfit.documents.command_output import show as show_document
    from dryfit.documents.summary import study_document

    if as_json:
        answer(result.summary, as_json=True)
    else:
        show_document(study_document(api.open_study(result.folder), api.layout_of(result.folder)))
    show_document(end_document(result, advice_alone=as_json))
    raise typer.Exit(result.status)


def agent(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[STUDY_DIR]", help="The study's folder, shared by all machines.")
    ] = None,
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the study listens.")] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A copy of the study's nodes/token.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Of the certificate to demand, where the study has nodes.tls.")
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, metavar="SECONDS", help="For a study that runs.")] = 600.0,
    quiet: QuietOption = False,
) -> None:
    """Run trials of a study with [nodes] on this machine. Ctrl-C: they go on elsewhere."""
    from dryfit.study.functions import agent as run_agent

    on_note = notes(quiet=quiet)
    ended = run_agent(folder, join=join, token_file=token_file, fingerprint=fingerprint, wait_s=wait_s, on_note=on_note)
    typer.echo(ended, err=True)


def nodes(
    study: StudyArgument,
    logs: Annotated[
        str | None, typer.Option(metavar="NODE", help="What this one says: ends of its agent's log and its trials'.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the machines that joined a study: devices, trials, losses."""
    import dryfit.study.functions as api

    answer(api.nodes(study) if logs is None else api.node_logs(study, logs), as_json=as_json)
