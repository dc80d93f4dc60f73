"""A study and its trials as rows of text: what ``show``, ``tune`` and the live view print."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from dryfit.core.load_report import LoadReport
from dryfit.core.settings import Task
from dryfit.core.trial import Outcome, Scalar, best_first
from dryfit.core.wire import LOG_FILE
from dryfit.core.words import few
from dryfit.report.plans import execution_cell, memory_cell, plan_lines
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptState, TrialState


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads and rows of text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number_text(value: float | None) -> str:
    """A metric as people read it; a dash for none."""
    return "-" if value is None else f"{value:.4f}"


def value_text(value: Scalar) -> str:
    """A parameter as people read it."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def params_text(params: dict[str, Scalar]) -> str:
    """Parameters in one line."""
    return "  ".join(f"{name}={value_text(value)}" for name, value in params.items())


def duration_text(seconds: float) -> str:
    """A duration as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def moment(at_s: float) -> str:
    """A moment as people read it, UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def trial_time_s(trial: TrialState) -> float:
    """Seconds during which a process worked on the trial, lost attempts not counted."""
    return sum(attempt.ended_at_s - attempt.placed_at_s for attempt in trial.attempts if attempt.ended_at_s is not None)


def trials_table(state: StudyState) -> Table:
    """One row a trial, in order; how each is run, and its memory, where the study plans that.

    Where there are several generations, each trial has the number of its own.
    """
    several = len(state.generations) > 1
    planned = any(trial.plan is not None for trial in state.trials)
    values = goal_names(state) if len(goal_names(state)) > 1 else ("value",)
    rows = [
        (
            str(trial.number),
            str(trial.outcome or "open"),
            *((str(trial.generation),) if several else ()),
            *_cells_beside(trial, state, len(values)),
            str(trial.steps or "-"),
            str(len(trial.attempts)),
            duration_text(trial_time_s(trial)),
            *((execution_cell(trial), memory_cell(trial)) if planned else ()),
            params_text(trial.params),
        )
        for trial in state.trials
    ]
    heads = ("run with", "memory observed / planned") if planned else ()
    first = ("trial", "outcome", *(("generation",) if several else ()))
    return Table((*first, *values, "steps", "attempts", "time", *heads, "parameters"), tuple(rows))


def _cells_beside(trial: TrialState, state: StudyState, goals: int) -> tuple[str, ...]:
    """A trial's values, beside those of the present generation; with their names where its goals were others."""
    own = state.generations[trial.generation - 1].basis.goals if state.generations else ()
    if trial.values is None or not own or own == state.generation.basis.goals:
        return values_cells(trial, goals)
    named = ", ".join(f"{goal.name} {number_text(value)}" for goal, value in zip(own, trial.values, strict=False))
    return (named, *("-",) * (goals - 1))


def goal_names(state: StudyState) -> tuple[str, ...]:
    """What the study optimises, its metric first."""
    return tuple(goal.name for goal in state.created.goals) if state.created else ()


def values_cells(trial: TrialState, goals: int) -> tuple[str, ...]:
    """A trial's value of each goal, with dashes where it has none."""
    values = trial.values or (None,) * goals
    return tuple(number_text(value) for value in values)


def front_table(state: StudyState) -> Table:
    """One row for each trial of the Pareto front, in order of the study's metric, the best first."""
    names = goal_names(state)
    front = best_first(state.front, state.direction)
    rows = [(str(trial.number), *values_cells(trial, len(names)), params_text(trial.params)) for trial in front]
    return Table(("trial", *names, "parameters"), tuple(rows))


def outcomes_table(state: StudyState) -> Table:
    """One row for each outcome that occurred: how many trials, and the time they took."""
    rows: list[tuple[str, ...]] = []
    for outcome in Outcome:
        trials = [trial for trial in state.present if trial.outcome is outcome]
        if trials:
            time_s = sum(trial_time_s(trial) for trial in trials)
            rows.append((str(outcome), str(len(trials)), duration_text(time_s)))
    still_open = sum(trial.outcome is None for trial in state.present)
    if still_open:
        rows.append(("open", str(still_open), "-"))
    return Table(("outcome", "trials", "time"), tuple(rows))


