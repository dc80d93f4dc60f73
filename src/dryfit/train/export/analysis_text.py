"""What a model does well and badly, as Markdown for its card: a few short tables; the whole is in ``analysis.json``."""

import re
from typing import Final

from dryfit.core.jobs.analysis import ANALYSIS_FILE, Analysis
from dryfit.core.text.table import Table
from dryfit.core.text.words import printable
from dryfit.scoring.analysis_tables import Of, analysis_tables

_MOST: Final = {Of.CLASSES: 20, Of.THRESHOLDS: 20, Of.SPANS: 2, Of.NUMBERS: 2, Of.CRITERIA: 10, Of.WORST: 5}
"""Tables that a card has, with the most rows of each."""
_MOST_CONFUSED: Final = 8
"""A wider table of confusions is not read."""
_COLUMNS: Final = {Of.CLASSES: 5}
"""The columns of a table that a card has; else all."""
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def analysis_text(analysis: Analysis) -> str:
    """Return the section of a model card."""
    blocks = [_on_what(analysis)] if analysis.rows else []
    classes = analysis.classes
    for of, _, table in analysis_tables(analysis):
        if of is Of.CALIBRATION and classes is not None:
            blocks.append(f"Expected calibration error of its probabilities: {classes.ece:.4f}.")
        elif of is Of.ANSWERS and analysis.texts is not None:
            texts = analysis.texts
            blocks.append(f"Of {texts.asked} generated answers {texts.exact} are exactly as wanted.")
        elif of in _MOST or (of is Of.CONFUSION and len(table.rows) <= _MOST_CONFUSED):
            rows = table.rows[: _MOST.get(of)]
            blocks += ["The worst rows:"] if of is Of.WORST else []
            blocks.append(_markdown(Table(table.heads, rows), _COLUMNS.get(of)))
            left = (classes.classes if of is Of.CLASSES and classes is not None else len(table.rows)) - len(rows)
            if left and of in (Of.CLASSES, Of.CRITERIA):
                blocks.append(f"{left} more {of} are not listed.")
    return "\n\n".join([*blocks, *analysis.notes])


def _on_what(analysis: Analysis) -> str:
    rows = f"{analysis.rows} rows of {analysis.split}"
    chosen = ", by which its weights were chosen: its numbers are optimistic" if analysis.split != "test" else ""
    return f"On the {rows}{chosen}. All of it, with calibration and curves, is in `{ANALYSIS_FILE}`."


def _markdown(table: Table, columns: int | None) -> str:
    heads, *rows = (list(map(_plain, row[:columns])) for row in (table.heads, *table.rows))
    line = f"|---|{'--:|' * (len(heads) - 1)}"
    return "\n".join([f"| {' | '.join(heads)} |", line, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(text: str) -> str:
    """Return a text of the data as Markdown shows it: on one line, and none of it markup."""
    return _MARKUP.sub(r"\\\1", " ".join(printable(text).split()))
