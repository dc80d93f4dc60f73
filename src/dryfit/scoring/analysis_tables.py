"""What a trained model does well and badly, as tables: for a terminal, a report's page and a model's card."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from dryfit.core.jobs.analysis import Analysis, ClassAnalysis, NumberAnalysis, PartScores, SpanAnalysis, WorstRow
from dryfit.core.text.table import Table, number_text
from dryfit.core.text.words import printable

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
            tables.append((Of.WORST, "Worst rows", _worst(part.worst)))
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


def _worst(rows: Sequence[WorstRow]) -> Table:
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
