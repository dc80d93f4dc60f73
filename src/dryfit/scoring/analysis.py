"""What a model does well and badly, from scored rows: by class, criterion and group, and the rows it has most wrong.

It is the same whether a model has just answered, or files of scored rows are read. All of it is bounded, whatever the
rows are, and says ids and numbers of rows, never their texts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dryfit.core.jobs.analysis import Analysis, NumberAnalysis, PartScores, SpanAnalysis, TextAnalysis, WorstRow
from dryfit.core.settings.choices import Metric
from dryfit.core.text.words import sendable
from dryfit.scoring.class_analysis import MOST_WORST, analysed_classes, number, row_name
from dryfit.scoring.row_metrics import both_parts, row_metric
from dryfit.scoring.scored_row import CLASS, LOSS_TERMS, NUMBER, SPAN, TEXT, RowFacts, ScoredRow, known_facts

MOST_CRITERIA: Final = 50
MOST_GROUPS: Final = 20
"""With more groups, each has few rows: they say nothing one by one."""
_MOST_NAME: Final = 120
_MOST_SPANS: Final = 5

_OF_CLASSES: Final = (Metric.F1_MACRO, Metric.F1, Metric.ACCURACY)
_OF_SPANS: Final = (Metric.TOKEN_F1, Metric.TOKEN_F1_HAS, Metric.NULL_RECALL)
_OF_NUMBERS: Final = (Metric.MSE, Metric.MAE, Metric.PEARSON, Metric.SPEARMAN)
_OF_TEXTS: Final = (Metric.EXACT_MATCH, Metric.TOKEN_F1, Metric.LOSS)


def analyse(
    rows: Sequence[ScoredRow],
    facts: Mapping[str, RowFacts] | None,
    *,
    split: str,
    metric: str,
    of: int | None = None,
    thresholds: Sequence[float] = (),
    labels: Sequence[str] = (),
) -> Analysis | None:
    """Return the analysis of a model's answers; None without rows.

    Args:
        rows: With the model's answers.
        facts: Criteria and groups of rows by id; None: they are not known.
        split: Which rows they are.
        metric: The study's, which comes first.
        of: Rows of the split; None: as many.
        thresholds: Above which a class is answered: of class 1 of two, or with several classes a row of each class;
            where there is none, one half.
        labels: Names of the classes; empty: they are numbers.
    """
    if not rows:
        return None
    of = len(rows) if of is None else of
    unsound = _unanalysable(rows)
    if unsound:
        notes = (f"The rows are not analysed: {unsound}.",)
        return Analysis(
            split=split, rows=0, of=of, overall=PartScores(name="all", rows=len(rows), scores={}), notes=notes
        )
    classes = [row for row in rows if row.p and CLASS in row.answer]
    spans = [row for row in rows if SPAN in row.answer]
    numbers = [row for row in rows if NUMBER in row.answer]
    usual = (*(_OF_CLASSES if classes else ()), *(_OF_SPANS if spans else ()), *(_OF_NUMBERS if numbers else ()))
    names = _metrics(rows, metric, usual or _OF_TEXTS)
    parts, notes = ((), ()), ("Which criterion and group rows have is not known: the study keeps no such file.",)
    if facts is not None:
        parts, notes = _parts(rows, facts, names)
    return Analysis(
        split=split,
        rows=len(rows),
        of=of,
        overall=_scores("all", rows, names),
        classes=analysed_classes(classes, thresholds, labels) if classes else None,
        spans=_spans(spans) if spans else None,
        texts=_texts(rows) if not classes and not spans and not numbers and _is_scored(rows) else None,
        numbers=_numbers(numbers) if numbers else None,
        criteria=parts[0],
        groups=parts[1],
        notes=notes,
    )


def _unanalysable(rows: Sequence[ScoredRow]) -> str:
    """Return why rows cannot be analysed; empty where they can: a task of the user's own may tell anything."""
    several = {isinstance(row.truth[CLASS], list) for row in rows if CLASS in row.truth}
    sizes = {len(row.p) for row in rows if row.p and CLASS in row.answer}
    if any(part not in row.truth for row in rows for part in row.answer):
        return "some have an answer and nothing that is right"
    if len(sizes) > 1 or len(several) > 1:
        return "they have different numbers of classes"
    (size,) = sizes or {0}
    said = (part[CLASS] for row in rows if row.p for part in (row.truth, row.answer) if CLASS in part)
    labels = (label for one in said for label in (one if isinstance(one, list) else [one]))
    if any(not isinstance(label, int) or not 0 <= label < size for label in labels):
        return f"a class is none of 0 to {size - 1}"
    return ""


def _metrics(rows: Sequence[ScoredRow], metric: str, usual: Sequence[str]) -> list[str]:
    """Return the names of the metrics that these rows have: the study's, and the usual ones of such answers."""
    names = dict.fromkeys(map(str, (metric, *usual)))
    return [name for name in names if row_metric(name, rows) is not None]


def _scores(name: str, rows: Sequence[ScoredRow], names: Sequence[str]) -> PartScores:
    metrics = {one: row_metric(one, rows) for one in names}
    scores = {one: number(metric.value) if metric is not None else None for one, metric in metrics.items()}
    return PartScores(name=name, rows=len(rows), scores=scores)


_Parts = tuple[tuple[PartScores, ...], tuple[PartScores, ...]]


