"""Trains configurations of a study once more to get models to use, beside the study, which may be running meanwhile.

Nothing here writes the study's ledger or takes its lock. Each run has a folder under ``final/``, named after all that
decides its result; the files in there say how far it is, so that the same command goes on.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dryfit.core.errors import ChildError, ConfigError, DryfitError, StudyBusyError
from dryfit.core.failure import Action, PastFailure
from dryfit.core.jobs.child import ChildResult
from dryfit.core.jobs.job import Job
from dryfit.core.jobs.train import FinalResult, TrainResult
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.sharding.device_groups import node_of, on_cpu
from dryfit.core.wire import LOG_FILE, Checkpointed, Note, Progress, Report, Verdict
from dryfit.runtime.children.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.runtime.children.result_reading import read_result
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.recovery import ANOTHER_ATTEMPT, attempt_terms, decide_recovery
from dryfit.runtime.machine.node import Nodes
from dryfit.store.layout import FinalLayout
from dryfit.store.lock import StudyLock, lock_owner
from dryfit.store.state import PlanState
from dryfit.study.loop.driver import drive
from dryfit.study.loop.final_runs import FinalRun, final_request
from dryfit.study.loop.next_step import End
from dryfit.study.loop.stops import StopRequests
from dryfit.study.planning.device_needs import process_count
from dryfit.study.resources.attempt_files import drop_superseded, take_over
from dryfit.study.resources.trial_devices import choose_place
from dryfit.study.trials.child_limits import training_limits
from dryfit.study.trials.child_requests import Placement
from dryfit.study.trials.context import StudySnapshot
from dryfit.study.trials.own_final import own_final_request, own_final_result, own_finished

OnNote = Callable[[str], None]

_IDLE_S = 0.5
_TELL_EVERY_S = 5.0


def finished(paths: FinalLayout) -> FinalResult | None:
    """Return the result of a run, if it is done and its model is still there."""
    for attempt in range(paths.attempts, 0, -1):
        ended = read_result(paths.attempt(attempt))
        result = None if ended is None else ended.answer
        if isinstance(result, FinalResult):
            gone = result.model_dir is not None and not paths.model.is_dir()
            # The study may have been moved since: the model lies where the study does now.
            at = None if result.model_dir is None else str(paths.model)
            return None if gone else result.model_copy(update={"model_dir": at})
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
            result = self._finished(run, paths)
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
        limits = training_limits(self.study.config.runtime, attempt.past)
        match attempt.run:
            case FinalRun(own=None):
                body = final_request(self.study, attempt.run, placement)
            case FinalRun(trial=trial, seed=seed, save=save):
                body = own_final_request(self.study, trial, placement, attempt.paths, seed=seed, save=save)
                limits = replace(limits, hang_learned=False)  # as of a trial
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
        result = self._result(child.run, child.paths, None if event.result is None else event.result.answer)
        if result is not None:
            self.results[child.run.name] = result
            for folder in (child.paths.checkpoints, child.paths.best):
                shutil.rmtree(folder, ignore_errors=True)
        elif not self._stopping:
            self._follow(child, event)

    def _finished(self, run: FinalRun, paths: FinalLayout) -> FinalResult | None:
        if run.own is not None:
            return own_finished(self.study, paths, save=run.save)
        return finished(paths)

    def _result(self, run: FinalRun, paths: FinalLayout, answer: object) -> FinalResult | None:
        """Return the result of a run that has come to its end; None: it has not."""
        if run.own is not None:
            if not isinstance(answer, TrainResult) or answer.stopped_by is not None:
                return None
            return own_final_result(self.study, answer, paths, save=run.save)
        return answer if isinstance(answer, FinalResult) else None

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
