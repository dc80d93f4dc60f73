"""What a trained model does well and badly: by class and group, with tables."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, TypeAlias, cast

import numpy as np

from dryfit.settings.choices import Metric
from dryfit.settings.text import Table, number_text, printable, sendable
from dryfit.settings.training_messages import (
    Analysis,
    CalibrationBin,
    ClassAnalysis,
    ClassScore,
    NumberAnalysis,
    PartScores,
    PrecisionRecall,
    SpanAnalysis,
    TextAnalysis,
    WorstRow,
)
from dryfit.tasks.row_metrics import CALIBRATION_BINS, Floats, both_parts, judged, one_hot, row_metric
from dryfit.tasks.scored_rows import CLASS, LOSS_TERMS, NUMBER, SPAN, TEXT, RowFacts, ScoredRow, known_facts

# What a classifier does well and badly: classes, confusion, calibration, precision over recall, the worst rows.
#
# Dimension suffixes: ``R`` rows, ``C`` classes, ``N`` probabilities of a row that are judged, ``U`` thresholds.


MOST_CLASSES: Final = 50
MOST_CURVES: Final = 10
MOST_POINTS: Final = 100
MOST_WORST: Final = 20
HALF: Final = 0.5
_MOST_ID: Final = 200


def analysed_classes(
    rows: Sequence[ScoredRow], thresholds: Sequence[float], names: Sequence[str] = ()
) -> ClassAnalysis:
    """Return the analysis of rows that are answered with classes.

    Args:
        rows: One at least; each with the probabilities of as many classes.
        thresholds: Of class 1 of two, or with several classes a row of each class; where there is none, one half.
        names: Of the classes; where these are not as many, they have none.
    """
    several, classes = isinstance(rows[0].truth[CLASS], list), len(rows[0].p)
    names = tuple(names) if len(names) == classes else ()
    # As many digits as files of scored rows keep, so that these give the same.
    p_RC = np.array([[float(f"{p:.9g}") for p in row.p] for row in rows])
    has_RC, said_RC = (one_hot([part[CLASS] for part in parts], classes) for parts in both_parts(rows))
    support_C = has_RC.sum(axis=0)
    by_support = np.argsort(-support_C, kind="stable")
    shown = np.sort(by_support[:MOST_CLASSES])
    scores = [_class_score(int(label), has_RC[:, label], said_RC[:, label]) for label in shown]
    counts = np.rint(has_RC.T @ said_RC).astype(int)[np.ix_(shown, shown)].tolist()
    finite_R = np.array([all(map(math.isfinite, row.p)) for row in rows])
    curved = [1] if classes == 2 and not several else np.sort(by_support[:MOST_CURVES]).tolist() if several else []
    asked = {score.label: score for score in scores}
    return ClassAnalysis(
        classes=classes,
        several=several,
        scores=tuple(scores),
        confusion=() if several else tuple(map(tuple, counts)),
        ece=_ece([row for row, finite in zip(rows, finite_R, strict=True) if finite]),
        calibration=tuple(_calibration(p_RC[finite_R], has_RC[finite_R], several=several)),
        curves=tuple(
            _curve(asked[label], _threshold(thresholds, at), p_RC[finite_R, label], has_RC[finite_R, label])
            for at, label in ((label if several else 0, label) for label in curved)
        ),
        worst=_worst_classes(rows, _cross_entropies(p_RC, has_RC, several=several), names),
        names=names,
    )


def number(value: float) -> float | None:
    """Return a number with six digits; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def row_name(row: ScoredRow) -> str:
    """Return a row's id, cut where it is long."""
    return sendable(row.id)[:_MOST_ID]


def _class_score(label: int, has_R: Floats, said_R: Floats) -> ClassScore:
    has, said, both = (int(np.rint(one)) for one in (has_R.sum(), said_R.sum(), has_R @ said_R))
    return ClassScore(
        label=label,
        support=has,
        answered=said,
        right=both,
        precision=number(both / said) if said else None,
        recall=number(both / has) if has else None,
        f1=float(f"{2 * both / (has + said):.6g}") if both else 0.0,
    )


def _ece(rows: Sequence[ScoredRow]) -> float | None:
    metric = row_metric(Metric.ECE, rows)
    return number(metric.value) if metric is not None else None


