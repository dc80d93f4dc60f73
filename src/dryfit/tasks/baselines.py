"""What a metric is worth without a model: one answer for all rows, chance, linear models of words."""

import math
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import Direction, Metric
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import DataSettings, LmSettings
from dryfit.settings.task_facts import MetricName
from dryfit.settings.training_messages import BaselineScore, BaselinesRequest, BaselinesResult
from dryfit.tasks.answers import decided, fit_thresholds, scored_number
from dryfit.tasks.base import Measured, Task, TaskContext
from dryfit.tasks.own import make_task
from dryfit.tasks.prepare import Fold, checked_fold, checked_splits, prepared_tokens, study_folds
from dryfit.tasks.prompts import ROLES, PromptPart, TokenRole, exchanges, parts_of
from dryfit.tasks.row_metrics import row_metric
from dryfit.tasks.rows import TEST, TRAIN, VALIDATION, Row, Splits, fingerprint
from dryfit.tasks.scored_rows import CLASS, FACTS_FILE, LOSS_TERMS, RowFacts, ScoredRow, kept, write_facts, write_rows
from dryfit.tasks.spans import Floats, Ints, null_threshold, scored_spans
from dryfit.tasks.tokens import Tokens, TokenSet
from dryfit.tasks.windows import Ragged, Spans, Trimmer, space_flags, word_spans

# The type of a baseline, and the interface by which a task declares its own.


