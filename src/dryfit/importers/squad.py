"""Import SQuAD 2.0: questions on paragraphs, each with its answers as spans, or without an answer.

Format: Rajpurkar, Jia and Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD" (ACL 2018),
rajpurkar.github.io/SQuAD-explorer: ``{"version", "data": [{"title", "paragraphs": [{"context", "qas": [{"id",
"question", "is_impossible", "answers": [{"text", "answer_start"}], "plausible_answers"}]}]}]}``. SQuAD 1.1 is the same
without ``is_impossible``. ``plausible_answers`` are wrong ones, written down for those who annotate: they are not read.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, StrictStr

from dryfit.importers.files import whole
from dryfit.importers.items import ImportedRow, Item, Span, UnfitError, each, read_as


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
    """Return a row for each question: criterion the question, text its paragraph, label whether it can be answered.

    The evidence is all distinct answers, and the group is the article.

    Args:
        document: The parsed file.
        source: Its name.

    Raises:
        DataError: It is not a SQuAD file.
    """
    articles = whole(_File, document, source, '{"data": [articles]}', "contractnli").data
    return each(articles, f"{source}, data", _article_rows)


def _article_rows(number: int, raw: Any, path: str) -> Iterator[Item]:
    article = read_as(_Article, raw)
    group = article.title if article.title.strip() else f"article-{number}"
    return each(article.paragraphs, f"{path}.paragraphs", partial(_paragraph_rows, group))


def _paragraph_rows(group: str, _index: int, raw: Any, path: str) -> Iterator[Item]:
    paragraph = read_as(_Paragraph, raw)
    return each(paragraph.qas, f"{path}.qas", partial(_row, group, paragraph.context))


def _row(group: str, context: str, _index: int, raw: Any, path: str) -> Iterator[ImportedRow]:
    question = read_as(_Question, raw)
    if question.is_impossible and question.answers:
        raise UnfitError(f"is_impossible is true, and it has {len(question.answers)} answers")
    if not question.is_impossible and not question.answers:
        raise UnfitError("is_impossible is false or absent, and it has no answer")
    spans: set[Span] = set()
    for index, answer in enumerate(question.answers):
        end = answer.answer_start + len(answer.text)
        if answer.answer_start < 0 or not answer.text or context[answer.answer_start : end] != answer.text:
            raise UnfitError(_misplaced(answer, context), f".answers[{index}]")
        spans.add((answer.answer_start, end))
    yield ImportedRow(
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
    where = f"but at {found} (counted in characters)" if found >= 0 else "nor anywhere in the context"
    return f"{problem}, {where}"
