"""The one doing loop: it asks the deciders what comes next and does it, writing the ledger first."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dryfit.core.failure import Action, Evidence, Failure
from dryfit.core.jobs import ChildResult
from dryfit.core.seeds import derive_seed
from dryfit.core.trial import Outcome
from dryfit.core.wire import Checkpointed, FirstStep, Report, Started, Verdict
from dryfit.runtime.faults import classify
from dryfit.runtime.harvest import harvest, read_messages
from dryfit.runtime.recovery import decide
from dryfit.runtime.spec import ChildEvent, ChildExited, ChildMessage
from dryfit.runtime.supervisor import Supervisor
from dryfit.search.points import known_points
from dryfit.search.pruning import Rules, judge, most_reports
from dryfit.search.suggest import suggest
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    CheckpointMade,
    Event,
    FailureFacts,
    FirstStepDone,
    ReportMade,
    TrialAsked,
    TrialFinished,
    VerdictGiven,
)
from dryfit.store.replay import TrialState
from dryfit.study.context import StudyContext, child_spec, choose_device, trial_fingerprint
from dryfit.study.machine import (
    Ask,
    End,
    Leave,
    Limits,
    Live,
    Place,
    Plan,
    Refuse,
    StopRunning,
    Wait,
    finish_trial,
    next_step,
)
from dryfit.study.observers import Observer
from dryfit.study.planner import Planner
from dryfit.study.refusals import refusal_text
from dryfit.study.retention import forget_what_is_not_needed
from dryfit.study.stops import StopRequests

_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """A trial's process."""

    number: int
    attempt: int
    device: str | None