Rows = Sequence[ScoredRow]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Answers to the rows of the validation split that no model was trained for, or a linear one at most.

    Attributes:
        name: A word, by which it is the same baseline in another fold: ``majority``.
        words: What it answers: ``always class 1, which 79 % of the training rows have``.
        rows: Gives the rows, or rows with metrics that they do not tell; it may take long.
        is_linear: It is trained: a linear model.
    """

    name: str
    words: str
    rows: Callable[[], Rows | Measured]
    is_linear: bool = False

    def scored(self) -> tuple[Rows, Mapping[str, float]]:
        """Return the rows, and those of their metrics that they do not tell."""
        found = self.rows()
        return (list(found.rows.values()), found.metrics) if isinstance(found, Measured) else (found, {})


@runtime_checkable
class HasBaselines(Protocol):
    """A task with baselines of its own."""

    def baselines(self, splits: Splits, tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
        """Yield the baselines of the validation split; each sees no more of it than a model would.

        Args:
            splits: The rows of train and validation.
            tokens: Gives the same as tokens, for what is measured by token.
        """
        ...


class TimeIsUpError(Exception):
    """A piece of work has taken its time."""


@contextmanager
def at_most(seconds: float) -> Generator[None, None, None]:
    """Interrupt the block after a time limit; only in the main thread of a process that does not use SIGALRM.

    Raises:
        TimeIsUpError: It took longer.
    """

    def stop(*_: Any) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A linear model of words: TF-IDF of words and pairs of words, and logistic regression, or ridge regression.
#
# Salton and Buckley 1988 (Inf. Process. Manag. 24(5)); the usual baseline of text classification (Wang and Manning
# 2012, ACL). Both are scikit-learn's. Dimension suffixes: ``R`` texts, ``C`` classes.


Asked = tuple[str | None, str]
"""A criterion, or None, and a text."""

_MOST_FEATURES: Final = 100_000
_MOST_CHARS: Final = 10_000
"""Characters of a text that are read."""
_MOST_ROUNDS: Final = 300
_STRENGTH: Final = 10.0
"""Inverse of the regularisation: words of few hundred short texts weigh too little at the default of 1."""
_BESIDE: Final = "\x1f"


def train_words(asked: Sequence[Asked], has_RC: NDArray[Any], *, balanced: bool) -> Callable[[Sequence[Asked]], Any]:
    """Train a linear model of words for each class; where texts have a criterion, each word also together with it.

    Args:
        asked: The texts to learn from.
        has_RC: 1 where a text has a class.
        balanced: Weigh the texts of each class so that all classes weigh the same.

    Returns:
        A function from texts to the probability of each class, (R, C), each decided for itself.
    """
    from sklearn.linear_model import LogisticRegression

    vectorizer = _vectorizer()
    of_words = vectorizer.fit_transform(asked)
    options: Any = {"C": _STRENGTH, "max_iter": _MOST_ROUNDS, "class_weight": "balanced" if balanced else None}
    models: list[Any] = []
    for has_R in has_RC.T:
        learnable = 0 < has_R.sum() < len(has_R)
        models.append(LogisticRegression(**options).fit(of_words, has_R) if learnable else float(has_R.mean()))

    def probabilities(others: Sequence[Asked]) -> NDArray[np.float64]:
        theirs = vectorizer.transform(others)
        columns = [
            np.full(len(others), model) if isinstance(model, float) else model.predict_proba(theirs)[:, 1]
            for model in models
        ]
        return np.stack(columns, axis=1)

    return probabilities


def train_numbers(asked: Sequence[Asked], numbers: Sequence[float]) -> Callable[[Sequence[Asked]], list[float]]:
    """Train a linear model of words for a number: ridge regression.

    Args:
        asked: The texts to learn from.
        numbers: The number of each.

    Returns:
        A function from texts to their numbers.
    """
    from sklearn.linear_model import Ridge

    vectorizer = _vectorizer()
    options: Any = {"solver": "sparse_cg", "alpha": 1.0}
    model: Any = Ridge(**options).fit(vectorizer.fit_transform(asked), numbers)
    return lambda others: model.predict(vectorizer.transform(others)).tolist()


def _vectorizer() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    reading: Any = {"analyzer": _features}  # its stub knows of names alone
    return TfidfVectorizer(**reading, sublinear_tf=True, max_features=_MOST_FEATURES)


def _features(asked: Asked) -> list[str]:
    """Return the words and pairs of words of a text, and with a criterion each word together with it."""
    criterion, text = asked
    words = [word.strip(".,;:!?\"'()[]") for word in text[:_MOST_CHARS].lower().split()]
    found = [*words, *(f"{one} {other}" for one, other in pairwise(words))]
    return found if criterion is None else [*found, *(f"{criterion}{_BESIDE}{word}" for word in found)]


# Baselines of classes: the commonest, chance, each class for all rows, and a linear model of words.


_TRUE_FROM: Final = 0.5
_NEVER_CERTAIN: Final = 1e-12
"""Probabilities are kept so far from 0 and 1: their log-odds are finite."""
_MOST_CLASSES: Final = 20
"""Classes of which each is tried as the answer to all rows."""

Shares = NDArray[np.float64]


def class_baselines(
    splits: Splits, data: DataSettings, *, fits: bool = False, metric: MetricName | None = None
) -> Iterator[Baseline]:
    """Yield the baselines of a classification; with several classes a row, of each class for itself.

    Args:
        splits: The rows of train and validation.
        data: The number of classes, and whether a row has several.
        fits: A linear model's thresholds are fitted on validation, as a trained model's are with
            ``head.threshold = "calibrated"``.
        metric: The study's, by which they are fitted.
    """
    rows, several = splits[VALIDATION], data.multi_label
    has_RC = classes_of(splits[TRAIN], data.num_labels)
    # One row more of each class, and of none where a row may have several: a class that no row has is not impossible.
    p_C = (has_RC.sum(axis=0) + 1) / (len(has_RC) + (2 if several else data.num_labels))
    answer = partial(_answered_classes, rows, several=several)
    if several:
        yield Baseline("majority", "each class where most training rows have it", lambda: answer(p_C))
        every_C = 0.5 + p_C / 2
        yield Baseline("constant", "always every class", lambda: answer(every_C))
    else:
        ranked = np.argsort(-p_C, kind="stable").tolist()
        first, share = data.class_name(ranked[0]), has_RC[:, ranked[0]].mean()
        words = f"always class {first}, which {share:.0%} of the training rows have"
        yield Baseline("majority", words, lambda: answer(p_C))
        for one in ranked[1:_MOST_CLASSES]:
            yield Baseline(
                f"constant-{one}", f"always class {data.class_name(one)}", partial(answer, _likeliest(p_C, one))
            )
    by_chance = partial(_by_chance, rows, p_C, several)
    yield Baseline("prior", "each class as often as in the training rows, by chance", by_chance)
    for name, words, balanced in (("tfidf", "", False), ("tfidf-balanced", ", classes weighed alike", True)):
        of_words = partial(_classes_by_words, splits, has_RC, several, balanced, fits, metric)
        yield Baseline(name, f"TF-IDF of words and logistic regression{words}", of_words, is_linear=True)


def classes_of(rows: Sequence[Row], classes: int) -> Shares:
    """Return 1 where a row has a class, (rows, classes)."""
    has_RC = np.zeros((len(rows), classes))
    for at, row in enumerate(rows):
        has_RC[at, _plain(row.label)] = 1
    return has_RC


def _plain(label: float | tuple[int, ...] | None) -> Any:
    return list(label) if isinstance(label, tuple) else label


def _likeliest(p_C: Shares, one: int) -> Shares:
    """Return shares by which a class is the likeliest; the others are as they were to one another."""
    raised_C = p_C / 2
    raised_C[one] += 0.5
    return raised_C


def _answered_classes(rows: Sequence[Row], p: Shares, *, several: bool) -> Rows:
    """Return rows that are answered by probabilities, (C,) for all rows or (R, C)."""
    found: list[ScoredRow] = []
    for row, p_C in zip(rows, np.broadcast_to(p, (len(rows), p.shape[-1])), strict=True):
        answer = np.flatnonzero(p_C >= _TRUE_FROM).tolist() if several else int(p_C.argmax())
        found.append(_scored_class(row, answer, p_C))
    return found


def _scored_class(row: Row, answer: Any, p_C: Shares) -> ScoredRow:
    """Return a row with an answer and its plain cross entropy; with several classes the mean over them."""
    truth = _plain(row.label)
    if isinstance(truth, list):
        has_C = np.isin(np.arange(len(p_C)), truth)
        loss = -np.log(np.maximum(np.where(has_C, p_C, 1 - p_C), np.finfo(np.float64).tiny)).mean()
    else:
        loss = -np.log(max(p_C[truth], np.finfo(np.float64).tiny))
    return ScoredRow(row.id, {CLASS: truth}, {CLASS: answer}, tuple(p_C.tolist()), {"loss": float(loss)})


def _by_chance(rows: Sequence[Row], p_C: Shares, several: bool) -> Rows:
    found: list[ScoredRow] = []
    for row in rows:
        generator = np.random.default_rng(derive_seed(0, "chance", row.id))
        has = np.flatnonzero(generator.random(len(p_C)) < p_C).tolist()
        found.append(_scored_class(row, has if several else int(generator.choice(len(p_C), p=p_C)), p_C))
    return found


def _classes_by_words(
    splits: Splits, has_RC: Shares, several: bool, balanced: bool, fits: bool, metric: MetricName | None
) -> Rows:
    rows = splits[VALIDATION]
    predict = train_words([(row.criterion, row.text) for row in splits[TRAIN]], has_RC, balanced=balanced)
    p_RC = predict([(row.criterion, row.text) for row in rows])
    if not several:
        p_RC = p_RC / p_RC.sum(axis=1, keepdims=True)
    if not fits:
        return _answered_classes(rows, p_RC, several=several)
    scores_RC = torch.from_numpy(p_RC)
    scores_RC = scores_RC.logit(_NEVER_CERTAIN) if several else scores_RC.clamp_min(_NEVER_CERTAIN).log()
    truth_RC = torch.from_numpy(classes_of(rows, p_RC.shape[1]))
    labels = truth_RC if several else truth_RC.argmax(dim=1)
    fitted = fit_thresholds(scores_RC, labels, metric, multi_label=several)
    said = decided(scores_RC, fitted, multi_label=several, calibrated=True)
    answers = [has_C.nonzero()[:, 0].tolist() for has_C in said] if several else said.tolist()
    return [_scored_class(row, answer, p_C) for row, answer, p_C in zip(rows, answers, p_RC, strict=True)]


# Baselines of spans: never one, the whole text, its first sentence, or the one that a linear model likes best.


_ENDS: Final = ".!?\\n\u3002\uff01\uff1f"
_SENTENCE: Final = re.compile(f"[^{_ENDS}]+[{_ENDS}]*")
_NONE: Final = (0, 0)


def span_baselines(
    splits: Splits, golds: Mapping[str, Spans], *, fits: bool = False, metric: MetricName | None = None
) -> Iterator[Baseline]:
    """Yield the baselines of spans.

    Args:
        splits: The rows of train and validation.
        golds: The right spans of each row, by its id, without those of white space alone.
        fits: A linear model's threshold of none is fitted on validation, as a trained model's is with
            ``null_policy = "calibrated"``; else a sentence is an answer from a probability of one half on.
        metric: The study's, by which it is fitted.
    """
    rows = splits[VALIDATION]
    for name, words, pick in (
        ("never", "never a span", lambda _: _NONE),
        ("whole", "always the whole text", _whole),
        ("first", "always the first sentence", lambda text: sentences(text)[0]),
    ):
        yield Baseline(name, words, partial(_scored_span_rows, rows, golds, [pick(row.text) for row in rows]))
    for name, how, balanced in (("tfidf", "", False), ("tfidf-balanced", ", sentences weighed alike", True)):
        words = f"the likeliest sentence, or none, by TF-IDF of its words and logistic regression{how}"
        answers = partial(_spans_by_words, splits, golds, balanced, fits, metric)
        yield Baseline(name, words, answers, is_linear=True)


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the sentences of a text, [start, end) each; the whole text where it has none, (0, 0) of white space."""
    found = _trimmed(text, [match.span() for match in _SENTENCE.finditer(text)])
    return [span for span in found if span != _NONE] or [_whole(text)]


