"""Functions that make Trainers for studies of the tests: tiny random models on rows made on the spot."""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.models.bert import BertConfig, BertForSequenceClassification

import dryfit

SPACE = {"rate": {"low": 1e-3, "high": 1e-2, "log": True}, "dropout": [0.1, 0.3]}
ROWS, BATCH, EPOCHS = 48, 8, 2
STEPS = EPOCHS * ROWS // BATCH


def rows(count: int, seed: int) -> Any:
    """Rows whose class is whether their first token is above the middle."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 60, (count, 12), generator=draw)
    return [
        {"input_ids": row, "attention_mask": torch.ones(12, dtype=torch.long), "labels": int(row[0] > 31)}
        for row in ids
    ]


def model(dropout: Any = 0.1, wide: int = 32) -> BertForSequenceClassification:
    """A model with dropout, whose weights the seed decides."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=wide,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def accuracy(scored: Any) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((scored.predictions.argmax(-1) == scored.label_ids).mean())}


def arguments(trial: Any, **changed: Any) -> TrainingArguments:
    """Arguments with an evaluation and a checkpoint every second step, on the CPU."""
    given: dict[str, Any] = {
        "output_dir": str(trial.folder),
        "learning_rate": trial.params["rate"],
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**given, **changed})


def made(trial: Any, cls: type[Trainer] = Trainer, callbacks: Any = (), **changed: Any) -> Trainer:
    """A Trainer of the tiny model."""
    return cls(
        model=model(trial.params["dropout"]),
        args=arguments(trial, **changed),
        train_dataset=rows(ROWS, 1),
        eval_dataset=rows(32, 2),
        compute_metrics=accuracy,
        callbacks=[*callbacks],
    )


def make(trial: dryfit.Trial) -> Trainer:
    """Evaluates and keeps a checkpoint every second step."""
    return made(trial)


def by_epoch(trial: dryfit.Trial) -> Trainer:
    """Evaluates at the end of each epoch, and keeps checkpoints at steps; the last of an epoch is one of them."""
    return made(trial, eval_strategy="epoch", save_steps=3)


def stops_early(trial: dryfit.Trial) -> Trainer:
    """Ends where the accuracy has not grown for three evaluations."""
    return made(
        trial,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        num_train_epochs=6,
    )


def initialised(trial: dryfit.Trial) -> Trainer:
    """Makes its model in ``model_init``, accumulates gradients, and keeps no checkpoints of its own."""
    return Trainer(
        model_init=lambda: model(trial.params["dropout"]),
        args=arguments(trial, save_strategy="no", per_device_train_batch_size=4, gradient_accumulation_steps=2),
        train_dataset=rows(ROWS, 1),
        eval_dataset={"near": rows(16, 2), "far": rows(16, 3)},
    )


