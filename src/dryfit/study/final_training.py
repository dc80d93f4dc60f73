"""Configurations of a study trained once more, to get models to use."""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.ledger.folder import FinalLayout, StudyLayout
from dryfit.ledger.ledger import StudyLock, lock_owner
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import PlanState, TrialState
from dryfit.processes.attempt import read_messages, read_result
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.failures import ANOTHER_ATTEMPT, attempt_terms, classify, decide_recovery
from dryfit.processes.node import Nodes
from dryfit.settings.devices import node_of, on_cpu
from dryfit.settings.errors import Action, ChildError, ConfigError, DryfitError, PastFailure, StudyBusyError
from dryfit.settings.files import publishing, sync_path, write_model
from dryfit.settings.jobs import ChildResult
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.study_file_reading import load_study_file
from dryfit.settings.task_facts import facts_of, task_word
from dryfit.settings.training_messages import (
    FinalRequest,
    FinalResult,
    OwnTrainingRequest,
    TrainRequest,
    TrainResult,
)
from dryfit.settings.trial import MetricPoint, Outcome, TrialConfig, mean
from dryfit.settings.user_code import FOLDER, CommandTemplate, source_hash
from dryfit.settings.wire import (
    LOG_FILE,
    REQUEST_FILE,
    Checkpointed,
    Job,
    Message,
    Note,
    Progress,
    Report,
    Verdict,
    digest,
)
from dryfit.study.context import AnyStudy, StudySnapshot, choose_place, trial_config
from dryfit.study.driver import StopRequests, drive
from dryfit.study.files import drop_superseded, take_over
from dryfit.study.next_step import End
from dryfit.study.placements import process_count
from dryfit.study.requests import Placement, own_code_request, train_request, training_limits
from dryfit.tasks.scored_rows import FACTS_FILE

# Final training of a user's own Trainer or script: its request and its result.


_PREFIX = "eval_"


def own_final_request(study: StudySnapshot, run: "FinalRun", placement: Placement) -> OwnTrainingRequest:
    """Return the request for a run of the user's own code, as that is today; earlier attempts are gone on from.

    Args:
        study: The study, whose task has such code.
        run: The run.
        placement: How it is run.
    """
    own, paths, trial = study.config.function, study.layout.final(run.name), run.trial
    assert own is not None  # the caller has looked
    body = own_code_request(study, own, trial, paths, placement)
    assert isinstance(body, OwnTrainingRequest)
    steps = [each.step for each in _messages(paths) if isinstance(each, Checkpointed)]
    identity = {"trial": trial.fingerprint, "number": trial.number, "seed": run.seed}
    calling = body.calling.model_copy(
        update={
            "seed": run.seed,
            "fingerprint": digest(identity),
            "reported": (),
            "checkpoint_step": max(steps, default=None) if paths.checkpoints.is_dir() else None,
            "own_file": "",  # today's code: who asks for a model is told where it has changed
        }
    )
    plan = trial.plan
    otherwise = plan is not None and (plan.changes_what_was_asked or placement.choice != plan.execution)
    update = {
        "calling": calling,
        "best_dir": str(paths.files_of(placement.attempt).best) if run.save else None,
        "choice": placement.choice if otherwise else None,
    }
    return body.model_copy(update=update)


def edited_since(study: AnyStudy) -> Path | None:
    """Return the file of the user's own code if it was edited since the study's last session."""
    own, file = study.config.function, study.resolved.own_file
    if own is None or not file or study.resolved.revisions.get(own.function, "") == source_hash(Path(file)):
        return None
    return Path(file)


def _own_final_result(study: StudySnapshot, run: "FinalRun", ended: TrainResult) -> FinalResult:
    """Return the result of a finished run; its output becomes its model by one rename.

    Nothing changes where that was done before.

    Args:
        study: The study.
        run: The run; the files of its last attempt are taken over.
        ended: How training ended, with a value.
    """
    paths = study.layout.final(run.name)
    if run.save and paths.best.is_dir():
        shutil.rmtree(paths.model, ignore_errors=True)
        paths.best.rename(paths.model)
        sync_path(paths.folder)
    best = next((point for point in _reports(paths) if point.value == ended.value), None)
    names = (study.config.study.metric, *study.config.study.also)
    values = (ended.value, *ended.also)
    goals = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    others = best.metrics if best is not None else {}
    same = {_PREFIX + name for name in goals}  # the Trainer's name of a goal
    return FinalResult(
        training=ended,
        step=best.step if best is not None else ended.steps,
        validation=goals | {name: value for name, value in others.items() if name not in {*goals, *same}},
        test=None,
        rows={},
        model_dir=str(paths.model) if run.save and paths.model.is_dir() else None,
    )


