"""Configurations of a study trained once more, to be used: beside the study, which may be running meanwhile.

Nothing here writes the study's ledger or takes its lock. Each run has a folder of its own under ``final/``, named after
all that decides what it computes; what stands in there says how far it is, so that the same command goes on.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.core.errors import ChildError, ConfigError, DryfitError, StudyBusyError
from dryfit.core.failure import Action, PastFailure
from dryfit.core.jobs import ChildResult, FinalRequest, FinalResult, Job
from dryfit.core.plan import DeviceKind
from dryfit.core.trial import Outcome, TrialConfig, mean
from dryfit.core.wire import LOG_FILE, REQUEST_FILE, Checkpointed, Note, Progress, Report, Verdict, write_model
from dryfit.runtime.faults import classify
from dryfit.runtime.harvest import harvest
from dryfit.runtime.recovery import ANOTHER_ATTEMPT, attempt_terms, decide
from dryfit.runtime.spec import ChildExited, ChildMessage, ChildSpec
from dryfit.runtime.supervisor import Supervisor
from dryfit.store.layout import FinalLayout
from dryfit.store.ledger import StudyLock, lock_owner
from dryfit.store.state import PlanState, TrialState
from dryfit.study.context import (
    Placement,
    StudyView,
    choose_device,
    side_by_side,
    train_request,
    training_limits,
    trial_config,
)
from dryfit.study.stops import StopRequests

OnNote = Callable[[str], None]

_IDLE_S = 0.5
_TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class FinalRun:
    """One configuration to train once more.

    Attributes:
        trial: Whose configuration it is.
        seed: Seed of head, dropout and batch order; the trial's own repeats the trial.
        last_step: As in :class:`dryfit.core.jobs.FinalRequest`.
        save: Whether the model is wanted, or its scores alone.
        schedule_steps: As in :class:`dryfit.core.jobs.FinalRequest`.
    """

    trial: TrialState
    seed: int
    last_step: int | None = None
    save: bool = True
    schedule_steps: int | None = None

    @property
    def name(self) -> str:
        """The run's folder: another name for everything that would compute something else."""
        parts = [f"trial-{self.trial.number:04d}", f"seed-{self.seed}"]
        parts += ["with-validation"] if self.last_step is not None else []
        return "-".join([*parts, *([] if self.save else ["scores"])])


def final_run(trial: TrialState, *, seed: int | None, with_validation: bool, save: bool = True) -> FinalRun:
    """What to run for a trial.

    Args:
        trial: Whose configuration is wanted.
        seed: None: the trial's own.
        with_validation: Train on train and validation together.
        save: As in :class:`FinalRun`.

    Raises:
        ConfigError: The trial was refused; or it has no best validation, whose step would be the last.
    """
    doing = f"training trial {trial.number} once more"
    if trial.outcome is Outcome.REFUSED:
        raise ConfigError(doing, f"it was refused ({trial.reason})", "a trial that fits the device")
    last_step = schedule_steps = None
    if with_validation and trial.folds:
        # As long as its trainings were on average: each had nearly as many rows as this one has.
        last_step = max(1, round(mean([fold.best_step for fold in trial.folds])))
        schedule_steps = max(last_step, round(mean([fold.schedule_steps for fold in trial.folds])))
    elif with_validation:
        if trial.best is None:
            allowed = "with --with-validation: a trial that has a best validation, whose step is the last one"
            raise ConfigError(doing, "it has none", allowed, "train it without --with-validation, or another one")
        last_step = trial.reports[trial.best].step
    return FinalRun(trial, trial.seed if seed is None else seed, last_step, save, schedule_steps)


def final_request(study: StudyView, run: FinalRun, placement: Placement) -> FinalRequest:
    """What the process is asked that does a run."""
    paths, trial = study.layout.final(run.name), run.trial
    return FinalRequest(
        training=train_request(study, _config(study, run), paths, placement),
        last_step=run.last_step,
        schedule_steps=run.schedule_steps,
        model_dir=str(paths.model) if run.save else None,
        study=study.config.study.name,
        searched=trial.value,
        folds=max(1, len(trial.folds)),
    )


