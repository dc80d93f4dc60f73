"""A tiny random causal language model for first trials, with a tokenizer trained on the example texts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dryfit.processes.channel import ChildChannel
from dryfit.settings.training_messages import TinyLmRequest, TinyLmResult

END, PAD = "<|endoftext|>", "<|pad|>"
_MOST_TOKENS = 800


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (as of Qwen2 and GPT-2), which encodes any text without loss.

    Args:
        texts: Texts to learn merges from.
        vocab_size: Most tokens; 256 bytes and the special tokens are always included.
    """
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def write_tiny_lm(folder: Path, texts: Iterable[str], *, vocab_size: int, seed: int) -> tuple[int, int]:
    """Write a Qwen2 of random weights and its tokenizer into a folder.

    Args:
        folder: Target; made if absent.
        texts: Texts that the tokenizer is trained on.
        vocab_size: Most tokens.
        seed: Of the weights.

    Returns:
        The number of weights, and the number of tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    tokenizer.save_pretrained(folder)
    ids: Any = tokenizer.convert_tokens_to_ids([END, PAD])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[0],
        pad_token_id=ids[1],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters(), len(tokenizer)


def write(body: TinyLmRequest, channel: ChildChannel) -> TinyLmResult:
    """Child job TINY_LM: write the model of ``init --task causal-lm``."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(body.source).read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['criterion']}\n{row['text']}" for row in rows]
    weights, tokens = write_tiny_lm(Path(body.folder), texts, vocab_size=_MOST_TOKENS, seed=body.seed)
    return TinyLmResult(weights=weights, tokens=tokens)
