"""The trials of a study as tables and as CSV."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import starmap, zip_longest
from pathlib import Path

from dryfit.core.regular_files import contents
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.settings.trial import Outcome, Scalar, best_first
from dryfit.core.text.table import Table, number_text
from dryfit.reporting.document import duration_text, measured_text, params_text
from dryfit.reporting.plans import execution_cell, memory_cell
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

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
