"""Begin, run, resume, inspect and stop a study, or several one after another."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from dryfit.documents.document import Document, document_of
from dryfit.documents.live_study import StudyFollower
from dryfit.documents.story import TrialStory, trial_story
from dryfit.documents.summary import (
    FAILED,
    NOT_BEGUN,
    LogEnd,
    NodeLogs,
    NodesView,
    SeveralStatuses,
    SeveralSummary,
    StudyEntry,
    StudyStatus,
    StudySummary,
    nodes_view,
    status_document,
    summarise,
)
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import lock_owner, read_ledger
from dryfit.ledger.replay import StudyState
from dryfit.processes.attempt import log_tail
from dryfit.processes.child_spec import demand_secrets
from dryfit.search.followers import storage_url
from dryfit.search.space import Space
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import Action, ConfigError, DryfitError, ExitStatus, LedgerError
from dryfit.settings.files import write_text_atomic
from dryfit.settings.secrets import redacted, secrets_of
from dryfit.settings.study_file import StudyConfig
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.task_facts import facts_of
from dryfit.settings.text import Shown, shown_by
from dryfit.settings.training_messages import TinyLmRequest
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import LOG_FILE
from dryfit.study.arguments import layout_of, space_of, study_file_of
from dryfit.study.child_jobs import run_alone
from dryfit.study.driver import GRACEFUL, NOW, StopSignals
from dryfit.study.handle import Study, trial_of
from dryfit.study.next_step import End
from dryfit.study.observers import Observer, threaded
from dryfit.study.own_functions import MakeTrainer, Objective, objective_study, trainer_study
from dryfit.study.session import SessionResult, finished, folded, read_study, run_session
from dryfit.study.template import DATA_FOLDER, MODEL_FOLDER, TASKS, init_folder, starter_study
from dryfit.study.trial_plans import nothing_fits_text


@dataclass(frozen=True, slots=True)
class TuneResult(Shown):
    """How a run of a study ended.

    Attributes:
        end: Why it ended.
        summary: The study in numbers.
        folder: Where everything lies.
        status: The exit status of the command.
        advice: Where nothing fits the device: what came closest, and changes that would fit. Where it was paused:
            what has to be mended.
    """

    end: End
    summary: StudySummary
    folder: Path
    status: ExitStatus
    advice: str = ""

    @property
    def study(self) -> Study:
        """The study at hand: its trials, its report."""
        return Study(self.folder)


def init(
    folder: Path | str,
    *,
    task: BuiltInTask | str | None = None,
    force: bool = False,
    preset: str | None = None,
) -> list[Path]:
    """Write a commented ``study.toml`` and a small synthetic data set into ``folder``.

    Args:
        folder: The target; made if absent.
        task: What the model learns; None: the preset's task, or classes. ``"all"``: a folder for each task below
            ``folder``, named as the task, for :func:`tune_all`.
        force: Replace files that are there.
        preset: A study file that comes with dryfit, as ``dryfit init --help`` lists them; None: the starter's own.

    Returns:
        The files written.

    Raises:
        ConfigError: A file is already there, and ``force`` is not set; there is no such preset, or it is for another
            task; or the task is a function of your own. Nothing is written then.
    """
    target = Path(folder)
    if task == "all":
        for one in TASKS:
            starter_study(target / one, task=one, force=force, preset=preset)
        return [path for one in TASKS for path in init(target / one, task=one, force=force, preset=preset)]
    if task is not None and task not in list(BuiltInTask):
        raise ConfigError(
            f"writing a study in {target}", f"there is no task {task!r}", ", ".join((*BuiltInTask, "all"))
        )
    named = None if task is None else BuiltInTask(task)
    written = init_folder(target, task=named, force=force, preset=preset)
    if named is None or not facts_of(named).decoder or preset is not None:
        return written
    model = (target / MODEL_FOLDER).absolute()
    source = (target / DATA_FOLDER / "train.jsonl").absolute()
    run_alone(f"writing {model}", TinyLmRequest(folder=str(model), source=str(source), seed=1))
    return [*written, target / MODEL_FOLDER]


def tune(
    study_file: Path | str | None = None,
    *,
    objective: Objective | None = None,
    trainer: MakeTrainer | None = None,
    metric: str | None = None,
    space: Mapping[str, Any] | None = None,
    direction: str | Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    folder: Path | str | None = None,
    observers: Sequence[Observer] = (),
    **tables: Mapping[str, Any],
) -> TuneResult:
    """Search the hyperparameters of a study file, a function or a Trainer, going on where an earlier run stopped.

    Args:
        study_file: A study file, or a folder with a ``study.toml``; not beside a function.
        objective: A function that takes a :class:`dryfit.Trial` and returns a number. Each call is in a process of its
            own, so it must be importable: defined at the top of a module, or of the script that runs.
        trainer: A function that takes a :class:`dryfit.Trial` and returns a ``transformers.Trainer``, importable too;
            dryfit trains it. Not beside ``objective``.
        metric: With ``trainer``: what is optimised, by its name in the Trainer's evaluations.
        space: With a function: its parameters, each as ``[space]`` of a study file has it, a list of choices or a
            table with ``low`` and ``high``.
        direction: With a function: ``"minimize"`` (the default, but for metrics of a Trainer other than its loss) or
            ``"maximize"``; of an objective that returns a tuple, the names of its numbers, in order, each with its
            direction.
        overrides: ``key=value`` pairs that replace keys of the file.
        trials: The study's total of counted trials; replaces ``study.trials``.
        folder: Where the study lives. Of a file, see :func:`layout_of` for the default; of a function, a folder with
            its name and ``-study`` in the current one.
        observers: Called with what happens.
        tables: With a function: further tables of a study file, ``search={"sampler": "random"}``.

    Raises:
        DryfitError: It could not run.
    """
    given = {"an objective": objective, "a trainer": trainer, f"a study file ({study_file})": study_file}
    named = [what for what, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError("starting a study", " and ".join(named), "one of them")
    if metric is not None and trainer is None:
        raise ConfigError("starting a study", f"metric={metric!r}, and no trainer", "trainer= and metric=")
    asked, totals = {**tables, "space": space or {}}, with_total(overrides, trials)
    own = None
    if trainer is not None:
        own = trainer_study(trainer, asked, metric=metric, direction=direction, folder=folder, overrides=totals)
    elif objective is not None:
        own = objective_study(objective, asked, direction=direction, folder=folder, overrides=totals)
    if own is not None:
        return result_of(run_session(own[0].config, space_of(own[0]), own[1], observers))
    if study_file is None or space is not None or direction is not None or tables:
        found = "a space or a direction" if space is not None or direction is not None else ", ".join(tables)
        found = f"{found or 'no study file'}, and no objective"
        raise ConfigError("starting a study", found, "a study file, or objective= or trainer=, and space=")
    path = study_file_of(Path(study_file))
    loaded = load_study_file(path, with_total(overrides, trials))
    layout = StudyLayout(Path(folder).resolve()) if folder is not None else layout_of(path)
    return result_of(run_session(loaded.config, space_of(loaded), layout, observers))


def resume(
    folder: Path | str,
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    observers: Sequence[Observer] = (),
) -> TuneResult:
    """Go on with a study exactly as it was last run, ``--set`` of that run included.

    Raises:
        LedgerError: There is no study in the folder.
        DryfitError: It could not run.
    """
    layout = layout_of(folder)
    read_study(layout)
    loaded = load_study_file(layout.frozen_file, with_total(overrides, trials))
    return result_of(run_session(loaded.config, space_of(loaded), layout, observers))


def open_study(folder: Path | str) -> StudyState:
    """Read a study, running or not, without owning it.

    Raises:
        LedgerError: There is no study in the folder.
    """
    return read_study(layout_of(folder))


def status(folder: Path | str) -> StudySummary:
    """Return a summary of a study, running or not.

    Raises:
        LedgerError: There is no study in the folder.
    """
    layout = layout_of(folder)
    return summarise(read_study(layout), layout)


def nodes(folder: Path | str) -> NodesView:
    """Return the known state of a study's machines, running or not.

    Raises:
        LedgerError: There is no study in the folder.
    """
    layout = layout_of(folder)
    return nodes_view(read_study(layout), lambda node: _age_s(layout.node_heard(node)))


def _age_s(file: Path) -> float | None:
    """Return how long ago a file was written to; None where it is not there."""
    with suppress(OSError):
        return max(0.0, time.time() - file.stat().st_mtime)
    return None


def node_logs(folder: Path | str, node: str) -> NodeLogs:
    """Return the ends of the logs of a machine of the last session: its agent's, and of the trials that run there.

    Raises:
        LedgerError: There is no study in the folder.
        ConfigError: No such machine has joined.
    """
    layout = layout_of(folder)
    state = read_study(layout)
    view = nodes_view(state)
    here = next((one for one in view.nodes if one.node == node), None)
    if here is None:
        joined = ", ".join(one.node for one in view.nodes) or "none has joined"
        raise ConfigError("reading the logs of a node", f"{node!r} is none of the last session", joined)
    files = {"agent": layout.node_log(node), "fork server": layout.node_server_log(node)}
    for number in here.trials:
        attempt = trial_of(state, number).attempts[-1].number
        files[f"trial {number}"] = layout.trial(number).attempt(attempt) / LOG_FILE
    return NodeLogs(
        node=node, logs=tuple(LogEnd(name=name, file=str(file), text=log_tail(file)) for name, file in files.items())
    )


def agent(
    folder: Path | str | None = None,
    *,
    join: str | None = None,
    token_file: Path | str | None = None,
    fingerprint: str | None = None,
    wait_s: float = 600.0,
    on_note: Callable[[str], None] = lambda _text: None,
) -> str:
    """Run trials of a study on this machine until its session is over, or SIGTERM or SIGINT ask this process to end.

    Args:
        folder: The study's folder, in which address and token lie; it must be shared between the machines.
        join: ``HOST:PORT`` instead, with ``token_file``.
        token_file: A copy of the study's ``nodes/token``.
        fingerprint: With ``join``, of a study with ``nodes.tls``: the SHA-256 of its certificate.
        wait_s: How long to wait for a control process, at the start and whenever it is gone.
        on_note: Called with what happens, in sentences.

    Returns:
        Why it ended.

    Raises:
        ConfigError: Neither a folder is given, nor an address with a token.
        DryfitError: It may not join, finds nobody to join, or this machine lacks what trials need.
    """
    from dryfit.processes.agent import serve

    layout = layout_of(folder) if folder is not None else None
    token = Path(token_file) if token_file is not None else None
    return serve(layout, join, token, wait_s, on_note, fingerprint)


def story(folder: Path | str, number: int) -> TrialStory:
    """Return everything known of one trial, in the order in which it happened.

    Raises:
        LedgerError: There is no study in the folder.
        ConfigError: It has no such trial.
    """
    layout = layout_of(folder)
    events = read_ledger(layout.ledger)
    state = folded(events, layout)
    return trial_story(state, trial_of(state, number).number, events, layout)


def follow(folder: Path | str) -> StudyFollower:
    """Watch a study that another process runs, without disturbing it.

    Raises:
        LedgerError: There is no study in the folder.
    """
    layout = layout_of(folder)
    if not layout.ledger.exists():
        raise LedgerError(
            f"watching the study in {layout.folder}",
            "there is none (no ledger.jsonl)",
            hint=f"start it with `dryfit tune {layout.study_file}`",
        )
    return StudyFollower(layout)


def owner(folder: Path | str) -> int | None:
    """Return the process id that runs a study now; None where none does."""
    return lock_owner(layout_of(folder).lock)


def stop(folder: Path | str, *, now: bool = False) -> int | None:
    """Ask the process that runs a study to stop.

    Args:
        now: Do not wait for checkpoints.

    Returns:
        The process id that was asked; None where no process runs the study.

    Raises:
        LedgerError: There is no study in the folder.
    """
    layout = layout_of(folder)
    if not layout.ledger.exists():
        raise LedgerError(f"stopping the study in {layout.folder}", "there is none (no ledger.jsonl)")
    asked = lock_owner(layout.lock)
    if asked is not None:
        write_text_atomic(layout.stop_request, NOW if now else GRACEFUL)
    return asked


def with_total(overrides: Sequence[str], trials: int | None) -> tuple[str, ...]:
    """Return overrides with the study's total of trials added where one is given."""
    return (*overrides, f"study.trials={trials}") if trials is not None else tuple(overrides)


