"""The mean of several models' answers, beside one that is computed span by span."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spans
import tiny
from dryfit.core.settings.tables import SpanSettings
from dryfit.tasks.averaging import ModelOutputs
from dryfit.tasks.spans.evidence import collate_windows
from dryfit.tasks.spans.span_average import mean_decoded, span_logs
from dryfit.tasks.spans.span_decoding import decode, pack, token_scores
from dryfit.tasks.tokens.windows import Cut, Windows, covering_tokens, cut_into_windows

WIDE = SpanSettings(topk=100, max_answer_len=1000, nms_iou=1.0, reranker="sum")
LENGTH = 9

Span = tuple[int, int]


def said_of(scores_WL2: torch.Tensor, windows: Windows, settings: SpanSettings) -> ModelOutputs:
    packed = pack(scores_WL2, spans.span_batch(windows), settings)
    return ModelOutputs(packed, token_scores(scores_WL2).flatten(0, 1), windows.tokens)


def drawn(rows: int, *, seed: int, settings: SpanSettings = WIDE) -> ModelOutputs:
    return said_of(*spans.drawn_windows(rows, seed=seed, length=LENGTH), settings)


def window_views(said: ModelOutputs, row: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Of each window of a row: characters of its tokens, probabilities of these as starts and ends, null's place."""
    for window in (Windows(said.tokens).rows_W == row).nonzero()[:, 0].tolist():
        tokens = slice(window * LENGTH, (window + 1) * LENGTH)
        offsets, null = Windows(said.tokens).offsets_T2[tokens].numpy(), int(Windows(said.tokens).nulls_W[window])
        raw = said.by_token_TK[tokens].double().numpy()
        may = offsets[:, 1] > 0
        may[null] = True
        shares = np.exp(raw) * may[:, None]
        yield offsets, shares / shares.sum(axis=0), null


def shortest(offsets: np.ndarray, span: Span) -> tuple[int, int] | None:
    """The shortest run of tokens that covers a span, by trying all; of equals the one with most tokens."""
    text = [token for token in range(len(offsets)) if offsets[token, 0] < offsets[token, 1]]
    runs = [
        (offsets[last, 1] - offsets[first, 0], first - last, first, last)
        for first in text
        for last in text
        if first <= last and offsets[first, 0] <= span[0] and offsets[last, 1] >= span[1]
    ]
    return min(runs)[2:] if runs else None


def probability(said: ModelOutputs, row: int, span: Span) -> float:
    """Of a span of characters, without those at its ends that the model has no token for, in the best window."""
    known = {place for offsets, _, _ in window_views(said, row) for pair in offsets for place in range(*pair)}
    inside = [place for place in range(*span) if place in known]
    if not inside:
        return 0.0
    span, found = (inside[0], inside[-1] + 1), [0.0]
    for offsets, shares, _ in window_views(said, row):
        tokens = shortest(offsets, span)
        if tokens is not None:
            found.append(float(shares[tokens[0], 0] * shares[tokens[1], 1]))
    return max(found)


def candidates(said: ModelOutputs, row: int) -> set[Span]:
    found: set[Span] = set()
    for offsets, _, _ in window_views(said, row):
        text = [token for token in range(LENGTH) if offsets[token, 1] > 0]
        found |= {(int(offsets[i, 0]), int(offsets[j, 1])) for i in text for j in text if i <= j}
    return found


@pytest.mark.parametrize("models", [1, 2, 3])
def test_it_is_the_mean_of_what_each_model_gives_to_each_span(models: int) -> None:
    said = [drawn(4, seed=40 + number) for number in range(models)]
    decoded = mean_decoded(said, WIDE)
    for row in range(4):
        every = set().union(*(candidates(one, row) for one in said))
        means = {span: sum(probability(one, row, span) for one in said) / models for span in every}
        ranked = sorted(means, key=lambda span: (-means[span], span))
        assert tuple(decoded.spans_RK2[row, 0]) == ranked[0]
        for place, span in enumerate(map(tuple, decoded.spans_RK2[row].tolist())):
            if span != (0, 0):
                assert decoded.scores_RK[row, place] == pytest.approx(math.log(means[span]), abs=1e-6)
        nulls = [min(shares[null].prod() for _, shares, null in window_views(one, row)) for one in said]
        assert decoded.nulls_R[row] == pytest.approx(math.log(sum(nulls) / models), abs=1e-6)
        assert decoded.differences_R[row] == pytest.approx(decoded.nulls_R[row] - decoded.scores_RK[row, 0], abs=1e-9)


