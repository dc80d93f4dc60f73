"""Text classification with the HF Trainer, as `run_glue.py` does: evaluation, metrics, loader workers, checkpoints."""

import argparse
import random

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=200)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
parser.add_argument("--optim", default="adamw_torch_fused")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--no-evaluation", action="store_true")
parser.add_argument("--full", action="store_true", help="texts that fill the length")
args = parser.parse_args()

set_seed(1)
words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(args.vocabulary - 2))]
core = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
core.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")

drawn = random.Random(0)


def text():
    count = args.length if args.full else drawn.randint(3, args.length)
    return " ".join(drawn.choices(words[2:], k=count))


texts = [text() for _ in range(args.rows)]
data = Dataset.from_dict({"text": texts, "label": [len(one) % 2 for one in texts]})
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=args.length), batched=True)
data = data.remove_columns("text").train_test_split(0.25, seed=0)

config = AutoConfig.for_model(
    "bert",
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=max(args.width // 64, 2),
    intermediate_size=4 * args.width,
    max_position_embeddings=max(args.length, 32),
)
model = AutoModelForSequenceClassification.from_config(config)


def compute_metrics(predicted):
    labels = np.argmax(predicted.predictions, axis=-1)
    return {"accuracy": float((labels == predicted.label_ids).mean())}


on_device = torch.cuda.is_available()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        gradient_checkpointing=args.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_train_epochs=1,
        learning_rate=1e-3,
        optim=args.optim if on_device else "adamw_torch",
        fp16=args.precision == "fp16" and on_device,
        bf16=args.precision == "bf16",
        dataloader_num_workers=args.workers,
        eval_strategy="no" if args.no_evaluation else "epoch",
        save_strategy="no" if args.no_evaluation else "epoch",
        load_best_model_at_end=not args.no_evaluation,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
if not args.no_evaluation:
    print(trainer.evaluate())
    trainer.save_model()
