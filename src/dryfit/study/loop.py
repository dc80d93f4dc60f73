"""The trials of a study, step by step: each decision is written to the ledger before it is carried out."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dryfit.ledger.events import AttemptEnded, AttemptPlaced, Event, FailureFacts, Observed, TrialAsked, TrialFinished
from dryfit.ledger.folder import attempt_key
from dryfit.ledger.state import AttemptState, TrialState
from dryfit.processes.attempt import read_result, stacks_tail
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.failure_texts import FaultCase, lost_devices
from dryfit.processes.failures import attempt_terms, classify, decide_recovery, fault_detail, terms_text
from dryfit.processes.node import Nodes
from dryfit.processes.packing import Need, need_on
from dryfit.search.samplers import GpProcess, SamplerInput, suggest_at, suggest_next
from dryfit.search.space import Point, enqueued_points
from dryfit.settings.devices import node_of, on_cpu
from dryfit.settings.errors import Action, Evidence, Failure, FailureKind, RecoveryAction
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.splits import derive_seed
from dryfit.settings.study_file import SamplerName
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import FirstStep
from dryfit.study.context import StudyContext, fold_reports, trial_fingerprint
from dryfit.study.driver import StopRequests, drive
from dryfit.study.files import forget_what_is_not_needed, take_over
from dryfit.study.messages import MessageHandler, RunningAttempt
from dryfit.study.next_step import (
    AskTrial,
    End,
    EndSession,
    Limits,
    Live,
    PlaceTrial,
    PlanTrial,
    RefuseTrial,
    StopTrials,
    Wait,
    next_step,
    tripped,
)
from dryfit.study.observers import Observer
from dryfit.study.placements import Placements, alone_first
from dryfit.study.requests import Placement, child_spec
from dryfit.study.trial_plans import TrialPlanner, refusal_text, smallest_left

# How a trial ends: by the result that its process left, or by its last failure. Pure.


ASKED_TO_STOP: Final = (StopReason.REQUEST, StopReason.SIGTERM)
"""Why a training stopped that goes on in the next attempt."""


def finish_trial(trial: TrialState, result: TrainResult) -> TrialFinished | None:
    """Return the end of a trial whose process left a result; None if the trial was asked to stop and goes on."""
    if result.stopped_by in ASKED_TO_STOP:
        return None
    end = TrialFinished(
        number=trial.number,
        outcome=Outcome.PRUNED,
        steps=result.steps,
        folds=result.folds,
        observed=_observed(result),
    )
    if result.stopped_by is StopReason.VERDICT:
        last = trial.verdicts[max(trial.verdicts)] if trial.verdicts else None
        return end.model_copy(update={"best": result.best, "reason": last.reason if last else "pruned"})
    if result.value is None or math.isnan(result.value):
        return end.model_copy(update={"reason": f"{FailureKind.NONFINITE}: no validation gave a number"})
    scores = {"value": result.value, "also": result.also, "best": result.best}
    return end.model_copy(update={"outcome": Outcome.COMPLETE, **scores, "reason": _why_complete(result)})


def _why_complete(result: TrainResult) -> str:
    """Return why a complete trial's training ended early; empty if it did not."""
    if result.stopped_by is not StopReason.EARLY_STOPPING:
        return ""
    early = sum(fold.stopped_early for fold in result.folds)
    return f"early stopping in {early} of {len(result.folds)} folds" if result.folds else "early stopping"


def _observed(result: TrainResult) -> Observed | None:
    peaks = (result.peak_allocated_bytes, result.peak_reserved_bytes, result.peak_rss_bytes)
    if all(size_bytes is None for size_bytes in peaks):
        return None
    return Observed(allocated_bytes=peaks[0], reserved_bytes=peaks[1], rss_bytes=peaks[2])


def end_of(trial: TrialState) -> Failure:
    """Return the failure that a trial ends with, from its recorded attempts alone.

    A last attempt that only looked for the place of an earlier failure adds to that one.
    """
    failures = [attempt.failure for attempt in trial.attempts if attempt.failure is not None]
    last = failures[-1]
    first = next((failure for failure in failures[:-1] if failure.action is Action.DIAGNOSE), None)
    if first is None or last.action is not Action.GIVE_UP:
        return Failure(last.kind, last.sentence)
    if last.kind is first.kind:
        return Failure(first.kind, last.sentence)
    return Failure(first.kind, f"{first.sentence}; run again to learn where: {last.kind}: {last.sentence}")