def _whole(text: str) -> tuple[int, int]:
    return _trimmed(text, [(0, len(text))])[0]


def _trimmed(text: str, spans: Spans) -> list[tuple[int, int]]:
    """Return spans without white space at their ends, as rows of the data are read."""
    trimmed_N2 = Trimmer.of(space_flags(text)).trimmed(np.array(spans, dtype=np.int32).reshape(-1, 2))
    return [(start, end) for start, end in trimmed_N2.tolist()]


def _scored_span_rows(rows: Sequence[Row], golds: Mapping[str, Spans], answers: Spans | Ints) -> Rows:
    names = [row.id for row in rows]
    return list(scored_spans(names, np.array(answers, dtype=np.int64), *_truths(rows, golds)))


def _truths(rows: Sequence[Row], golds: Mapping[str, Spans]) -> tuple[Ragged, Ragged]:
    """Return the right spans and the words of rows."""
    right = [np.array(_trimmed(row.text, golds[row.id]), dtype=np.int32).reshape(-1, 2) for row in rows]
    return Ragged.of(right), Ragged.of([word_spans(row.text) for row in rows])


def _spans_by_words(
    splits: Splits, golds: Mapping[str, Spans], balanced: bool, fits: bool, metric: MetricName | None
) -> Rows:
    rows = splits[VALIDATION]
    found = likeliest_sentences(splits, golds, balanced=balanced)
    if not fits:
        return _scored_span_rows(rows, golds, found.answers())
    best = null_threshold(found.spans_R2, found.differences_R, *_truths(rows, golds), metric=metric)
    return _scored_span_rows(rows, golds, found.answers(best))


