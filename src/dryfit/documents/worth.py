"""Whether a study's best trial beats the baselines, differs from other trials, or has collapsed."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dryfit.documents.comparison import Comparison, findings
from dryfit.documents.document import counted
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.settings.choices import Direction
from dryfit.settings.errors import FileError
from dryfit.settings.text import number_text
from dryfit.settings.training_messages import BaselineScore
from dryfit.settings.trial import Outcome, Scalar, better
from dryfit.tasks.row_metrics import Interval, Split, difference_interval
from dryfit.tasks.scored_rows import FACTS_FILE, read_facts, read_rows, row_files

_SHARE: Final = 1 / 3
"""From this share of complete trials on, causes are looked for."""
_FEWEST: Final = 2
_MOST_OTHERS: Final = 0.5
"""A setting that more than half of the other trials have as well is no cause."""
_MOST_CAUSES: Final = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """The best trial, or a trained model, beside the strongest baseline.

    Attributes:
        metric: The study's.
        direction: Which of its values are better.
        score: The value of what is compared.
        baseline: The strongest baseline.
        difference: How much larger the score is, with its interval; None where rows are missing.
        subject: What is compared, as a sentence begins.
    """

    metric: str
    direction: Direction
    score: float
    baseline: BaselineScore
    difference: Interval | None
    subject: str = "The best trial"

    @property
    def beats(self) -> bool:
        """Whether the score is better than the baseline's, surely or not."""
        return better(self.score, self.baseline.metrics[self.metric], self.direction)

    @property
    def surely(self) -> bool:
        """Whether the interval of the difference is of one sign."""
        return self.difference is not None and self.difference.excludes_zero

    @property
    def sentence(self) -> str:
        """What this means, in a sentence."""
        baseline = f"the strongest baseline ({self.baseline.words}: {number_text(self.baseline.metrics[self.metric])})"
        if not self.beats:
            return f"{self.subject} does not beat {baseline}{self._by()}."
        if self.surely:
            return f"{self.subject} beats {baseline}{self._by()}."
        unknown = "" if self.difference is not None and self.difference.is_known else "; no interval is known"
        return f"{self.subject} is not surely better than {baseline}{self._by()}{unknown}."

    def _by(self) -> str:
        gap = self.score - self.baseline.metrics[self.metric]
        text = f": {abs(gap):.4f} {'higher' if gap > 0 else 'lower'}" if gap else ": they are equal"
        if self.difference is None or not self.difference.is_known:
            return text
        low, high = self.difference.low, self.difference.high
        groups = counted(self.difference.groups, "group")
        return f"{text} (95 % interval of the difference {low:+.4f} to {high:+.4f}, over {groups})"


def strongest_baseline(state: StudyState) -> BaselineScore | None:
    """Return the baseline that is best by the study's metric; None where there is none."""
    return state.baselines.result.strongest(state.goals[0]) if state.baselines is not None and state.goals else None


def flaws_of_best(state: StudyState) -> tuple[str, ...]:
    """Return in clauses why the best trial so far shows no learning; empty without a known flaw."""
    best, baseline = state.best, strongest_baseline(state)
    if best is None or best.value is None:
        return ()
    flaws = ("collapsed, as every trial before it",) if best.is_collapsed else ()
    if baseline is None or better(best.value, value := baseline.metrics[state.goals[0].name], state.direction):
        return flaws
    return (*flaws, f"not better than the strongest baseline, {number_text(value)}")


def standing_of(state: StudyState, layout: StudyLayout | None) -> Standing | None:
    """Return how the best trial stands; None without a ranked trial or a baseline.

    Args:
        state: The study.
        layout: Its folder, for the rows that an interval needs; None: there is no interval.
    """
    ranked, baseline = state.ranked, strongest_baseline(state)
    if not ranked or baseline is None:
        return None
    goal = state.goals[0]
    difference = _difference(goal.name, ranked[0], baseline, layout) if layout is not None else None
    assert ranked[0].score is not None  # a ranked trial has one
    return Standing(goal.name, goal.direction, ranked[0].score, baseline, difference)


def model_judgement(
    state: StudyState, layout: StudyLayout, value: float | None, *, subject: str, trial: TrialState | None, folds: int
) -> tuple[str, ...]:
    """Return in sentences whether a trained model beats the strongest baseline; empty where none is known.

    Args:
        state: The study.
        layout: Its folder, for the rows that an interval needs. Only the trial's are there, so a model has an interval
            where it repeats its trial's value.
        value: The study's metric on validation; None: validation was trained on.
        subject: The model, as a sentence begins.
        trial: Whose configuration it has; None: those of several.
        folds: ``data.folds``: with several, baselines are means over them, and a model is validated on one split.
    """
    baseline = strongest_baseline(state)
    if baseline is None:
        return ()
    goal = state.goals[0]
    score = trial.score if trial is not None else None
    if value is None or folds > 1:
        why = "was trained on validation too" if value is None else "was validated on one split, not on the folds"
        cannot = f"{subject} {why}, so it cannot be compared with the baselines."
        if trial is None or score is None:
            return (cannot,)
        known = _difference(goal.name, trial, baseline, layout)
        searched = Standing(goal.name, goal.direction, score, baseline, known, f"In the search, trial {trial.number}")
        return searched.sentence, cannot
    known = _difference(goal.name, trial, baseline, layout) if trial is not None and score == value else None
    return (Standing(goal.name, goal.direction, value, baseline, known, subject).sentence,)


