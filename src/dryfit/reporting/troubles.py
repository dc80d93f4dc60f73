"""Troubles of a study: failures by kind, reasons of incomplete trials, and limits of parallel trials."""

import re
from collections import Counter

from pydantic import Field

from dryfit.core.failure import FailureKind
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.settings.trial import Outcome
from dryfit.core.sharding.device_groups import place_in_words
from dryfit.core.text.units import gib
from dryfit.core.text.words import few
from dryfit.reporting.document import View, duration_text
from dryfit.store.events import FailureFacts
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptEnd, AttemptState, TrialState

NO_FAULTS = frozenset({FailureKind.INTERRUPTED, FailureKind.NONFINITE})
"""Failures that are no faults: an interruption was asked for, and a loss that is not finite is a result."""

_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_FEW_TRIALS = 8
_MOST_REASONS = 5


class FailuresView(View):
    """All failures of one kind.

    Attributes:
        attempts: Number of failed attempts.
        trials: Numbers of their trials.
        actions: The actions that followed, with counts.
        time_s: How long their processes worked.
        lost_s: The part of that time whose work was lost.
        said: The last of the sentences.
        sentences: The failures' sentences, each once.
    """

    kind: FailureKind
    attempts: int
    trials: tuple[int, ...]
    actions: dict[str, int]
    time_s: float
    lost_s: float
    said: str
    sentences: tuple[str, ...] = Field(default=(), exclude=True)


class SuccessView(View):
    """Counts of trials and attempts without a failure; :data:`NO_FAULTS` do not count as failures.

    Attributes:
        trials: Trials that had a process and have ended.
        clean_trials: Those without any failure.
        attempts: Attempts that have ended.
        clean_attempts: Those that did not fail.
        vanished: Attempts lost with their control process, which no later session has examined yet.
    """

    trials: int
    clean_trials: int
    attempts: int
    clean_attempts: int
    vanished: int


class ReasonView(View):
    """The number of trials with one outcome for one reason."""

    outcome: Outcome
    reason: str
    trials: int


class SideBySideView(View):
    """How many trials run at once.

    Attributes:
        asked: The number in the study file.
        now: The number in force; None if it is the one asked for.
        reason: Why not more; empty if as asked for.
        set_aside: Devices that get no more trials, each with the reason.
    """

    asked: int
    now: int | None
    reason: str
    set_aside: dict[str, str]


class Troubles(View):
    """What went wrong in a study."""

    success: SuccessView
    failures: tuple[FailuresView, ...] = Field(description="failed attempts by kind, the costliest first")
    reasons: tuple[ReasonView, ...] = Field(description="why trials did not complete")
    side_by_side: SideBySideView | None


def troubles_of(state: StudyState) -> Troubles:
    """Return a study's troubles so far.

    Args:
        state: The study's state, after ``study_created``.
    """
    return Troubles(
        success=success_view(state),
        failures=failures_by_kind(state),
        reasons=reason_views(state),
        side_by_side=side_by_side_view(state),
    )


def failures_by_kind(state: StudyState) -> tuple[FailuresView, ...]:
    """Return the failed attempts by kind, the costliest kind first."""
    by_kind: dict[FailureKind, list[tuple[AttemptState, FailureFacts]]] = {}
    for attempt in state.attempts:
        if attempt.failure is not None:
            by_kind.setdefault(attempt.failure.kind, []).append((attempt, attempt.failure))
    views: list[FailuresView] = []
    for kind, attempts in by_kind.items():
        sentences = tuple(dict.fromkeys(failure.sentence for _, failure in attempts))
        view = FailuresView(
            kind=kind,
            attempts=len(attempts),
            trials=tuple(dict.fromkeys(attempt.trial for attempt, _ in attempts)),
            actions=dict(Counter(str(failure.action) for _, failure in attempts).most_common()),
            time_s=round(sum(attempt.time_s for attempt, _ in attempts), 3),
            lost_s=round(sum(attempt.lost_s for attempt, _ in attempts), 3),
            said=sentences[-1],
            sentences=sentences,
        )
        views.append(view)
    return tuple(sorted(views, key=lambda view: (-view.lost_s, view.kind)))


