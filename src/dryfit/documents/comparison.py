"""Whether the best trials really differ: the result of ``dryfit compare``, its statistics and its wording."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from pydantic import Field, ValidationError

from dryfit.documents.document import Answer, Document, Line, View, counted, document_of, params_text
from dryfit.documents.finals import SeedSpread, spread, spread_cells
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.settings.choices import Direction
from dryfit.settings.errors import FileError
from dryfit.settings.files import contents
from dryfit.settings.text import Table, number_text
from dryfit.settings.trial import Scalar
from dryfit.tasks.row_metrics import FEWEST_SEEDS, SeedDifference, collapsed, seed_difference, surviving
from dryfit.tasks.scored_rows import RowFacts, RowFile, read_rows, row_files


class BestIs(StrEnum):
    """How the best trial stands to another one."""

    BETTER = "better"
    WORSE = "worse"
    NOT_TOLD_APART = "not_told_apart"
    UNKNOWN = "unknown"


class ComparedRun(View):
    """A configuration trained with one seed."""

    seed: int
    value: float | None = Field(
        description="the study's metric on validation; null: the run failed, or it is no number"
    )
    collapsed: str | None = Field(description="in words how it gave all rows the same answer; null: it did not")
    error: str | None = Field(description="why there is no value")
    folder: str = Field(description="its folder under final/")


class ComparedTrial(View):
    """One of the best configurations of the search, trained with several seeds."""

    rank: int
    trial: int
    params: dict[str, Scalar]
    searched: float = Field(description="its value in the search")
    collapsed: bool = Field(description="whether it had collapsed in the search")
    validation: SeedSpread | None = Field(description="over the seeds; null: no run has a value")
    runs: tuple[ComparedRun, ...]


class TrialDifference(View):
    """The best trial of the search beside another one, on the same rows with the same seeds."""

    trial: int = Field(description="the other one")
    best_is: BestIs = Field(description="better and worse: also after Holm's correction for all comparisons")
    value: float | None = Field(description="metric of the best trial minus that of the other, mean over the seeds")
    low: float | None = Field(
        description="lower end of its 95 % interval, of this comparison alone; null: too few groups"
    )
    high: float | None = Field(description="upper end")
    seeds: tuple[int, ...] = Field(description="those with which both have rows")
    groups: int = Field(description="groups of rows that were drawn from; without known groups, rows")
    rows: int = Field(description="rows that both have")
    why: str | None = Field(description="why the two cannot be compared")

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of this comparison alone is of one sign."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Comparison(Answer):
    """The best trials of a study over several seeds; the best of the search first."""

    study: str
    metric: str
    direction: Direction
    generation: int = Field(description="of the study")
    best: int = Field(description="the best trial of the search, which the others are compared with")
    seeds: tuple[int, ...]
    grouped: bool = Field(description="whether the groups of rows are known; else each row counts as one")
    trials: tuple[ComparedTrial, ...]
    differences: tuple[TrialDifference, ...]
    judgement: tuple[str, ...] = Field(default=(), description="what this means, in sentences")
    notes: tuple[str, ...] = Field(description="what limits it")

    @property
    def is_useful(self) -> bool:
        """Whether any two trials could be compared."""
        return any(one.best_is is not BestIs.UNKNOWN for one in self.differences)


def read_comparison(layout: StudyLayout, state: StudyState) -> Comparison | None:
    """Return the comparison that was made last; None without one, or where another trial was the best then."""
    data = contents(layout.comparison)
    if data is None or not state.ranked:
        return None
    try:
        found = Comparison.model_validate_json(data)
    except ValidationError:
        return None  # of another version: it can be made again
    now = (state.goals[0].name, len(state.generations), state.ranked[0].number)
    return found if (found.metric, found.generation, found.best) == now else None


_SAID = {
    BestIs.BETTER: "is better than",
    BestIs.NOT_TOLD_APART: "is not told apart from",
    BestIs.WORSE: "is worse than",
    BestIs.UNKNOWN: "could not be compared with",
}


def judgement(comparison: Comparison) -> tuple[str, ...]:
    """Return a comparison in sentences: first all pairs together, then each, then notes."""
    seeds = counted(len(comparison.seeds), "seed")
    whole = f"Trained again with {seeds} each, {findings(comparison)}."
    return (
        *([whole] if len(comparison.differences) > 1 else []),
        *(_sentence(comparison, one) for one in comparison.differences),
        *_better_choice(comparison),
        *_collapsed(comparison.trials),
    )


def findings(comparison: Comparison) -> str:
    """Return in a clause how the best trial stands to the others, with how sure that is."""
    parts: list[str] = []
    for best_is, said in _SAID.items():
        numbers = [one.trial for one in comparison.differences if one.best_is is best_is]
        parts += [f"{said} {_trials(numbers)}"] if numbers else []
    return f"trial {comparison.best} {_joined(parts)} (95 %{_corrected(comparison)})"


def _corrected(comparison: Comparison) -> str:
    many = sum(one.best_is is not BestIs.UNKNOWN for one in comparison.differences)
    return f", Holm's correction for {many} comparisons" if many > 1 else ""


def _sentence(comparison: Comparison, one: TrialDifference) -> str:
    best, other = f"trial {comparison.best}", f"trial {one.trial}"
    if one.best_is is BestIs.UNKNOWN or one.value is None or one.low is None or one.high is None:
        mine, theirs = (number_text(_mean(comparison, number)) for number in (comparison.best, one.trial))
        return f"{best.capitalize()} and {other} cannot be compared ({mine} and {theirs} on average): {one.why}."
    pool = counted(one.groups, "group" if comparison.grouped else "row")
    over = f"over {counted(len(one.seeds), 'seed')} and {pool}"
    if one.best_is is not BestIs.NOT_TOLD_APART:
        first, second = (best, other) if one.best_is is BestIs.BETTER else (other, best)
        low, high = sorted((abs(one.low), abs(one.high)))
        by = f"{number_text(abs(one.value))} (95 % interval {number_text(low)} to {number_text(high)} {over})"
        return f"{first.capitalize()} is better than {second} by {by}."
    gap = f"{number_text(abs(one.value))} {'higher' if one.value > 0 else 'lower'}" if one.value else "they are equal"
    interval = f"95 % interval of the difference {one.low:+.4f} to {one.high:+.4f} {over}"
    alone = (
        f"; alone this would be a difference, but{_corrected(comparison)[1:]} leaves none" if one.excludes_zero else ""
    )
    return f"{best.capitalize()} is not told apart from {other}: {gap} ({interval}){alone}."


def _mean(comparison: Comparison, number: int) -> float | None:
    """Return a trial's mean over the seeds; None where no run has a value."""
    spread = next(one.validation for one in comparison.trials if one.trial == number)
    return spread.mean if spread is not None else None