@dataclass(frozen=True, slots=True)
class LikeliestSentences:
    """The likeliest sentence of each row.

    Attributes:
        spans_R2: Its characters; (0, 0) in a row of white space.
        differences_R: One half minus its probability: above 0 it is likelier that the row has no span; ``inf`` in a row
            of white space.
    """

    spans_R2: Ints
    differences_R: Floats

    def answers(self, threshold: float = 0.0) -> Ints:
        """Return each row's sentence, (R, 2); (0, 0) for none, where the difference is above the threshold."""
        return np.where(self.differences_R[:, None] > threshold, 0, self.spans_R2)


def likeliest_sentences(splits: Splits, golds: Mapping[str, Spans], *, balanced: bool) -> LikeliestSentences:
    """Train a linear model on the sentences of train, and return the likeliest sentence of each row of validation.

    Args:
        splits: The rows of train and validation.
        golds: The right spans of each row of train: a sentence is right that shares a character with one.
        balanced: Weigh right and wrong sentences alike.
    """
    asked: list[tuple[str | None, str]] = []
    has: list[bool] = []
    for row in splits[TRAIN]:
        for start, end in sentences(row.text):
            asked.append((row.criterion, row.text[start:end]))
            has.append(any(start < last and first < end for first, last in golds[row.id]))
    predict = train_words(asked, np.array(has, dtype=np.float64)[:, None], balanced=balanced)
    rows = splits[VALIDATION]
    found = [(at, span) for at, row in enumerate(rows) for span in sentences(row.text)]
    p_N = predict([(rows[at].criterion, rows[at].text[start:end]) for at, (start, end) in found])[:, 0]
    best = LikeliestSentences(np.zeros((len(rows), 2), dtype=np.int64), np.full(len(rows), np.inf))
    for (at, span), p in zip(found, p_N.tolist(), strict=True):
        if span != _NONE and _TRUE_FROM - p < best.differences_R[at]:
            best.spans_R2[at], best.differences_R[at] = span, _TRUE_FROM - p
    return best