def how_it_was_run(layout: StudyLayout, state: StudyState) -> str:
    """Return where the best trial of the user's own code left its weights, and how to run a script as it was run."""
    if state.best is None or state.created is None or not facts_of(state.created.task).makes_trainer:
        return ""
    number, left = state.best.number, layout.trial(state.best.number).best
    script = load_study_file(layout.frozen_file).config.script
    kept = (
        f"what trial {number} has left is in {left}" if left.is_dir() else f"`dryfit train {layout.folder}` trains it"
    )
    if script is None:
        return kept
    command = CommandTemplate.parse(script.command)
    words = command.arguments({**state.best.params, FOLDER: "DIR", "seed": state.best.seed, "number": number})
    target = ["-m", command.target] if command.is_module else [command.target]
    return f"{kept}; it was run by: python {shlex.join([*target, *words])}"


def _reports(paths: FinalLayout) -> list[MetricPoint]:
    """Return all reports of a run in the order of their steps; of those of one step the last."""
    points = {each.point.step: each.point for each in _messages(paths) if isinstance(each, Report)}
    return [points[step] for step in sorted(points)]


def _messages(paths: FinalLayout) -> Iterator[Message]:
    for attempt in range(1, paths.attempts + 1):
        yield from read_messages(paths.attempt(attempt))


# Runs beside a study: a configuration trained once more; and their requests.


@dataclass(frozen=True, slots=True)
class FinalRun:
    """One configuration to train once more.

    Attributes:
        trial: The trial with the configuration.
        seed: Seed of head, dropout and batch order; the trial's own repeats the trial.
        last_step: As in :class:`dryfit.settings.training_messages.FinalRequest`.
        save: Whether to save the model, or to return its scores alone.
        schedule_steps: As in :class:`dryfit.settings.training_messages.FinalRequest`.
        test: Whether to evaluate on test.
        own: The job of the user's own code that trains it; None: dryfit does.
    """

    trial: TrialState
    seed: int
    last_step: int | None = None
    save: bool = True
    schedule_steps: int | None = None
    test: bool = True
    own: Job | None = None

    @property
    def name(self) -> str:
        """Name of the run's folder; different for everything that computes something else."""
        parts = [f"trial-{self.trial.number:04d}", f"seed-{self.seed}"]
        parts += ["with-validation"] if self.last_step is not None else []
        parts += [] if self.save else ["scores"]
        return "-".join([*parts, *([] if self.test else ["no-test"])])

    @property
    def job(self) -> Job:
        """What its process does."""
        return self.own or Job.FINAL

    @property
    def plan(self) -> PlanState | None:
        """The plan of its trial."""
        return self.trial.plan


def final_run(
    trial: TrialState, *, seed: int | None, with_validation: bool, save: bool = True, own: Job | None = None
) -> FinalRun:
    """Return the run that trains a trial's configuration once more.

    Args:
        trial: The trial.
        seed: None: the trial's own.
        with_validation: Train on train and validation together.
        save: As in :class:`FinalRun`.
        own: As in :class:`FinalRun`.

    Raises:
        ConfigError: The trial was refused; or it has no best validation, whose step would be the last; or only the
            user's own code knows which rows it validates on.
    """
    doing = f"training trial {trial.number} once more"
    if trial.outcome is Outcome.REFUSED:
        raise ConfigError(doing, f"it was refused ({trial.reason})", "a trial that fits the device")
    last_step = schedule_steps = None
    if with_validation and own is not None:
        raise ConfigError(doing, "which rows it is validated on, only your own code knows", "without --with-validation")
    if with_validation and trial.folds:
        # As long as its trainings were on average: each had nearly as many rows as this one has.
        last_step = max(1, round(mean([fold.best_step for fold in trial.folds])))
        schedule_steps = max(last_step, round(mean([fold.schedule_steps for fold in trial.folds])))
    elif with_validation:
        last_step = trial.best_step
        if last_step is None:
            allowed = "with --with-validation: a trial that has a best validation, whose step is the last one"
            raise ConfigError(doing, "it has none", allowed, "train it without --with-validation, or another one")
    return FinalRun(trial, trial.seed if seed is None else seed, last_step, save, schedule_steps, own=own)