class StudyLoop:
    """Runs a study to its end, or to the request to stop.

    Args:
        study: What to run.
        supervisor: Where children come from.
        stops: Requests to stop.
        observers: Who is told.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        study: StudyContext,
        supervisor: Supervisor,
        stops: StopRequests,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._study = study
        self._supervisor = supervisor
        self._stops = stops
        self._observers = observers
        self._clock = clock
        self._planner = Planner(study, supervisor, self._write)
        self._running: dict[str, RunningAttempt] = {}
        self._waiting_until_s: dict[int, float] = {}
        self._stopping: End | None = None
        self._killed = False
        runtime, settings = study.config.runtime, study.config.study
        self._rules = Rules(
            search=study.config.search,
            direction=study.state.direction,
            study=settings.name,
            most_reports=most_reports(study.space, study.config.trial_settings),
        )
        self._limits = Limits(
            total=study.total,
            parallel=runtime.parallel,
            max_wall_s=settings.max_hours * 3600 if settings.max_hours is not None else None,
            patience=settings.patience,
            max_failed_in_a_row=runtime.max_failed_in_a_row,
            max_refused_in_a_row=runtime.max_refused_in_a_row,
        )

    def run(self) -> End:
        """Go on until nothing is left to do or a stop was asked for.

        Raises:
            OSError: The ledger could not be written (a full disk); nothing that it holds is lost.
        """
        self._reconcile()
        while True:
            self._heed_stops()
            step = next_step(self._study.state, self._limits, self._live())
            match step:
                case Ask(number):
                    self._ask(number)
                case Plan(number):
                    self._planner.plan(self._study.state.trials[number])
                case Refuse(number):
                    self._refuse(self._study.state.trials[number])
                case Place(number):
                    self._place(self._study.state.trials[number])
                case StopRunning(why):
                    self._stop(why)
                case Wait(until_s):
                    self._wait(until_s)
                case Leave(why):
                    self._planner.abandon()
                    return why

    def _live(self) -> Live:
        return Live(
            running=frozenset(child.number for child in self._running.values()),
            waiting_until_s=self._waiting_until_s,
            stopping=self._stopping,
            now_s=self._clock(),
            planning=self._planner.planning,
            readiness=self._planner.readiness(),
        )

    def _write(self, event: Event) -> None:
        written = self._study.ledger.append(event)
        for observer in self._observers:
            observer.on_event(written, self._study.state)

    def _note(self, text: str) -> None:
        for observer in self._observers:
            observer.on_note(text)

    # ---- before the first step: what a killed control process left open

    def _reconcile(self) -> None:
        """Close every attempt whose control process died; a result it left is taken, never computed again."""
        for trial in self._study.state.open_trials:
            if not trial.attempts:
                continue
            last = trial.attempts[-1]
            if last.failure is not None:
                if last.failure.action in (Action.GIVE_UP, Action.PRUNE):
                    self._follow(trial, Failure(last.failure.kind, last.failure.sentence), last.failure.action, 0.0)
                continue
            child = RunningAttempt(trial.number, last.number, last.device)
            folder = self._study.layout.trial(trial.number).attempt(last.number)
            result = harvest(folder)
            if result is not None and result.train is not None and finish_trial(trial, result.train) is None:
                result = None  # it had been asked to stop, and did: the trial goes on
            if result is not None:
                for message in read_messages(folder):
                    if isinstance(message, Report):
                        self._keep_report(child, message)
                        self._verdict(child, message.point.n)  # the pruner must remember what it would have said
            self._on_exit(child, result, Evidence(server_lost=result is None))
        forget_what_is_not_needed(self._study.layout, self._study.state, keep=self._study.config.runtime.keep)

    # ---- doing what was decided

    def _ask(self, number: int) -> None:
        study = self._study
        suggestion = suggest(
            study.space,
            study.state.history(),
            search=study.config.search,
            directions=study.state.directions,
            points=known_points(study.space, study.config, number),
            seed=study.config.study.seed,
            number=number,
        )
        seed = derive_seed(study.config.study.seed, "trial", number)
        self._write(
            TrialAsked(
                number=number,
                params=dict(suggestion.params),
                internal=dict(suggestion.internal),
                distributions=dict(suggestion.distributions),
                given=dict(suggestion.given),
                seed=seed,
                fingerprint=trial_fingerprint(study, number, suggestion.params, seed),
            )
        )

    def _refuse(self, trial: TrialState) -> None:
        assert trial.plan is not None  # only a plan refuses
        reason = refusal_text(trial.plan.answer)
        self._finish(TrialFinished(number=trial.number, outcome=Outcome.REFUSED, reason=reason))

    def _place(self, trial: TrialState) -> None:
        attempt = len(trial.attempts) + 1
        device = choose_device(self._study.resolved, [child.device for child in self._running.values()])
        spec = child_spec(self._study, trial, attempt, device, self._planner.choice(trial))
        self._waiting_until_s.pop(trial.number, None)
        self._write(AttemptPlaced(number=trial.number, attempt=attempt, device=device))
        self._running[spec.key] = RunningAttempt(trial.number, attempt, device)
        self._supervisor.start(spec)

    def _heed_stops(self) -> None:
        self._stops.look()
        if self._stops.why is not None and self._stopping is None:
            self._stop(self._stops.why)
        if self._stops.at_once and not self._killed:
            self._killed = True
            for key in self._running:
                self._supervisor.kill(key, "now")

    def _stop(self, why: End) -> None:
        self._stopping = why
        self._planner.abandon()
        if self._running:
            self._note(f"stopping ({why}): {len(self._running)} running trial(s) write a checkpoint")
        for key in self._running:
            self._supervisor.ask_stop(key)

    def _wait(self, until_s: float | None) -> None:
        timeout_s = _IDLE_S if until_s is None else min(_IDLE_S, max(0.0, until_s - self._clock()))
        for event in self._supervisor.wait(timeout_s):
            planned = self._planner.owner(event.key)
            if planned is not None:
                self._on_plan(event, planned)
            child = self._running.get(event.key)
            if child is None:
                continue
            match event:
                case ChildMessage():
                    self._on_message(event, child)
                case ChildExited():
                    del self._running[event.key]
                    self._on_exit(child, event.result, event.evidence)

    # ---- what children say

    def _on_plan(self, event: ChildEvent, number: int) -> None:
        match event:
            case ChildMessage(message=message):
                for observer in self._observers:
                    observer.on_message(number, message)
            case ChildExited():
                trouble = self._planner.take(event)
                if trouble is not None:
                    trial = self._study.state.trials[trouble.number]
                    self._follow(trial, trouble.failure, trouble.action, trouble.delay_s)

    def _on_message(self, event: ChildMessage, child: RunningAttempt) -> None:
        number, attempt = child.number, child.attempt
        match event.message:
            case Started(pid=pid, overhead_ms=overhead_ms):
                self._write(AttemptStarted(number=number, attempt=attempt, pid=pid, overhead_ms=overhead_ms))
            case FirstStep(after_ms=after_ms):
                self._write(FirstStepDone(number=number, attempt=attempt, after_ms=after_ms))
            case Checkpointed(step=step):
                self._write(CheckpointMade(number=number, attempt=attempt, step=step))
            case Report() as report:
                self._keep_report(child, report)
                n = report.point.n
                self._supervisor.answer(event.key, Verdict(n=n, proceed=self._verdict(child, n).proceed))
            case message:
                for observer in self._observers:
                    observer.on_message(number, message)

    def _keep_report(self, child: RunningAttempt, report: Report) -> None:
        trial = self._study.state.trials[child.number]
        if report.point.n >= len(trial.reports):
            self._write(ReportMade(number=child.number, attempt=child.attempt, point=report.point))

    def _verdict(self, child: RunningAttempt, n: int) -> VerdictGiven:
        """The verdict on report ``n``: the one given before if there is one, else a new one."""
        trial = self._study.state.trials[child.number]
        verdict = trial.verdicts.get(n)
        if verdict is None:
            judged = judge(self._study.state.history(), child.number, self._rules)
            verdict = VerdictGiven(
                number=child.number,
                n=n,
                proceed=judged.proceed,
                system_attrs=dict(judged.system_attrs),
                reason=judged.reason,
            )
            self._write(verdict)
        return verdict

    def _on_exit(self, child: RunningAttempt, result: ChildResult | None, evidence: Evidence) -> None:
        trial = self._study.state.trials[child.number]
        finished = finish_trial(trial, result.train) if result is not None and result.train is not None else None
        if finished is not None:
            if not trial.attempts[-1].ended:
                self._write(AttemptEnded(number=child.number, attempt=child.attempt))
            self._finish(finished)
            return
        failure = classify(evidence, result, job=self._study.trial_job)
        progress = trial.attempts[-1].checkpoint_step is not None
        retries = self._study.config.runtime.retries
        answer = decide(
            failure,
            trial.past_failures,
            retries=retries,
            reached_checkpoint=progress,
            rungs_left=trial.plan.rungs_left if trial.plan is not None else 0,
        )
        facts = FailureFacts(kind=failure.kind, sentence=failure.sentence, action=answer.action)
        if not trial.attempts[-1].ended:
            self._write(AttemptEnded(number=child.number, attempt=child.attempt, failure=facts))
        self._follow(trial, failure, answer.action, answer.delay_s)

    def _follow(self, trial: TrialState, failure: Failure, action: Action, delay_s: float) -> None:
        reason = f"{failure.kind}: {failure.sentence}"
        match action:
            case Action.RETRY:
                self._waiting_until_s[trial.number] = self._clock() + delay_s
            case Action.RUNG:
                self._note(f"trial {trial.number} goes on with what its plan has next: {reason}")
            case Action.GIVE_UP | Action.UNPLANNED:
                self._finish(TrialFinished(number=trial.number, outcome=Outcome.FAILED, reason=reason))
            case Action.PRUNE:
                self._finish(TrialFinished(number=trial.number, outcome=Outcome.PRUNED, reason=reason))
            case Action.PAUSE:
                if self._stopping is None:
                    self._note(f"study paused by trial {trial.number}: {reason}")
                    self._stop(End.PAUSED)
            case Action.STOP_STUDY:
                self._note(f"study stopped by trial {trial.number}: {reason}")
                self._stop(End.BROKEN)

    def _finish(self, event: TrialFinished) -> None:
        self._write(event)
        forget_what_is_not_needed(
            self._study.layout,
            self._study.state,
            keep=self._study.config.runtime.keep,
            just_finished=event.number,
        )
