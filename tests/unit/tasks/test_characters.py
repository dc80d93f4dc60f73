import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.tasks.windows import Owners, Trimmer, space_flags, word_spans
from spans import texts


@given(texts)
def test_words_are_what_split_gives(text: str) -> None:
    """For scripts with spaces; the others are cut further, never across white space."""
    spans = word_spans(text)
    assert "".join(text[start:end] for start, end in spans.tolist()) == "".join(text.split())
    edges = {edge for span in spans.tolist() for edge in span}
    at = 0
    for word in text.split():
        at = text.index(word, at)
        assert {at, at + len(word)} <= edges
        at += len(word)
    latin = "".join(char if char < "\u3040" else "x" for char in text)
    assert [latin[start:end] for start, end in word_spans(latin).tolist()] == latin.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\u3000", []),
        ("don't  stop.", ["don't", "stop."]),
        ("我很sad 了。", ["我", "很", "sad", "了", "。"]),
        ("ひらカナ漢字 한국어", ["ひ", "ら", "カ", "ナ", "漢", "字", "한국어"]),
        ("\U00020000x\U0002f800", ["\U00020000", "x", "\U0002f800"]),
        ("\ud83d lone", ["\ud83d", "lone"]),
    ],
)
def test_ideographs_and_kana_are_words_of_their_own(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in word_spans(text).tolist()] == words


@given(texts, st.data())
def test_trimming_is_strips(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    ((first, last),) = Trimmer.of(space_flags(text)).trimmed(np.array([[start, end]])).tolist()
    assert text[first:last] == text[start:end].strip()
    assert (first, last) == (0, 0) or start <= first < last <= end


def test_space_is_what_python_says() -> None:
    every = "".join(map(chr, range(0xD800))) + "".join(map(chr, range(0xE000, 0x110000)))
    assert space_flags(every).tolist() == [char.isspace() for char in every]


def test_stray_characters_belong_to_the_token_before_or_at_the_start_of_a_word_to_the_one_after() -> None:
    #        0123456789
    text = "ab* *cd* *"
    tokens = np.array([[0, 1], [1, 2], [5, 7], [0, 0]], dtype=np.int32)
    have = Owners.of(space_flags(text), tokens).extended(tokens)
    assert have.tolist() == [[0, 1], [1, 3], [4, 8], [0, 0]]  # the last * is a word without a token
    whole = np.array([[0, 10]], dtype=np.int32)
    assert Owners.of(space_flags(text), whole).extended(whole).tolist() == [[0, 10]]
