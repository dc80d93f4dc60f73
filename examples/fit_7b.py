"""Fit a model of seven billion parameters on 24 GB: what to change, known before a card is rented.

    dryfit rehearse --device rtx4090 examples/fit_7b.py --per_device_train_batch_size 4
    dryfit rehearse --device rtx4090 examples/fit_7b.py --per_device_train_batch_size 4 --rank 16
    dryfit rehearse --device rtx4090 --largest=--per_device_train_batch_size examples/fit_7b.py \\
        --per_device_train_batch_size 4 --rank 16 --gradient_checkpointing True

The sizes are those of Qwen2.5-7B; weights are random, so nothing is downloaded. Needs transformers and PEFT.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import HfArgumentParser, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments


@dataclass
class Own:
    """What the script adds to the Trainer's arguments; ``rank`` 0 trains all weights, another one adapters."""

    hidden: int = 3584
    layers: int = 28
    heads: int = 28
    words: int = 152064
    tokens: int = 1024
    rank: int = 0


def model_of(own: Own) -> torch.nn.Module:
    """A Qwen2 model in bf16, with adapters on all linear layers if a rank is given."""
    config = Qwen2Config(
        vocab_size=own.words,
        hidden_size=own.hidden,
        intermediate_size=own.hidden * 37 // 7,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        num_key_value_heads=max(1, own.heads // 7),
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    if not own.rank:
        return model
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=own.rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def main() -> None:
    """Train on random tokens: put your own rows here."""
    own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
    rows = torch.randint(own.words, (64, own.tokens), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model_of(own), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
