"""Prompts and wanted answers of a causal language model, made from rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.settings.tables import LmSettings
from dryfit.tasks.rows.checked_rows import Row, UnlabelledRow


class PromptPart(IntEnum):
    """What a prompt asks for."""

    WHOLE = 0
    """A plain text, or the answer to an instruction."""
    CRITERIA = 1
    EVIDENCE = 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt with its answer.

    Attributes:
        name: The row's id, with the part where a row has two prompts.
        template: The prompt with ``{criterion}`` and ``{text}``; None: there is no prompt.
        criterion: Value of the first; None where rows have no criterion.
        text: Value of the second, the only part of a prompt that may be cut.
        answer: The text to learn.
        part: What the prompt asks for.
        place: Where the row came from, for messages.
    """

    name: str
    template: str | None
    criterion: str | None
    text: str
    answer: str
    part: PromptPart
    place: str

    def prompt(self, characters: int | None = None) -> str:
        """Return the prompt with the first characters of the text; None: with all of them."""
        if self.template is None:
            return ""
        return self.template.format(criterion=self.criterion, text=self.text[:characters])


def answer_words(lm: LmSettings, num_labels: int) -> tuple[str, ...]:
    """Return the word of each label.

    Raises:
        ConfigError: There is not one word for each label, or two are the same.
    """
    words = tuple(word.strip() for word in lm.answers.split(","))
    if len(words) != num_labels or not all(words) or len(set(words)) < len(words):
        raise ConfigError(
            "reading lm.answers",
            f"{lm.answers!r} has {len(words)} words, and data.num_labels is {num_labels}",
            allowed="a different word for each label from 0, with commas between them",
            hint='lm.answers = "no,yes" for two labels',
        )
    return words


def exchanges(row: Row, lm: LmSettings, words: Sequence[str]) -> tuple[Exchange, ...]:
    """Return the prompts of a row with their answers.

    Args:
        row: A checked row.
        lm: The ``[lm]`` table.
        words: Of the labels; used where the format asks for them.

    Raises:
        DataError: The row has no criterion, and a prompt asks for it.
    """
    answers = {
        PromptPart.WHOLE: row.text,
        PromptPart.EVIDENCE: "\n".join(row.text[start:end] for start, end in row.evidence),
    }
    if PromptPart.CRITERIA in parts_of(lm):
        assert isinstance(row.label, int)  # several labels are refused with the study file
        answers[PromptPart.CRITERIA] = words[row.label]
    answers[PromptPart.EVIDENCE] = answers[PromptPart.EVIDENCE] or lm.no_evidence
    return tuple(_exchange(row, row.id, part, lm, answers[part]) for part in parts_of(lm))


def questions(row: UnlabelledRow, lm: LmSettings) -> tuple[Exchange, ...]:
    """Return the prompts of a row to predict, without answers; in the format ``text`` the text is continued.

    Raises:
        DataError: The row has no criterion, and a prompt asks for it.
    """
    if lm.format == "text":
        return (Exchange(row.id or row.place, "{text}", None, row.text, "", PromptPart.WHOLE, row.place),)
    return tuple(_exchange(row, row.id or row.place, part, lm, "") for part in parts_of(lm))


def parts_of(lm: LmSettings) -> tuple[PromptPart, ...]:
    """Return the parts of each row's prompts."""
    match lm.format:
        case "text" | "instruction":
            return (PromptPart.WHOLE,)
        case "criteria":
            return (PromptPart.CRITERIA,)
        case "evidence":
            return (PromptPart.EVIDENCE,)
        case "both":
            return PromptPart.CRITERIA, PromptPart.EVIDENCE


def _exchange(row: Row | UnlabelledRow, name: str, part: PromptPart, lm: LmSettings, answer: str) -> Exchange:
    templates = {
        PromptPart.WHOLE: "{criterion}" if lm.format == "instruction" else None,
        PromptPart.CRITERIA: lm.criteria_prompt,
        PromptPart.EVIDENCE: lm.evidence_prompt,
    }
    template = templates[part]
    if row.criterion is None and template is not None and "{criterion}" in template:
        raise DataError(
            f"making the prompt of {row.place}",
            "the row has no criterion",
            allowed=f"rows with a criterion, as the prompt has it: {template[:60]!r}",
            hint="name its column with data.criterion, or write a prompt without {criterion}",
        )
    return Exchange(
        name=f"{name} ({part.name.lower()})" if lm.format == "both" else name,
        template=template,
        criterion=row.criterion,
        text=row.text if part is not PromptPart.WHOLE else "",
        answer=answer,
        part=part,
        place=row.place,
    )
