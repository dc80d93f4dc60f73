"""One trial as people write it with the HF Trainer: what the loops around Optuna and Ray Tune share. No dryfit in it.

A search is described by a JSON file, so that another environment can read it.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

METRIC = "f1_macro"


@dataclass(frozen=True)
class Search:
    """What is searched, with what, and where its validations are written.

    Attributes:
        model: Folder of the encoder.
        train: Training rows, JSONL; ``rows`` of them are read.
        validation: Validation rows; ``validation_rows`` of them.
        space: Keys with their choices (a list) or range (``low``, ``high``, and ``log`` or ``step``).
        pruner_startup_trials: Complete trials before the median prunes.
        startup_trials: Random trials before TPE is trusted.
        warmup_reports: Validations that no trial is pruned before.
        out: Folder of what a loop writes.
    """

    model: str
    train: str
    validation: str
    rows: int
    validation_rows: int
    max_length: int
    epochs: int
    evals_per_epoch: int
    warmup_ratio: float
    space: Mapping[str, Any]
    trials: int
    seed: int
    startup_trials: int
    pruner_startup_trials: int
    warmup_reports: int
    out: str

    @classmethod
    def read(cls, path: str) -> "Search":
        """Read a search from its file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def reports(self) -> int:
        """Validations of a trial."""
        return self.epochs * self.evals_per_epoch


class Rows(torch.utils.data.Dataset):
    """Tokenised rows."""

    def __init__(self, path: str, limit: int, folder: str, max_length: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()[:limit]]
        pairs = [row["criterion"] for row in rows], [row["text"] for row in rows]
        found = tokenizer(*pairs, truncation="only_second", max_length=max_length)
        self.items = [
            {"labels": row["label"], **{name: values[at] for name, values in found.items()}}
            for at, row in enumerate(rows)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


@dataclass(frozen=True)
class Data:
    """The rows of both splits."""

    train: Rows
    validation: Rows

    @classmethod
    def read(cls, search: Search) -> "Data":
        """Read and tokenise them."""
        sizes = search.model, search.max_length
        return cls(Rows(search.train, search.rows, *sizes), Rows(search.validation, search.validation_rows, *sizes))


class Reporting(TrainerCallback):
    """Validates so often an epoch, writes each value down, and says it; whoever hears it may raise to end the trial."""

    def __init__(self, search: Search, number: int, steps: int, hear: Callable[[int, float], None]) -> None:
        self.places = {round(steps * at / search.reports) for at in range(1, search.reports + 1)}
        self.log, self.number, self.hear = Path(search.out) / "validations.jsonl", number, hear
        self.values: list[float] = []

    def on_step_end(self, args, state, control, **others) -> None:
        control.should_evaluate = state.global_step in self.places

    def on_evaluate(self, args, state, control, metrics, **others) -> None:
        value = metrics[f"eval_{METRIC}"]
        self.values.append(value)
        line = {"at_s": time.time(), "trial": self.number, "value": value}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        self.hear(len(self.values) - 1, value)


def macro_f1(prediction) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)
    return {METRIC: float(f1_score(prediction.label_ids, guesses, average="macro"))}


def train(
    search: Search, data: Data, number: int, params: Mapping[str, Any], hear: Callable[[int, float], None]
) -> float:
    """Train one configuration and return its best validation.

    Args:
        search: The search.
        data: Its rows.
        number: The trial's number.
        params: Values of the searched keys.
        hear: Called with the index and value of each validation.
    """
    set_seed(search.seed + number)
    batch_size = int(params["train.batch_size"])
    steps = math.ceil(len(data.train) / batch_size) * search.epochs
    arguments = TrainingArguments(
        output_dir=str(Path(search.out) / "trainer"),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=64,
        learning_rate=params["optim.lr"],
        weight_decay=params["optim.weight_decay"],
        lr_scheduler_type=params["sched.name"],
        warmup_steps=round(search.warmup_ratio * steps),
        num_train_epochs=search.epochs,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=search.seed + number,
        dataloader_pin_memory=False,
    )
    reporting = Reporting(search, number, steps, hear)
    model = AutoModelForSequenceClassification.from_pretrained(
        search.model, num_labels=2, classifier_dropout=params["head.dropout"]
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(search.model)),
        compute_metrics=macro_f1,
        callbacks=[reporting],
    )
    trainer.train()
    return max(reporting.values)
