"""Baselines of generated text: token frequencies of the answers, and answers without a model.

Answers are measured as those of models are: the same rows, by the same functions.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from dryfit.core.settings.choices import Metric
from dryfit.core.settings.tables import LmSettings
from dryfit.scoring.scored_row import LOSS_TERMS, ScoredRow
from dryfit.tasks.base import Measured
from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.baselines.classes import classes_of
from dryfit.tasks.baselines.spans import likeliest_sentences, sentences
from dryfit.tasks.baselines.words import train_words
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION, Row, Splits
from dryfit.tasks.rows.prompts import PromptPart, exchanges, parts_of
from dryfit.tasks.tokens.prompt_tokens import ROLES, TokenRole
from dryfit.tasks.tokens.token_set import Tokens, TokenSet

_SMOOTHING: Final = 1.0
"""Added to the count of each token (Laplace): one that no training answer has is not impossible."""


def token_baselines(tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
    """Yield the baseline of a token's loss."""
    yield Baseline("unigram", "each token as often as in the answers of the training rows", lambda: _unigram(tokens()))


def _unigram(tokens: Tokens) -> Rows:
    train, rows = tokens.splits[TRAIN], tokens.splits[VALIDATION]
    size = 1 + max(int(train.ids_T.max()), int(rows.ids_T.max()))
    counts_V = torch.bincount(train.ids_T[_answered(train)].long(), minlength=size).double() + _SMOOTHING
    losses_T = -(counts_V / counts_V.sum()).log()[rows.ids_T.long()] * _answered(rows)
    ends_R = torch.cat([torch.zeros(1, dtype=torch.float64), losses_T.cumsum(0)])[rows.starts_R]
    terms_R = torch.cat([torch.zeros(1, dtype=torch.int64), _answered(rows).cumsum(0)])[rows.starts_R].diff()
    return [
        ScoredRow(name, {}, {}, values={Metric.LOSS: loss, LOSS_TERMS: terms})
        for name, loss, terms in zip(rows.source_names, ends_R.diff().tolist(), terms_R.tolist(), strict=True)
    ]


def _answered(split: TokenSet) -> torch.Tensor:
    """Return which tokens are of answers, (T,)."""
    return split.extra[ROLES] & TokenRole.ANSWER != 0


@dataclass(frozen=True, slots=True)
class Quiz:
    """The prompts of the validation rows, and how answers to them are measured.

    Attributes:
        splits: The rows; each is asked for the parts of the format, in order.
        lm: The ``[lm]`` table.
        words: The answer of each class; empty where none is asked for.
        measure: Takes an answer for each prompt, those that are not measured included.
    """

    splits: Splits
    lm: LmSettings
    words: Sequence[str]
    measure: Callable[[Sequence[str]], Measured]

    def given(self, said: Mapping[PromptPart, Callable[[int], str]]) -> Measured:
        """Return how answers do: of each part, the function of the row's place in the validation split."""
        rows, parts = self.splits[VALIDATION], parts_of(self.lm)
        return self.measure([said[part](at) for at in range(len(rows)) for part in parts])


def answer_baselines(quiz: Quiz) -> Iterator[Baseline]:
    """Yield the baselines of answers that a model would generate."""
    parts = parts_of(quiz.lm)
    words = "the commonest answer of the training rows, for all rows"
    yield Baseline("commonest", words, lambda: quiz.given(_commonest(quiz)))
    if PromptPart.EVIDENCE in parts:
        beside = ", and the commonest class" if PromptPart.CRITERIA in parts else ""
        constants: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
            ("none", "never a quotation", lambda _: quiz.lm.no_evidence),
            ("whole", "always the whole text", lambda row: row.text),
            ("first", "always the first sentence", lambda row: _quoted(row, sentences(row.text)[0])),
        )
        for name, words, quote in constants:
            yield Baseline(name, words + beside, partial(_constant, quiz, quote))
    if PromptPart.WHOLE not in parts:
        for name, how, balanced in (("tfidf", "", False), ("tfidf-balanced", ", weighed alike", True)):
            what = [
                *(["the likeliest class"] if PromptPart.CRITERIA in parts else []),
                *(["the likeliest sentence, or none"] if PromptPart.EVIDENCE in parts else []),
            ]
            words = f"{' and '.join(what)}, by TF-IDF of words and logistic regression{how}"
            yield Baseline(name, words, partial(_by_words, quiz, balanced), is_linear=True)


def _commonest(quiz: Quiz) -> dict[PromptPart, Callable[[int], str]]:
    """Return the commonest training answer to each part."""
    counts: dict[PromptPart, Counter[str]] = {part: Counter() for part in parts_of(quiz.lm)}
    for row in quiz.splits[TRAIN]:
        for one in exchanges(row, quiz.lm, quiz.words):
            counts[one.part][one.answer] += 1
    best = {part: min(found, key=lambda said, of=found: (-of[said], said)) for part, found in counts.items()}
    return {part: lambda _, said=said: said for part, said in best.items()}


def _constant(quiz: Quiz, quote: Callable[[Row], str]) -> Measured:
    rows = quiz.splits[VALIDATION]
    return quiz.given(_commonest(quiz) | {PromptPart.EVIDENCE: lambda at: quote(rows[at])})


def _by_words(quiz: Quiz, balanced: bool) -> Measured:
    splits = quiz.splits
    rows, said = splits[VALIDATION], dict[PromptPart, Callable[[int], str]]()
    if PromptPart.CRITERIA in parts_of(quiz.lm):
        asked = [(row.criterion, row.text) for row in splits[TRAIN]]
        predict = train_words(asked, classes_of(splits[TRAIN], len(quiz.words)), balanced=balanced)
        likeliest_R = predict([(row.criterion, row.text) for row in rows]).argmax(axis=1)
        said[PromptPart.CRITERIA] = lambda at: quiz.words[int(likeliest_R[at])]
    if PromptPart.EVIDENCE in parts_of(quiz.lm):
        golds = {row.id: row.evidence for row in splits[TRAIN]}
        spans = likeliest_sentences(splits, golds, balanced=balanced).answers().tolist()
        said[PromptPart.EVIDENCE] = lambda at: _quoted(rows[at], spans[at]) or quiz.lm.no_evidence
    return quiz.given(said)


def _quoted(row: Row, span: tuple[int, int]) -> str:
    return row.text[slice(*span)]
