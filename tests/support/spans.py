"""Rows of the span tests: texts of every script, tokenizers of every kind."""

from dataclasses import dataclass

from hypothesis import strategies as st

TOKENIZERS = ("bert", "roberta", "xlm-roberta", "deberta-v3", "xlnet", "modernbert")
"""WordPiece; byte-level BPE, with trimmed offsets or not; sentencepiece, the classification token first or last."""

_PIECES = (
    *(" ", "  ", "\n\t", "\u00a0", "\u3000", "\u2028", ".", "[SEP]", "<s>", "A", "b c", "sad"),
    *("\u0301", "e\u0301", "\u200b", "\u200d", "\ufe0f", "\u0e33", "\u0f71\u0f72", "\ufb01", "\u2460", "\u00ad"),
    *("😀", "👍🏽", "👩‍👩‍👧", "🇩🇪", "日本", "カ\u3099", "한국", "كيف", "Straße", "नमस्ते", "\x00", "\ufffd", "ǆ"),
)
texts = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=4)), max_size=14).map("".join)
"""Texts of any script, with emoji, combining characters, runs of white space and characters that tokenizers drop."""


@dataclass(frozen=True)
class SpanRow:
    """A row without a label."""

    text: str
    criterion: str | None = "feel sad"
    place: str = "rows.jsonl, line 1"
