"""From the scores of windows to those of rows: which class a row has, and what both heads are worth together."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

import spans
from dryfit.settings.errors import DataError
from dryfit.settings.tables import DataSettings, TrialSettings
from dryfit.settings.task_facts import metrics_of_both
from dryfit.tasks.base import TaskContext
from dryfit.tasks.evidence import EvidenceTask
from dryfit.tasks.guard import BatchGuard, Bounds
from dryfit.tasks.joint import ShareTask, row_means
from dryfit.tasks.tokens import CLASSES

ROWS = 70


def drawn(*, several: bool):
    """A task, its windows with classes, and what is kept of them."""
    logits, windows = spans.drawn_windows(ROWS, seed=5, golds=True)
    rng = torch.Generator().manual_seed(6)
    size = (ROWS, 3) if several else (ROWS,)
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
    means = torch.stack([scores_WC[tokens.source_R == row].double().mean(dim=0) for row in range(ROWS)])
    assert torch.allclose(row_means(scores_WC.double(), tokens.source_R, ROWS), means, rtol=0, atol=1e-12)
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
    said = list(known.predictions(kept, tokens, [spans.SpanRow("x" * 4000)] * ROWS))
    truth = [[n for n, has in enumerate(row) if has] if several else row for row in labels_R.tolist()]
    hits = sum(one["label"] == label for one, label in zip(said, truth, strict=True))
    assert hits / ROWS == pytest.approx(task.metrics(kept, tokens, fitted)["accuracy"], abs=1e-12)
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
