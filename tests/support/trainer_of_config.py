"""Fine-tune the model of a folder's config with the HF Trainer, on random rows of one length: a user's plain script."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
parser.add_argument("--optim", default="adamw_torch_fused")
parser.add_argument("--checkpointing", choices=["saved", "reentrant"])
parser.add_argument("--lora", type=int, default=0)
arguments = parser.parse_args()

config = AutoConfig.from_pretrained(arguments.config)
is_decoder = config.model_type in ("qwen2", "llama")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random rows, padded at their ends."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, config.vocab_size, (arguments.length,))
        mask = torch.ones_like(ids)
        mask[-5:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids if is_decoder else torch.tensor(index % 2)}


kind = AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification
if arguments.lora:
    from peft import LoraConfig, get_peft_model

    base = kind.from_config(config, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision])
    model = get_peft_model(
        base, LoraConfig(r=arguments.lora, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    )
else:
    model = kind.from_config(config)
training = TrainingArguments(
    arguments.output_dir,
    per_device_train_batch_size=arguments.rows // arguments.accumulation,
    gradient_accumulation_steps=arguments.accumulation,
    bf16=arguments.precision == "bf16",
    fp16=arguments.precision == "fp16",
    optim=arguments.optim,
    max_steps=3,
    save_strategy="no",
    report_to=[],
    gradient_checkpointing=arguments.checkpointing is not None,
    gradient_checkpointing_kwargs={"use_reentrant": arguments.checkpointing == "reentrant"},
)
Trainer(model, training, train_dataset=Rows()).train()
