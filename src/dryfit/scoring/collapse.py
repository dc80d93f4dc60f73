"""Collapse: a model that gives every row the same answer has learned nothing of the rows, whatever its score."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dryfit.core.text.words import brief
from dryfit.scoring.row_metrics import both_parts
from dryfit.scoring.scored_row import CLASS, NUMBER, SPAN, TEXT, ScoredRow

_FEWEST_ROWS: Final = 2
_SPREAD: Final = 0.01
"""Standard deviation of numbers from which on they differ, as a share of that of the right ones."""
_WORDS: Final = {CLASS: "class", SPAN: "span", TEXT: "answer"}


def collapsed(rows: Sequence[ScoredRow], names: Sequence[str] = ()) -> str:
    """Return in words how a model's answers have collapsed; empty where they have not.

    Each part of an answer is looked at for itself, where the right answers differ and the rows asked for it are two at
    least: one class, or one set of classes, for all rows; no span for any, or the same characters for all; one text.

    Numbers have collapsed where they spread over less than a hundredth of what is right: a model of the mean alone
    still says something else in the last digits.

    Args:
        rows: With their answers.
        names: Of the classes; empty: they are numbers.
    """
    said = [
        f"every row is answered with {_said(part, only, names)}"
        for part in _WORDS
        if (only := _only_answer(part, [row for row in rows if part in row.answer])) is not _DIFFERENT
    ]
    return "; ".join([*said, *_only_number([row for row in rows if NUMBER in row.answer])])


def _only_number(rows: Sequence[ScoredRow]) -> list[str]:
    """Return what is said of numbers that hardly differ; nothing where they do, or where it is right."""
    if len(rows) < _FEWEST_ROWS:
        return []
    right, said = (np.array([part[NUMBER] for part in parts], np.float64) for parts in both_parts(rows))
    if not np.isfinite(said).all() or said.std() >= _SPREAD * right.std():
        return []
    return [f"every row is answered with {said.mean():.4g}, or nearly"]


_DIFFERENT: Final = object()


def _only_answer(part: str, rows: Sequence[ScoredRow]) -> Any:
    """Return the one answer of all rows; ``_DIFFERENT`` where there is none, or it is right for all."""
    if len(rows) < _FEWEST_ROWS:
        return _DIFFERENT
    first = rows[0]
    if any(row.answer[part] != first.answer[part] for row in rows):
        return _DIFFERENT
    return first.answer[part] if any(row.truth[part] != first.truth[part] for row in rows) else _DIFFERENT


def _said(part: str, answer: Any, names: Sequence[str]) -> str:
    match part, answer:
        case "span", None:
            return "no span"
        case "span", [start, end]:
            return f"the characters {start} to {end}"
        case "class", []:
            return "no class"
        case "class", list():
            return f"the classes {', '.join(str(names[one] if names else one) for one in answer)}"
        case "class", _:
            return f"class {names[answer] if names else answer}"
        case _:
            return brief(answer, 80)
