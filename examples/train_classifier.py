"""A training script in the style of those that come with transformers, which knows nothing of dryfit.

    python examples/train_classifier.py --model_name_or_path MODEL --output_dir out
    dryfit init classifier --script examples/train_classifier.py -- --model_name_or_path MODEL --eval_strategy epoch
    dryfit tune classifier

Its Trainer's evaluations are reports, poor trials are pruned, and a stopped one goes on from the Trainer's checkpoint.
"""

from dataclasses import dataclass, field

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

WORDS = ("day", "walk", "dinner", "book", "garden", "talk", "night", "trip")


@dataclass
class ModelArguments:
    """Which model, and what of it."""

    model_name_or_path: str = field(default="google-bert/bert-base-uncased", metadata={"help": "a folder or a name"})
    classifier_dropout: float = field(default=0.1, metadata={"help": "of the vector that is classified"})
    rows: int = field(default=256, metadata={"help": "to train on"})


def rows(first: int, count: int, tokenizer: AutoTokenizer) -> list[dict[str, object]]:
    """Sentences that praise or do not: put your own rows here."""
    made = []
    for number in range(first, first + count):
        label = number % 2
        text = f"it was a {'good' if label else 'bad'} {WORDS[number // 2 % 8]} and a {WORDS[number // 16 % 8]}"
        made.append({**tokenizer(text, truncation=True), "labels": label})
    return made


def main() -> None:
    """Train, and save."""
    own, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        own.model_name_or_path, num_labels=2, classifier_dropout=own.classifier_dropout
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(0, own.rows, tokenizer),
        eval_dataset=rows(own.rows, own.rows // 4, tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda scored: {
            "accuracy": float((scored.predictions.argmax(-1) == scored.label_ids).mean()),
        },
    )
    trainer.train()
    if arguments.eval_strategy == "no":
        trainer.evaluate()
    trainer.save_model()


if __name__ == "__main__":
    main()
