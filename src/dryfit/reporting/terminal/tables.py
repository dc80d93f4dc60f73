"""A study and its trials as tables of text, and how numbers, durations and times are written."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import starmap, zip_longest
from pathlib import Path

from dryfit.core.regular_files import contents
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.settings.trial import Outcome, Scalar, best_first
from dryfit.reporting.data.observed_memory import execution_cell, memory_cell
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number_text(value: float | None) -> str:
    """Format a metric; a dash for None."""
    return "-" if value is None else f"{value:.4f}"


def value_text(value: Scalar) -> str:
    """Format a parameter."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def params_text(params: dict[str, Scalar]) -> str:
    """Format parameters in one line."""
    return "  ".join(f"{name}={value_text(value)}" for name, value in params.items())


def duration_text(seconds: float) -> str:
    """Format a duration."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def time_text(at_s: float) -> str:
    """Format a Unix time, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``2 trials``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """Cut a text to ``most`` characters, an ellipsis included."""
    return text if len(text) <= most else text[: most - 1] + "…"


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


def measured_text(value: float | None, spread: float | None) -> str:
    """Format a value; with ``spread`` it is a mean, and the standard deviation follows."""
    return number_text(value) if spread is None else f"{number_text(value)} ± {number_text(spread)}"


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