def result_of(session: SessionResult) -> TuneResult:
    """Return how a session ended as the result of this API."""
    return TuneResult(
        end=session.end,
        summary=summarise(session.state, session.layout),
        folder=session.layout.folder,
        status=exit_status(session.end, session.state),
        advice=_advice(session),
    )


def _advice(session: SessionResult) -> str:
    match session.end:
        case End.REFUSED:
            return nothing_fits_text(session.state)
        case End.PAUSED | End.BROKEN:
            return session.why or _stopped_by(session.state)
        case _:
            return ""


def _stopped_by(state: StudyState) -> str:
    """Return the failure for whose sake a session has stopped; empty where it was none of a trial."""
    for trial in state.open_trials:
        failure = trial.attempts[-1].failure if trial.attempts else None
        if failure is not None and failure.action in (Action.PAUSE, Action.STOP_STUDY):
            return f"trial {trial.number}: {failure.kind}: {failure.sentence}"
    return ""


@document_of.register
def _(result: TuneResult) -> Document:
    status = status_document(result.summary, str(result.end).replace("_", " "))
    return Document((*status.blocks, *result.advice.splitlines(), f"everything lies in {result.folder}"))


shown_by(TuneResult, document_of)


def exit_status(end: End, state: StudyState) -> ExitStatus:
    """Return the exit status of a command after a study's session."""
    match end:
        case End.DONE | End.NO_IMPROVEMENT:
            useful = state.counts[Outcome.COMPLETE] + state.counts[Outcome.PRUNED]
            return ExitStatus.DONE if useful else ExitStatus.ANSWER_IS_NO
        case End.TOO_MANY_FAILURES | End.SAME_FAILURE | End.REFUSED:
            return ExitStatus.ANSWER_IS_NO
        case End.BAD_DATA:
            return ExitStatus.CANNOT_RUN
        case End.MAX_HOURS | End.STOPPED | End.PAUSED:
            return ExitStatus.STOPPED
        case End.INTERRUPTED:
            return ExitStatus.INTERRUPTED
        case End.BROKEN:
            return ExitStatus.BUG


