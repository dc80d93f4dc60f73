"""Make configs of narrower models of the same class, step by step, that are sharded in the same way.

A narrow model has the layers of the wide one, with fewer words, fewer features and fewer heads. The features of a head,
the number of query heads that share keys, and the number of experts stay. Every size that shrinks keeps its remainder
by the degree: what the degree divides in one of the models, it divides in the other.
"""

import copy
from enum import IntEnum
from math import lcm
from typing import Any, Final

from transformers import PreTrainedConfig


class Narrowing(IntEnum):
    """How far a model is narrowed; each step includes those before it."""

    VOCABULARY = 1
    """Fewer words; layers have their full width."""
    FEATURES = 2
    """Fewer features between the two halves of a feed-forward network."""
    HEADS = 3
    """Fewer heads, at least two for each rank, and a narrower stream between the layers."""
    ONE_HEAD = 4
    """One head for each rank, or one group of heads where queries share keys."""


_WORDS: Final = 512
_FEATURES_OF_EACH: Final = 64
_STREAM: Final = 128
_LANES: Final = 16  # kernels of experts need rows of whole vectors: multiples of it stay multiples
_BETWEEN: Final = (
    "intermediate_size",
    "n_inner",
    "hidden_dim",
    "ffn_dim",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""What architectures call the features between the two halves of a feed-forward network."""
_LIKE_THE_STREAM: Final = ("embedding_size", "pooler_hidden_size", "word_embed_proj_dim")
"""Keys that repeat the width of the stream between the layers."""


def narrow_config(config: PreTrainedConfig, degree: int, step: Narrowing) -> PreTrainedConfig:
    """Return a config of the same class whose model is narrower.

    Args:
        config: The wide model's; it is not changed.
        degree: Number of ranks.
        step: How far to go. Sizes under unknown keys stay.
    """
    narrow = copy.deepcopy(config)
    _fewer_words(narrow, degree)
    if step >= Narrowing.FEATURES:
        _fewer_between(narrow, degree)
    if step >= Narrowing.HEADS:
        _fewer_heads(narrow, degree, of_each=2 if step is Narrowing.HEADS else 1)
    return narrow


def sizes_changed(wide: PreTrainedConfig, narrow: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the sizes that differ, by key: (wide, narrow). Ids of tokens are no sizes."""
    before, after = wide.to_dict(), narrow.to_dict()
    return {
        key: (value, after[key])
        for key, value in sorted(before.items())
        if type(value) is int and type(after.get(key)) is int and after[key] != value and not key.endswith("_token_id")
    }


def _fewer_words(config: Any, degree: int) -> None:
    rows = _number(config, "vocab_size")
    if rows is None or (fewer := _smaller(rows, _WORDS, _LANES * degree)) == rows:
        return
    config.vocab_size = fewer
    for key, value in vars(config).items():
        if not key.endswith("_token_id"):
            continue
        if type(value) is int and value >= fewer:  # it would lie outside the table
            setattr(config, key, 0)
        elif isinstance(value, list):
            setattr(config, key, [0 if type(one) is int and one >= fewer else one for one in value])


def _fewer_between(config: Any, degree: int) -> None:
    for key in _BETWEEN:
        features = _number(config, key)
        if (
            key == "n_inner"
            and features is None
            and hasattr(config, key)
            and (stream := _number(config, "hidden_size"))
        ):
            features = 4 * stream  # GPT-2's own default
        if features is not None:
            fewer = _smaller(features, _FEATURES_OF_EACH * degree, _LANES * degree)
            if fewer != features:
                setattr(config, key, fewer)


def _fewer_heads(config: Any, degree: int, *, of_each: int) -> None:
    stream, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    if stream is None or heads is None or stream % heads:
        return
    shared = _number(config, "num_key_value_heads")
    groups = shared or heads
    if heads % groups:
        return
    fewer = _smaller(groups, of_each * degree, degree)
    narrow_heads = fewer * (heads // groups)
    if _number(config, "head_dim") is None:
        width = narrow_heads * (stream // heads)
    else:  # the stream has a width of its own
        width = _narrow_stream(stream, narrow_heads, degree)
    config.num_attention_heads = narrow_heads
    if shared is not None:
        config.num_key_value_heads = fewer
    config.hidden_size = width
    for key in _LIKE_THE_STREAM:
        if _number(config, key) == stream:
            setattr(config, key, width)


def _narrow_stream(stream: int, heads: int, degree: int) -> int:
    """Return a width that the heads divide, as configs require, with the wide one's remainder by the degree."""
    step = lcm(heads, _LANES)
    begin = step * -(-_STREAM // step)
    return next((size for size in range(begin, stream, step) if size % degree == stream % degree), stream)


def _smaller(size: int, least: int, step: int) -> int:
    """Return the smallest number from ``least`` on with the same remainder by a step, at most the number itself."""
    return min(size, least + (size - least) % step)


def _number(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value if type(value) is int and value > 0 else None
