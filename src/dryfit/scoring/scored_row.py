"""One row of a split with a model's answer and the correct one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

CLASS: Final = "class"
"""Part of an answer: a class, or with several to a row the list of them."""
SPAN: Final = "span"
"""Part of an answer: ``[start, end)`` in characters, or None; the truth is the list of all right spans."""
TEXT: Final = "text"
"""Part of an answer: generated text."""

NUMBER: Final = "number"
"""Part of an answer: the number that a regression says."""

LOSS_TERMS: Final = "loss_terms"
"""Name in :attr:`ScoredRow.values` of how many terms (windows, tokens) the row's ``loss`` is the sum of; absent: 1."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row of a split with a model's answer.

    Attributes:
        id: The row's own.
        truth: What is right, by part (:data:`CLASS`, :data:`SPAN`, :data:`TEXT`,
            :data:`NUMBER`); of JSON values.
        answer: What the model said, by the same parts; a part may be missing where it was not asked.
        p: Probability of each class; empty where the task has none.
        values: Numbers of this row whose mean over rows is a metric, by the metric's name; ``loss`` is a sum of
            :data:`LOSS_TERMS`.
    """

    id: str
    truth: Mapping[str, Any]
    answer: Mapping[str, Any]
    p: tuple[float, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict[str, float])


def joined(row: ScoredRow, other: ScoredRow) -> ScoredRow:
    """Return a row with the parts and values of both; probabilities are the first's."""
    return ScoredRow(
        row.id, {**row.truth, **other.truth}, {**row.answer, **other.answer}, row.p, {**row.values, **other.values}
    )


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A row's facts beside its answer: group and criterion.

    Attributes:
        group: Rows of one group depend on one another: they are drawn together.
        criterion: The question about the text; None where there is none.
    """

    group: str
    criterion: str | None = None


def known_facts(facts: Mapping[str, RowFacts], name: str) -> RowFacts | None:
    """Return the facts of a scored row by its id; of one of two prompts, ``r7 (evidence)``, those of the row itself."""
    return facts[name] if name in facts else facts.get(name.rpartition(" (")[0])