# Ends of attempts and trials: record results, classify failures, carry out the recovery.


@dataclass(slots=True)
class AttemptFinalizer:
    """Ends attempts and trials of one session.

    Attributes:
        study: The study.
        messages: Takes in the last reports of a process that ended unheard.
        write: Appends an event to the ledger.
        note: Tells the user a sentence.
        stop: Asks every running trial to stop; takes the end and a sentence for the user.
        set_aside: Gives a device no more trials; takes its name and the reason.
        clock: Unix time in seconds.
        waiting_until_s: Earliest time (Unix seconds) of the next attempt of trials that must wait.
    """

    study: StudyContext
    messages: MessageHandler
    write: Callable[[Event], None]
    note: Callable[[str], None]
    stop: Callable[[End, str], None]
    set_aside: Callable[[str, str], None]
    clock: Callable[[], float]
    waiting_until_s: dict[int, float] = field(default_factory=dict[int, float])

    def reconcile(self, going_on: Collection[int] = ()) -> None:
        """Close every attempt whose control process died; a result it left is taken, never computed again.

        A trial of an earlier generation ends: as its result says if there is one, else as cancelled.

        Args:
            going_on: Numbers of the trials whose attempt runs on; they are let be.
        """
        generation = self.study.state.generation.number
        for trial in self.study.state.open_trials:
            if trial.number in going_on:
                continue
            last = trial.attempts[-1] if trial.attempts else None
            if last is not None:
                self._take_over(trial, last)
            result = self._result_left(trial, last) if last is not None and last.failure is None else None
            if trial.generation != generation and training_of(result) is None:
                reason = f"generation {generation} of the study began before it ended"
                self.finish(TrialFinished(number=trial.number, outcome=Outcome.CANCELLED, reason=reason))
            elif last is not None and last.failure is not None:
                if last.failure.action in (Action.GIVE_UP, Action.PRUNE):
                    self.follow(trial, end_of(trial), last.failure.action, 0.0)
            elif last is not None:
                child = RunningAttempt(trial.number, last.number, last.place, Need(trial.number))
                self.messages.catch_up(child)
                self.on_exit(child, result, Evidence(server_lost=result is None))
        forget_what_is_not_needed(self.study.layout, self.study.state, keep=self.study.config.runtime.keep)

    def _result_left(self, trial: TrialState, attempt: AttemptState) -> ChildResult | None:
        """Return what an attempt left; None also where it was asked to stop and did: its trial goes on."""
        result = read_result(self.study.layout.trial(trial.number).attempt(attempt.number))
        trained = training_of(result)
        return None if trained is not None and trained.stopped_by in ASKED_TO_STOP else result

    def _take_over(self, trial: TrialState, attempt: AttemptState) -> None:
        """Take over what an attempt left, before its end is recorded; nothing that comes there later counts."""
        if not attempt.ended:
            take_over(self.study.layout.trial(trial.number), attempt.number, self.study.trial_job)

    def on_exit(self, child: RunningAttempt, result: ChildResult | None, evidence: Evidence) -> None:
        """End an attempt whose process is gone, and do what follows from it."""
        trial = self.study.state.trials[child.number]
        self._take_over(trial, trial.attempts[-1])
        trained = training_of(result)
        finished = finish_trial(trial, trained) if trained is not None else None
        if finished is not None:
            if not trial.attempts[-1].ended:
                self.write(AttemptEnded(number=child.number, attempt=child.attempt))
            self.finish(finished)
            return
        kind, answer = self._judge(child, trial, result, evidence)
        # A process that had ended in order leaves no failure in the ledger, even where its result is gone since.
        failure = Failure(kind, answer.reason) if trial.attempts[-1].failure is None else end_of(trial)
        self.follow(trial, failure, answer.action, answer.delay_s)

    def _judge(
        self, child: RunningAttempt, trial: TrialState, result: ChildResult | None, evidence: Evidence
    ) -> tuple[FailureKind, RecoveryAction]:
        """Classify a failure, decide what follows from it, and record both."""
        job, past = self.study.trial_job, trial.past_failures
        complete = _with_terms(evidence, trial)
        failure = classify(complete, result, job=job)
        if failure.kind is FailureKind.DEVICE_LOST and not on_cpu(child.place):
            for device in lost_devices(complete, child.place):
                self.set_aside(device, f"{failure.kind} in trial {child.number}: {failure.sentence}")
        answer = decide_recovery(
            failure,
            past,
            retries=self.study.config.runtime.retries,
            reached_checkpoint=trial.made_progress,
            fallbacks_left=trial.plan.left_after(complete.phase) if trial.plan is not None else 0,
            diagnosable=True,
        )
        answer = alone_first(answer, failure, trial, shared=self.study.parallelism.most > 1)
        folder = self.study.layout.trial(child.number).attempt(child.attempt)
        fault = FaultCase(complete, result).fault
        detail = fault_detail(failure.kind, complete, fault, stacks_tail(folder))
        facts = FailureFacts(
            kind=failure.kind,
            sentence=answer.reason,
            action=answer.action,
            phase=complete.phase,
            **dict(detail),
        )
        if not trial.attempts[-1].ended:
            self.write(AttemptEnded(number=child.number, attempt=child.attempt, failure=facts))
        return failure.kind, answer

    def follow(self, trial: TrialState, failure: Failure, action: Action, delay_s: float) -> None:
        """Do what was decided to follow a failure."""
        reason = f"{failure.kind}: {failure.sentence}"
        match action:
            case Action.RETRY | Action.EXCLUSIVE | Action.ELSEWHERE | Action.LIGHTER | Action.DIAGNOSE:
                self.waiting_until_s[trial.number] = self.clock() + delay_s
            case Action.FALLBACK:
                self.note(f"trial {trial.number} goes on with what its plan has next: {reason}")
            case Action.GIVE_UP | Action.UNPLANNED:
                self.finish(TrialFinished(number=trial.number, outcome=Outcome.FAILED, reason=reason))
            case Action.PRUNE:
                self.finish(TrialFinished(number=trial.number, outcome=Outcome.PRUNED, reason=reason))
            case Action.PAUSE:
                self.stop(End.PAUSED, f"study paused by trial {trial.number}: {reason}")
            case Action.STOP_STUDY:
                self.stop(End.BROKEN, f"study stopped by trial {trial.number}: {reason}")

    def finish(self, event: TrialFinished) -> None:
        """End a trial, and remove the files that nobody needs any more."""
        self.write(event)
        forget_what_is_not_needed(
            self.study.layout,
            self.study.state,
            keep=self.study.config.runtime.keep,
            just_finished=event.number,
        )


