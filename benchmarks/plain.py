"""What people write without dryfit: Optuna around the HF Trainer, in one process. The yardstick of the benchmarks.

    python benchmarks/plain.py --train ROWS.jsonl --validation ROWS.jsonl [--test ROWS.jsonl] ...

With ``--lr`` once it is a plain training script; several values make an Optuna loop over them. ``--same-batches``
takes the batches (and so the padding) of dryfit's plain shuffle, so that both do the same arithmetic.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import optuna
import torch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from dryfit.meta.checkpoint_files import model_folder
from dryfit.settings.tables import ModelSettings
from dryfit.training.batches import EpochBatchSampler

FOLDER = str(model_folder(ModelSettings(name="minilm")))


class Rows(torch.utils.data.Dataset):
    """Tokenised rows."""

    def __init__(self, path: str, tokenizer, max_length: int, limit: int | None) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()[:limit]
        self.rows = [json.loads(line) for line in lines]
        pairs = [[row["criterion"] for row in self.rows], [row["text"] for row in self.rows]]
        found = tokenizer(*pairs, truncation="only_second", max_length=max_length)
        self.items = [
            {"labels": row["label"], **{name: values[index] for name, values in found.items()}}
            for index, row in enumerate(self.rows)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


class SameBatches(Trainer):
    """The Trainer over given batches."""

    def get_train_dataloader(self) -> DataLoader:
        lengths = torch.tensor([len(item["input_ids"]) for item in self.train_dataset.items])
        batch_size = self.args.per_device_train_batch_size
        sampler = EpochBatchSampler(lengths, seed=1, batch_size=batch_size, group_by_length=False)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)


def macro_f1(prediction) -> dict[str, float]:
    return {"f1_macro": float(f1_score(prediction.label_ids, prediction.predictions.argmax(-1), average="macro"))}


def train(options: argparse.Namespace, lr: float, data: dict[str, Rows], tokenizer, folder: str) -> Trainer:
    set_seed(options.seed)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=lr,
        num_train_epochs=options.epochs,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
        dataloader_pin_memory=False,
    )
    trainer = (SameBatches if options.same_batches else Trainer)(
        model=AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=2),
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=macro_f1,
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("train", "validation"):
        parser.add_argument(f"--{name}", required=True)
        parser.add_argument(f"--{name}-limit", type=int)
    parser.add_argument("--test")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--same-batches", action="store_true")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    data = {
        name: Rows(getattr(options, name), tokenizer, options.max_length, getattr(options, f"{name}_limit"))
        for name in ("train", "validation")
    }
    last: list[Trainer] = []

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_categorical("lr", options.lr)
        last[:] = [train(options, lr, data, tokenizer, str(out / "trainer"))]
        return max(entry["eval_f1_macro"] for entry in last[0].state.log_history if "eval_f1_macro" in entry)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"lr": options.lr}))
    study.optimize(objective, n_trials=len(options.lr))
    found = {"validation": study.best_value}
    if options.test:
        test = Rows(options.test, tokenizer, options.max_length, None)
        guesses = last[0].predict(test).predictions.argmax(-1)
        np.save(out / "test.npy", guesses)
    (out / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
