"""Fine-tune a model of Qwen2.5-7B's sizes on random tokens, all of its weights or LoRA adapters, by the Trainer.

The launcher and ``--deepspeed`` decide how the model lies on the devices. No weights are needed: the sizes are those of
the published config.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen2Config, Trainer, TrainingArguments


@dataclass
class Own:
    """Arguments of this script.

    Attributes:
        rank: Of the LoRA adapters; 0: all weights are trained.
        tokens: Of each row.
    """

    rank: int = 0
    tokens: int = 2048


own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
config = Qwen2Config(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    tie_word_embeddings=False,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if own.rank:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=own.rank, lora_alpha=own.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model.enable_input_require_grads()
    model = get_peft_model(model, adapters)
ids = torch.randint(0, config.vocab_size, (64, own.tokens)).tolist()
rows = [{"input_ids": one, "labels": one} for one in ids]
Trainer(model, arguments, train_dataset=rows).train()