def _with_terms(evidence: Evidence, trial: TrialState) -> Evidence:
    """Return the evidence with what the ledger has on how the attempt was run."""
    attempt = trial.attempts[-1]
    planned_bytes = evidence.planned_bytes
    if planned_bytes is None and attempt.device is not None:
        planned_bytes = attempt.needs_bytes
    diagnostic = attempt_terms(trial.past_failures).diagnostic
    return replace(
        evidence, device=evidence.device or attempt.device, planned_bytes=planned_bytes, diagnostic=diagnostic
    )


_IDLE_S = 0.5


class TrialDecider:
    """Runs a study to its end, or to the request to stop.

    Args:
        study: The study.
        nodes: Where children run.
        stops: Requests to stop.
        observers: Watch the study.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        study: StudyContext,
        nodes: Nodes,
        stops: StopRequests,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._study = study
        self._nodes = nodes
        self._stops = stops
        self._observers = observers
        self._clock = clock
        self._gp = GpProcess()
        self._planner = TrialPlanner(study, nodes, self._write)
        self._messages = MessageHandler(study, nodes, self._write, observers)
        self._placements = Placements(study, nodes, self._write, self._note, clock)
        self._finalizer = AttemptFinalizer(
            study, self._messages, self._write, self._note, self._stop_because, self._placements.set_aside, clock
        )
        self._smallest = smallest_left(study.space, study.state) if self._planner.plans else None
        self._stopping: End | None = None
        self._end: End | None = None

    def run(self) -> End:
        """Go on until nothing is left to do or a stop was asked for.

        Raises:
            OSError: The ledger could not be written (a full disk); nothing that it holds is lost.
        """
        going_on = self._go_on_with(self._nodes.take_going_on())
        self._finalizer.reconcile({child.number for child in self._placements.running.values()})
        with self._gp:
            if self._study.config.search.sampler is SamplerName.GP:
                self._gp.warm()
            drive(self, self._nodes, self._stops, going_on)
        assert self._end is not None  # without it the work is not done
        return self._end

    def _go_on_with(self, left: Mapping[str, str]) -> Mapping[str, str]:
        """Count the attempts of this generation that still run on nodes as running; end all others there.

        Args:
            left: The node of each process that an earlier session has left running, by its key.

        Returns:
            The same, without those that are ended.
        """
        state, needs = self._study.state, self._placements.needs(self._planner.readiness(), self._planner.usable)
        for trial in state.open_trials:
            attempt = trial.attempts[-1] if trial.attempts else None
            if attempt is None or attempt.ended or trial.generation != state.generation.number:
                continue
            key = attempt_key(trial.number, attempt.number)
            if left.get(key) == node_of(attempt.place):
                kind = trial.plan.kind if trial.plan is not None else None
                need = need_on(needs[trial.number], trial.number, kind)
                child = RunningAttempt(trial.number, attempt.number, attempt.place, need)
                self._placements.start(key, child, ())
        for key in left.keys() - self._placements.running.keys():
            self._nodes.all()[left[key]].kill(key)
        return {key: node for key, node in left.items() if key in self._placements.running}

    @property
    def _limits(self) -> Limits:
        """The limits as they are now: with a node that joins, more trials may run side by side."""
        runtime, settings = self._study.config.runtime, self._study.config.study
        return Limits(
            total=settings.trials,
            parallel=self._study.parallelism.most,
            max_wall_s=settings.max_hours * 3600 if settings.max_hours is not None else None,
            patience=settings.patience,
            max_failed_in_a_row=runtime.max_failed_in_a_row,
            max_refused_in_a_row=runtime.max_refused_in_a_row,
            device_wait_s=runtime.device_wait_s,
            max_same_failure=runtime.max_same_failure,
        )

    @property
    def running(self) -> Mapping[str, RunningAttempt | int]:
        """The attempts that have a process, and the numbers of the trials that a PLAN child plans."""
        return {**self._placements.running, **self._planner.running}

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        """Take the next step of the study."""
        live = self._live()
        match next_step(self._study.state, self._limits, live):
            case AskTrial(number):
                self._ask(number)
            case PlanTrial(number):
                return self._planner.plan(self._study.state.trials[number])
            case RefuseTrial(number):
                self._refuse(self._study.state.trials[number])
            case PlaceTrial(number) as step:
                return [self._place(self._study.state.trials[number], step, live)]
            case StopTrials(why):
                self._stop(why)
            case Wait(until_s, why):
                self._placements.waiting(why)
                return _IDLE_S if until_s is None else min(_IDLE_S, max(0.0, until_s - self._clock()))
            case EndSession(why, text):
                self._leave(why, text)
                return None
        return ()

    def on_stop(self, why: End) -> None:
        """Stop for a person's, or the system's, sake, unless the study stops already."""
        if self._stopping is None:
            self._stop(why)

    def on_message(self, child: RunningAttempt | int, event: ChildMessage) -> None:
        """Take in a message: of a trial it is written down and judged, of a planner it is passed on."""
        if isinstance(child, int):
            for observer in self._observers:
                observer.on_message(child, event.message)
            return
        if isinstance(event.message, FirstStep):
            self._placements.worked(child)
        self._messages.on_message(event, child)

    def on_exit(self, child: RunningAttempt | int, event: ChildExited) -> None:
        """Take in the end of an attempt, or the plan that a PLAN child has made."""
        if not isinstance(child, int):
            self._placements.end(event)
            self._finalizer.on_exit(child, event.result, event.evidence)
            return
        trouble = self._planner.take(event)
        if trouble is not None:
            trial = self._study.state.trials[trouble.number]
            self._finalizer.follow(trial, trouble.failure, trouble.action, trouble.delay_s)

    def _live(self) -> Live:
        readiness = self._planner.readiness()
        return Live(
            cluster=self._placements.cluster(),
            waiting_until_s=self._finalizer.waiting_until_s,
            stopping=self._stopping,
            now_s=self._clock(),
            planning=self._planner.planning,
            readiness=readiness,
            needs=self._placements.needs(readiness, self._planner.usable),
            idle_since_s=self._placements.idle_since_s,
            nothing_fits=self._smallest is not None and not self._smallest.points,
        )

    def _write(self, event: Event) -> None:
        written = self._study.ledger.append(event)
        for observer in self._observers:
            observer.on_event(written, self._study.state)

    def _note(self, text: str) -> None:
        for observer in self._observers:
            observer.on_note(text)

    def _ask(self, number: int) -> None:
        study, generation = self._study, self._study.state.generation
        inputs = SamplerInput(
            space=study.space,
            history=study.state.history().before(number),
            search=study.config.search,
            directions=study.state.directions,
            seed=study.config.study.seed,
            number=number,
            ask_gp=self._gp.ask,
        )
        known = enqueued_points(study.space, study.config, number - generation.first)
        smallest = self._smallest_wanted()
        suggestion = suggest_at(inputs, smallest) if smallest else suggest_next(inputs, (*known, *generation.points))
        seed = derive_seed(study.config.study.seed, "trial", number)
        fallback = self._gp.take_trouble()
        if fallback:
            self._note(f"trial {number} is drawn by tpe: {fallback}")
        self._write(
            TrialAsked(
                number=number,
                params=dict(suggestion.params),
                internal=dict(suggestion.internal),
                distributions=dict(suggestion.distributions),
                enqueued=dict(suggestion.enqueued),
                seed=seed,
                fingerprint=trial_fingerprint(study, number, suggestion.params, seed),
                fold_reports=fold_reports(study),
                fallback=fallback,
            )
        )

    def _smallest_wanted(self) -> Point:
        """Return the values of a trial that takes least memory, where so far every trial was refused; else none."""
        state = self._study.state
        if self._smallest is None or not state.refused_in_a_row:
            return {}
        ended_otherwise = any(count for outcome, count in state.counts.items() if outcome is not Outcome.REFUSED)
        if ended_otherwise or any(trial.attempts for trial in state.open_trials):
            return {}
        return self._smallest.points[0] if self._smallest.points else {}

    def _refuse(self, trial: TrialState) -> None:
        answers = self._planner.refusals(trial)
        reason = "; ".join(map(refusal_text, answers))
        self._finalizer.finish(TrialFinished(number=trial.number, outcome=Outcome.REFUSED, reason=reason))
        if self._smallest is not None and all(answer.verdict is VerdictKind.REFUSED for answer in answers):
            self._smallest = self._smallest.without(trial.params)

    def _place(self, trial: TrialState, step: PlaceTrial, live: Live) -> ChildSpec:
        attempt, place, need = len(trial.attempts) + 1, step.place, live.need(trial.number, step.kind)
        plans = self._planner.usable(trial)
        plan = next((plan for plan in plans if plan.kind == step.kind), None)
        terms = attempt_terms(trial.past_failures)
        fraction = self._placements.fence(plan, need, place)
        placement = Placement(attempt, place, self._planner.choice(plan), terms, fraction, need.shared_bytes)
        spec = child_spec(self._study, trial, placement)
        self._finalizer.waiting_until_s.pop(trial.number, None)
        self._write(
            AttemptPlaced(
                number=trial.number,
                attempt=attempt,
                node=node_of(place),
                device=None if on_cpu(place) else place,
                needs_bytes=need.host_bytes if on_cpu(place) else need.shared_bytes,
                terms=terms_text(terms),
                plan=plan.key if plan is not None else None,
            )
        )
        passed = [number for number in live.needs if number < trial.number and live.is_ready(number)]
        self._placements.start(spec.key, RunningAttempt(trial.number, attempt, place, need), passed)
        return spec

    def _stop(self, why: End) -> None:
        self._stopping = why
        self._planner.abandon()
        if self._placements.running:
            self._note(f"stopping ({why}): {len(self._placements.running)} running trial(s) write a checkpoint")
        for key, child in self._placements.running.items():
            self._nodes.all()[node_of(child.place)].ask_stop(key)

    def _stop_because(self, why: End, text: str) -> None:
        """Stop for a trial's sake; a pause gives way to whatever stops the study already."""
        if why is End.PAUSED and self._stopping is not None:
            return
        self._note(text)
        self._stop(why)

    def _leave(self, why: End, text: str) -> None:
        if text:
            self._note(text)
        self._planner.abandon()
        trip = tripped(self._study.state, self._limits)
        if trip is not None and trip.end is why:
            self._note(trip.sentence)
        self._end = why