def _calibration(p_RC: Floats, has_RC: Floats, *, several: bool) -> list[CalibrationBin]:
    """Return the bins that have a probability; the probability 1 is in one of its own, as in the metric."""
    found = judged(p_RC, has_RC, several=several)
    bins: list[CalibrationBin] = []
    for at in np.unique(found.bins_RN).tolist():
        inside_RN = found.bins_RN == at
        low, high = ((at - 1) / CALIBRATION_BINS, min(at / CALIBRATION_BINS, 1.0))
        p, share = float(found.p_RN[inside_RN].mean()), float(found.true_RN[inside_RN].mean())
        count = int(inside_RN.sum())
        bins.append(
            CalibrationBin(
                low=round(low, 6), high=round(high, 6), count=count, p=number(p) or 0.0, share=number(share) or 0.0
            )
        )
    return bins


def _threshold(thresholds: Sequence[float], at: int) -> float:
    return thresholds[at] if at < len(thresholds) else HALF


def _curve(score: ClassScore, threshold: float, p_R: Floats, has_R: Floats) -> PrecisionRecall:
    """Return precision and recall where a threshold falls, with the average precision of scikit-learn's user guide."""
    order = np.argsort(-p_R, kind="stable")
    p_R, has_R = p_R[order], has_R[order]
    # The last row of each probability: rows of one probability are answered alike.
    ends_U = np.flatnonzero(np.diff(p_R, append=-math.inf))
    right_U = np.cumsum(has_R)[ends_U]
    precision_U = right_U / (ends_U + 1)
    known = has_R.sum() > 0
    recall_U = right_U / has_R.sum() if known else np.zeros_like(right_U)
    kept = np.unique(np.linspace(0, len(ends_U) - 1, min(MOST_POINTS, len(ends_U))).round().astype(int))
    return PrecisionRecall(
        label=score.label,
        threshold=threshold,
        precision=score.precision,
        recall=score.recall,
        average_precision=number(float(np.diff(recall_U, prepend=0.0) @ precision_U)) if known else None,
        thresholds=_numbers(p_R[ends_U][kept]) if known else (),
        precisions=_numbers(precision_U[kept]) if known else (),
        recalls=_numbers(recall_U[kept]) if known else (),
    )