def _better_choice(comparison: Comparison) -> Iterator[str]:
    """Say which trial to use where the search's best is worse than another."""
    sign = 1.0 if comparison.direction is Direction.MAXIMIZE else -1.0
    ahead = [one for one in comparison.differences if one.best_is is BestIs.WORSE]
    if ahead:
        chosen = min(ahead, key=lambda one: sign * (one.value or 0.0))
        yield f"So trial {chosen.trial} is the one to use, though trial {comparison.best} was the best of the search."


def _collapsed(trials: Sequence[ComparedTrial]) -> Iterator[str]:
    for trial in trials:
        runs = [run for run in trial.runs if run.collapsed]
        if runs:
            of = counted(len(trial.runs), "run")
            yield f"{len(runs)} of {of} of trial {trial.trial} collapsed: with seed {runs[0].seed} {runs[0].collapsed}."
        elif trial.collapsed:
            yield f"Trial {trial.trial} had collapsed in the search; none of its runs has."


def comparison_table(comparison: Comparison) -> Table:
    """Return one row for each trial, the best of the search first."""
    heads = ("trial", "search", "seeds", "validation", "min", "max", "best minus this", "95 % interval", "the best is")
    against = {one.trial: one for one in comparison.differences}
    rows: list[tuple[str, ...]] = []
    for one in comparison.trials:
        difference = against.get(one.trial)
        values = spread_cells(one.validation)
        collapsed = sum(run.collapsed is not None for run in one.runs)
        marked = f"{values[0]} ({collapsed} collapsed)" if collapsed else values[0]
        seeds = f"{sum(run.value is not None for run in one.runs)}/{len(one.runs)}"
        searched = number_text(one.searched) + (" (collapsed)" if one.collapsed else "")
        cells = (str(one.trial), searched, seeds, marked, *values[1:], *_difference_cells(difference))
        rows.append((*cells, params_text(one.params)))
    return Table((*heads, "parameters"), tuple(rows))


