"""Import SQuAD 2.0: questions on paragraphs, each with its answers as spans, or without an answer.

Format: Rajpurkar, Jia and Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD" (ACL 2018),
rajpurkar.github.io/SQuAD-explorer: ``{"version", "data": [{"title", "paragraphs": [{"context", "qas": [{"id",
"question", "is_impossible", "answers": [{"text", "answer_start"}], "plausible_answers"}]}]}]}``. SQuAD 1.1 is the same
without ``is_impossible``. ``plausible_answers`` are wrong ones, written down for those who annotate: they are not read.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr, ValidationError

from dryfit.core.errors import DataError
from dryfit.importers.files import has_keys, top_level
from dryfit.importers.items import ImportedRow, Item, Rejected, Span, json_fault


class _File(BaseModel):
    data: list[Any]


class _Article(BaseModel):
    title: StrictStr = ""
    paragraphs: list[Any]


class _Paragraph(BaseModel):
    context: StrictStr
    qas: list[Any]


class _Answer(BaseModel):
    text: StrictStr
    answer_start: StrictInt


class _Question(BaseModel):
    id: StrictStr
    question: StrictStr
    is_impossible: StrictBool = False
    answers: list[_Answer] = []


def squad_rows(document: Any, source: str) -> Iterator[Item]:
    """Yield a row for each question: criterion the question, text its paragraph, label whether it can be answered.

    The evidence is all distinct answers, and the group is the article.

    Args:
        document: The parsed file.
        source: Its name.

    Raises:
        DataError: It is not a SQuAD file.
    """
    try:
        articles = _File.model_validate(document).data
    except ValidationError as error:
        hint = "is it ContractNLI? `dryfit import contractnli`" if has_keys(document, "documents", "labels") else ""
        raise DataError(f"reading {source}", top_level(document), '{"data": [articles]}', hint) from error
    for number, raw in enumerate(articles):
        path = f"{source}, data[{number}]"
        try:
            article = _Article.model_validate(raw)
        except ValidationError as error:
            yield json_fault(error, path)
            continue
        group = article.title if article.title.strip() else f"article-{number}"
        for index, paragraph in enumerate(article.paragraphs):
            yield from _paragraph_rows(paragraph, group, f"{path}.paragraphs[{index}]")


def _paragraph_rows(raw: Any, group: str, path: str) -> Iterator[Item]:
    try:
        paragraph = _Paragraph.model_validate(raw)
    except ValidationError as error:
        yield json_fault(error, path)
        return
    for index, question in enumerate(paragraph.qas):
        yield _row(question, paragraph.context, group, f"{path}.qas[{index}]")


def _row(raw: Any, context: str, group: str, path: str) -> ImportedRow | Rejected:
    try:
        question = _Question.model_validate(raw)
    except ValidationError as error:
        return json_fault(error, path)
    if question.is_impossible and question.answers:
        return Rejected(path, f"is_impossible is true, and it has {len(question.answers)} answers")
    if not question.is_impossible and not question.answers:
        return Rejected(path, "is_impossible is false or absent, and it has no answer")
    spans: set[Span] = set()
    for index, answer in enumerate(question.answers):
        end = answer.answer_start + len(answer.text)
        if answer.answer_start < 0 or not answer.text or context[answer.answer_start : end] != answer.text:
            return Rejected(f"{path}.answers[{index}]", _misplaced(answer, context))
        spans.add((answer.answer_start, end))
    return ImportedRow(
        id=question.id,
        group=group,
        criterion=question.question,
        text=context,
        label=int(not question.is_impossible),
        evidence=tuple(sorted(spans)),
        place=path,
    )


def _misplaced(answer: _Answer, context: str) -> str:
    found = context.find(answer.text) if answer.text else -1
    problem = f"its text of {len(answer.text)} characters does not stand at answer_start {answer.answer_start}"
    return (
        f"{problem}, but at {found} (counted in characters)"
        if found >= 0
        else f"{problem}, nor anywhere in the context"
    )
