"""Windows of texts of any script: what lies in a window decodes back to itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

import encoders
import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.settings.errors import ConfigError
from dryfit.tasks.windows import Cut, Windows, cut_into_windows
from spans import TOKENIZERS, SpanRow, texts


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in TOKENIZERS:
        encoders.tokenizer(folder / name, name)
    return {name: load_tokenizer(FolderSource(str(folder / name))) for name in TOKENIZERS}


def window_tokens(found: Windows, window: int) -> list[tuple[int, int]]:
    """Characters of each token of a window."""
    start, end = found.tokens.starts_R[window : window + 2].tolist()
    return [tuple(span) for span in found.offsets_T2[start:end].tolist()]


def text_tokens(found: Windows, window: int) -> list[tuple[int, int]]:
    return [span for span in window_tokens(found, window) if span[0] < span[1]]


def decoded(found: Windows, window: int) -> tuple[int, int] | None:
    """The characters that a window's label stands for."""
    first, last = found.tokens.labels_R[window].tolist()
    if first == found.nulls_W[window]:
        assert last == first
        return None
    tokens = window_tokens(found, window)
    return tokens[first][0], tokens[last][1]


def cut_row(tokenizer: PreTrainedTokenizerBase, row: SpanRow, golds: list[tuple[int, int]], cut: Cut) -> Windows:
    return cut_into_windows([row], [golds], tokenizer, cut)


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    inner = text[start:end]
    return start + len(inner) - len(inner.lstrip()), end - len(inner) + len(inner.rstrip())


CUT = Cut(max_length=18, doc_stride=3)
criteria = st.sampled_from([None, "sad", "feel 日本"])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@given(text=texts, criterion=criteria, data=st.data())
def test_what_begins_and_ends_with_tokens_decodes_back_to_itself(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, text: str, criterion: str | None, data: st.DataObject
) -> None:
    assume(text.strip())
    row = SpanRow(text, criterion)
    plain = cut_row(tokenizers[name], row, [], CUT)
    assert not plain.has_span_W.any()
    window = data.draw(st.integers(0, len(plain) - 1))
    tokens = text_tokens(plain, window)
    assume(tokens)
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first, len(tokens) - 1))
    gold = (tokens[first][0], tokens[last][1])
    found = cut_row(tokenizers[name], row, [gold], CUT)
    assert decoded(found, window) == gold
    for have in (decoded(found, other) for other in range(len(found))):
        # Where tokens overlap (a mark that a word begins, and the word), another window may have but the longer one.
        assert have is None or have[0] <= gold[0] < gold[1] <= have[1]
    assert found.golds.spans_N2.tolist() == [list(gold)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20, deadline=None)
@given(text=texts, data=st.data())
def test_any_span_decodes_to_the_smallest_one_of_tokens_that_covers_it(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    end = data.draw(st.integers(start, len(text)))
    assume(text[start:end].strip())
    start, end = trimmed(text, start, end)
    found = cut_row(tokenizers[name], SpanRow(text), [(start, end)], CUT)
    everywhere = {at for window in range(len(found)) for span in text_tokens(found, window) for at in range(*span)}
    asked = {at for at in range(start, end) if at in everywhere}
    fits = False
    for window in range(len(found)):
        tokens = text_tokens(found, window)
        covering = [
            (first[0], last[1])
            for index, first in enumerate(tokens)
            for last in tokens[index:]
            if asked and asked <= set(range(first[0], last[1]))
        ]
        have = decoded(found, window)
        want = min(covering, key=lambda span: span[1] - span[0], default=None)
        assert have == want, (window, tokens)
        fits = fits or want is not None
    assert found.unfit_R.tolist() == [not fits]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=10, deadline=None)