class _Shuffled(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows with their tokens in an order that is drawn each time: what stays is the first, which decides."""

    def __init__(self) -> None:
        self._rows = rows(ROWS, 1)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        order = [0, *random.sample(range(1, 12), 11)]
        return {**row, "input_ids": row["input_ids"][order]}


def masked(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch with some of its tokens hidden, by the global generators."""
    made = default_data_collator(batch)
    hidden = torch.rand(made["input_ids"].shape) < 0.3
    hidden[:, int(np.random.randint(1, 12))] = True
    hidden[:, 0] = False
    made["input_ids"][hidden] = 3
    return made


def draws(trial: Any, **changed: Any) -> Trainer:
    """Draws numbers for each row and for each batch, and accumulates gradients."""
    return Trainer(
        model=model(trial.params["dropout"]),
        args=arguments(trial, per_device_train_batch_size=4, gradient_accumulation_steps=2, **changed),
        train_dataset=_Shuffled(),
        eval_dataset=rows(32, 2),
        data_collator=masked,
    )


def weights_only(trial: dryfit.Trial) -> Trainer:
    """Its checkpoints hold no state to go on from."""
    return made(trial, save_only_model=True)


MAKERS = {"make": make, "by_epoch": by_epoch, "stops_early": stops_early, "initialised": initialised}
MAKERS |= {"draws": draws, "weights_only": weights_only}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Killer(TrainerCallback):
    """Kills its process at an event of a step, or asks the study's own process to stop there."""

    def __init__(self, event: str, step: int, at: str) -> None:
        self.event, self.step, self.at = event, step, at

    def _look(self, event: str, step: int) -> None:
        if (event, step) == (self.event, self.step):
            if self.at == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                _die()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look("step", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look("evaluate", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look("save", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look("end", state.global_step)


def killed(trial: dryfit.Trial) -> Trainer:
    """One of :data:`MAKERS`, killed in its first attempt, and in its second again where it says so: ``KILL_AT``."""
    return kill_at(MAKERS[json.loads(os.environ["KILL_AT"])["maker"]](trial), trial.attempt)


def kill_at(trainer: Trainer, attempt: int) -> Trainer:
    """Let a Trainer die where ``KILL_AT`` says for an attempt."""
    plan = json.loads(os.environ["KILL_AT"])
    if attempt > len(plan["at"]):
        return trainer
    event, step = plan["at"][attempt - 1]
    if event == "half":
        save_rng_state = trainer._save_rng_state

        def half(folder: str) -> None:
            if trainer.state.global_step == step:
                _die()
            save_rng_state(folder)

        trainer._save_rng_state = half  # type: ignore[method-assign]
    else:
        trainer.add_callback(_Killer(event.removeprefix("stop at "), step, "stop" if "stop" in event else "kill"))
        if event == "evaluate":  # after dryfit's own callback has reported
            report = trainer.evaluate

            def evaluate(*args: Any, **kwargs: Any) -> Any:
                metrics = report(*args, **kwargs)
                if trainer.state.global_step == step:
                    _die()
                return metrics

            trainer.evaluate = evaluate  # type: ignore[method-assign]
            trainer.pop_callback(_Killer)
    return trainer


# ---- what is wrong


class _Bad(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        network: Any = self.model
        if network.training and self.state.global_step == 4 and not kwargs.get("return_outputs"):
            return loss * float("nan")
        return loss


def _two(trial: Any) -> Trainer:
    made(trial, max_steps=1).train()
    return made(trial)


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows of which nobody knows how many there are."""

    def __iter__(self) -> Any:
        return iter(rows(ROWS, 1))


def _endless(trial: Any, **changed: Any) -> Trainer:
    return Trainer(
        model=model(trial.params["dropout"]),
        args=arguments(trial, **changed),
        train_dataset=Endless(),
        eval_dataset=rows(32, 2),
    )


WAYS = {
    "none": lambda trial: None,
    "class": lambda trial: Trainer,
    "number": lambda trial: 0.5,
    "own error": lambda trial: made(trial, optim="no such optimizer"),
    "no evaluation": lambda trial: made(trial, eval_strategy="no"),
    "late evaluation": lambda trial: made(trial, eval_delay=1000),
    "two": _two,
    "nan": lambda trial: made(trial, _Bad),
    "endless": _endless,
    "endless with steps": lambda trial: _endless(trial, max_steps=4),
    "no checkpoints": lambda trial: made(trial, save_strategy="no"),
    "weights only": lambda trial: made(trial, save_only_model=True),
    "exit": lambda trial: sys.exit(3),
}


def every_way(trial: dryfit.Trial) -> Any:
    """Ends as its parameter says."""
    return WAYS[str(trial.params["way"])](_Fixed(trial))


class _Fixed:
    """A trial with the parameters of the other makers."""

    def __init__(self, trial: dryfit.Trial) -> None:
        self.folder: Path = trial.folder
        self.params = {"rate": 3e-3, "dropout": 0.1}


def ignores(trial: dryfit.Trial) -> Trainer:
    """Does not read what is searched."""
    return made(_Fixed(trial))


def needs_two(trial: dryfit.Trial, other: object) -> Trainer:
    """Cannot be called with a trial alone."""
    return made(trial)


def without_any() -> Trainer:
    """Takes no trial."""
    raise AssertionError


# ---- planned


def on_gpu(trial: dryfit.Trial) -> Trainer:
    """Trains on a GPU where there is one, with activations that are larger than what it takes for a library."""
    return Trainer(
        model=model(trial.params["dropout"], wide=2**17),
        args=arguments(trial, use_cpu=False),
        train_dataset=rows(ROWS, 1),
        eval_dataset=rows(32, 2),
    )


def without_evaluation(trial: dryfit.Trial) -> Trainer:
    """Never evaluates."""
    return made(trial, eval_strategy="no")


class RunsOut(Trainer):
    """Has too little memory for four rows at once, from its fourth step on."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.per_device_train_batch_size > 2 and self.state.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(*args, **kwargs)


def runs_out(trial: dryfit.Trial) -> Trainer:
    """Has too little memory for four rows at once, from its fourth step on."""
    trainer = made(trial, RunsOut)
    assert (trial.attempt, trainer.args.per_device_train_batch_size) in {(1, 4), (2, 2)}
    return trainer


def changed_by(trial: dryfit.Trial) -> Trainer:
    """Has arguments or a model that its parameter names."""
    fixed, way = _Fixed(trial), str(trial.params["way"])
    if way == "pushes":
        return made(fixed, push_to_hub=True, auto_find_batch_size=True)
    trainer = made(fixed, dataloader_drop_last=way == "drop last")
    if way == "set afterwards":
        trainer.args.per_device_train_batch_size = BATCH
    if way == "batch norm":
        changed: Any = trainer.model
        changed.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(16), changed.classifier)
    if way == "fsdp":
        trainer.args.fsdp = "full_shard"
    return trainer