@document_of.register
def _(comparison: Comparison) -> Document:
    """Return whether the best trials really differ, then their values, and what limits that."""
    notes = (Line(note, aside=True) for note in comparison.notes)
    return Document((*comparison.judgement, comparison_table(comparison), *notes))


def _difference_cells(one: TrialDifference | None) -> tuple[str, str, str]:
    if one is None:
        return "-", "-", "-"
    known = one.low is not None and one.high is not None
    interval = f"{one.low:+.4f} to {one.high:+.4f}" if known else "-"
    return "-" if one.value is None else f"{one.value:+.4f}", interval, str(one.best_is).replace("_", " ")


def _trials(numbers: Sequence[int]) -> str:
    return f"trial{'s' if len(numbers) > 1 else ''} {_joined(list(map(str, numbers)))}"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


_SPLIT = "validation"
_GONE = "there are no rows with which both were scored, with two seeds at least"


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """How a configuration did with one seed.

    Attributes:
        seed: The seed.
        value: The study's metric on validation; None: there is none.
        error: Why there is none.
        scored: The folder of the rows that it was scored on.
    """

    seed: int
    value: float | None
    error: str | None
    scored: Path


@dataclass(frozen=True)
class Contender:
    """A trial to be compared, with how it did with each seed."""

    trial: TrialState
    outcomes: tuple[SeedOutcome, ...]

    @cached_property
    def files(self) -> Mapping[int, RowFile]:
        """Its rows, by seed; without those of runs that have none."""
        files: dict[int, RowFile] = {}
        for outcome in self.outcomes:
            path = validation_rows(outcome.scored)
            try:
                if path is not None and outcome.error is None:
                    files[outcome.seed] = read_rows(path)
            except (FileError, OSError):
                continue  # damaged, or of another version: the run counts as one without rows, which is said
        return files


_Pair: TypeAlias = tuple[TrialDifference, SeedDifference | None]
"""The best contender beside another, not judged yet, with their difference; None: there is none."""


def validation_rows(scored: Path) -> Path | None:
    """Return the file with the rows of validation in a run's folder of scored rows; None: it has none."""
    return next((file for file in row_files(scored) if file.name.partition(".")[0] == _SPLIT), None)


def comparison_of(
    state: StudyState, contenders: Sequence[Contender], facts: Mapping[str, RowFacts] | None, notes: Sequence[str] = ()
) -> Comparison:
    """Compare trials with the first of them.

    The rows of two trials are in memory at once, not those of all.

    Args:
        state: The study.
        contenders: Two trials or more, the best of the search first.
        facts: The groups of rows; None: they are not known, and each row is a group of its own.
        notes: What else limits the comparison.
    """
    assert state.created is not None  # it has trials
    metric = state.goals[0].name
    best, names = contenders[0], state.resolved.labels if state.resolved is not None else ()
    trials, pairs = [_compared(1, best, names)], list[_Pair]()
    for rank, contender in enumerate(contenders[1:], start=2):
        trials.append(_compared(rank, contender, names))
        pairs.append(_pair(metric, best, contender, facts or {}))
    comparison = Comparison(
        study=state.created.name,
        metric=metric,
        direction=state.direction,
        generation=len(state.generations),
        best=best.trial.number,
        seeds=tuple(outcome.seed for outcome in best.outcomes),
        grouped=facts is not None,
        trials=tuple(trials),
        differences=tuple(_judged(pairs, state.direction)),
        notes=(*notes, *_limits(contenders, pairs, facts)),
    )
    return comparison.model_copy(update={"judgement": judgement(comparison)})


