"""The mean of several models' spans: the mean of the probabilities that they give to each answer.

An answer is a span of characters, or none. Models with different tokens and windows have these in common, and so
probabilities are averaged there: a mixture of the models' distributions over answers. Starts and ends are not averaged
separately, which would put one model's start beside another's end.

A model's probability of a span is that of the labels which the span would have as a gold one: of the first of the
fewest tokens that cover it as a start, times that of the last as an end, in the best window that holds it; 0 where no
window does. Candidates are those of every model, and each model scores all of them.

Dimension suffixes: ``W`` windows of a split, ``T`` tokens of a split, ``R`` rows, ``N`` spans of all rows, ``L`` tokens
of a window, ``K`` numbers kept of a window or of a span, ``2`` start and end.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from dryfit.core.settings.tables import SpanSettings
from dryfit.tasks.averaging import ModelOutputs
from dryfit.tasks.rows.characters import Positions, Trimmer, covered
from dryfit.tasks.spans.span_decoding import Candidates, Decoded, Floats, Ints, log_normalisers, ranked, row_candidates
from dryfit.tasks.tokens.windows import Windows, covering_tokens


def mean_decoded(outputs: Sequence[ModelOutputs], settings: SpanSettings) -> Decoded:
    """Return the best spans of each row by the mean of several models' probabilities.

    Args:
        outputs: Of each model, for the same rows: :func:`~dryfit.tasks.spans.span_decoding.pack` of each window, and
            each token's scores as a start and as an end.
        settings: The ``[span]`` table by which the mean becomes an answer.
    """
    models = [row_candidates(one.kept_RK, Windows(one.tokens), normalised=True) for one in outputs]
    keys_NK, places = _distinct([candidates for candidates, _ in models])
    rows_N, spans_N2 = keys_NK[:, 0], keys_NK[:, 1:]
    by_model: list[Floats] = []
    for one, (candidates, _), own in zip(outputs, models, places, strict=True):
        logs_N = span_logs(one, rows_N, spans_N2)
        # Of several pairs of tokens with the same characters it is the likeliest that a model answers with.
        np.maximum.at(logs_N, own, candidates.logs_N)
        by_model.append(logs_N)
    mean = Candidates.of(rows_N, spans_N2, log_mean(by_model))
    return ranked(mean, log_mean([nulls_R for _, nulls_R in models]), settings)


def log_mean(logs: Sequence[Floats]) -> Floats:
    """Return the log of the mean of probabilities that are given by their logs."""
    return np.logaddexp.reduce(np.stack(logs), axis=0) - math.log(len(logs))


def span_logs(outputs: ModelOutputs, rows_N: Ints, spans_N2: Ints) -> Floats:
    """Return the log of the probability that a model gives to each span; ``-inf`` where no window holds it.

    Args:
        outputs: As of :func:`mean_decoded`.
        rows_N: The row of each span, ascending.
        spans_N2: Characters of each, none empty.
    """
    assert outputs.by_token_TK is not None
    windows = Windows(outputs.tokens)
    norms_W2 = log_normalisers(outputs.kept_RK)
    logs_T2 = (outputs.by_token_TK.double() - norms_W2.repeat_interleave(windows.tokens.lengths_R, dim=0)).numpy()
    offsets_T2, starts_W = windows.offsets_T2.numpy(), windows.tokens.starts_R.numpy()
    firsts_R = np.searchsorted(windows.rows_W.numpy(), np.arange(len(windows.golds) + 1))
    best_N = np.full(len(rows_N), -np.inf)
    for row, first, last in _runs(rows_N):
        begin, end = firsts_R[row], firsts_R[row + 1]
        reached_N2 = _reached(offsets_T2[starts_W[begin] : starts_W[end]], spans_N2[first:last])
        for window in range(begin, end):
            tokens_L = slice(starts_W[window], starts_W[window + 1])
            tokens_N2 = covering_tokens(offsets_T2[tokens_L], reached_N2)
            logs_L2 = logs_T2[tokens_L]
            logs_N = logs_L2[tokens_N2[:, 0], 0] + logs_L2[tokens_N2[:, 1], 1]
            held_N = tokens_N2[:, 0] >= 0
            best_N[first:last][held_N] = np.maximum(best_N[first:last], logs_N)[held_N]
    return best_N


def _reached(offsets_L2: Positions, spans_N2: Ints) -> Ints:
    """Return spans without characters at their ends that no token covers, as gold spans are learned."""
    characters = int(max(offsets_L2.max(), spans_N2.max()))
    return Trimmer.of(~covered(characters, offsets_L2)).trimmed(spans_N2).astype(np.int64)


def _runs(rows_N: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield each row with the range of its spans."""
    rows, firsts = np.unique(rows_N, return_index=True)
    yield from zip(rows.tolist(), firsts.tolist(), np.append(firsts, len(rows_N))[1:].tolist(), strict=True)


def _distinct(models: Sequence[Candidates]) -> tuple[Ints, list[Ints]]:
    """Return the distinct spans (row, start, end) of several models, and the indices of each one's candidates."""
    keys_NK = np.concatenate([np.column_stack([one.rows_N, one.spans_N2]) for one in models])
    distinct_NK, places_N = np.unique(keys_NK, axis=0, return_inverse=True)
    ends = np.cumsum([len(one.rows_N) for one in models])[:-1]
    return distinct_NK, np.split(places_N.reshape(-1), ends)  # numpy 2.0 gives a column
