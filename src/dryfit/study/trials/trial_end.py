"""How a trial ends: by the result that its process left, or by its last failure. Pure."""

import math
from typing import Final

from dryfit.core.failure import Action, Failure, FailureKind
from dryfit.core.jobs.train import StopReason, TrainResult
from dryfit.core.settings.trial import Outcome
from dryfit.store.events import Observed, TrialFinished
from dryfit.store.state import TrialState

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
