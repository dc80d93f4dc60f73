"""The threshold of null: by which metric it is chosen, and how far from any row it lies."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

import spans
from dryfit.settings.choices import Metric
from dryfit.settings.errors import DataError
from dryfit.settings.tables import DataSettings, LossSettings, SpanSettings, TrialSettings
from dryfit.settings.task_facts import metrics_of_both
from dryfit.tasks.base import TaskContext
from dryfit.tasks.evidence import EvidenceTask
from dryfit.tasks.guard import BatchGuard, Bounds
from dryfit.tasks.joint import ShareTask, row_means
from dryfit.tasks.spans import NULL_THRESHOLD, Decoded, SpanAnswers
from dryfit.tasks.tokens import CLASSES
from dryfit.tasks.windows import Ragged, Windows

ROWS = 120
MEANS = (Metric.SPAN_BALANCED, Metric.TOKEN_F1, Metric.EXACT_MATCH, Metric.SPAN_IOU)


def answers(seed: int, metric: str | None) -> SpanAnswers:
    """Answers that are right, or nearly, or not at all; the surer the model is of one, the better it is on average."""
    rng = np.random.default_rng(seed)
    _, windows = spans.drawn_windows(ROWS, seed=seed, golds=True)
    found_R2 = rng.integers(0, 40, size=(ROWS, 1)) + np.array([0, 9])
    has_R = windows.golds.counts_R.numpy() > 0
    for row, (start, end) in zip(np.flatnonzero(has_R), windows.golds.spans_N2.tolist(), strict=True):
        if rng.random() < 0.8:
            found_R2[row] = (start, end) if rng.random() < 0.4 else (start, end + int(rng.integers(1, 30)))
    differences_R = rng.normal(size=ROWS) * 3 - 2 * has_R
    zeros_R = np.zeros(ROWS)
    decoded = Decoded(found_R2[:, None, :], zeros_R[:, None], zeros_R, differences_R, differences_R)
    return SpanAnswers(decoded, windows, SpanSettings(), None if metric is None else Metric(metric))


def mostly_with_evidence(said: SpanAnswers) -> SpanAnswers:
    """The same answers where four of five rows without evidence have some after all: none is then rarely right."""
    counts = said.windows.golds.counts_R.tolist()
    spans_of_rows = list(said.windows.golds.spans_N2.numpy())
    golds: list[np.ndarray] = []
    for row, count in enumerate(counts):
        taken = [spans_of_rows.pop(0) for _ in range(count)] or ([(0, 5)] if row % 5 else [])
        golds.append(np.array(taken, dtype=np.int32).reshape(-1, 2))
    ragged = Ragged.of(golds)
    extra = {**said.windows.tokens.extra, "golds": ragged.spans_N2, "gold_counts": ragged.counts_R}
    return replace(said, windows=Windows(replace(said.windows.tokens, extra=extra)))


def value(said: SpanAnswers, metric: str, threshold: float) -> float:
    return said.metrics({NULL_THRESHOLD: threshold})[metric]


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("metric", MEANS)
def test_no_threshold_is_better_by_the_metric_it_is_chosen_by(metric: Metric) -> None:
    won = 0
    for seed in range(6):
        said = answers(seed, metric)
        fitted = said.fit()[NULL_THRESHOLD]
        edges = np.sort(said.decoded.differences_R)
        every = [edges[0] - 1, *((edges[1:] + edges[:-1]) / 2), edges[-1] + 1]
        assert value(said, metric, fitted) == pytest.approx(max(value(said, metric, one) for one in every), abs=1e-12)
        for other in MEANS:
            by_other = value(said, metric, answers(seed, other).fit()[NULL_THRESHOLD])
            won += by_other < value(said, metric, fitted) - 1e-9
    assert won, "whichever metric it is chosen by, it is the same one"


def test_the_balanced_threshold_is_the_best_of_all_and_not_that_of_the_words() -> None:
    differ = 0
    for seed in range(6):
        said = mostly_with_evidence(answers(seed, Metric.SPAN_BALANCED))
        fitted = said.fit()[NULL_THRESHOLD]
        edges = np.sort(said.decoded.differences_R)
        every = [edges[0] - 1, *((edges[1:] + edges[:-1]) / 2), edges[-1] + 1]
        best = max(value(said, "span_balanced", one) for one in every)
        assert value(said, "span_balanced", fitted) == pytest.approx(best, abs=1e-12)
        found = said.metrics({NULL_THRESHOLD: fitted})
        assert found["span_balanced"] == pytest.approx((found["token_f1_has"] + found["null_recall"]) / 2, abs=1e-12)
        differ += replace(said, metric=Metric.TOKEN_F1).fit() != said.fit()
    assert differ, "whichever metric it is chosen by, it is the same one"


@pytest.mark.parametrize("metric", [None, *metrics_of_both(DataSettings())])
def test_by_any_other_metric_it_is_that_of_the_words(metric: Metric | None) -> None:
    """Some do not depend on it; the best by the others alone would answer every row with none, or none of them."""
    if metric not in MEANS:
        for seed in range(3):
            assert answers(seed, metric).fit() == answers(seed, Metric.TOKEN_F1).fit()


@pytest.mark.parametrize("metric", MEANS)
def test_rounding_changes_no_answer_of_the_rows_it_was_fitted_on(metric: Metric) -> None:
    for seed in range(6):
        said = answers(seed, metric)
        fitted = said.fit()
        noise_R = np.random.default_rng(seed).uniform(-1e-6, 1e-6, size=ROWS)
        moved = replace(said, decoded=replace(said.decoded, differences_R=said.decoded.differences_R + noise_R))
        assert moved.metrics(fitted) == said.metrics(fitted)
        assert moved.fit()[NULL_THRESHOLD] == pytest.approx(fitted[NULL_THRESHOLD], abs=1e-5)


@pytest.mark.parametrize("reranker", ["sum", "product", "softmax"])
def test_scores_of_a_model_may_be_rounded_otherwise(reranker: str) -> None:
    """From scores of tokens to answers, whatever scores of spans are made of them."""
    logits, windows = spans.drawn_windows(ROWS, seed=4, golds=True)
    # The gold spans of half the rows are found, and null wins in many of the others.
    at_W = torch.arange(len(windows))
    for end in (0, 1):
        logits[at_W, windows.tokens.labels_R[:, end], end] += 8.0 * (windows.rows_W % 2)
    logits[at_W, windows.nulls_W] += 3 + windows.rows_W.unsqueeze(1) % 7
    context = TaskContext(TrialSettings(span=SpanSettings.model_validate({"reranker": reranker})), DataSettings())
    task = EvidenceTask(replace(context, metric=Metric.EXACT_MATCH))
    batch = spans.span_batch(windows)
    fitted = task.fit(task.keep(logits, batch), windows.tokens)
    found = task.metrics(task.keep(logits, batch), windows.tokens, fitted)
    assert 0 < found["null_recall"] <= 1
    for seed in range(4):
        noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) * 2e-6 - 1e-6
        again = task.metrics(task.keep(logits + noise, batch), windows.tokens, fitted)
        del again["loss"]
        assert again == {name: found[name] for name in again}


def test_a_task_of_classes_and_spans_hands_the_metric_on() -> None:
    logits, windows = spans.drawn_windows(ROWS, seed=4, golds=True)
    logits[torch.arange(len(windows)), windows.nulls_W] += 4 + windows.rows_W.unsqueeze(1) % 7
    tokens = replace(windows.tokens, extra={**windows.tokens.extra, CLASSES: windows.rows_W % 2})
    for end in (0, 1):
        logits[torch.arange(len(windows)), tokens.labels_R[:, end] // 2 * 2, end] += 9.0
    context = TaskContext(TrialSettings(loss=LossSettings()), DataSettings())
    found: dict[str, float] = {}
    for metric in (Metric.TOKEN_F1, Metric.EXACT_MATCH):
        alone, both = (cls(replace(context, metric=metric)) for cls in (EvidenceTask, ShareTask))
        batch = spans.span_batch(windows)
        fitted = both.fit(both.keep((torch.zeros(len(windows), 2), logits), batch), tokens)
        assert fitted == alone.fit(alone.keep(logits, batch), tokens)
        found[metric] = fitted[NULL_THRESHOLD]
    assert found[Metric.TOKEN_F1] != found[Metric.EXACT_MATCH]


# ---- From the scores of windows to those of rows: which class a row has, and what both heads are worth together


BOTH_ROWS = 70


def drawn(*, several: bool):
    """A task, its windows with classes, and what is kept of them."""
    logits, windows = spans.drawn_windows(BOTH_ROWS, seed=5, golds=True)
    rng = torch.Generator().manual_seed(6)
    size = (BOTH_ROWS, 3) if several else (BOTH_ROWS,)
    labels_R = torch.randint(0, 2 if several else 3, size, generator=rng)
    labels_R = labels_R.to(torch.uint8) if several else labels_R
    tokens = replace(windows.tokens, extra={**windows.tokens.extra, CLASSES: labels_R[windows.rows_W]})
    task = ShareTask(TaskContext(TrialSettings(), DataSettings(num_labels=3, multi_label=several)))
    scores_WC = torch.randn(len(windows), 3, generator=rng) * 2
    kept = task.keep((scores_WC, logits), spans.span_batch(windows))
    return task, tokens, kept, scores_WC, labels_R


@pytest.mark.parametrize("several", [False, True])
def test_classes_are_scored_by_row(several: bool) -> None:
    task, tokens, kept, scores_WC, labels_R = drawn(several=several)
    assert tokens.source_R is not None
    assert int(torch.bincount(tokens.source_R).max()) > 2
    means = torch.stack([scores_WC[tokens.source_R == row].double().mean(dim=0) for row in range(BOTH_ROWS)])
    assert torch.allclose(row_means(scores_WC.double(), tokens.source_R, BOTH_ROWS), means, rtol=0, atol=1e-12)
    fitted = task.fit(kept, tokens)
    found = task.metrics(kept, tokens, fitted)
    assert tuple(sorted(found)) == tuple(sorted(metrics_of_both(DataSettings(num_labels=3, multi_label=several))))
    guess = (means > 0).int() if several else means.argmax(dim=-1)
    assert found["f1_macro"] == pytest.approx(f1_score(labels_R, guess, average="macro"), abs=1e-12)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels_R, guess), abs=1e-12)
    alone = EvidenceTask(TaskContext(TrialSettings(), DataSettings())).metrics(kept[:, 3:], tokens, fitted)
    assert found["combined"] == pytest.approx((found["f1_macro"] + alone["token_f1"]) / 2, abs=1e-12)
    if not several:
        plain = log_loss(labels_R, means.softmax(dim=-1), labels=[0, 1, 2])
        assert found["loss"] == pytest.approx((plain + alone["loss"]) / 2, rel=1e-6)


@pytest.mark.parametrize("several", [False, True])
def test_predictions_say_what_was_scored(several: bool) -> None:
    task, tokens, kept, _, labels_R = drawn(several=several)
    fitted = task.fit(kept, tokens)
    known = ShareTask(replace(task.context, fitted=fitted))
    said = list(known.predictions(kept, tokens, [spans.SpanRow("x" * 4000)] * BOTH_ROWS))
    truth = [[n for n, has in enumerate(row) if has] if several else row for row in labels_R.tolist()]
    hits = sum(one["label"] == label for one, label in zip(said, truth, strict=True))
    assert hits / BOTH_ROWS == pytest.approx(task.metrics(kept, tokens, fitted)["accuracy"], abs=1e-12)
    assert {"label", "probabilities", "span", "text", "score", "null_score", "candidates"} == said[0].keys()


def test_classes_of_windows_are_counted() -> None:
    _, tokens, _, _, labels_R = drawn(several=False)
    assert tokens.source_R is not None
    windows = torch.bincount(tokens.source_R)
    want = {label: int(windows[labels_R == label].sum()) for label in range(3)}
    assert tokens.label_counts(3) == want


def test_a_class_that_the_model_has_not_is_refused_before_it_is_used() -> None:
    task, tokens, _, _, _ = drawn(several=False)
    guard = BatchGuard("train", tokens, Bounds(None, None, None, None, entries=task.limits))
    batch = task.collate(tokens, range(6))
    guard.check_batch(batch, lambda: range(6))
    batch[CLASSES][4] = 3
    with pytest.raises(DataError) as caught:
        guard.check_batch(batch, lambda: range(6))
    assert caught.value.found == "classes 3 in 1 row: row 4"
    assert caught.value.allowed == "0 to 2"
