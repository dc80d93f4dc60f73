"""A causal language model with the HF Trainer: accumulation and gradient checkpointing."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--architecture", default="llama")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--kv_heads", type=int, default=2)
parser.add_argument("--intermediate", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=200)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16", "pure_bf16"], default="bf16")
parser.add_argument("--no-checkpointing", action="store_true")
parser.add_argument("--reentrant", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
args = parser.parse_args()

set_seed(0)
config = AutoConfig.for_model(
    args.architecture,
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    num_key_value_heads=args.kv_heads,
    intermediate_size=args.intermediate,
    max_position_embeddings=2 * args.length,
    tie_word_embeddings=False,
    use_cache=False,
)
dtype = torch.bfloat16 if args.precision == "pure_bf16" else torch.float32
model = AutoModelForCausalLM.from_config(config, dtype=dtype)
print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")


class Rows(Dataset):
    def __len__(self):
        return args.rows

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(args.vocabulary, (args.length,), generator=drawn)
        return {"input_ids": tokens, "labels": tokens.clone()}


Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        gradient_checkpointing=not args.no_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": args.reentrant},
        num_train_epochs=1,
        optim=args.optim,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        warmup_steps=2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Rows(),
).train()