def _numbers(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def _cross_entropies(p_RC: Floats, has_RC: Floats, *, several: bool) -> list[float]:
    """Return each row's loss by its probabilities alone, with several classes the mean over them; infinite where none.

    Rows of tasks that learn spans too do not say what their classes lost.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if several:
            loss_R = -np.log(np.where(has_RC > 0, p_RC, 1 - p_RC)).mean(axis=1)
        else:
            loss_R = -np.log((p_RC * has_RC).sum(axis=1))
    return np.nan_to_num(loss_R, nan=math.inf, posinf=math.inf).tolist()


def _worst_classes(rows: Sequence[ScoredRow], losses: Sequence[float], names: Sequence[str]) -> tuple[WorstRow, ...]:
    both = zip(rows, losses, strict=True)
    wrong = [(-loss, row.id, row) for row, loss in both if row.truth[CLASS] != row.answer[CLASS]]
    wrong.sort(key=lambda one: one[:2])
    return tuple(
        WorstRow(
            id=row_name(row),
            right=_classes(row.truth[CLASS], names),
            answered=_classes(row.answer[CLASS], names),
            values={**_probabilities(row), str(Metric.LOSS): number(-negative)},
        )
        for negative, _, row in wrong[:MOST_WORST]
    )


def _probabilities(row: ScoredRow) -> dict[str, float | None]:
    right, answer = row.truth[CLASS], row.answer[CLASS]
    return {} if isinstance(right, list) else {"p": number(row.p[answer]), "p_right": number(row.p[right])}


def _classes(part: Any, names: Sequence[str]) -> str:
    """Return a class, or several, as text."""
    if not isinstance(part, list):
        return names[int(part)] if names else str(part)
    labels = cast("list[int]", part)[:MOST_WORST]
    shown = ", ".join(names[one] if names else str(one) for one in labels)
    return "none" if not labels else shown if len(part) <= MOST_WORST else f"{shown} ..."


# What a model does well and badly, from scored rows: by class, criterion and group, and the rows it has most wrong.
#
# It is the same whether a model has just answered, or files of scored rows are read. All of it is bounded, whatever
# the rows are, and says ids and numbers of rows, never their texts.


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
        numbers=_number_analysis(numbers) if numbers else None,
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


def _number_analysis(rows: Sequence[ScoredRow]) -> NumberAnalysis:
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


# What a trained model does well and badly, as tables: for a terminal, a report's page and a model's card.


_MOST_CONFUSED: Final = 20


class Of(StrEnum):
    """What a table is of."""

    ALL = "all"
    CLASSES = "classes"
    CONFUSION = "confusion"
    CALIBRATION = "calibration"
    THRESHOLDS = "thresholds"
    SPANS = "spans"
    ANSWERS = "answers"
    NUMBERS = "numbers"
    CRITERIA = "criteria"
    GROUPS = "groups"
    WORST = "worst"


Captioned: TypeAlias = list[tuple[Of, str, Table]]
"""Tables, each with what it is of and the line above it."""


def analysis_tables(analysis: Analysis) -> Captioned:
    """Return how a model does: in all, by class, with and without a span, by criterion and group, the worst rows."""
    overall = Table(("metric", "value"), tuple((name, number_text(x)) for name, x in analysis.overall.scores.items()))
    tables = [(Of.ALL, "", overall)] if overall.rows else []
    if analysis.classes is not None:
        tables += _of_classes(analysis.classes)
    if analysis.spans is not None:
        tables.append((Of.SPANS, "Rows with and without a span", _of_spans(analysis.spans)))
    if analysis.texts is not None and analysis.texts.asked:
        counts = (str(analysis.texts.asked), str(analysis.texts.exact))
        tables.append((Of.ANSWERS, "Generated answers", Table(("answers", "exactly as wanted"), (counts,))))
    if analysis.numbers is not None:
        tables.append((Of.NUMBERS, "Numbers", _of_numbers(analysis.numbers)))
    for of, head, parts in ((Of.CRITERIA, "criterion", analysis.criteria), (Of.GROUPS, "group", analysis.groups)):
        if parts:
            tables.append((of, f"By {head}", _by_part(head, parts)))
    for part in (analysis.classes, analysis.spans, analysis.texts, analysis.numbers):
        if part is not None and part.worst:
            tables.append((Of.WORST, "Worst rows", _worst_table(part.worst)))
    return tables


def _of_classes(found: ClassAnalysis) -> Captioned:
    rows = tuple(
        (
            printable(found.name(one.label)),
            *map(number_text, (one.precision, one.recall, one.f1)),
            *map(str, (one.support, one.answered, one.right)),
        )
        for one in found.scores
    )
    tables = [(Of.CLASSES, "", Table(("class", "precision", "recall", "F1", "rows", "answered", "right"), rows))]
    if 1 < len(found.confusion) <= _MOST_CONFUSED:
        names = [printable(found.name(one.label)) for one in found.scores]
        cells = tuple((name, *map(str, counts)) for name, counts in zip(names, found.confusion, strict=True))
        tables.append((Of.CONFUSION, "Confusion", Table(("right class, by answer", *names), cells)))
    if found.ece is not None:
        caption = f"Calibration: expected error {number_text(found.ece)}"
        bins = tuple(
            (f"{one.low:.3f} to {one.high:.3f}", str(one.count), number_text(one.p), number_text(one.share))
            for one in found.calibration
        )
        tables.append(
            (Of.CALIBRATION, caption, Table(("probability", "answers", "mean", "share that came true"), bins))
        )
    if found.curves:
        curves = tuple(
            (
                printable(found.name(one.label)),
                *map(number_text, (one.threshold, one.precision, one.recall, one.average_precision)),
            )
            for one in found.curves
        )
        tables.append(
            (
                Of.THRESHOLDS,
                "Thresholds",
                Table(("class", "answered above", "precision", "recall", "average precision"), curves),
            )
        )
    return tables


def _of_spans(found: SpanAnalysis) -> Table:
    rows = (("has a span", found.found, found.missed), ("has none", found.invented, found.left))
    heads = ("rows", "answered with a span", "answered with none")
    return Table(heads, tuple((name, str(said), str(none)) for name, said, none in rows))


def _of_numbers(found: NumberAnalysis) -> Table:
    sides = (
        ("right", found.mean, found.deviation),
        ("answered", found.answered_mean, found.answered_deviation),
    )
    rows = tuple((name, number_text(mean), number_text(deviation)) for name, mean, deviation in sides)
    return Table(("numbers", "mean", "standard deviation"), rows)


def _by_part(head: str, parts: Sequence[PartScores]) -> Table:
    names = tuple(parts[0].scores)
    rows = tuple(
        (printable(one.name), str(one.rows), *(number_text(one.scores.get(name)) for name in names)) for one in parts
    )
    return Table((head, "rows", *names), rows)


def _worst_table(rows: Sequence[WorstRow]) -> Table:
    names = tuple(rows[0].values)
    cells = tuple(
        (
            printable(one.id),
            one.right or "-",
            one.answered or "-",
            *(number_text(one.values.get(name)) for name in names),
        )
        for one in rows
    )
    return Table(("id", "right", "answered", *names), cells)