def _difference(metric: str, best: TrialState, baseline: BaselineScore, layout: StudyLayout) -> Interval | None:
    try:
        facts = read_facts(layout.baselines / FACTS_FILE)
        mine, theirs = (
            {file.split: file.rows for file in map(read_rows, row_files(folder))}
            for folder in (layout.trial(best.number).scored, layout.baselines / baseline.name)
        )
    except (FileError, OSError):
        return None  # removed, or of another version: the values are known all the same
    if not mine or mine.keys() != theirs.keys():
        return None
    pairs: list[tuple[Split, Split]] = [(mine[name], theirs[name]) for name in sorted(mine)]
    return difference_interval(metric, [one for one, _ in pairs], [other for _, other in pairs], facts)


@dataclass(frozen=True, slots=True)
class Cause:
    """A setting that collapsed trials share, and others mostly do not have.

    Attributes:
        words: ``optim.lr is 0.003 or more``.
        collapsed: How many collapsed trials have it.
        others: How many other complete trials have it.
    """

    words: str
    collapsed: int
    others: int


@dataclass(frozen=True, slots=True)
class Collapses:
    """The collapsed trials of a study.

    Attributes:
        trials: Complete trials that gave all rows the same answer.
        complete: Number of complete trials.
        causes: What they share, where they are a third or more.
    """

    trials: tuple[TrialState, ...]
    complete: int
    causes: tuple[Cause, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """What this means; empty without such trials."""
        if not self.trials:
            return ()
        many, others = len(self.trials), self.complete - len(self.trials)
        first = self.trials[0]
        of = counted(self.complete, "complete trial")
        said = f"{many} of {of} collapsed: in trial {first.number} {first.collapsed}."
        shared = [
            f"{cause.words} ({cause.collapsed} of {many} collapsed trials, {cause.others} of {others} others)"
            for cause in self.causes
        ]
        return (said, f"They share: {'; '.join(shared)}.") if shared else (said,)


def collapses_of(state: StudyState) -> Collapses:
    """Return the collapsed trials of the present generation, and the likely causes where they are a third or more."""
    complete = state.complete
    trials = tuple(trial for trial in complete if trial.is_collapsed)
    others = [trial for trial in complete if not trial.is_collapsed]
    many = len(trials) >= max(_FEWEST, _SHARE * len(complete))
    return Collapses(trials, len(complete), tuple(_causes(trials, others)) if many and others else ())


def _causes(trials: Sequence[TrialState], others: Sequence[TrialState]) -> list[Cause]:
    """Return the settings that tell collapsed trials best from others: by the difference of their shares."""
    found = [cause for name in trials[0].params for cause in _conditions(name, trials, others)]
    telling = [
        cause
        for cause in found
        if cause.collapsed > _MOST_OTHERS * len(trials) and cause.others <= _MOST_OTHERS * len(others)
    ]

    def tells(cause: Cause) -> float:
        return cause.collapsed / len(trials) - cause.others / len(others)

    best: dict[str, Cause] = {}
    for cause in sorted(telling, key=tells, reverse=True):
        best.setdefault(cause.words.partition(" is ")[0], cause)
    return list(best.values())[:_MOST_CAUSES]


def _conditions(name: str, trials: Sequence[TrialState], others: Sequence[TrialState]) -> Iterator[Cause]:
    mine = [trial.params[name] for trial in trials if name in trial.params]
    theirs = [trial.params[name] for trial in others if name in trial.params]
    numbers = [value for value in (*mine, *theirs) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(mine) + len(theirs):
        for value in dict.fromkeys(mine):
            yield Cause(f"{name} is {_text(value)}", mine.count(value), theirs.count(value))
        return
    for bound in sorted(set(numbers)):
        above = [sum(value >= bound for value in _floats(values)) for values in (mine, theirs)]
        below = [sum(value <= bound for value in _floats(values)) for values in (mine, theirs)]
        yield Cause(f"{name} is {number_text(bound)} or more", *above)
        yield Cause(f"{name} is {number_text(bound)} or less", *below)


def _floats(values: Sequence[Scalar]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float)]


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def judgement(standing: Standing | None, collapses: Collapses) -> tuple[str, ...]:
    """Return in sentences whether a study's best trial beats the baselines; empty where unknown."""
    return (*((standing.sentence,) if standing is not None else ()), *collapses.sentences)


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


def verdict_of(
    state: StudyState, *, defaults_first: bool, standing: Standing | None = None, comparison: Comparison | None = None
) -> StudyVerdict:
    """Return the verdict on a study: first the flaws of its best trial, if any.

    Args:
        state: The study.
        defaults_first: Whether the first trial is known to have the study file's own values.
        standing: How the best trial stands against what the metric is worth without a model, where that is known.
        comparison: How it stands against other trials over several seeds, likewise.
    """
    ranked = state.ranked
    if not ranked:
        return StudyVerdict(_no_result(state), "Nothing can be compared yet.")
    result = _result(state, ranked, defaults_first=defaults_first)
    if standing is not None:
        good = standing.beats and standing.surely
        result = f"{result} {standing.sentence}" if good else f"{standing.sentence} {result}"
    if ranked[0].is_collapsed:
        every = "Every complete trial collapsed, so the best one has learned nothing of the rows"
        result = f"{every}: {ranked[0].collapsed}. {result}"
    return StudyVerdict(result, _certainty(state, ranked, comparison))


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
