"""Baselines of generated text: how often each token stands in answers, and the commonest answer for all rows."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import torch

from dryfit.core.settings.choices import Metric
from dryfit.scoring.scored_row import LOSS_TERMS, ScoredRow
from dryfit.tasks.baselines.baseline import Baseline, Rows
from dryfit.tasks.lm.generation import sampled
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.tasks.tokens.prompt_tokens import ROLES, TokenRole
from dryfit.tasks.tokens.token_set import Tokens, TokenSet

_SMOOTHING: Final = 1.0
"""Added to the count of each token (Laplace): one that no training answer has is not impossible."""


def text_baselines(tokens: Callable[[], Tokens], generated: int) -> Iterator[Baseline]:
    """Yield the baselines of generated text.

    Args:
        tokens: Of train and validation.
        generated: How many rows of validation are answered by generation; 0: none.
    """
    yield Baseline("unigram", "each token as often as in the answers of the training rows", lambda: _unigram(tokens()))
    if generated:
        words = "the commonest answer of the training rows, for all rows"
        yield Baseline("commonest", words, lambda: _commonest(tokens(), generated))


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


def _commonest(tokens: Tokens, generated: int) -> Rows:
    answers = Counter(_answers(tokens.splits[TRAIN]))
    commonest = min(answers, key=lambda answer: (-answers[answer], answer))
    split = tokens.splits[VALIDATION]
    names, given = split.source_names, _answers(split)
    measured = set(sampled(len(split), generated, seed=0))
    return [
        ScoredRow(name, {}, {}, values={Metric.EXACT_MATCH: float(answer == commonest)} if row in measured else {})
        for row, (name, answer) in enumerate(zip(names, given, strict=True))
    ]


def _answered(split: TokenSet) -> torch.Tensor:
    """Return which tokens are of answers, (T,)."""
    return split.extra[ROLES] & TokenRole.ANSWER != 0


def _answers(split: TokenSet) -> list[tuple[int, ...]]:
    """Return the ids of each answer, in order; examples that share a sequence are told apart by their prompts."""
    answered_T = _answered(split)
    begins_T = answered_T & ~torch.cat([torch.zeros(1, dtype=torch.bool), answered_T[:-1]])
    begins_T[split.starts_R[:-1]] |= answered_T[split.starts_R[:-1]]
    numbers = (begins_T.cumsum(0) - 1)[answered_T].tolist()
    found: list[list[int]] = [[] for _ in range(int(begins_T.sum()))]
    for number, one in zip(numbers, split.ids_T[answered_T].tolist(), strict=True):
        found[number].append(one)
    return [tuple(answer) for answer in found]
