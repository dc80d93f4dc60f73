"""Tables of a report: trials, failures, why trials did not complete."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import starmap, zip_longest
from pathlib import Path

from pydantic import Field

from dryfit.documents.document import View, duration_text, measured_text, params_text
from dryfit.documents.plans import execution_cell, memory_cell
from dryfit.ledger.events import FailureFacts
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptEnd, AttemptState, TrialState
from dryfit.settings.devices import place_in_words
from dryfit.settings.errors import FailureKind
from dryfit.settings.files import contents
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.task_facts import facts_of
from dryfit.settings.text import Table, few, gib, number_text
from dryfit.settings.trial import Outcome, Scalar, best_first

# The trials of a study as tables and as CSV.


_GUARDED = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


def csv_text(state: StudyState) -> str:
    """Return the whole table, heads first."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    heads, rows = trial_rows(state)
    writer.writerow(_row(heads))
    for row in rows:
        writer.writerow(_row(row))
    return out.getvalue()


def trial_rows(state: StudyState) -> tuple[list[str], list[list[Scalar]]]:
    """Return the heads of the table, and a row of values for each trial."""
    further = [f"value.{goal.name}" for goal in state.goals[1:]]
    trials = state.trials
    names = tuple(dict.fromkeys(name for trial in trials for name in trial.params))
    folds = max((len(trial.folds) for trial in trials), default=0)
    parts = ("spread", *(f"fold.{number + 1}" for number in range(folds))) if folds else ()
    heads = [*_FIRST, *further, *parts, *_FACTS, *(f"param.{name}" for name in names), "reason"]
    return heads, [_cells(trial, names, len(further), len(parts)) for trial in trials]


_FIRST = ("number", "generation", "outcome", "value")
_FACTS = (
    *("last_value", "seed", "steps", "attempts", "seconds", "planned_bytes", "observed_bytes"),
    *("asked_at", "finished_at"),
)


def _cells(trial: TrialState, names: Sequence[str], further: int, parts: int) -> list[Scalar]:
    also: list[Scalar] = [*trial.also, *[None] * further]
    folds: list[Scalar] = [next(iter(trial.spreads), None), *(fold.value for fold in trial.folds), *[None] * parts]
    return [
        trial.number,
        trial.generation,
        str(trial.outcome) if trial.outcome is not None else None,
        trial.value,
        *also[:further],
        *folds[:parts],
        trial.last_value,
        trial.seed,
        trial.steps_done,
        len(trial.attempts),
        round(trial.time_s, 3),
        trial.planned_bytes,
        trial.observed_bytes,
        _moment(trial.asked_at_s),
        _moment(trial.finished_at_s),
        *(trial.params.get(name) for name in names),
        trial.reason or None,
    ]


def _row(cells: Iterable[Scalar]) -> list[str]:
    return [cell_text(cell) for cell in cells]


def cell_text(value: Scalar) -> str:
    """Return one cell; the module's docstring has the rules."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case str():
            return f"'{value}" if value.startswith(_GUARDED) else value
        case _:
            return repr(value)


def _moment(at_s: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def trials_table(state: StudyState) -> Table:
    """Return one row for each trial, in order.

    Execution and memory have columns if the study plans memory, the generation if there are several.
    """
    several = len(state.generations) > 1
    planned = any(trial.plan is not None for trial in state.trials)
    values = goal_names(state) if len(goal_names(state)) > 1 else ("value",)
    rows = [
        (
            str(trial.number),
            str(trial.outcome or "open"),
            *((str(trial.generation),) if several else ()),
            *_comparable_cells(trial, state, len(values)),
            str(trial.steps or "-"),
            str(len(trial.attempts)),
            duration_text(trial.time_s),
            *((execution_cell(trial), memory_cell(trial)) if planned else ()),
            params_text(trial.params),
        )
        for trial in state.trials
    ]
    heads = ("run with", "memory observed / planned") if planned else ()
    first = ("trial", "outcome", *(("generation",) if several else ()))
    return Table((*first, *values, "steps", "attempts", "time", *heads, "parameters"), tuple(rows))


def _comparable_cells(trial: TrialState, state: StudyState, goals: int) -> tuple[str, ...]:
    """Return a trial's values; with the names of its goals if they are not those of the present generation."""
    own = state.generations[trial.generation - 1].comparability.goals if state.generations else ()
    if trial.values is None or not own or own == state.generation.comparability.goals:
        return values_cells(trial, goals)
    named = ", ".join(f"{goal.name} {number_text(value)}" for goal, value in zip(own, trial.values, strict=False))
    return (named, *("-",) * (goals - 1))


