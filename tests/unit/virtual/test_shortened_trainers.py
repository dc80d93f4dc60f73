"""Trainers of transformers and loops of Accelerate end after three steps, as at their natural end, on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from dryfit.gpu.loaders import EVALUATION_BATCHES, RehearsalDone
from dryfit.gpu.shortening import Shortening
from in_fork import in_fork

pytestmark = pytest.mark.heavy

LONGEST = 24


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of several lengths; the longest is the last."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        length = LONGEST if at == self.count - 1 else 4 + at % 8
        return {"input_ids": torch.full((length,), 1 + at % 9), "labels": torch.tensor(at % 2)}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.stack([row["labels"] for row in rows])}


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
            max_position_embeddings=LONGEST,
        )
    )  # fmt: skip


class Watched(Trainer):
    """Writes down what it does instead of writing files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[str] = []

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.told.append(f"train {tuple(inputs['input_ids'].shape)}")
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append("predict")
        return super().prediction_step(*args, **kwargs)

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self.told.append("save")


def train(folder: Path, kind: type[Watched] = Watched, **arguments: Any) -> dict[str, Any]:
    """Train in a fork, shortened; return what was done."""

    def run() -> dict[str, Any]:
        short = Shortening(3)
        short.install()
        defaults: dict[str, Any] = {
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "num_train_epochs": 4,
        }
        trainer = kind(
            bert(),
            TrainingArguments(**(defaults | arguments)),
            train_dataset=Rows(40),
            eval_dataset=Rows(100),
            data_collator=padded,
        )
        trainer.train()
        largest = short.largest_batch
        return {"told": trainer.told, "largest": largest.model_dump(mode="json"), "notes": short.notes}

    return in_fork(run)


def kinds(told: list[str]) -> list[str]:
    """What was done, without repetition: ``train x3``."""
    found: list[list[Any]] = []
    for kind in (text.partition(" ")[0] for text in told):
        if found and found[-1][0] == kind:
            found[-1][1] += 1
        else:
            found.append([kind, 1])
    return [f"{kind} x{times}" for kind, times in found]


EVALUATION = f"predict x{EVALUATION_BATCHES}"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_that_evaluates_and_saves_each_epoch(tmp_path: Path, workers: int):
    answer = train(tmp_path, eval_strategy="epoch", save_strategy="epoch", dataloader_num_workers=workers)
    assert kinds(answer["told"]) == ["train x3", EVALUATION, "save x1", "train x1"]
    assert answer["told"][0] == answer["told"][2]  # drawn one ahead: the largest comes again at the third step
    assert answer["told"][0] == f"train {(2, LONGEST)}"
    assert answer["largest"] == {
        "shapes": {"input_ids": [2, LONGEST], "labels": [2]},
        "seen": 20,
        "of": 20,
        "fed_first": True,
    }
    assert answer["notes"] == [f"an evaluation was ended after {EVALUATION_BATCHES} of 50 batches"]


def test_a_trainer_that_evaluates_every_so_many_steps(tmp_path: Path):
    told = train(tmp_path, eval_strategy="steps", eval_steps=500, save_strategy="steps", save_steps=500)["told"]
    assert kinds(told) == ["train x3", EVALUATION, "save x1", "train x1"]
    told = train(tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="no")["told"]
    assert kinds(told) == ["train x2", EVALUATION, "train x1", EVALUATION]


def test_a_trainer_that_neither_evaluates_nor_saves(tmp_path: Path):
    told = train(tmp_path, save_strategy="no", gradient_accumulation_steps=4)["told"]
    assert kinds(told) == ["train x12"]


def test_a_trainer_that_evaluates_before_it_trains(tmp_path: Path):
    told = train(tmp_path, save_strategy="no", eval_strategy="epoch", eval_on_start=True)["told"]
    assert kinds(told) == [EVALUATION, "train x3", EVALUATION, "train x1"]


def test_a_trainer_that_finds_its_batch_begins_with_the_largest_of_the_smaller_ones(tmp_path: Path):
    class Small(Watched):
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if len(inputs["labels"]) > 3 and self.state.global_step == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().training_step(model, inputs, *args, **kwargs)

    answer = train(tmp_path, Small, auto_find_batch_size=True, per_device_train_batch_size=4, save_strategy="no")
    assert [text.partition(",")[0] for text in answer["told"]] == ["train (4", "train (3", "train (3"]
    assert answer["told"][1] == f"train {(3, LONGEST)}"
    assert answer["largest"]["shapes"]["input_ids"] == [3, LONGEST]


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_loop_of_accelerate(dispatched: bool):
    def run() -> list[str]:
        from accelerate.utils import DataLoaderConfiguration

        short = Shortening(3)
        short.install()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatched),
        )
        model = bert()
        model, optimizer, loader, test = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            DataLoader(Rows(40), 2, shuffle=True, collate_fn=padded),
            DataLoader(Rows(100), 2, collate_fn=padded),
        )
        told = []
        try:
            for _ in range(2):
                model.train()
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(**batch).loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    told.append(f"train {tuple(batch['input_ids'].shape)}")
                model.eval()
                for batch in test:
                    with torch.no_grad():
                        accelerator.gather_for_metrics(model(**batch).logits)
                    told.append("predict")
                told.append("save")
        except RehearsalDone:
            told.append("stopped")
        largest = short.largest_batch
        assert largest.shapes["input_ids"] == (2, LONGEST)
        return told

    told = in_fork(run)
    assert kinds(told) == ["train x6", EVALUATION, "save x1", "train x2", "stopped x1"]
    assert told[0] == f"train {(2, LONGEST)}"


class Answers(Watched):
    """Asks for a prediction of each row, as scripts of question answering do."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        output = self.evaluation_loop(self.get_eval_dataloader(), "evaluation", prediction_loss_only=False)
        self.told.append(f"{len(output.predictions)} predictions, {len(output.label_ids)} labels")  # pyright: ignore
        return {}


def test_what_looks_at_the_predictions_of_a_cut_evaluation_finds_one_for_each_row(tmp_path: Path) -> None:
    told = train(tmp_path, Answers, eval_strategy="epoch", save_strategy="no")["told"]
    assert "100 predictions, 100 labels" in told
    assert told.count("predict") == EVALUATION_BATCHES
