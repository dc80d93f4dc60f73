"""The result of a study in a few sentences: whether the best trial is worth anything, and how certain that is."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dryfit.core.settings.choices import Direction
from dryfit.core.settings.trial import Outcome
from dryfit.reporting.comparing.comparison import Comparison
from dryfit.reporting.comparing.comparison_text import findings
from dryfit.reporting.data.worth import Standing
from dryfit.reporting.terminal.tables import counted, number_text
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

_TOP = 5
_FEW = 10


@dataclass(frozen=True, slots=True)
class StudyVerdict:
    """Few sentences.

    Attributes:
        result: Whether the best trial is worth anything, and its lead.
        certainty: How many trials that rests on.
    """

    result: str
    certainty: str


@dataclass(frozen=True, slots=True)
class KnownOfBest:
    """What is known of a study's best trial beside its value.

    Attributes:
        standing: How it stands against what the metric is worth without a model.
        comparison: How it stands against other trials over several seeds.
    """

    standing: Standing | None = None
    comparison: Comparison | None = None


_NOTHING = KnownOfBest()


def verdict_of(state: StudyState, *, defaults_first: bool, known: KnownOfBest = _NOTHING) -> StudyVerdict:
    """Return the verdict on a study: first what is wrong with its best trial, if anything is.

    Args:
        state: The study.
        defaults_first: Whether the first trial is known to have the study file's own values.
        known: What else is known of the best trial.
    """
    ranked, standing = state.ranked, known.standing
    if not ranked:
        return StudyVerdict(_no_result(state), "Nothing can be compared yet.")
    result = _result(state, ranked, defaults_first=defaults_first)
    if standing is not None:
        good = standing.beats and standing.surely
        result = f"{result} {standing.sentence}" if good else f"{standing.sentence} {result}"
    if ranked[0].is_collapsed:
        every = "Every complete trial collapsed, so the best one has learned nothing of the rows"
        result = f"{every}: {ranked[0].collapsed}. {result}"
    return StudyVerdict(result, _certainty(state, ranked, known.comparison))


def _no_result(state: StudyState) -> str:
    if not state.present:
        return "This study has no trial yet."
    counts = [
        f"{count} {outcome}"
        for outcome in Outcome
        if (count := sum(trial.outcome is outcome for trial in state.present))
    ]
    running = sum(trial.outcome is None for trial in state.present)
    counts += [f"{running} not finished"] if running else []
    without = sum(trial.outcome is Outcome.COMPLETE for trial in state.present)
    why = f"; {counted(without, 'trial')} completed without a finite {state.goals[0].name}" if without else ""
    return f"No trial has a result: of {counted(len(state.present), 'trial')} {', '.join(counts)}{why}."


def _result(state: StudyState, ranked: Sequence[TrialState], *, defaults_first: bool) -> str:
    best, first, goal = ranked[0], state.present[0], state.goals[0]
    baseline = f"the defaults (trial {first.number})" if defaults_first else f"trial {first.number}"
    parts = [f"Trial {best.number} has the best {goal.name}, {number_text(best.score)}"]
    if len(state.goals) > 1:
        size = counted(len(state.front), "trial")
        parts[0] = f"The Pareto front has {size}; {parts[0][0].lower()}{parts[0][1:]}"
    if best.number == first.number:
        parts.append("and that is the study file's own configuration" if defaults_first else "the first one tried")
    else:
        if first.score is None:
            parts.append(f"{baseline} gave no result to compare it with")
        else:
            parts.append(f"{_better_by(best.score, first.score, goal.direction)} than {baseline}")
    if len(ranked) > 1:
        median = statistics.median(trial.score for trial in ranked if trial.score is not None)
        gap = _better_by(best.score, median, goal.direction)
        parts.append(f"{gap} than the median of {len(ranked)} complete trials")
    return ", ".join(parts) + "."


def _certainty(state: StudyState, ranked: Sequence[TrialState], comparison: Comparison | None) -> str:
    open_trials = sum(trial.outcome is None for trial in state.present)
    running = f", and {open_trials} {'is' if open_trials == 1 else 'are'} not finished" if open_trials else ""
    base = f"This rests on {counted(len(ranked), 'complete trial')}"
    if comparison is not None:
        again = (
            f"the best {len(comparison.trials)} were trained again with {counted(len(comparison.seeds), 'seed')} each"
        )
        return f"{base}{running}; {again}: {findings(comparison)}."
    base = f"{base} of one seed each{running}"
    if len(ranked) == 1:
        return f"{base}: there is nothing to compare it with."
    top = ranked[:_TOP]
    width = abs((top[0].score or 0.0) - (top[-1].score or 0.0))
    range_text = f"the best {len(top)} lie within {number_text(width)} of each other"
    if len(ranked) < _FEW:
        return f"{base}; {range_text}, and fewer than {_FEW} trials are a first impression only."
    return f"{base}; {range_text}, and the best of many validation values is an optimistic estimate."


def _better_by(value: float | None, than: float, direction: Direction) -> str:
    gap = (value or 0.0) - than
    if gap == 0:
        return "no better"
    word = "higher" if direction is Direction.MAXIMIZE else "lower"
    return f"{abs(gap):.4f} {word}"