def _config(study: StudyView, run: FinalRun) -> TrialConfig:
    """What is learned: a model that is to be used is one, though the trial may have trained one for each fold."""
    config = trial_config(study, run.trial.number, run.trial.params, run.seed)
    return config.model_copy(update={"data": config.data.model_copy(update={"folds": 1})})


def in_process_request(study: StudyView, run: FinalRun) -> Path:
    """Write what :mod:`dryfit.train.inprocess` is asked, in a folder of its own that is emptied first."""
    paths = FinalLayout(study.layout.final(run.name).folder.with_name(f"{run.name}-in-process"))
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.mkdir(parents=True)
    choice = run.trial.plan.execution if run.trial.plan is not None else None
    device = choose_device(study.resolved, ())
    body = train_request(study, _config(study, run), paths, Placement(1, device, choice))
    request = paths.folder / REQUEST_FILE
    write_model(request, body, durable=False)
    return request


def finished(paths: FinalLayout) -> FinalResult | None:
    """What a run has come to, if it is done and its model still there."""
    for attempt in range(paths.attempts, 0, -1):
        result = harvest(paths.attempt(attempt))
        if result is not None and result.final is not None:
            gone = result.final.model_dir is not None and not paths.model.is_dir()
            # The study may have been moved since: the model lies where the study does now.
            at = None if result.final.model_dir is None else str(paths.model)
            return None if gone else result.final.model_copy(update={"model_dir": at})
    return None


def runs_at_once(study: StudyView) -> int:
    """How many runs go on side by side: as many as trials; one a GPU where that is left to us, as nothing is packed."""
    if study.config.runtime.parallel == "auto" and study.resolved.device is DeviceKind.CUDA:
        return study.resolved.device_count
    return side_by_side(study).most


def run_lock(paths: FinalLayout) -> StudyLock:
    """The lock of one run, to be entered.

    Raises:
        StudyBusyError: Another process does the same run.
    """
    paths.folder.mkdir(parents=True, exist_ok=True)
    owner = lock_owner(paths.lock)
    if owner is not None:
        raise StudyBusyError(f"training in {paths.folder}", f"process {owner} does just that", hint="wait for it")
    return StudyLock(paths.lock)


@dataclass(slots=True)
class _Live:
    """A run that has, or waits for, a process.

    Attributes:
        plan: The trial's, with the fallbacks that this run took besides; the trial's own stays as it is.
        not_before_s: When it may have its next process (``time.monotonic()``), after a failure that needs time to pass.
    """

    run: FinalRun
    paths: FinalLayout
    attempt: int
    plan: PlanState | None
    device: str | None = None
    past: tuple[PastFailure, ...] = ()
    checkpointed: bool = False
    told_s: float = 0.0
    not_before_s: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.run.name}-{self.attempt}"

    def may_tell(self) -> bool:
        """Whether a line on progress is due."""
        now_s = time.monotonic()
        due = now_s - self.told_s >= _TELL_EVERY_S
        self.told_s = now_s if due else self.told_s
        return due


