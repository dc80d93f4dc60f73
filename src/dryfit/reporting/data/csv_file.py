"""A study as CSV, one row for each trial (RFC 4180, UTF-8, lines end with CR LF).

Trials of earlier generations come first; their values belong to the goals and the data of their generation.

With ``data.folds``, ``spread`` is the sample standard deviation of a trial's folds, and ``fold.1`` and so on are the
values of the folds that were done.

A cell is empty where a trial has no value. Numbers read back exactly; NaN and infinities are ``nan``, ``inf`` and
``-inf``, booleans ``true`` and ``false``. A text that a spreadsheet could take for a formula (it begins with ``=``,
``+``, ``-``, ``@``, a tab or a line end), or that begins with an apostrophe, gets an apostrophe in front: without one
leading apostrophe, every text is as it was.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from dryfit.core.settings.trial import Scalar
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
