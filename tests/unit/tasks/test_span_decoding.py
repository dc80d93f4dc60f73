"""Decoding against a plain search through all pairs, written without any array."""

import itertools
import math

import numpy as np
import pytest
import torch

from dryfit.settings.tables import LossSettings, SpanSettings
from dryfit.tasks.spans import Decoded, SpanLoss, decode, fit_threshold, pack, rows_without, window_losses
from dryfit.tasks.windows import Windows
from spans import drawn_windows, span_batch

ROWS = 40
LENGTH = 24


def iou(first: tuple[int, int], second: tuple[int, int]) -> float:
    one, other = set(range(*first)), set(range(*second))
    return len(one & other) / len(one | other)


def reference(logits: torch.Tensor, windows: Windows, settings: SpanSettings):
    """Of each row: its n-best as (score, span), the score of null, and log null - log best."""
    batch = span_batch(windows)
    of_row: dict[int, list[tuple[float, tuple[int, int]]]] = {row: [] for row in range(len(windows.golds))}
    nulls: dict[int, list[float]] = {row: [] for row in range(len(windows.golds))}
    for window, row in enumerate(windows.rows_W.tolist()):
        starts, ends = (logits[window, :, end].double().tolist() for end in (0, 1))
        offsets = windows.offsets_T2.reshape(len(windows), -1, 2)[window].tolist()
        text = [token for token in range(LENGTH) if batch["text_mask"][window, token]]
        null = int(windows.nulls_W[window])
        norm = 0.0
        if settings.reranker == "product":
            norm = sum(math.log(sum(math.exp(scores[at]) for at in [*text, null])) for scores in (starts, ends))
        nulls[row].append(starts[null] + ends[null] - norm)
        first = sorted(text, key=lambda at: -starts[at])[: settings.topk]
        last = sorted(text, key=lambda at: -ends[at])[: settings.topk]
        pairs = [
            (starts[begin] + ends[end] - norm, (offsets[begin][0], offsets[end][1]))
            for begin, end in itertools.product(first, last)
            if begin <= end < begin + settings.max_answer_len
        ]
        of_row[row] += sorted(pairs, reverse=True)[: settings.topk]
    found = []
    for row, candidates in of_row.items():
        kept: list[tuple[float, tuple[int, int]]] = []
        for log, span in sorted(candidates, key=lambda one: -one[0]):
            if len(kept) < settings.topk and all(iou(span, other) < settings.nms_iou for _, other in kept):
                kept.append((log, span))
        null = min(nulls[row])
        scores, null_score = [log for log, _ in kept], null
        if settings.reranker == "product":
            scores, null_score = [math.exp(score) for score in scores], math.exp(null)
        if settings.reranker == "softmax":
            total = math.exp(null) + sum(math.exp(score) for score in scores)
            scores, null_score = [math.exp(score) / total for score in scores], math.exp(null) / total
        ratio = null - kept[0][0] if kept else math.inf
        found.append(([(score, span) for score, (_, span) in zip(scores, kept, strict=True)], null_score, ratio))
    return found


def decoded(logits: torch.Tensor, windows: Windows, settings: SpanSettings) -> Decoded:
    return decode(pack(logits, span_batch(windows), settings), windows, settings)


@pytest.mark.parametrize("reranker", ["sum", "product", "softmax"])
@pytest.mark.parametrize(
    "limits",
    [
        {"topk": 5, "max_answer_len": 6, "nms_iou": 0.5},
        {"topk": 100, "max_answer_len": 100, "nms_iou": 1.0},  # all pairs of tokens there are
        {"topk": 3, "max_answer_len": 1, "nms_iou": 0.1},
        {"topk": 1},
    ],
)
def test_decoding_is_the_plain_search(reranker: str, limits: dict) -> None:
    settings = SpanSettings(reranker=reranker, **limits)
    logits, windows = drawn_windows(ROWS, seed=settings.topk, length=LENGTH)
    packed = pack(logits, span_batch(windows), settings)
    assert packed.shape == (len(windows), 5 + 4 * settings.topk)
    have = decode(packed, windows, settings)
    assert have.spans_RK2.shape == (ROWS, settings.topk, 2)
    for row, (kept, null, ratio) in enumerate(reference(logits, windows, settings)):
        count = len(kept)
        assert [tuple(span) for span in have.spans_RK2[row, :count].tolist()] == [span for _, span in kept]
        assert not have.spans_RK2[row, count:].any()
        assert have.scores_RK[row, :count] == pytest.approx([score for score, _ in kept], rel=1e-5, abs=1e-9)
        assert have.nulls_R[row] == pytest.approx(null, rel=1e-5, abs=1e-9)
        assert have.log_ratios_R[row] == pytest.approx(ratio, rel=1e-5, abs=1e-5)
        want = null - kept[0][0] if kept else math.inf
        assert have.differences_R[row] == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_a_window_without_text_and_scores_that_are_no_numbers_decode_to_nothing() -> None:
    settings = SpanSettings(topk=4)
    logits, windows = drawn_windows(6, seed=1, length=LENGTH)
    batch = span_batch(windows)
    batch["text_mask"] = batch["text_mask"] & (windows.rows_W != 2).unsqueeze(1)
    logits[windows.rows_W == 3] = math.nan
    logits[windows.rows_W == 4] = math.inf
    for reranker in ("sum", "product", "softmax"):
        chosen = settings.model_copy(update={"reranker": reranker})
        packed = pack(logits, batch, chosen)
        have = decode(packed, windows, chosen)
        assert have.differences_R[2] == math.inf
        assert not have.spans_RK2[2].any()
        for policy in ("none", "threshold", "ratio", "calibrated"):
            without = rows_without(have, chosen.model_copy(update={"null_policy": policy}), 1e9)
            assert without[2]
            assert not have.answers(without)[2].any()
        clean = np.isin(np.arange(6), (0, 1, 5))
        assert np.isfinite(have.differences_R[clean]).all()
        assert not np.isnan(have.differences_R).any()
        assert window_losses(packed)[windows.rows_W == 3].isnan().all()