@dataclass(slots=True)
class FinalWork:
    """Does runs, several at once, until all are done or a stop is asked for.

    Attributes:
        study: Whose configurations they are.
        supervisor: Where children come from.
        stops: Requests to stop.
        told: Hears what happens, a line at a time.
        results: What each run came to, by its name: its result, or the error that ended it.
    """

    study: StudyView
    supervisor: Supervisor
    stops: StopRequests
    told: OnNote
    results: dict[str, FinalResult | DryfitError] = field(default_factory=dict[str, FinalResult | DryfitError])
    _running: dict[str, _Live] = field(default_factory=dict[str, _Live])
    _stopping: bool = False
    _killed: bool = False

    def do(self, runs: Sequence[FinalRun], *, most: int) -> None:
        """Do the runs; those that are not in :attr:`results` afterwards were stopped, and go on next time.

        Args:
            runs: Their locks are held.
            most: How many at once.
        """
        waiting: list[_Live] = []
        for run in runs:
            paths = self.study.layout.final(run.name)
            done = finished(paths)
            if done is not None:
                self.results[run.name] = done
            else:
                waiting.append(_Live(run, paths, paths.attempts + 1, run.trial.plan))
        while self._running or (waiting and not self._stopping):
            self._heed_stops()
            due = [live for live in waiting if live.not_before_s <= time.monotonic()]
            for live in [] if self._stopping else due[: max(0, most - len(self._running))]:
                waiting.remove(live)
                self._start(live)
            for event in self.supervisor.wait(_IDLE_S):
                live = self._running.get(event.key)
                if live is None:
                    continue
                match event:
                    case ChildMessage():
                        self._hear(event, live)
                    case ChildExited():
                        del self._running[event.key]
                        again = self._judge(event, live)
                        if again is not None:
                            waiting.append(again)

    def _heed_stops(self) -> None:
        self.stops.look()
        if self.stops.why is not None and not self._stopping:
            self._stopping = True
            if self._running:
                self.told(f"stopping ({self.stops.why}): {len(self._running)} run(s) write a checkpoint")
            for key in self._running:
                self.supervisor.ask_stop(key)
        if self.stops.at_once and not self._killed:
            self._killed = True
            for key in self._running:
                self.supervisor.kill(key, "now")

    def _start(self, live: _Live) -> None:
        live.device = choose_device(self.study.resolved, [one.device for one in self._running.values()])
        choice = live.plan.execution if live.plan is not None else None
        placement = Placement(live.attempt, live.device, choice, attempt_terms(live.past))
        body = final_request(self.study, live.run, placement)
        limits = training_limits(self.study.config.runtime, live.past)
        spec = ChildSpec(live.key, live.paths.attempt(live.attempt), body, limits)
        self._running[live.key] = live
        self.supervisor.start(spec)

    def _hear(self, event: ChildMessage, live: _Live) -> None:
        match event.message:
            case Report(point=point):
                # Nothing is pruned here: what was worth asking for is trained to its end.
                self.supervisor.answer(event.key, Verdict(n=point.n, proceed=True))
                metric = self.study.config.study.metric
                self.told(f"{live.run.name}: validation {point.n}, step {point.step}: {metric} {point.value:.4f}")
            case Progress(step=step, total_steps=total_steps, loss=loss) if loss is not None and live.may_tell():
                self.told(f"{live.run.name}: step {step}/{total_steps}, loss {loss:.4f}")
            case Checkpointed():
                live.checkpointed = True
            case Note(text=text):
                self.told(f"{live.run.name}: {text}")
            case _:
                pass

    def _judge(self, exited: ChildExited, live: _Live) -> _Live | None:
        """Take a result, or say what is to be tried next."""
        result = exited.result
        if result is not None and result.final is not None:
            self.results[live.run.name] = result.final
            for folder in (live.paths.checkpoints, live.paths.best):
                shutil.rmtree(folder, ignore_errors=True)
            return None
        failure = classify(exited.evidence, result, job=Job.FINAL)
        retries = self.study.config.runtime.retries
        rungs_left = live.plan.rungs_left if live.plan is not None else 0
        answer = decide(
            failure, live.past, retries=retries, reached_checkpoint=live.checkpointed, rungs_left=rungs_left
        )
        if answer.action in ANOTHER_ATTEMPT and not self._stopping:
            self.told(f"{live.run.name}: {failure.kind}: {failure.sentence} -> {answer.action}")
            past = (*live.past, PastFailure(failure.kind, live.checkpointed, answer.action, live.device))
            plan = live.plan
            if plan is not None and answer.action is Action.RUNG:
                plan = replace(plan, rung=plan.rung + 1)
            due_s = time.monotonic() + answer.delay_s
            return replace(live, attempt=live.attempt + 1, plan=plan, past=past, checkpointed=False, not_before_s=due_s)
        if not self._stopping:
            self.results[live.run.name] = _error(live, result, f"{failure.kind}: {failure.sentence}")
        return None


def _error(live: _Live, result: ChildResult | None, sentence: str) -> DryfitError:
    if result is not None and result.error is not None:
        return result.error.rebuilt()
    log = live.paths.attempt(live.attempt) / LOG_FILE
    return ChildError(f"training {live.run.name}", f"its process failed ({sentence})", hint=f"see {log}")


def copy_model(model: Path, out: Path) -> None:
    """Copy a saved model to where it is wanted, by one rename.

    Raises:
        ConfigError: Something is there already.
    """
    refuse_taken(out)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, temporary)
    temporary.rename(out)


def refuse_taken(out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        ConfigError: Something is there already.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"saving a model to {out}", "something is there already", "a new or an empty folder")