def _compared(rank: int, contender: Contender, names: Sequence[str]) -> ComparedTrial:
    trial, files = contender.trial, contender.files
    assert trial.score is not None  # only complete trials are compared
    runs = tuple(
        ComparedRun(
            seed=one.seed,
            value=one.value if one.value is not None and math.isfinite(one.value) else None,
            collapsed=(collapsed(files[one.seed].rows, names) or None) if one.seed in files else None,
            error=one.error,
            folder=one.scored.parent.name,
        )
        for one in contender.outcomes
    )
    return ComparedTrial(
        rank=rank,
        trial=trial.number,
        params=trial.params,
        searched=trial.score,
        collapsed=trial.is_collapsed,
        validation=spread([run.value for run in runs]),
        runs=runs,
    )


def _pair(metric: str, best: Contender, other: Contender, facts: Mapping[str, RowFacts]) -> _Pair:
    seeds = tuple(seed for seed in best.files if seed in other.files)
    difference, why, rows = None, _GONE, 0
    if len(seeds) >= FEWEST_SEEDS:
        ones, others = ([one.files[seed].rows for seed in seeds] for one in (best, other))
        rows, difference = len(ones[0]), seed_difference(metric, ones, others, facts)
        if difference is None:
            why = f"the scored rows do not say what {metric} needs"
        elif not math.isfinite(difference.value):
            why = f"{metric} is undefined with one of the seeds"
        else:
            few = f"{difference.groups} groups of rows are too few for an interval"
            why = None if difference.interval().is_known else few
    interval = difference.interval() if difference is not None else None
    known = interval if interval is not None and interval.is_known else None
    unjudged = TrialDifference(
        trial=other.trial.number,
        best_is=BestIs.UNKNOWN,
        value=interval.value if interval is not None and math.isfinite(interval.value) else None,
        low=known.low if known is not None else None,
        high=known.high if known is not None else None,
        seeds=seeds,
        groups=interval.groups if interval is not None else 0,
        rows=rows,
        why=why,
    )
    return unjudged, difference


def _judged(pairs: Sequence[_Pair], direction: Direction) -> Iterator[TrialDifference]:
    """Yield the differences with what survives Holm's correction."""
    known = [difference for one, difference in pairs if difference is not None and one.why is None]
    survives = iter(surviving(known))
    for one, _ in pairs:
        if one.why is not None or one.value is None:
            yield one
            continue
        told = BestIs.BETTER if (one.value > 0) == (direction is Direction.MAXIMIZE) else BestIs.WORSE
        yield one.model_copy(update={"best_is": told if next(survives) else BestIs.NOT_TOLD_APART})


def _limits(contenders: Sequence[Contender], pairs: Sequence[_Pair], facts: Mapping[str, RowFacts] | None) -> list[str]:
    notes = [
        f"Trial {contender.trial.number} has no run with seed {outcome.seed}: {outcome.error}"
        for contender in contenders
        for outcome in contender.outcomes
        if outcome.error is not None
    ]
    of = max((file.of for file in contenders[0].files.values()), default=0)
    rows = min((one.rows for one, _ in pairs if one.rows), default=of)
    if of > rows:
        notes.append(f"The differences are those of {rows} of the {of} rows of validation, which are kept.")
    if facts is None:
        notes.append("The groups of rows are not known: rows that depend on one another make the intervals too narrow.")
    if any(contender.trial.folds for contender in contenders):
        notes.append(
            "The search scored these trials by folds. Here each was trained on the train rows once for each seed, and "
            "scored on the validation rows: its values compare with one another, not with those of the search."
        )
    return notes
