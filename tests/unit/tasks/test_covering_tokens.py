"""The tokens that cover a span of characters."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dryfit.tasks.windows import covering_tokens

Span = tuple[int, int]


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
