"""Compare the best trials, each trained with several seeds, from the rows that their runs have scored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dryfit.core.errors import FileError
from dryfit.core.settings.choices import Direction
from dryfit.reporting.comparing.comparison import BestIs, ComparedRun, ComparedTrial, Comparison, TrialDifference
from dryfit.reporting.comparing.comparison_text import judgement
from dryfit.reporting.data.final_results import spread
from dryfit.scoring.collapse import collapsed
from dryfit.scoring.intervals import FEWEST_SEEDS, SeedDifference, seed_difference, surviving
from dryfit.scoring.row_files import RowFile, read_rows, row_files
from dryfit.scoring.scored_row import RowFacts
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

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


@dataclass(frozen=True, slots=True)
class Contender:
    """A trial to be compared, with how it did with each seed."""

    trial: TrialState
    outcomes: tuple[SeedOutcome, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """A contender with its rows, by seed; without those of runs that have none."""

    contender: Contender
    files: Mapping[int, RowFile]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The best contender beside another: their difference, or why there is none."""

    trial: int
    seeds: tuple[int, ...]
    rows: int
    of: int
    difference: SeedDifference | None
    why: str | None


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
    best, names = _read(contenders[0]), state.resolved.labels if state.resolved is not None else ()
    trials, pairs = [_compared(1, best, names)], list[_Pair]()
    for rank, contender in enumerate(contenders[1:], start=2):
        other = _read(contender)
        trials.append(_compared(rank, other, names))
        pairs.append(_pair(metric, best, other, facts or {}))
    comparison = Comparison(
        study=state.created.name,
        metric=metric,
        direction=state.direction,
        generation=len(state.generations),
        best=contenders[0].trial.number,
        seeds=tuple(outcome.seed for outcome in contenders[0].outcomes),
        grouped=facts is not None,
        trials=tuple(trials),
        differences=tuple(_judged(pairs, state.direction)),
        notes=(*notes, *_limits(contenders, pairs, facts)),
    )
    return comparison.model_copy(update={"judgement": judgement(comparison)})


def _read(contender: Contender) -> _Read:
    files: dict[int, RowFile] = {}
    for outcome in contender.outcomes:
        path = validation_rows(outcome.scored)
        try:
            if path is not None and outcome.error is None:
                files[outcome.seed] = read_rows(path)
        except (FileError, OSError):
            continue  # damaged, or of another version: the run counts as one without rows, which is said
    return _Read(contender, files)


def _compared(rank: int, read: _Read, names: Sequence[str]) -> ComparedTrial:
    trial = read.contender.trial
    assert trial.score is not None  # only complete trials are compared
    runs = tuple(
        ComparedRun(
            seed=one.seed,
            value=one.value if one.value is not None and math.isfinite(one.value) else None,
            collapsed=(collapsed(read.files[one.seed].rows, names) or None) if one.seed in read.files else None,
            error=one.error,
            folder=one.scored.parent.name,
        )
        for one in read.contender.outcomes
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


def _pair(metric: str, best: _Read, other: _Read, facts: Mapping[str, RowFacts]) -> _Pair:
    seeds = tuple(seed for seed in best.files if seed in other.files)
    number = other.contender.trial.number
    if len(seeds) < FEWEST_SEEDS:
        return _Pair(number, seeds, 0, 0, None, _GONE)
    ones, others = ([read.files[seed].rows for seed in seeds] for read in (best, other))
    first = best.files[seeds[0]]
    difference = seed_difference(metric, ones, others, facts)
    why = None
    if difference is None:
        why = f"the scored rows do not say what {metric} needs"
    elif not math.isfinite(difference.value):
        why = f"{metric} is undefined with one of the seeds"
    elif not difference.interval().is_known:
        why = f"{difference.groups} groups of rows are too few for an interval"
    return _Pair(number, seeds, len(first.rows), first.of, difference, why)


def _judged(pairs: Sequence[_Pair], direction: Direction) -> list[TrialDifference]:
    """Return the differences with what survives Holm's correction."""
    known = [pair.difference for pair in pairs if pair.difference is not None and pair.why is None]
    survives = iter(surviving(known))
    found: list[TrialDifference] = []
    for pair in pairs:
        best_is, interval = BestIs.UNKNOWN, pair.difference.interval() if pair.difference is not None else None
        if pair.why is None and interval is not None:
            ahead = (interval.value > 0) == (direction is Direction.MAXIMIZE)
            told = BestIs.BETTER if ahead else BestIs.WORSE
            best_is = told if next(survives) else BestIs.NOT_TOLD_APART
        finite = interval is not None and interval.is_known
        found.append(
            TrialDifference(
                trial=pair.trial,
                best_is=best_is,
                value=interval.value if interval is not None and math.isfinite(interval.value) else None,
                low=interval.low if interval is not None and finite else None,
                high=interval.high if interval is not None and finite else None,
                seeds=pair.seeds,
                groups=interval.groups if interval is not None else 0,
                rows=pair.rows,
                why=pair.why,
            )
        )
    return found


def _limits(contenders: Sequence[Contender], pairs: Sequence[_Pair], facts: Mapping[str, RowFacts] | None) -> list[str]:
    notes = [
        f"Trial {contender.trial.number} has no run with seed {outcome.seed}: {outcome.error}"
        for contender in contenders
        for outcome in contender.outcomes
        if outcome.error is not None
    ]
    cut = max(pairs, key=lambda pair: pair.of - pair.rows)
    if cut.of > cut.rows:
        notes.append(f"The differences are those of {cut.rows} of the {cut.of} rows of validation, which are kept.")
    if facts is None:
        notes.append("The groups of rows are not known: rows that depend on one another make the intervals too narrow.")
    if any(contender.trial.folds for contender in contenders):
        notes.append(
            "The search scored these trials by folds. Here each was trained on the train rows once for each seed, and "
            "scored on the validation rows: its values compare with one another, not with those of the search."
        )
    return notes
