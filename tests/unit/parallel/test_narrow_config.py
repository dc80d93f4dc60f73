"""Configs of narrow models: what is made smaller, and what stays."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig

from dryfit.meta.configs import catalogue_config
from dryfit.parallel.narrow import Narrowing, narrow_config, sizes_changed


def changed(name: str, step: Narrowing, degree: int = 2) -> dict[str, tuple[int, int]]:
    wide = catalogue_config(name)
    before = wide.to_dict()
    narrow = narrow_config(wide, degree, step)
    assert wide.to_dict() == before
    return sizes_changed(wide, narrow)


def test_words_first_then_features_then_heads():
    words = {"vocab_size": (32000, 512)}
    features = {"intermediate_size": (11008, 128)}
    assert changed("meta-llama/Llama-2-7b-hf", Narrowing.VOCABULARY) == words
    assert changed("meta-llama/Llama-2-7b-hf", Narrowing.FEATURES) == words | features
    assert changed("meta-llama/Llama-2-7b-hf", Narrowing.HEADS) == words | features | {
        "hidden_size": (4096, 128),
        "num_attention_heads": (32, 4),
        "num_key_value_heads": (32, 4),
    }
    assert changed("meta-llama/Llama-2-7b-hf", Narrowing.ONE_HEAD)["num_attention_heads"] == (32, 2)


def test_queries_share_keys_as_they_did():
    found = changed("Qwen/Qwen2.5-7B", Narrowing.ONE_HEAD)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == ((28, 14), (4, 2))
    assert found["hidden_size"] == (3584, 14 * 128)  # its heads have what the stream has, divided by their number


def test_what_is_as_wide_as_the_stream_stays_so():
    assert changed("google/electra-large-discriminator", Narrowing.HEADS)["embedding_size"] == (1024, 256)
    assert "embedding_size" not in changed("google/electra-small-discriminator", Narrowing.HEADS)


def test_gpt2_says_its_features_only_where_they_are_not_four_times_the_stream():
    wide = catalogue_config("openai-community/gpt2-large")
    assert narrow_config(wide, 2, Narrowing.VOCABULARY).n_inner is None  # pyright: ignore
    assert narrow_config(wide, 2, Narrowing.FEATURES).n_inner == 128  # pyright: ignore


def test_tokens_lie_within_the_table():
    wide = AutoConfig.for_model("llama", vocab_size=4096, pad_token_id=4095, eos_token_id=[4000, 2], bos_token_id=1)
    narrow = narrow_config(wide, 2, Narrowing.VOCABULARY)
    assert (narrow.pad_token_id, narrow.eos_token_id, narrow.bos_token_id) == (0, [0, 2], 1)  # pyright: ignore


def test_what_is_narrow_stays():
    config = AutoConfig.for_model("bert", vocab_size=64, hidden_size=32, num_attention_heads=4, intermediate_size=48)
    for step in (Narrowing.VOCABULARY, Narrowing.FEATURES, Narrowing.HEADS):
        assert sizes_changed(config, narrow_config(config, 2, step)) == {}


@given(
    degree=st.integers(2, 8),
    groups=st.integers(1, 64),
    shared=st.integers(1, 8),
    head=st.sampled_from([16, 64, 128]),
    between=st.integers(1, 20_000),
    words=st.integers(10, 200_000),
    step=st.sampled_from(list(Narrowing)),
)
def test_what_the_degree_divides_stays_what_it_divides(
    degree: int, groups: int, shared: int, head: int, between: int, words: int, step: Narrowing
):
    wide: Any = LlamaConfig(
        vocab_size=words,
        hidden_size=groups * shared * head,
        num_attention_heads=groups * shared,
        num_key_value_heads=groups,
        intermediate_size=between,
    )

    narrow: Any = narrow_config(wide, degree, step)

    for key in ("vocab_size", "hidden_size", "num_key_value_heads", "intermediate_size"):
        assert getattr(narrow, key) <= getattr(wide, key)
        assert getattr(narrow, key) % degree == getattr(wide, key) % degree
    assert narrow.head_dim == head
    assert narrow.num_attention_heads == narrow.num_key_value_heads * shared
    assert narrow.hidden_size % narrow.num_attention_heads == 0
    if groups >= 2 * degree and step <= Narrowing.HEADS:
        assert narrow.num_key_value_heads >= 2 * degree


@pytest.mark.parametrize("key", ["pooler_hidden_size", "word_embed_proj_dim"])
def test_other_names_of_the_stream(key: str):
    config = AutoConfig.for_model("bert", vocab_size=64, hidden_size=512, num_attention_heads=16)
    setattr(config, key, 512)
    assert getattr(narrow_config(config, 2, Narrowing.HEADS), key) == 128