def success_view(state: StudyState) -> SuccessView:
    """Count the trials and attempts without a failure."""
    ended = [attempt for attempt in state.attempts if attempt.end in (AttemptEnd.RESULT, AttemptEnd.FAILED)]
    failed = [attempt for attempt in ended if _is_fault(attempt)]
    hit = {attempt.trial for attempt in failed}
    tried = [trial for trial in state.present if trial.outcome is not None and trial.attempts]
    return SuccessView(
        trials=len(tried),
        clean_trials=sum(trial.number not in hit for trial in tried),
        attempts=len(ended),
        clean_attempts=len(ended) - len(failed),
        vanished=sum(attempt.end is AttemptEnd.LOST for attempt in state.attempts),
    )


def _is_fault(attempt: AttemptState) -> bool:
    return attempt.failure is not None and attempt.failure.kind not in NO_FAULTS


def reason_views(state: StudyState) -> tuple[ReasonView, ...]:
    """Return why trials did not complete, by outcome, the most frequent reason first.

    Reasons that differ only in numbers count as one.
    """
    ended = [(trial.outcome, _reason(trial)) for trial in state.trials if trial.outcome is not None]
    counts = Counter(end for end in ended if end[0] is not Outcome.COMPLETE)
    order = list(Outcome)
    rows = [ReasonView(outcome=outcome, reason=reason, trials=count) for (outcome, reason), count in counts.items()]
    return tuple(sorted(rows, key=lambda row: (order.index(row.outcome), -row.trials, row.reason)))


def _reason(trial: TrialState) -> str:
    if trial.outcome is Outcome.REFUSED and trial.plan is not None:
        answer = trial.plan.answer
        if answer.verdict is VerdictKind.UNKNOWN:
            return "memory unknown"
        return f"does not fit {answer.device.name}, {gib(answer.device.capacity_bytes)}"
    if trial.outcome is Outcome.FAILED:
        return trial.reason.partition(":")[0] or "no reason given"
    return _NUMBER.sub("N", trial.reason) or "no reason given"


def side_by_side_view(state: StudyState) -> SideBySideView | None:
    """Return how many trials run at once; None before the first session."""
    if not state.sessions:
        return None
    session = state.sessions[-1]
    return SideBySideView(
        asked=session.parallel,
        now=session.side_by_side,
        reason=session.side_by_side_reason,
        set_aside=dict(session.set_aside),
    )


# ---- as text


def trouble_lines(troubles: Troubles) -> list[str]:
    """Return the troubles of a study as lines."""
    success = _success_line(troubles.success)
    lines = [success] if success else []
    lines += [_failures_line(view) for view in troubles.failures]
    for outcome in Outcome:
        views = [view for view in troubles.reasons if view.outcome is outcome]
        lines += [f"{view.trials} {view.outcome}: {view.reason}" for view in views[:_MOST_REASONS]]
        if len(views) > _MOST_REASONS:
            rest = sum(view.trials for view in views[_MOST_REASONS:])
            lines.append(f"{rest} {outcome} for other reasons")
    return lines + (_side_by_side_lines(troubles.side_by_side) if troubles.side_by_side is not None else [])


def _success_line(view: SuccessView) -> str:
    parts = [f"{_share(view.clean_trials, view.trials)} trials"] if view.trials else []
    parts += [f"{_share(view.clean_attempts, view.attempts)} attempts"] if view.attempts else []
    texts = [f"without a failure: {', '.join(parts)}"] if parts else []
    if view.vanished:
        texts.append(
            f"{view.vanished} attempt(s) vanished with their control process: `dryfit resume` goes on with them"
        )
    return "; ".join(texts)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part // whole} %)"


def _failures_line(view: FailuresView) -> str:
    followed = ", ".join(f"{count} {action}" for action, count in view.actions.items())
    trials = few((str(number) for number in view.trials), _FEW_TRIALS)
    lost = f"{duration_text(view.lost_s)} lost"
    return f"{view.attempts} x {view.kind} in trial(s) {trials}: {followed}; {lost} ({view.said})"


def _side_by_side_lines(view: SideBySideView) -> list[str]:
    now = view.asked if view.now is None else view.now
    lines = [f"side by side: {now} ({view.reason or 'as asked for'})"]
    return [*lines, *(f"{place_in_words(device)} is set aside: {reason}" for device, reason in view.set_aside.items())]