def _parts(
    rows: Sequence[ScoredRow], facts: Mapping[str, RowFacts], names: Sequence[str]
) -> tuple[_Parts, tuple[str, ...]]:
    """Return the scores by criterion and by group, and what is missing."""
    known = [(row, fact) for row in rows if (fact := known_facts(facts, row.id)) is not None]
    asked, grouped = defaultdict[str, list[ScoredRow]](list), defaultdict[str, list[ScoredRow]](list)
    for row, fact in known:
        grouped[fact.group].append(row)
        if fact.criterion is not None:
            asked[fact.criterion].append(row)
    notes = [f"Criterion and group are known of {len(known)} of {len(rows)} rows."] if len(known) < len(rows) else []
    if len(asked) > MOST_CRITERIA:
        notes.append(f"Of {len(asked)} criteria the {MOST_CRITERIA} with the most rows are listed.")
    few = 1 < len(grouped) <= MOST_GROUPS and 2 * len(grouped) <= len(known)
    found = _of_each(asked, names)[:MOST_CRITERIA], _of_each(grouped, names) if few else ()
    return found, tuple(notes)


def _of_each(parts: Mapping[str, Sequence[ScoredRow]], names: Sequence[str]) -> tuple[PartScores, ...]:
    ordered = sorted(parts, key=lambda name: (-len(parts[name]), name))[:MOST_CRITERIA]
    return tuple(_scores(_short(name), parts[name], names) for name in ordered)


def _short(name: str) -> str:
    name = sendable(name)
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 3]}..."


def _spans(rows: Sequence[ScoredRow]) -> SpanAnalysis:
    def count(*, has: bool, said: bool) -> int:
        return sum(bool(row.truth[SPAN]) is has and (row.answer[SPAN] is not None) is said for row in rows)

    wrong = [row for row in rows if not row.values.get(Metric.TOKEN_F1, 0.0) >= 1.0]
    return SpanAnalysis(
        found=count(has=True, said=True),
        missed=count(has=True, said=False),
        invented=count(has=False, said=True),
        left=count(has=False, said=False),
        worst=_worst(wrong, _span_text),
    )


def _is_scored(rows: Sequence[ScoredRow]) -> bool:
    """Whether texts were generated, or tokens scored."""
    return any(TEXT in row.answer or Metric.LOSS in row.values for row in rows)


def _texts(rows: Sequence[ScoredRow]) -> TextAnalysis:
    asked = [row for row in rows if TEXT in row.answer]
    exact = [row for row in asked if row.answer[TEXT] == row.truth[TEXT]]
    wrong = [row for row in asked if row.answer[TEXT] != row.truth[TEXT]] if asked else rows
    return TextAnalysis(asked=len(asked), exact=len(exact), worst=_worst(wrong, lambda _: ""))


def _numbers(rows: Sequence[ScoredRow]) -> NumberAnalysis:
    right_R, said_R = (np.array([part[NUMBER] for part in parts], np.float64) for parts in both_parts(rows))
    return NumberAnalysis(
        mean=number(float(right_R.mean())),
        deviation=number(float(right_R.std())),
        answered_mean=number(float(said_R.mean())),
        answered_deviation=number(float(said_R.std())),
        worst=tuple(
            WorstRow(
                id=row_name(row),
                right=f"{row.truth[NUMBER]:.6g}",
                answered=f"{row.answer[NUMBER]:.6g}",
                values={str(Metric.MAE): number(row.values.get(Metric.MAE, math.nan))},
            )
            for row in sorted(rows, key=lambda row: (-_loss(row), row.id))[:MOST_WORST]
        ),
    )


def _worst(rows: Sequence[ScoredRow], said: Callable[[Any], str]) -> tuple[WorstRow, ...]:
    """Return the worst of rows: by token F1 where they have one, then by their loss."""

    def rank(row: ScoredRow) -> tuple[float, float, str]:
        return row.values.get(Metric.TOKEN_F1, 0.0), -_loss(row), row.id

    return tuple(
        WorstRow(
            id=row_name(row),
            right=said(row.truth.get(SPAN)),
            answered=said(row.answer.get(SPAN)),
            values={
                **{
                    str(name): number(row.values[name])
                    for name in (Metric.TOKEN_F1, Metric.SPAN_IOU)
                    if name in row.values
                },
                **_loss_value(row),
            },
        )
        for row in sorted(rows, key=rank)[:MOST_WORST]
    )


def _loss(row: ScoredRow) -> float:
    """Return a row's loss, of several windows or tokens their mean; infinite where it is no number, 0 without one."""
    if Metric.LOSS not in row.values:
        return 0.0
    loss = row.values[Metric.LOSS] / max(1.0, row.values.get(LOSS_TERMS, 1.0))
    return math.inf if math.isnan(loss) else loss


def _loss_value(row: ScoredRow) -> dict[str, float | None]:
    """Return a row's loss by its name, if it has one."""
    return {str(Metric.LOSS): number(_loss(row))} if Metric.LOSS in row.values else {}


def _span_text(part: Any) -> str:
    """Return one span, or several, as characters from and to; ``none``."""
    if not part:
        return "none"
    spans = part if isinstance(part[0], list) else [part]
    text = ", ".join(f"{start}-{end}" for start, end in spans[:_MOST_SPANS])
    return text if len(spans) <= _MOST_SPANS else f"{text} ..."
