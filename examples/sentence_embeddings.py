"""Sentence embeddings by pairs that mean the same: the Trainer of sentence-transformers, unchanged.

    dryfit init pairs --script examples/sentence_embeddings.py -- --model microsoft/mpnet-base
    dryfit tune pairs --set study.metric=eval_loss

Needs ``pip install sentence-transformers``. The loss compares each pair with the others of its batch, so the batch size
changes what is learned: search it. It is never split for want of memory.
"""

import argparse

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

THINGS = ("bread", "a book", "the garden", "two trains", "cold water", "her letter", "a song", "my keys")
WAYS = (("where can i find {0}?", "{0} is over there"), ("do you like {0}?", "yes, i am fond of {0}"))


def pairs(first: int, count: int, sentences: int) -> Dataset:
    """Questions with answers: put your own rows here."""
    made = []
    for n in range(first, first + count):
        question, answer = WAYS[n % 2]
        thing = " and ".join(THINGS[(n // 2 + k) % 8] for k in range(sentences))
        made.append({"anchor": question.format(thing), "positive": answer.format(thing)})
    return Dataset.from_list(made)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="microsoft/mpnet-base")
parser.add_argument("--learning_rate", type=float, default=2e-5)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--scale", type=float, default=20.0, help="of cosines, before the softmax")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--rows", type=int, default=1000)
parser.add_argument("--sentences", type=int, default=1, help="things that a made-up row speaks of")
parser.add_argument("--output_dir", default="out")


def main() -> None:
    """Train, and save."""
    own = parser.parse_args()
    model = SentenceTransformer(own.model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=own.output_dir,
            learning_rate=own.learning_rate,
            per_device_train_batch_size=own.batch_size,
            num_train_epochs=own.epochs,
            eval_strategy="steps",
            eval_steps=0.5,
            report_to="none",
        ),
        train_dataset=pairs(0, own.rows, own.sentences),
        eval_dataset=pairs(own.rows, own.rows // 4, own.sentences),
        loss=MultipleNegativesRankingLoss(model, scale=own.scale),
    )
    trainer.train()
    model.save_pretrained(own.output_dir)


if __name__ == "__main__":
    main()