def places(state: StudyState, layout: StudyLayout) -> tuple[tuple[str, Path], ...]:
    """Where everything lies: what it is, and its path."""
    found: list[tuple[str, Path]] = []
    if state.best is not None and state.created is not None and state.created.task is not Task.OBJECTIVE:
        found.append(("best weights", layout.trial(state.best.number).best))
    found += [("configuration", layout.frozen_file), ("ledger", layout.ledger), ("trials and logs", layout.trials)]
    journal = _mirrored_journal(layout)
    if journal is not None:
        found.append(("Optuna journal", journal))
    return tuple(found)


def _mirrored_journal(layout: StudyLayout) -> Path | None:
    try:
        status = json.loads(layout.mirror_status.read_bytes())
        return Path(status["journal"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no mirror, a mirror into a database, or none that has begun yet


def _attempt_lines(attempt: AttemptState, folder: Path) -> list[str]:
    if attempt.failure is not None:
        end = f"{attempt.failure.kind}: {attempt.failure.sentence} -> {attempt.failure.action}"
    else:
        end = "ended with a result" if attempt.ended else "running, or lost with its control process"
    facts = [f"on device {attempt.device}"] if attempt.device is not None else []
    if attempt.overhead_ms is not None:
        facts.append(f"first line after {attempt.overhead_ms:.0f} ms")
    if attempt.first_step_ms is not None:
        facts.append(f"first step after {attempt.first_step_ms:.0f} ms")
    if attempt.checkpoint_step is not None:
        facts.append(f"checkpoint at step {attempt.checkpoint_step}")
    return [
        f"  attempt {attempt.number}: {end}",
        *([f"    {', '.join(facts)}"] if facts else []),
        f"    log: {folder / LOG_FILE}",
    ]


def _origin_lines(path: Path) -> list[str]:
    """Where the weights that the trial began with came from; nothing where it never loaded any."""
    try:
        report = LoadReport.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError:
        return [f"  loaded: {path} cannot be read; it may be of another version of dryfit"]
    said = [report.summary(), *(f"{count} {cast}" for cast, count in report.casts.items())]
    lines = [f"  loaded: {', '.join(said)}"]
    if report.random:
        lines.append(f"    random: {few(report.random)}")
    return lines


def trial_story(trial: TrialState, layout: StudyLayout) -> list[str]:
    """Everything known of one trial, as lines: parameters, validations, verdicts, attempts, where the logs are."""
    paths = layout.trial(trial.number)
    head = f"trial {trial.number}: {trial.outcome or 'open'}"
    if trial.values is not None:
        head += f", value {', '.join(map(number_text, trial.values))}"
    if trial.best is not None and trial.best < len(trial.reports):
        head += f" at step {trial.reports[trial.best].step}"
    lines = [head + (f" ({trial.reason})" if trial.reason else "")]
    lines += [f"  {name} = {value_text(value)}" for name, value in trial.params.items()]
    lines.append(f"  seed {trial.seed}, fingerprint {trial.fingerprint}")
    lines += plan_lines(trial)
    for point in trial.reports:
        verdict = trial.verdicts.get(point.n)
        said = "" if verdict is None else ("" if verdict.proceed else f"  -> stop: {verdict.reason}")
        others = "  ".join(f"{name} {number_text(value)}" for name, value in point.metrics.items())
        # Only a trial that trains has epochs: a validation comes after at least a part of one.
        kind, epoch = ("validation", f", epoch {point.epoch:.2f}") if point.epoch else ("report", "")
        lines.append(f"  {kind} {point.n}: step {point.step}{epoch}: {others}{said}")
    for attempt in trial.attempts:
        lines += _attempt_lines(attempt, paths.attempt(attempt.number))
    lines += _origin_lines(paths.load_report)
    if paths.best.exists():
        lines.append(f"  weights: {paths.best}")
    return lines