def final_request(study: StudySnapshot, run: FinalRun, placement: Placement) -> FinalRequest:
    """Return the request for a run."""
    paths, trial = study.layout.final(run.name), run.trial
    known = study.state.baselines
    baseline = known.result.strongest(study.state.goals[0]) if known is not None else None
    return FinalRequest(
        training=_train_request(study, run, paths, placement),
        last_step=run.last_step,
        schedule_steps=run.schedule_steps,
        chosen_dirs=_chosen_dirs(study, run),
        model_dir=str(paths.model) if run.save else None,
        attempt_model_dir=str(paths.files_of(placement.attempt).model),
        study=study.config.study.name,
        searched=trial.value,
        folds=max(1, len(trial.folds)),
        baseline=(baseline.metrics[study.state.goals[0].name], baseline.words) if baseline is not None else None,
        facts_file=str(study.layout.baselines / FACTS_FILE),
        test=run.test,
    )


def _chosen_dirs(study: StudySnapshot, run: FinalRun) -> tuple[str, ...]:
    """Return the folders that may hold what validation chose: the trial's weights, or a later run's."""
    if run.last_step is None:
        return ()
    seeds = dict.fromkeys((run.trial.seed, run.seed))
    later = [final_run(run.trial, seed=seed, with_validation=False) for seed in seeds]
    return (
        str(study.layout.trial(run.trial.number).best),
        *(str(study.layout.final(other.name).model) for other in later),
    )


def _train_request(study: StudySnapshot, run: FinalRun, paths: FinalLayout, placement: Placement) -> TrainRequest:
    """Return the training of a run: of one model, though the trial may have trained one for each fold."""
    config = trial_config(study, run.trial.number, run.trial.params, run.seed)
    config = config.model_copy(update={"data": config.data.model_copy(update={"folds": 1})})
    return train_request(study, config, paths, placement, fingerprint=_fingerprint(run.trial, config))


def _fingerprint(trial: TrialState, config: TrialConfig) -> str:
    """Return the identity of a run: its trial as recorded, with today's data, and its own seed."""
    if not trial.fingerprint:
        return config.fingerprint
    decides = {
        "trial": trial.fingerprint,
        "seed": config.seed,
        "task": task_word(config.task),
        "data": [config.data_fingerprint, config.data.num_labels, config.data.multi_label],
    }
    return digest(decides)


def in_process_request(study: StudySnapshot, run: FinalRun) -> Path:
    """Write the request for :mod:`dryfit.training.in_process` into a folder of its own, which is emptied first."""
    paths = FinalLayout(study.layout.final(run.name).folder.with_name(f"{run.name}-in-process"))
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.attempt(1).mkdir(parents=True)
    choice = run.trial.plan.execution if run.trial.plan is not None else None
    processes = process_count(run.trial.plan, study.config.execution)
    place = choose_place(study.resolved.device, study.nodes, processes=processes)
    body = _train_request(study, run, paths, Placement(1, place, choice))
    request = paths.attempt(1) / REQUEST_FILE
    write_model(request, body, durable=False)
    return request


# Trains configurations of a study once more to get models to use, beside the study, which may be running meanwhile.
#
# Nothing here writes the study's ledger or takes its lock. Each run has a folder under ``final/``, named after all
# that decides its result; the files in there say how far it is, so that the same command goes on.


OnNote = Callable[[str], None]

_IDLE_S = 0.5
_TELL_EVERY_S = 5.0


def finished(study: StudySnapshot, run: FinalRun) -> FinalResult | None:
    """Return the result of a run, if it is done and its model is still there."""
    paths = study.layout.final(run.name)
    for attempt in range(paths.attempts, 0, -1):
        result = _result(study, run, read_result(paths.attempt(attempt)))
        if result is not None:
            gone = run.save and not paths.model.is_dir()
            # The study may have been moved since: the model lies where the study does now.
            return None if gone else result.model_copy(update={"model_dir": str(paths.model) if run.save else None})
    return None


