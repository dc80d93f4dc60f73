"""The ends of attempts and trials: results recorded, failures classified, files taken over."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Final

from dryfit.ledger.events import AttemptEnded, Event, FailureFacts, Observed, TrialFinished
from dryfit.ledger.state import AttemptState, TrialState
from dryfit.processes.attempt import read_result, stacks_tail
from dryfit.processes.failure_texts import lost_devices
from dryfit.processes.failures import attempt_terms, classify, decide_recovery, fault_detail
from dryfit.processes.packing import Need
from dryfit.settings.devices import on_cpu
from dryfit.settings.errors import Action, Evidence, Failure, FailureKind, RecoveryAction
from dryfit.settings.jobs import ChildResult, training_of
from dryfit.settings.training_messages import StopReason, TrainResult
from dryfit.settings.trial import Outcome
from dryfit.study.context import StudyContext
from dryfit.study.files import forget_what_is_not_needed, take_over
from dryfit.study.messages import MessageHandler, RunningAttempt
from dryfit.study.next_step import End
from dryfit.study.placements import alone_first

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
        fault = complete.fault or (result.fault if result is not None else None)
        detail = fault_detail(failure.kind, complete, fault, stacks_tail(folder))
        facts = FailureFacts(
            kind=failure.kind,
            sentence=answer.reason,
            action=answer.action,
            error_type=detail.error_type,
            error=detail.error,
            place=detail.place,
            phase=complete.phase,
            detail=detail.detail,
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
