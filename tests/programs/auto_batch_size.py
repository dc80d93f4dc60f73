"""The HF Trainer with `auto_find_batch_size`: it begins again with a smaller batch when memory runs out."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--rows", type=int, default=16)
args = parser.parse_args()

set_seed(0)
config = AutoConfig.for_model(
    "bert",
    vocab_size=200,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=max(args.width // 64, 2),
    intermediate_size=4 * args.width,
    max_position_embeddings=max(args.length, 32),
)
model = AutoModelForSequenceClassification.from_config(config)


class Rows(Dataset):
    def __len__(self):
        return args.rows

    def __getitem__(self, index):
        return {"input_ids": torch.full((args.length,), index % 200), "labels": index % 2}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        auto_find_batch_size=True,
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Rows(),
)
trainer.train()
print(f"batches of {trainer._train_batch_size}")