@given(text=texts)
def test_tokens_cover_every_word_that_has_one(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, text: str
) -> None:
    """Characters that the tokenizer drops belong to a token of their word; white space belongs to none."""
    assume(text.strip())
    found = cut_row(tokenizers[name], SpanRow(text), [], CUT)
    spans = [span for window in range(len(found)) for span in text_tokens(found, window)]
    covered = {at for span in spans for at in range(*span)}
    for start, end in spans:
        assert text[start:end].strip() == text[start:end] != ""
    begin = 0
    for at in range(len(text) + 1):
        if at == len(text) or text[at].isspace():
            word = set(range(begin, at))
            assert word <= covered or not word & covered, (text, begin, at)
            begin = at + 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_windows_hold_each_token_of_the_text_once_but_for_the_stride(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer = tokenizers[name]
    text = " ".join(encoders.words(6, seed=1))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    after = 2 if name == "xlnet" else 1  # special tokens behind the text
    before = len(tokenizer("feel sad", text)["input_ids"]) - len(whole) - after
    for stride in (0, 5):
        found = cut_row(tokenizer, SpanRow(text), [], Cut(24, stride))
        assert len(found) > 3
        joined: list[int] = []
        for window in range(len(found)):
            start, end = found.tokens.starts_R[window : window + 2].tolist()
            ids = found.tokens.ids_T[start:end].tolist()
            own = ids[before:-after]
            assert len(ids) <= 24
            assert ids[found.nulls_W[window]] == tokenizer.cls_token_id
            assert joined[len(joined) - stride :] == own[:stride] or window == 0
            joined += own[stride if window else 0 :]
        assert joined == whole
        assert found.rows_W.tolist() == [0] * len(found)


def test_the_first_span_that_fits_a_window_is_its_own(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    text = "sad " * 40
    golds = [(100, 103), (4, 11), (0, 3)]
    found = cut_row(tokenizers["bert"], SpanRow(text), golds, Cut(16, 2))
    have = [decoded(found, window) for window in range(len(found))]
    assert have[0] == (4, 11)
    assert set(have[1:]) == {None, (100, 103)}
    assert not found.unfit_R.any()


def test_a_span_longer_than_any_window_is_counted(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    rows = [SpanRow("sad " * 40), SpanRow("sad bad"), SpanRow("sad")]
    found = cut_into_windows(rows, [[(0, 150)], [(0, 3)], []], tokenizers["bert"], Cut(16, 2))
    assert found.unfit_R.tolist() == [True, False, False]
    assert found.golds.counts_R.tolist() == [1, 1, 0]
    assert found.words.counts_R.tolist() == [40, 2, 1]
    assert torch.equal(found.tokens.labels_R[found.rows_W == 0][:, 0], found.nulls_W[found.rows_W == 0])


def test_white_space_at_the_ends_of_a_span_counts_for_nothing(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    found = cut_row(tokenizers["bert"], SpanRow("a  sad \n b"), [(1, 9)], CUT)
    assert found.golds.spans_N2.tolist() == [[3, 6]]
    assert decoded(found, 0) == (3, 6)


def test_windows_that_share_all_they_hold_are_refused(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    row = SpanRow("sad " * 20)  # [CLS] feel sad [SEP] ... [SEP]: 5 tokens
    assert len(cut_row(tokenizers["bert"], row, [], Cut(12, 6))) == 14
    with pytest.raises(ConfigError, match=r"room for 7 tokens of a text beside the longest criterion") as caught:
        cut_row(tokenizers["bert"], row, [], Cut(12, 7))
    assert "at most 6" in caught.value.allowed
    with pytest.raises(ConfigError, match=r"room for 10 tokens of a text  "):
        cut_row(tokenizers["bert"], SpanRow("sad", None), [], Cut(12, 10))


def test_tokenizers_that_do_not_say_where_are_refused(tmp_path: Path) -> None:
    fast = tiny.tokenizer(tmp_path)

    class Slow(type(fast)):
        is_fast = False

    fast.__class__ = Slow
    with pytest.raises(ConfigError, match="Slow does not say which characters"):
        cut_row(fast, SpanRow("sad"), [], CUT)


def test_tokenizers_without_a_token_beside_the_text_are_refused(tmp_path: Path) -> None:
    fast = tiny.tokenizer(tmp_path)
    fast.backend_tokenizer.post_processor = None
    with pytest.raises(ConfigError, match="puts no token before the text"):
        cut_row(fast, SpanRow("sad", None), [], CUT)
    assert len(cut_row(fast, SpanRow("sad"), [], CUT)) == 1  # the criterion stands there
