"""What a comparison of trials over seeds means, in sentences and as a table."""

from collections.abc import Iterator, Sequence

from dryfit.core.settings.choices import Direction
from dryfit.reporting.comparing.comparison import BestIs, ComparedTrial, Comparison, TrialDifference
from dryfit.reporting.terminal.tables import Table, counted, measured_text, number_text, params_text

_SAID = {
    BestIs.BETTER: "is better than",
    BestIs.NOT_TOLD_APART: "is not told apart from",
    BestIs.WORSE: "is worse than",
    BestIs.UNKNOWN: "could not be compared with",
}


def judgement(comparison: Comparison) -> tuple[str, ...]:
    """Return in sentences what a comparison means: of several pairs the whole first, then each, then what else is."""
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
        spread, difference = one.validation, against.get(one.trial)
        values = ("-", "-", "-")
        if spread is not None:
            values = (measured_text(spread.mean, spread.std), number_text(spread.min), number_text(spread.max))
        collapsed = sum(run.collapsed is not None for run in one.runs)
        marked = f"{values[0]} ({collapsed} collapsed)" if collapsed else values[0]
        seeds = f"{sum(run.value is not None for run in one.runs)}/{len(one.runs)}"
        searched = number_text(one.searched) + (" (collapsed)" if one.collapsed else "")
        cells = (str(one.trial), searched, seeds, marked, *values[1:], *_difference_cells(difference))
        rows.append((*cells, params_text(one.params)))
    return Table((*heads, "parameters"), tuple(rows))


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