_GRAVEST_FIRST: Final = (
    ExitStatus.INTERRUPTED,
    ExitStatus.BUG,
    ExitStatus.STOPPED,
    ExitStatus.CANNOT_RUN,
    ExitStatus.ANSWER_IS_NO,
    ExitStatus.DONE,
)
"""A study that the same command would continue (3) comes before those for which it would do nothing (2, 1)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a study among several.

    Attributes:
        number: From 1.
        of: How many there are.
        name: ``study.name``.
        folder: Where it lives.
    """

    number: int
    of: int
    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class StudyRun:
    """The outcome of one of the studies.

    Attributes:
        turn: Which one.
        result: How its session ended; None where there was none.
        error: Why it could not run.
        worked_on: False where it was done before, or its turn did not come.
    """

    turn: Turn
    result: TuneResult | None = None
    error: DryfitError | None = None
    worked_on: bool = True

    @property
    def status(self) -> ExitStatus | None:
        """The exit status for this study alone; None where its turn did not come."""
        if self.error is not None:
            return self.error.exit_status
        return None if self.result is None else self.result.status


@dataclass(frozen=True, slots=True)
class TuneAllResult:
    """The outcome of several studies.

    Attributes:
        studies: One for each, in the given order.
        stopped: How a signal ended the run before its last study; None: no signal came.
        summary: All of them in numbers.
    """

    studies: tuple[StudyRun, ...]
    stopped: End | None
    summary: SeveralSummary

    @property
    def status(self) -> ExitStatus:
        """The exit status of the command."""
        return self.summary.status