# Baselines of generated text: token frequencies of the answers, and answers without a model.
#
# Answers are measured as those of models are: the same rows, by the same functions.


_SMOOTHING: Final = 1.0
"""Added to the count of each token (Laplace): one that no training answer has is not impossible."""


def token_baselines(tokens: Callable[[], Tokens]) -> Iterator[Baseline]:
    """Yield the baseline of a token's loss."""
    yield Baseline("unigram", "each token as often as in the answers of the training rows", lambda: _unigram(tokens()))


def _unigram(tokens: Tokens) -> Rows:
    train, rows = tokens.splits[TRAIN], tokens.splits[VALIDATION]
    size = 1 + max(int(train.ids_T.max()), int(rows.ids_T.max()))
    counts_V = torch.bincount(train.ids_T[_answer_tokens(train)].long(), minlength=size).double() + _SMOOTHING
    losses_T = -(counts_V / counts_V.sum()).log()[rows.ids_T.long()] * _answer_tokens(rows)
    ends_R = torch.cat([torch.zeros(1, dtype=torch.float64), losses_T.cumsum(0)])[rows.starts_R]
    terms_R = torch.cat([torch.zeros(1, dtype=torch.int64), _answer_tokens(rows).cumsum(0)])[rows.starts_R].diff()
    return [
        ScoredRow(name, {}, {}, values={Metric.LOSS: loss, LOSS_TERMS: terms})
        for name, loss, terms in zip(rows.source_names, ends_R.diff().tolist(), terms_R.tolist(), strict=True)
    ]


def _answer_tokens(split: TokenSet) -> torch.Tensor:
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
            yield Baseline(name, words, partial(_answers_by_words, quiz, balanced), is_linear=True)


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


def _answers_by_words(quiz: Quiz, balanced: bool) -> Measured:
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


# Baselines of a regression: the mean, the median, and a linear model of words.


def number_baselines(splits: Splits) -> Iterator[Baseline]:
    """Yield the baselines of a regression.

    Args:
        splits: The rows of train and validation.
    """
    known = right(splits[TRAIN])
    for name, value in (("mean", float(np.mean(known))), ("median", float(np.median(known)))):
        said = np.full(len(splits[VALIDATION]), value).tolist()
        words = f"always {value:.4g}, the {name} of the training rows"
        yield Baseline(name, words, partial(_scored_numbers, splits[VALIDATION], said))
    words = "TF-IDF of words and ridge regression"
    yield Baseline("tfidf", words, partial(_numbers_by_words, splits), is_linear=True)


def right(rows: Sequence[Row]) -> list[float]:
    """Return the labels of rows."""
    return [row.label for row in rows if isinstance(row.label, float)]


def _scored_numbers(rows: Sequence[Row], said: Sequence[float]) -> Rows:
    return [scored_number(row.id, truth, one) for row, truth, one in zip(rows, right(rows), said, strict=True)]


def _numbers_by_words(splits: Splits) -> Rows:
    predict = train_numbers([(row.criterion, row.text) for row in splits[TRAIN]], right(splits[TRAIN]))
    return _scored_numbers(splits[VALIDATION], predict([(row.criterion, row.text) for row in splits[VALIDATION]]))


# Child job BASELINES: values of the study's metric without a model, before any training.


_MOST_CONSTANTS = 4
"""Baselines of one answer that are kept: the plainest, and the best of the others."""