def _result(study: StudySnapshot, run: FinalRun, left: ChildResult | None) -> FinalResult | None:
    """Return the result of a run from what an attempt left; None: the run has not come to its end."""
    match left.answer if left is not None else None:
        case FinalResult() as result:
            return result
        case TrainResult(stopped_by=None) as ended if run.own is not None:
            return _own_final_result(study, run, ended)
        case _:
            return None


def runs_at_once(study: StudySnapshot, runs: Sequence[FinalRun]) -> int:
    """Return how many runs go on side by side: as many as trials; with ``parallel = "auto"`` one for each GPU.

    A run of several processes takes a GPU for each, and all runs count as the largest.
    """
    if study.config.runtime.parallel == "auto" and study.resolved.device is DeviceKind.CUDA:
        processes = max(process_count(run.plan, study.config.execution) for run in runs)
        return max(1, sum(len(node.devices) // processes for node in study.nodes.values()))
    return study.parallelism.most


def run_lock(paths: FinalLayout) -> StudyLock:
    """Return the lock of one run, to be entered.

    Raises:
        StudyBusyError: Another process does the same run.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    owner = lock_owner(paths.lock)
    if owner is not None:
        raise StudyBusyError(f"training in {paths.folder}", f"process {owner} does just that", hint="wait for it")
    return StudyLock(paths.lock)


@dataclass(slots=True)
class _Attempt:
    """An attempt at a run, which has a process or waits for one.

    Attributes:
        number: Its number, from 1.
        plan: The trial's plan, with the fallbacks that this run took besides; the trial's own stays as it is.
        place: Where it runs; empty: nowhere yet.
        past: How the attempts before it failed.
        checkpointed: Whether it has written a checkpoint.
        told_s: When a line on its progress was told last (``time.monotonic()``).
        not_before_s: When it may start (``time.monotonic()``): some failures need time to pass.
    """

    run: FinalRun
    paths: FinalLayout
    number: int
    plan: PlanState | None
    place: str = ""
    past: tuple[PastFailure, ...] = ()
    checkpointed: bool = False
    told_s: float = 0.0
    not_before_s: float = 0.0

    def may_tell(self) -> bool:
        """Whether a line on progress is due."""
        now_s = time.monotonic()
        due = now_s - self.told_s >= _TELL_EVERY_S
        self.told_s = now_s if due else self.told_s
        return due


@dataclass(slots=True)
class FinalTraining:
    """Runs final trainings, several at once, until all are done or a stop is requested.

    Attributes:
        study: The study whose configurations they are.
        nodes: Where children run.
        stops: Requests to stop.
        on_note: Hears what happens, a line at a time.
        results: The result of each run by its name, or the error that ended it.
        running: The attempts that have a process, by its key.
    """

    study: StudySnapshot
    nodes: Nodes
    stops: StopRequests
    on_note: OnNote
    results: dict[str, FinalResult | DryfitError] = field(default_factory=dict[str, FinalResult | DryfitError])
    running: dict[str, _Attempt] = field(default_factory=dict[str, _Attempt])
    _waiting: list[_Attempt] = field(default_factory=list[_Attempt])
    _most: int = 1
    _stopping: bool = False

    def do(self, runs: Sequence[FinalRun], *, most: int) -> None:
        """Do the runs; those that are not in :attr:`results` afterwards were stopped, and go on next time.

        Args:
            runs: The runs, whose locks are held.
            most: How many are done at once.
        """
        self._most = most
        for run in runs:
            paths = self.study.layout.final(run.name)
            take_over(paths, paths.attempts, run.job)  # of an attempt whose end nobody saw
            result = finished(self.study, run)
            if result is not None:
                self.results[run.name] = result
            else:
                self._waiting.append(_Attempt(run, paths, paths.attempts + 1, run.plan))
        drive(self, self.nodes, self.stops)

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        """Start as many attempts as may run at once; none after a request to stop."""
        waiting = [] if self._stopping else self._waiting
        if not self.running and not waiting:
            return None
        due = [attempt for attempt in waiting if attempt.not_before_s <= time.monotonic()]
        return [self._start(attempt) for attempt in due[: max(0, self._most - len(self.running))]] or _IDLE_S

    def on_stop(self, why: End) -> None:
        """Let trainings write a checkpoint."""
        self._stopping = True
        if self.running:
            self.on_note(f"stopping ({why}): {len(self.running)} run(s) write a checkpoint")
        for key, attempt in self.running.items():
            self.nodes.all()[node_of(attempt.place)].ask_stop(key)

    def _start(self, attempt: _Attempt) -> ChildSpec:
        self._waiting.remove(attempt)
        in_use = [other.place for other in self.running.values()]
        processes = process_count(attempt.plan, self.study.config.execution)
        attempt.place = choose_place(self.study.resolved.device, self.study.nodes, in_use, processes=processes)
        choice = attempt.plan.execution if attempt.plan is not None else None
        placement = Placement(attempt.number, attempt.place, choice, attempt_terms(attempt.past))
        own = attempt.run.own is not None
        body = (own_final_request if own else final_request)(self.study, attempt.run, placement)
        limits = training_limits(self.study.config.runtime, attempt.past, own=own)
        key = f"{attempt.run.name}-{attempt.number}"
        self.running[key] = attempt
        return ChildSpec(key, attempt.paths.attempt(attempt.number), body, limits, attempt.place)

    def on_message(self, child: _Attempt, event: ChildMessage) -> None:
        """Tell what a run says; nothing is pruned here, as what was asked for is trained to its end."""
        name = child.run.name
        match event.message:
            case Report(point=point):
                self.nodes.all()[event.node].answer(event.key, Verdict(n=point.n, proceed=True))
                metric = self.study.config.study.metric
                self.on_note(f"{name}: validation {point.n}, step {point.step}: {metric} {point.value:.4f}")
            case Progress(step=step, total_steps=total_steps, loss=loss) if loss is not None and child.may_tell():
                self.on_note(f"{name}: step {step}/{total_steps}, loss {loss:.4f}")
            case Checkpointed():
                child.checkpointed = True
                if child.run.job is Job.FINAL:  # a user's own code has files of any name
                    drop_superseded(child.paths, child.number)
            case Note(text=text):
                self.on_note(f"{name}: {text}")
            case _:
                pass

    def on_exit(self, child: _Attempt, event: ChildExited) -> None:
        """Take a result; else let the run wait for its next attempt, or take the error that ends it."""
        del self.running[event.key]
        take_over(child.paths, child.number, child.run.job)
        result = _result(self.study, child.run, event.result)
        if result is not None:
            self.results[child.run.name] = result
            for folder in (child.paths.checkpoints, child.paths.best):
                shutil.rmtree(folder, ignore_errors=True)
        elif not self._stopping:
            self._follow(child, event)

    def _follow(self, attempt: _Attempt, exited: ChildExited) -> None:
        """Decide what follows a failure."""
        run, past, plan = attempt.run, attempt.past, attempt.plan
        device = None if on_cpu(attempt.place) else attempt.place
        failure = classify(exited.evidence, exited.result, job=run.job)
        answer = decide_recovery(
            failure,
            past,
            retries=self.study.config.runtime.retries,
            reached_checkpoint=attempt.checkpointed,
            fallbacks_left=plan.left_after(exited.evidence.phase) if plan is not None else 0,
        )
        if answer.action not in ANOTHER_ATTEMPT:
            self.results[run.name] = _error(attempt, exited.result, f"{failure.kind}: {failure.sentence}")
            return
        self.on_note(f"{run.name}: {failure.kind}: {failure.sentence} -> {answer.action}")
        if plan is not None and answer.action is Action.FALLBACK:
            plan = replace(plan)
            plan.take_fallback(exited.evidence.phase)
        self._waiting.append(
            replace(
                attempt,
                number=attempt.number + 1,
                plan=plan,
                past=(*past, PastFailure(failure.kind, attempt.checkpointed, answer.action, device)),
                checkpointed=False,
                not_before_s=time.monotonic() + answer.delay_s,
            )
        )


def _error(attempt: _Attempt, result: ChildResult | None, sentence: str) -> DryfitError:
    if result is not None and result.error is not None:
        return result.error.rebuilt()
    log = attempt.paths.attempt(attempt.number) / LOG_FILE
    return ChildError(f"training {attempt.run.name}", f"its process failed ({sentence})", hint=f"see {log}")


def copy_model(model: Path, out: Path) -> None:
    """Copy a saved model to its target by one rename.

    Raises:
        ConfigError: Something is there already.
    """
    refuse_taken(out)
    with publishing(out) as temporary:
        shutil.copytree(model, temporary, dirs_exist_ok=True)


def refuse_taken(out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        ConfigError: Something is there already.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"saving a model to {out}", "something is there already", "a new or an empty folder")
