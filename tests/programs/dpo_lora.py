"""Preference optimisation by TRL with LoRA adapters: the reference model is the model without them."""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--vocabulary", type=int, default=200)
parser.add_argument("--optim", default="adamw_torch")
args = parser.parse_args()

words = ["<pad>", "<eos>", *(f"w{number}" for number in range(198))]
core = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
core.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
drawn = random.Random(0)


def text(least, most):
    return " " + " ".join(drawn.choices(words[2:], k=drawn.randint(least, most)))


half = args.length // 2
rows = [{"prompt": text(3, half), "chosen": text(2, half - 2), "rejected": text(2, half - 2)} for _ in range(args.rows)]
config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=3 * args.width,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
)
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
    args=DPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        max_length=args.length,
        num_train_epochs=1,
        optim=args.optim,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
