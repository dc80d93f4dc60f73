"""What a model does well and badly, as Markdown for its card: a few short tables; the whole is in ``analysis.json``."""

import re
from collections.abc import Sequence
from typing import Final

from dryfit.core.jobs.analysis import (
    ANALYSIS_FILE,
    Analysis,
    ClassAnalysis,
    NumberAnalysis,
    PartScores,
    SpanAnalysis,
    WorstRow,
)
from dryfit.core.text.words import printable

_MOST_CLASSES: Final = 20
_MOST_CONFUSED: Final = 8
"""A wider table of confusions is not read."""
_MOST_CRITERIA: Final = 10
_MOST_WORST: Final = 5
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def analysis_text(analysis: Analysis) -> str:
    """Return the section of a model card."""
    blocks = [_on_what(analysis)] if analysis.rows else []
    if analysis.classes is not None:
        blocks += _of_classes(analysis.classes)
    if analysis.spans is not None:
        blocks.append(_of_spans(analysis.spans))
    if analysis.texts is not None and analysis.texts.asked:
        texts = analysis.texts
        blocks.append(f"Of {texts.asked} generated answers {texts.exact} are exactly as wanted.")
    if analysis.numbers is not None:
        blocks.append(_of_numbers(analysis.numbers))
    if analysis.criteria:
        blocks.append(_by_criterion(analysis.criteria))
    blocks += [_worst(rows) for rows in _wrong(analysis) if rows]
    blocks += analysis.notes
    return "\n\n".join(blocks)


def _on_what(analysis: Analysis) -> str:
    rows = f"{analysis.rows} rows of {analysis.split}"
    chosen = ", by which its weights were chosen: its numbers are optimistic" if analysis.split != "test" else ""
    return f"On the {rows}{chosen}. All of it, with calibration and curves, is in `{ANALYSIS_FILE}`."


def _of_classes(found: ClassAnalysis) -> list[str]:
    listed = found.scores[:_MOST_CLASSES]
    cells = [
        [_plain(found.name(one.label)), _number(one.precision), _number(one.recall), _number(one.f1), str(one.support)]
        for one in listed
    ]
    blocks = [_table(["class", "precision", "recall", "F1", "rows"], cells)]
    if len(listed) < found.classes:
        blocks.append(f"{found.classes - len(listed)} more classes are not listed.")
    if 1 < len(found.confusion) <= _MOST_CONFUSED:
        heads = ["right class, by answer", *(_plain(found.name(one.label)) for one in found.scores)]
        rows = [
            [_plain(found.name(one.label)), *map(str, counts)]
            for one, counts in zip(found.scores, found.confusion, strict=True)
        ]
        blocks.append(_table(heads, rows))
    if found.ece is not None:
        blocks.append(f"Expected calibration error of its probabilities: {found.ece:.4f}.")
    if found.curves:
        cells = [
            [
                _plain(found.name(one.label)),
                f"{one.threshold:.4f}",
                _number(one.precision),
                _number(one.recall),
                _number(one.average_precision),
            ]
            for one in found.curves
        ]
        blocks.append(_table(["class", "answered above", "precision", "recall", "average precision"], cells))
    return blocks


def _of_spans(found: SpanAnalysis) -> str:
    rows = [
        ["has a span", str(found.found), str(found.missed)],
        ["has none", str(found.invented), str(found.left)],
    ]
    return _table(["rows", "answered with a span", "answered with none"], rows)


def _of_numbers(found: NumberAnalysis) -> str:
    rows = [
        ["right", _number(found.mean), _number(found.deviation)],
        ["answered", _number(found.answered_mean), _number(found.answered_deviation)],
    ]
    return _table(["numbers", "mean", "standard deviation"], rows)


def _by_criterion(parts: Sequence[PartScores]) -> str:
    names = list(parts[0].scores)
    rows = [
        [_plain(one.name), str(one.rows), *(_number(one.scores.get(name)) for name in names)]
        for one in parts[:_MOST_CRITERIA]
    ]
    left = len(parts) - len(rows)
    table = _table(["criterion", "rows", *names], rows)
    return f"{table}\n\n{left} more criteria are not listed." if left else table


def _wrong(analysis: Analysis) -> list[tuple[WorstRow, ...]]:
    parts = (analysis.classes, analysis.spans, analysis.texts, analysis.numbers)
    return [part.worst for part in parts if part is not None]


def _worst(rows: Sequence[WorstRow]) -> str:
    names = list(rows[0].values)
    cells = [
        [_plain(one.id), one.right or "-", one.answered or "-", *(_number(one.values.get(name)) for name in names)]
        for one in rows[:_MOST_WORST]
    ]
    return _table(["worst rows", "right", "answered", *map(_plain, names)], cells)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = f"|---|{'--:|' * (len(heads) - 1)}"
    return "\n".join([f"| {' | '.join(heads)} |", line, *(f"| {' | '.join(row)} |" for row in rows)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _plain(text: str) -> str:
    """Return a text of the data as Markdown shows it: on one line, and none of it markup."""
    return _MARKUP.sub(r"\\\1", " ".join(printable(text).split()))