_Ready: TypeAlias = tuple[Turn, StudyConfig, Space, StudyLayout]
"""A study that was read and checked."""


def tune_all(
    studies: Sequence[Path | str],
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    observers: Sequence[Observer] = (),
    on_turn: Callable[[Turn], None] = lambda _: None,
    on_end: Callable[[StudyRun], None] = lambda _: None,
) -> TuneAllResult:
    """Search several studies one after another, going on where an earlier run stopped.

    All files are read and checked before the first study begins. Each has a session of its own, which releases
    everything before the next one begins. A study that fails, pauses or cannot run does not keep the others from
    running. A signal stops the running one, and no further one begins; so does an internal error. The same call
    continues: for a study that is done, and whose file and rows have not changed, no process is started.

    Args:
        studies: Study files, or folders with a ``study.toml``; each lives where :func:`layout_of` says.
        overrides: ``key=value`` pairs that replace keys of every file.
        trials: Each study's total of counted trials; replaces ``study.trials``.
        observers: Called with what happens in each of the studies.
        on_turn: Called with each study before anything is done for it.
        on_end: Called with the outcome of each study.

    Raises:
        ConfigError: A file is wrong, or two studies are one; all problems of all files at once. Nothing has begun.
    """
    rows = _checked(studies, with_total(overrides, trials))
    threads = [threaded(observer) for observer in observers]  # one that is detached is so for all the studies
    runs: list[StudyRun] = []
    stopped = None
    with StopSignals() as signals:
        for ready in rows:
            stopped = signals.why
            if stopped is not None or any(run.status is ExitStatus.BUG for run in runs):
                runs.append(StudyRun(ready[0], worked_on=False))
                continue
            on_turn(ready[0])
            run = _run(ready, threads, signals)
            runs.append(run)
            on_end(run)
    return TuneAllResult(tuple(runs), stopped, _summary(rows, runs, stopped))