def test_the_kept_loss_is_the_plain_cross_entropy() -> None:
    logits, windows = drawn_windows(ROWS, seed=3, length=LENGTH)
    batch = span_batch(windows)
    kept = window_losses(pack(logits, batch, SpanSettings(topk=2)))
    for window in range(len(windows)):
        one = {name: values[window : window + 1] for name, values in batch.items()}
        want = SpanLoss(LossSettings()).loss_sum(logits[window : window + 1], one)
        assert kept[window].item() == pytest.approx(want.item(), rel=1e-5)


def test_more_padding_changes_nothing() -> None:
    settings = SpanSettings(topk=6, reranker="product")
    logits, windows = drawn_windows(ROWS, seed=5, length=LENGTH)
    batch = span_batch(windows)
    wide = torch.nn.functional.pad(logits, (0, 0, 0, 9), value=50.0)
    padded = batch | {"text_mask": torch.nn.functional.pad(batch["text_mask"], (0, 9))}
    torch.testing.assert_close(pack(wide, padded, settings), pack(logits, batch, settings), rtol=0, atol=1e-5)


def hand_made(differences: list[float], ratios: list[float]) -> Decoded:
    rows = len(differences)
    spans = np.tile(np.array([[[2, 5]]]), (rows, 1, 1))
    zeros = np.zeros(rows)
    return Decoded(spans, zeros[:, None], zeros, np.array(differences), np.array(ratios))


def test_null_policies() -> None:
    found = hand_made([-2.0, 0.5, 1.0, math.inf], [-3.0, 0.0, math.log(2.0), math.inf])

    def without(fitted: float | None = None, **settings) -> list[bool]:
        return rows_without(found, SpanSettings(**settings), fitted).tolist()

    assert without(null_policy="none") == [False, False, False, True]
    assert without(null_policy="threshold") == [False, True, True, True]
    assert without(null_policy="threshold", null_threshold=0.5) == [False, False, True, True]
    assert without(null_policy="threshold", null_threshold=-5.0) == [True, True, True, True]
    assert without(null_policy="ratio") == [False, False, True, True]
    assert without(null_policy="ratio", null_ratio=2.5) == [False, False, False, True]
    assert without(null_policy="ratio", null_ratio=0.01) == [True, True, True, True]
    assert without(0.7) == [False, False, True, True]
    assert found.answers(np.array([False, True, False, True])).tolist() == [[2, 5], [0, 0], [2, 5], [0, 0]]


@pytest.mark.parametrize("seed", range(8))
def test_the_fitted_threshold_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 60
    differences = rng.normal(size=rows).round(1) * 4  # many are equal
    differences[:5] = math.inf
    has = rng.random(rows) < (0.5, 0.0, 1.0, 0.9)[seed % 4]
    with_span = np.where(has, rng.random(rows).round(2), 0.0)
    without = (~has).astype(float)
    fitted = fit_threshold(differences, with_span, without)

    def value(threshold: float) -> float:
        return float(np.where(differences > threshold, without, with_span).mean())

    # One threshold between any two differences, one below all and one above.
    edges = np.unique(differences[np.isfinite(differences)])
    thresholds = [edges[0] - 1, *((edges[1:] + edges[:-1]) / 2), edges[-1] + 1]
    assert value(fitted) == pytest.approx(max(map(value, thresholds)), abs=1e-12)
    assert math.isfinite(fitted)
    within = [threshold for threshold in thresholds[1:-1] if value(threshold) > value(fitted) - 1e-12]
    assert all(abs(fitted) <= abs(threshold) for threshold in within)
    for moved in (differences - 1e-3, differences + 1e-3):
        assert ((moved > fitted) == (differences > fitted)).all()


def test_where_a_threshold_lies() -> None:
    """In the middle between two rows; beyond them as far as rows usually lie apart; differences may be equal."""
    differences = np.array([3.0, 1.0, 2.0, 7.0])

    def fitted(*with_span: float) -> float:
        return fit_threshold(differences, np.array(with_span), np.full(4, 0.5))

    assert fitted(0, 1, 1, 0) == pytest.approx(2.5)
    assert fitted(1, 1, 1, 0) == pytest.approx(5.0)
    assert fitted(0, 0, 0, 0) == pytest.approx(0.5)
    assert fitted(1, 1, 1, 1) == pytest.approx(7.5)
    nearly = differences[[1, 1, 2, 2]] + np.array([0.0, 1e-9, 0.0, 1e-9])
    values = np.array([1.0, 0.0, 1.0, 0.0])
    assert fit_threshold(nearly, values, np.array([0.0, 1.0, 0.5, 0.75])) == pytest.approx(0.5), "rounding parts none"
    assert fit_threshold(np.array([4.0]), np.ones(1), np.zeros(1)) == 5.0
    assert fit_threshold(np.array([4.0]), np.zeros(1), np.ones(1)) == 3.0


def test_without_any_candidate_there_is_nothing_to_fit() -> None:
    assert fit_threshold(np.array([math.inf, math.inf]), np.zeros(2), np.ones(2)) == 0.0