def baselines(body: BaselinesRequest, channel: ChildChannel) -> BaselinesResult:
    """Compute each baseline on the validation split, or on that of each fold.

    Raises:
        DataError: The rows are not those that the study was resolved with.
    """
    torch.set_num_threads(1)
    task = make_task(body.task, TaskContext(body.settings, body.data, metric=body.metric))
    splits = checked_splits(task)
    actual = fingerprint(splits)
    if actual != body.data_fingerprint:
        raise DataError("computing baselines", f"the rows have changed: fingerprint {actual}", body.data_fingerprint)
    folds: Sequence[Fold | None] = study_folds(body.data) or (None,)
    parts = {fold: splits if fold is None else checked_fold(task, splits, fold) for fold in folds}
    out = Path(body.out_dir)
    _remove(out)
    write_facts(out / FACTS_FILE, _facts(splits, list(parts.values())))
    if not isinstance(task, HasBaselines):
        return BaselinesResult(notes=(f"{type(task).__name__} names no baselines",))
    found: dict[str, _Found] = {}
    notes: list[str] = []
    for fold, rows in parts.items():
        tokens = partial(_tokens, task, body, fold)
        for baseline in task.baselines(rows, tokens):
            try:
                with at_most(body.limit_s):
                    scored, told = baseline.scored()
            except TimeIsUpError:
                notes.append(f"{baseline.name} is left out: it took longer than {body.limit_s:g} s")
                continue
            except ConfigError as error:  # a user's own metric of answers
                notes.append(f"{baseline.name} is left out: {error.doing}: {error.found}")
                continue
            channel.beat()
            of_fold = found.setdefault(baseline.name, _Found(baseline, task.metric_names()))
            of_fold.add(VALIDATION if fold is None else f"fold-{fold.number}", scored, told)
    whole = [one for one in found.values() if len(one.splits) == len(parts)]
    chosen = list(_chosen(whole, body))
    for one in chosen:
        one.write(out / one.baseline.name)
    return BaselinesResult(baselines=tuple(one.score() for one in chosen), notes=tuple(dict.fromkeys(notes)))


def _remove(folder: Path) -> None:
    """Remove what an earlier run left; of a symbolic link the link, not what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


class _Found:
    """A baseline's rows, and its metrics of each split.

    Args:
        baseline: Which one.
        names: The task's metrics.
    """

    def __init__(self, baseline: Baseline, names: Sequence[str]) -> None:
        self.baseline = baseline
        self.splits: dict[str, tuple[Rows, dict[str, float]]] = {}
        self._names = names

    def add(self, split: str, rows: Rows, told: Mapping[str, float]) -> None:
        """Take in the rows of a split, and those of its metrics that they do not tell."""
        metrics = {name: metric.value for name in self._names if (metric := row_metric(name, rows)) is not None}
        self.splits[split] = rows, {**told, **metrics}

    def score(self) -> BaselineScore:
        """Return its metrics; of several folds, the means."""
        every = [metrics for _, metrics in self.splits.values()]
        shared = [name for name in every[0] if all(name in one for one in every)]
        means = {name: float(np.mean([one[name] for one in every])) for name in shared}
        return BaselineScore(
            name=self.baseline.name, words=self.baseline.words, metrics=means, is_linear=self.baseline.is_linear
        )

    def write(self, folder: Path) -> None:
        """Write its rows, a file for each split."""
        for split, (rows, metrics) in self.splits.items():
            write_rows(folder, split, rows, metrics)


def _chosen(found: Sequence[_Found], body: BaselinesRequest) -> Iterator[_Found]:
    """Yield the plainest baseline, the best others of one answer by the study's metric, and those that are trained."""
    plain = [one for one in found if not one.baseline.is_linear]
    yield from plain[:1]
    ranked = sorted(plain[1:], key=lambda one: _rank(one.score().metrics.get(body.metric, math.nan), body.direction))
    yield from ranked[: _MOST_CONSTANTS - 1]
    yield from (one for one in found if one.baseline.is_linear)


def _rank(value: float, direction: Direction) -> float:
    """Return what sorts values from the best on; NaN is the last."""
    return math.inf if math.isnan(value) else -value if direction is Direction.MAXIMIZE else value


def _tokens(task: Task, body: BaselinesRequest, fold: Fold | None) -> Tokens:
    return prepared_tokens(
        task,
        cache_dir=Path(body.cache_dir),
        data_fingerprint=body.data_fingerprint,
        only=(TRAIN, VALIDATION),
        fold=fold,
    )


def _facts(splits: Splits, parts: Sequence[Splits]) -> dict[str, RowFacts]:
    """Return the facts of the rows that files of scored rows keep: those of validation or of all folds, and of test."""
    facts: dict[str, RowFacts] = {}
    scored = [*(rows[VALIDATION] for rows in parts), *(splits[name] for name in splits if name == TEST)]
    for rows in scored:
        chosen = kept([row.id for row in rows])
        facts |= {rows[at].id: RowFacts(rows[at].group, rows[at].criterion) for at in chosen}
    return facts
