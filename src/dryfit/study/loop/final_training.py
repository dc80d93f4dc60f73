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
from dryfit.core.jobs import ChildResult, Job
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.wire import LOG_FILE, Checkpointed, Note, Progress, Report, Verdict
from dryfit.runtime.children.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.runtime.children.result_reading import read_result
from dryfit.runtime.children.supervisor import Supervisor
from dryfit.runtime.failures.classify import classify
from dryfit.runtime.failures.recovery import ANOTHER_ATTEMPT, attempt_terms, decide_recovery
from dryfit.store.layout import FinalLayout
from dryfit.store.ledger import StudyLock, lock_owner
from dryfit.store.state import PlanState
from dryfit.study.loop.context import Placement, StudySnapshot, choose_device, side_by_side, training_limits
from dryfit.study.loop.final_runs import EnsembleRun, FinalRun, Result, Run, ensemble_request, final_request
from dryfit.study.loop.stops import StopRequests
from dryfit.study.planning.device_needs import process_count

OnNote = Callable[[str], None]

_IDLE_S = 0.5
_TELL_EVERY_S = 5.0


def finished(paths: FinalLayout) -> Result | None:
    """What a run has come to, if it is done and its model still there."""
    for attempt in range(paths.attempts, 0, -1):
        ended = read_result(paths.attempt(attempt))
        result = None if ended is None else ended.final or ended.ensemble
        if result is not None:
            gone = result.model_dir is not None and not paths.model.is_dir()
            # The study may have been moved since: the model lies where the study does now.
            at = None if result.model_dir is None else str(paths.model)
            return None if gone else result.model_copy(update={"model_dir": at})
    return None


def runs_at_once(study: StudySnapshot, runs: Sequence[Run]) -> int:
    """How many runs go on side by side: as many as trials; one a GPU where that is left to us, as nothing is packed.

    A run of several processes takes a GPU for each: all count as the one that has most.
    """
    if study.config.runtime.parallel == "auto" and study.resolved.device is DeviceKind.CUDA:
        return max(
            1, study.resolved.device_count // max(process_count(run.plan, study.config.execution) for run in runs)
        )
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

    run: Run
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

    study: StudySnapshot
    supervisor: Supervisor
    stops: StopRequests
    told: OnNote
    results: dict[str, Result | DryfitError] = field(default_factory=dict[str, Result | DryfitError])
    _running: dict[str, _Live] = field(default_factory=dict[str, _Live])
    _stopping: bool = False
    _killed: bool = False

    def do(self, runs: Sequence[Run], *, most: int) -> None:
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
                waiting.append(_Live(run, paths, paths.attempts + 1, run.plan))
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
            training = [key for key, live in self._running.items() if isinstance(live.run, FinalRun)]
            if training:
                self.told(f"stopping ({self.stops.why}): {len(training)} run(s) write a checkpoint")
            for key in self._running:
                if key in training:
                    self.supervisor.ask_stop(key)
                else:  # it has nothing to go on with: it begins again
                    self.supervisor.kill(key, "now")
        if self.stops.at_once and not self._killed:
            self._killed = True
            for key in self._running:
                self.supervisor.kill(key, "now")

    def _start(self, live: _Live) -> None:
        in_use = [one.device for one in self._running.values()]
        live.device = choose_device(
            self.study.resolved, in_use, processes=process_count(live.plan, self.study.config.execution)
        )
        choice = live.plan.execution if live.plan is not None else None
        placement = Placement(live.attempt, live.device, choice, attempt_terms(live.past))
        match live.run:
            case FinalRun():
                body = final_request(self.study, live.run, placement)
            case EnsembleRun():
                body = ensemble_request(self.study, live.run, placement)
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
        found = None if result is None else result.final or result.ensemble
        if found is not None:
            self.results[live.run.name] = found
            for folder in (live.paths.checkpoints, live.paths.best):
                shutil.rmtree(folder, ignore_errors=True)
            return None
        failure = classify(exited.evidence, result, job=Job.FINAL if isinstance(live.run, FinalRun) else Job.ENSEMBLE)
        retries = self.study.config.runtime.retries
        fallbacks_left = live.plan.fallbacks_left if live.plan is not None else 0
        answer = decide_recovery(
            failure, live.past, retries=retries, reached_checkpoint=live.checkpointed, fallbacks_left=fallbacks_left
        )
        if answer.action in ANOTHER_ATTEMPT and not self._stopping:
            self.told(f"{live.run.name}: {failure.kind}: {failure.sentence} -> {answer.action}")
            past = (*live.past, PastFailure(failure.kind, live.checkpointed, answer.action, live.device))
            plan = live.plan
            if plan is not None and answer.action is Action.FALLBACK:
                plan = replace(plan, fallbacks_taken=plan.fallbacks_taken + 1)
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
