"""Tiny causal language models of several architectures, with tokenizers that know many scripts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dryfit.tasks.tiny_lm import train_tokenizer

TEXTS = (
    "I sleep badly and feel sad. They never eat, we always walk!",
    "Ich schlafe schlecht und fühle mich müde. Größe, Straße, Äpfel.",
    "我睡得不好. 他们从来不吃饭。",
    "أنام بشكل سيئ وأشعر بالحزن. نمشي دائما",
    "Я плохо сплю и грущу. Мы всегда гуляем.",
    "मुझे नींद नहीं आती और मैं दुखी हूँ।",
    "😀 😢👩‍👩‍👧 🏳️‍🌈 <|endoftext|> {text} \t\n",
)
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 12},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "mamba": {"state_size": 4, "expand": 2, "conv_kernel": 4},
}


def config_alone(folder: Path) -> Path:
    """Write the config of a tiny Qwen2 into a folder: what planning reads."""
    config = AutoConfig.for_model("qwen2", vocab_size=100, pad_token_id=0, **{**_SIZES, **OWN["qwen2"]})
    config.save_pretrained(folder)
    return folder


def causal_lm(
    folder: Path,
    architecture: str = "qwen2",
    *,
    vocab_size: int = 420,
    sizes: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a random model and its tokenizer into a folder; ``sizes`` are the model's alone."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(TEXTS, vocab_size=vocab_size)
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 512,
            **_SIZES,
            **ids,
            **OWN[architecture],
            **changes,
            **(sizes or {}),
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # far from the small initial values, so that no leak is lost in them
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
