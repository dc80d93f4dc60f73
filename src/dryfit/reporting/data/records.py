"""The trials, attempts, failures and refusals of a study as records, from which reports and exports are made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dryfit.core.failure import FailureKind
from dryfit.core.settings.choices import Direction
from dryfit.core.settings.memory_key import IRRELEVANT, NEUTRAL
from dryfit.core.settings.trial import FoldScore, Goal, MetricPoint, Outcome, Scalar, best_first, better, fold_spreads
from dryfit.core.sharding.device_groups import place_in_words
from dryfit.reporting.data.observed_memory import compared_bytes
from dryfit.reporting.data.work import ended_at_s, lost_time_s, runs
from dryfit.search.space.params import from_text, public_name
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptState, SessionState, TrialState
from dryfit.study.planning.refusals import needed_bytes


class AttemptEnd(StrEnum):
    """How a process of a trial ended."""

    RESULT = "result"
    FAILED = "failed"
    LOST = "lost"
    """It was lost with its control process, and no later session has examined it yet."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial. ``seconds`` is the time of all its processes; bytes are peaks of the same execution."""

    number: int
    generation: int
    outcome: Outcome | None
    value: float | None
    also: tuple[float, ...]
    last_value: float | None
    params: dict[str, Scalar]
    seed: int
    steps: int
    attempts: int
    seconds: float
    planned_bytes: int | None
    observed_bytes: int | None
    reason: str
    asked_at_s: float
    finished_at_s: float | None
    reports: tuple[MetricPoint, ...]
    folds: tuple[FoldScore, ...] = ()
    """The folds, of a trial with ``data.folds``."""

    @property
    def spreads(self) -> tuple[float, ...]:
        """The sample standard deviation of its folds, for each goal; empty unless it completed with folds."""
        return () if self.value is None else fold_spreads(self.folds)

    @property
    def score(self) -> float | None:
        """The value of a complete trial; None unless it is finite."""
        known = self.outcome is Outcome.COMPLETE and self.value is not None and math.isfinite(self.value)
        return self.value if known else None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One process of a trial, from its placement to its end (Unix seconds)."""

    trial: int
    attempt: int
    device: str | None
    started_s: float
    ended_s: float
    end: AttemptEnd
    kind: FailureKind | None
    sentence: str
    action: str
    lost_s: float
    """See :func:`~dryfit.reporting.data.work.lost_time_s`; 0 while it runs."""

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """Refused trials with equal values of all settings that decide memory."""

    params: dict[str, Scalar]
    trials: tuple[int, ...]
    needed_bytes: int | None
    capacity_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class StudyRecords:
    """The records of a study, in order of trial numbers and of time."""

    name: str
    goals: tuple[Goal, ...]
    trials: tuple[TrialRow, ...]
    """Of the present generation."""
    front: tuple[TrialRow, ...]
    """With several goals, the trials of the Pareto front, the best by the first goal first."""
    attempts: tuple[AttemptRow, ...]
    sessions: tuple[SessionState, ...]
    logarithmic: frozenset[str] = frozenset()
    """Parameters sampled on a logarithmic scale."""
    earlier: tuple[TrialRow, ...] = ()
    """Trials of earlier generations; their values may belong to other goals or data."""

    @property
    def goal(self) -> Goal:
        """The goal that decides which trial is the best."""
        return self.goals[0]

    @property
    def complete(self) -> tuple[TrialRow, ...]:
        """Trials with a score."""
        return tuple(trial for trial in self.trials if trial.score is not None)

    @property
    def ranked(self) -> tuple[TrialRow, ...]:
        """Trials with a score, the best first, the earliest of equals."""
        return tuple(best_first(self.complete, self.goal.direction))

    @property
    def searched(self) -> tuple[str, ...]:
        """All parameters sampled in any trial, in order of appearance."""
        return tuple(dict.fromkeys(name for trial in self.trials for name in trial.params))


def records_of(state: StudyState) -> StudyRecords:
    """Return the records of a study.

    Args:
        state: The study's state, after ``study_created``.
    """
    created = state.created
    assert created is not None
    every = [_attempt(trial.number, attempt, state.sessions) for trial in state.trials for attempt in trial.attempts]
    first = state.generation.first
    seconds: dict[int, float] = {}
    for attempt in every:
        seconds[attempt.trial] = seconds.get(attempt.trial, 0.0) + attempt.seconds
    trials = tuple(_row(trial, seconds.get(trial.number, 0.0)) for trial in state.trials)
    return StudyRecords(
        name=created.name,
        goals=created.goals,
        trials=trials[first:],
        front=tuple(trials[trial.number] for trial in best_first(state.front, created.direction)),
        earlier=trials[:first],
        attempts=tuple(attempt for attempt in every if attempt.trial >= first),
        sessions=tuple(state.sessions),
        logarithmic=_logarithmic(state),
    )


def _logarithmic(state: StudyState) -> frozenset[str]:
    kinds = {(name, text) for trial in state.trials for name, text in trial.distributions.items()}
    return frozenset(public_name(name) for name, text in kinds if getattr(from_text(text), "log", False))


def _row(trial: TrialState, seconds: float) -> TrialRow:
    observed, planned = compared_bytes(trial)
    return TrialRow(
        number=trial.number,
        generation=trial.generation,
        outcome=trial.outcome,
        value=trial.value,
        also=trial.also,
        last_value=trial.reports[-1].value if trial.reports else None,
        params=trial.params,
        seed=trial.seed,
        steps=trial.steps or (trial.reports[-1].step if trial.reports else 0),
        attempts=len(trial.attempts),
        seconds=seconds,
        planned_bytes=planned,
        observed_bytes=observed,
        reason=trial.reason,
        asked_at_s=trial.asked_at_s,
        finished_at_s=trial.finished_at_s,
        reports=tuple(trial.reports),
        folds=trial.folds,
    )


def _attempt(number: int, attempt: AttemptState, sessions: Sequence[SessionState]) -> AttemptRow:
    failure = attempt.failure
    if failure is not None:
        end = AttemptEnd.FAILED
    elif attempt.ended:
        end = AttemptEnd.RESULT
    else:
        end = AttemptEnd.RUNNING if runs(attempt, sessions) else AttemptEnd.LOST
    return AttemptRow(
        trial=number,
        attempt=attempt.number,
        device=attempt.device,
        started_s=attempt.placed_at_s,
        ended_s=ended_at_s(attempt, sessions),
        end=end,
        kind=failure.kind if failure is not None else None,
        sentence=failure.sentence if failure is not None else "",
        action=str(failure.action) if failure is not None else "",
        lost_s=lost_time_s(attempt, sessions),
    )


def best_so_far(trials: Sequence[TrialRow], direction: Direction) -> list[float | None]:
    """Return the best score up to each trial; None before the first score."""
    best: float | None = None
    scores: list[float | None] = []
    for trial in trials:
        score = trial.score
        if score is not None and (best is None or better(score, best, direction)):
            best = score
        scores.append(best)
    return scores


def lanes(attempts: Sequence[AttemptRow]) -> list[tuple[AttemptRow, str]]:
    """Return each attempt with the name of its timeline row: its device, numbered where attempts ran side by side."""
    busy: dict[str, list[float]] = {}
    placed: list[tuple[AttemptRow, str, int]] = []
    for attempt in sorted(attempts, key=lambda attempt: (attempt.started_s, attempt.trial)):
        place = place_in_words(attempt.device) if attempt.device is not None else "slot"
        ends = busy.setdefault(place, [])
        lane = next((at for at, end_s in enumerate(ends) if end_s <= attempt.started_s), len(ends))
        ends[lane : lane + 1] = [attempt.ended_s]
        placed.append((attempt, place, lane))
    alone = {place for place, ends in busy.items() if len(ends) == 1 and place != "slot"}
    return [(attempt, place if place in alone else f"{place} {lane + 1}") for attempt, place, lane in placed]


def refusals(state: StudyState) -> list[RefusalRow]:
    """Return the refused trials grouped by plan, in order of their first trial."""
    by_key: dict[str, list[TrialState]] = {}
    for trial in state.present:
        if trial.outcome is Outcome.REFUSED:
            key = trial.plan.key if trial.plan is not None else f"trial {trial.number}"
            by_key.setdefault(key, []).append(trial)
    return [_refusal(trials) for trials in by_key.values()]


def _refusal(trials: Sequence[TrialState]) -> RefusalRow:
    first = trials[0]
    answer = first.plan.answer if first.plan is not None else None
    unrelated = IRRELEVANT | NEUTRAL.keys()
    return RefusalRow(
        params={name: value for name, value in first.params.items() if name not in unrelated},
        trials=tuple(trial.number for trial in trials),
        needed_bytes=needed_bytes(answer) if answer is not None and answer.memory is not None else None,
        capacity_bytes=answer.device.capacity_bytes if answer is not None else None,
        reason=first.reason,
    )