def goal_names(state: StudyState) -> tuple[str, ...]:
    """Return the names of the goals, the study's metric first."""
    return tuple(goal.name for goal in state.goals)


def values_cells(trial: TrialState, goals: int) -> tuple[str, ...]:
    """Return a trial's value of each goal, with the spread over its folds; a dash for each that it does not have."""
    values = trial.values or ()
    missing = (None,) * (goals - len(values))
    first, *others = starmap(measured_text, zip_longest((*values, *missing), trial.spreads))
    return (f"{first} (collapsed)" if trial.is_collapsed else first, *others)


def values_text(trial: TrialState) -> str:
    """Format a trial's values in one line."""
    return ", ".join(values_cells(trial, 1))


def front_table(state: StudyState) -> Table:
    """Return one row for each trial of the Pareto front, the best by the study's metric first."""
    names = goal_names(state)
    front = best_first(state.front, state.direction)
    rows = [(str(trial.number), *values_cells(trial, len(names)), params_text(trial.params)) for trial in front]
    return Table(("trial", *names, "parameters"), tuple(rows))


def outcomes_table(state: StudyState) -> Table:
    """Return one row for each outcome that occurred: number of trials and their time."""
    rows: list[tuple[str, ...]] = []
    for outcome in Outcome:
        trials = [trial for trial in state.present if trial.outcome is outcome]
        if trials:
            time_s = sum(trial.time_s for trial in trials)
            rows.append((str(outcome), str(len(trials)), duration_text(time_s)))
    still_open = sum(trial.outcome is None for trial in state.present)
    if still_open:
        rows.append(("open", str(still_open), "-"))
    return Table(("outcome", "trials", "time"), tuple(rows))


def file_locations(state: StudyState, layout: StudyLayout) -> tuple[tuple[str, Path], ...]:
    """Return the names and paths of a study's files."""
    files: list[tuple[str, Path]] = []
    facts = facts_of(state.created.task) if state.created is not None else None
    trains = facts is not None and (facts.makes_trainer or not facts.calls_function)
    if trains and state.best is not None and not state.best.folds:  # the weights of folds are not kept
        files.append(("best weights", layout.trial(state.best.number).best))
    files += [("configuration", layout.frozen_file), ("ledger", layout.ledger), ("trials and logs", layout.trials)]
    journal = _mirrored_journal(layout)
    if journal is not None:
        files.append(("Optuna journal", journal))
    return tuple(files)


def _mirrored_journal(layout: StudyLayout) -> Path | None:
    try:
        journal = json.loads(contents(layout.mirror_status) or b"")["journal"]
        return Path(journal) if journal else None  # a mirror in a database
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no mirror, or one that has not begun yet


# Troubles of a study: failures by kind, reasons of incomplete trials, and limits of parallel trials.


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
    failed = [one for one in ended if one.failure is not None and one.failure.kind not in NO_FAULTS]
    hit = {attempt.trial for attempt in failed}
    tried = [trial for trial in state.present if trial.outcome is not None and trial.attempts]
    return SuccessView(
        trials=len(tried),
        clean_trials=sum(trial.number not in hit for trial in tried),
        attempts=len(ended),
        clean_attempts=len(ended) - len(failed),
        vanished=sum(attempt.end is AttemptEnd.LOST for attempt in state.attempts),
    )


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
        asked=session.opened.parallel,
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