def status_all(studies: Sequence[Path | str]) -> SeveralStatuses:
    """Return how far several studies are, running or not; one that cannot be read does not hide the others.

    Args:
        studies: Their folders, or their study files.
    """
    entries = tuple(_status_of(layout_of(study)) for study in studies)
    unreadable = any(entry.error is not None for entry in entries)
    return SeveralStatuses(status=ExitStatus.CANNOT_RUN if unreadable else ExitStatus.DONE, studies=entries)


def _status_of(layout: StudyLayout) -> StudyStatus:
    try:
        summary, owner = summarise(read_study(layout), layout), lock_owner(layout.lock)
    except (DryfitError, OSError) as error:
        text = redacted(str(error), secrets_of(os.environ))
        return StudyStatus(folder=str(layout.folder), owner=None, error=text, summary=None)
    return StudyStatus(folder=str(layout.folder), owner=owner, error=None, summary=summary)


def overall(statuses: Sequence[ExitStatus]) -> ExitStatus:
    """Return the gravest of several exit statuses.

    3 comes before 2 and 1: a script that repeats the command on a 3 must do so also where another study is at fault.
    """
    return next(status for status in _GRAVEST_FIRST if status in statuses)


def _run(ready: _Ready, observers: Sequence[Observer], signals: StopSignals) -> StudyRun:
    turn, config, space, layout = ready
    try:
        before = finished(config, layout)
        if before is not None:
            return StudyRun(turn, result_of(before), worked_on=False)
        return StudyRun(turn, result_of(run_session(config, space, layout, observers, signals)))
    except DryfitError as error:
        return StudyRun(turn, error=error)


def _checked(studies: Sequence[Path | str], overrides: Sequence[str]) -> list[_Ready]:
    """Read and check every study; nothing is started, and nothing written.

    Raises:
        ConfigError: With all problems of all files.
    """
    if not studies:
        raise ConfigError("starting several studies", "none was named", "study files, or folders with a study.toml")
    rows: list[_Ready] = []
    problems: list[DryfitError] = []
    folders: dict[Path, Path | str] = {}
    for number, study in enumerate(studies, start=1):
        try:
            file = study_file_of(Path(study))
            layout = layout_of(file)
            if layout.folder in folders:
                raise _same_folder(study, folders[layout.folder], layout)
            folders[layout.folder] = study
            loaded = load_study_file(file, overrides)
            storage_url(loaded.config.search.mirror, os.environ)
            demand_secrets(loaded.config.function, os.environ, table=loaded.config.function_table)
            turn = Turn(number, len(studies), loaded.config.study.name, layout.folder)
            rows.append((turn, loaded.config, space_of(loaded), layout))
        except DryfitError as error:
            problems.append(_naming(study, error))
    if problems:
        raise _all_problems(problems, len(studies))
    return rows


def _same_folder(study: Path | str, first: Path | str, layout: StudyLayout) -> ConfigError:
    return ConfigError(
        f"looking for a study at {study}",
        f"it lives in {layout.folder}, and so does {first}, which was named before it",
        "each study once, and a folder for each",
    )


def _naming(study: Path | str, error: DryfitError) -> DryfitError:
    """Name the study in an error: they may all be called study.toml."""
    if str(study) in error.doing:
        return error
    return type(error)(f"{error.doing}, of {study}", error.found, error.allowed, error.hint)


def _all_problems(problems: Sequence[DryfitError], of: int) -> DryfitError:
    """Return one error with all problems, each with its parts."""
    if len(problems) == 1:
        return problems[0]
    texts = [line for problem in problems for line in str(problem).splitlines()]
    found = [f"{len(problems)} cannot run:", *(f"  {line}" for line in texts), "none has begun"]
    return ConfigError(f"reading {of} studies", "\n".join(found))


def _summary(rows: Sequence[_Ready], runs: Sequence[StudyRun], stopped: End | None) -> SeveralSummary:
    statuses = [run.status for run in runs if run.status is not None]
    if stopped is not None:
        statuses.append(ExitStatus.INTERRUPTED if stopped is End.INTERRUPTED else ExitStatus.STOPPED)
    entries = tuple(_entry(layout, run) for (*_, layout), run in zip(rows, runs, strict=True))
    return SeveralSummary(status=overall(statuses), studies=entries)


def _entry(layout: StudyLayout, run: StudyRun) -> StudyEntry:
    result, error = run.result, run.error
    return StudyEntry(
        study=run.turn.name,
        folder=str(run.turn.folder),
        status=run.status,
        end=str(result.end) if result is not None else FAILED if error is not None else NOT_BEGUN,
        worked_on=run.worked_on,
        error=None if error is None else redacted(str(error), secrets_of(os.environ)),
        advice="" if result is None else result.advice,
        summary=_status_of(layout).summary if result is None else result.summary,
    )