def cut_texts(folder: Path, settings: SpanSettings) -> ModelOutputs:
    """Real texts in windows that share tokens, with random scores."""
    rows = [spans.SpanRow(row["text"] + " " + row["text"], row["criterion"]) for row in tiny.rows(8, seed=4)]
    windows = cut_into_windows(rows, [()] * len(rows), tiny.tokenizer(folder), Cut(18, 5))
    rng, tokens = torch.Generator().manual_seed(6), windows.tokens
    packed: list[torch.Tensor] = []
    scores = torch.randn(len(tokens.ids_T), 2, generator=rng) * 3
    for window in range(len(windows)):
        batch = collate_windows(tokens, [window], pad_id=0)
        own = scores[int(tokens.starts_R[window]) : int(tokens.starts_R[window + 1])]
        packed.append(pack(own.unsqueeze(0), batch, settings))
    return ModelOutputs(torch.cat(packed), scores, tokens)


@pytest.mark.parametrize("settings", [WIDE, SpanSettings(topk=4, max_answer_len=5), SpanSettings(reranker="softmax")])
def test_a_model_beside_itself_is_itself(tmp_path: Path, settings: SpanSettings) -> None:
    """As one whose windows are compared by probabilities."""
    one = cut_texts(tmp_path, settings)
    assert len(Windows(one.tokens)) > len(Windows(one.tokens).golds)
    alone = decode(one.kept_RK, Windows(one.tokens), settings.model_copy(update={"reranker": "product"}))
    for together in (mean_decoded([one], settings), mean_decoded([one, one, one], settings)):
        if settings.reranker == "sum":
            np.testing.assert_allclose(np.exp(together.scores_RK), alone.scores_RK, rtol=1e-9)
            np.testing.assert_allclose(np.exp(together.nulls_R), alone.nulls_R, rtol=1e-9)
        np.testing.assert_array_equal(together.spans_RK2, alone.spans_RK2)
        np.testing.assert_allclose(together.log_ratios_R, alone.log_ratios_R, rtol=1e-9)


def test_a_span_that_no_window_of_a_model_holds_has_none_of_its_probability(tmp_path: Path) -> None:
    one = cut_texts(tmp_path, WIDE)
    windows_R = torch.bincount(Windows(one.tokens).rows_W)
    row = int(windows_R.argmax())
    assert windows_R[row] > 1
    tokens = slice(*(int(one.tokens.starts_R[(Windows(one.tokens).rows_W < row + more).sum()]) for more in (0, 1)))
    whole = int(Windows(one.tokens).offsets_T2[tokens].max())
    found = span_logs(one, np.array([row, row]), np.array([[0, whole], [0, 1]]))
    assert found[0] == -np.inf
    assert np.isfinite(found[1])


def test_scores_that_are_no_numbers_decode_to_something() -> None:
    scores, windows = spans.drawn_windows(4, seed=2, length=LENGTH)
    broken = torch.full_like(scores, math.nan)
    decoded = mean_decoded([said_of(scores, windows, WIDE), said_of(broken, windows, WIDE)], WIDE)
    assert not np.isnan(decoded.scores_RK).any()
    assert not np.isnan(decoded.nulls_R).any()


def test_rows_without_any_token_of_the_text_have_no_span() -> None:
    scores, windows = spans.drawn_windows(3, seed=2, length=LENGTH)
    nothing = {**windows.tokens.extra, "offsets": torch.zeros_like(windows.offsets_T2)}
    empty = Windows(replace(windows.tokens, labels_R=windows.nulls_W[:, None].expand(-1, 2), extra=nothing))
    decoded = mean_decoded([said_of(scores, empty, WIDE)] * 2, WIDE)
    assert not decoded.spans_RK2.any()
    assert (decoded.differences_R == np.inf).all()


@given(st.data())
def test_covering_tokens_are_the_shortest_run(data: st.DataObject) -> None:
    """In order, with tokens of the same characters, that overlap, that are of nothing, and that leave gaps."""
    count = data.draw(st.integers(1, 9))
    starts = np.sort(data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)))
    ends = np.maximum.accumulate(starts + data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    offsets = np.stack([starts, ends], axis=1).astype(np.int32)
    offsets[data.draw(st.lists(st.booleans(), min_size=count, max_size=count))] = 0
    first = data.draw(st.integers(0, 20))
    span = (first, data.draw(st.integers(first + 1, 24)))
    ((begin, end),) = covering_tokens(offsets, np.array([span])).tolist()
    expected = shortest(offsets, span)
    if expected is None:
        assert (begin, end) == (-1, -1)
    else:
        length = offsets[expected[1], 1] - offsets[expected[0], 0]
        assert 0 <= begin <= end
        assert offsets[begin, 0] <= span[0] and offsets[end, 1] >= span[1]
        assert offsets[end, 1] - offsets[begin, 0] == length


def test_no_span_and_no_tokens_are_covered_by_nothing() -> None:
    offsets = np.array([[0, 0], [0, 3], [4, 6]], dtype=np.int32)
    assert covering_tokens(offsets, np.array([[0, 0], [2, 5], [0, 7]])).tolist() == [[-1, -1], [1, 2], [-1, -1]]
    assert covering_tokens(np.zeros((3, 2), dtype=np.int32), np.array([[0, 1]])).tolist() == [[-1, -1]]
