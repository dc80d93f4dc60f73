"""Supervised fine-tuning by TRL with LoRA adapters on all linear layers of a Qwen2 model."""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl import SFTConfig, SFTTrainer

SIZES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944},
}
KV_HEADS = {"tiny": 2, "0.5b": 2, "7b": 4}
VOCABULARY = {"tiny": 200, "0.5b": 151_936, "7b": 152_064}

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--no-checkpointing", action="store_true")
args = parser.parse_args()

words = ["<pad>", "<eos>", *(f"w{number}" for number in range(198))]
core = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
core.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")

drawn = random.Random(0)
texts = [" ".join(drawn.choices(words[2:], k=drawn.randint(args.length // 2, args.length))) for _ in range(args.rows)]

config = Qwen2Config(
    vocab_size=VOCABULARY[args.size],
    num_key_value_heads=KV_HEADS[args.size],
    tie_word_embeddings=args.size == "0.5b",
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
    **SIZES[args.size],
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        gradient_checkpointing=not args.no_checkpointing,
        max_length=args.length,
        num_train_epochs=1,
        learning_rate=2e-4,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=args.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
