"""Images with a Trainer: a vision transformer, in a script that knows nothing of dryfit.

    dryfit init images --script examples/image_classifier.py -- --model google/vit-base-patch16-224 \\
        --eval_strategy epoch --remove_unused_columns False
    dryfit tune images --set study.metric=eval_accuracy --set study.direction=maximize
"""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForImageClassification, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Own:
    """What the script adds to the Trainer's arguments."""

    model: str = "google/vit-base-patch16-224"
    rows: int = 400


class Stripes(Dataset):
    """Noisy images with stripes across (1) or down (0): put your own images here."""

    def __init__(self, first: int, count: int, size: int) -> None:
        self.first, self.count, self.size = first, count, size

    def __len__(self) -> int:
        """Return how many there are."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return an image, drawn by its number alone."""
        number = self.first + index
        drawn = torch.Generator().manual_seed(number)
        stripes = torch.sin(torch.arange(self.size) * 0.8).expand(self.size, -1)
        image = stripes.T if number % 2 else stripes
        noise = torch.randn(3, self.size, self.size, generator=drawn)
        return {"pixel_values": image + noise, "labels": torch.tensor(number % 2)}


def main() -> None:
    """Train, and save."""
    own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
    size = AutoConfig.from_pretrained(own.model).image_size
    trainer = Trainer(
        model=AutoModelForImageClassification.from_pretrained(own.model, num_labels=2, ignore_mismatched_sizes=True),
        args=arguments,
        train_dataset=Stripes(0, own.rows, size),
        eval_dataset=Stripes(own.rows, own.rows // 4, size),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
