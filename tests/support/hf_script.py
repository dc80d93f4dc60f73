"""A training script in the style of those that come with transformers: its arguments are two dataclasses."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))  # where it lies itself: it may be run as a link

import trainers


@dataclass
class OwnArguments:
    """What the script adds to the Trainer's arguments."""

    dropout: float = 0.1
    forgotten: float = 0.5
    way: str = "plain"


def main() -> None:
    """Train, evaluate where training did not, and save."""
    classes: Any = (TrainingArguments, OwnArguments)
    arguments, own = HfArgumentParser(classes).parse_args_into_dataclasses()
    if own.way == "own rate":
        arguments.learning_rate = 1e-3
    if own.way == "weights only":
        arguments.save_only_model = True
    if own.way == "no checkpoints":
        arguments.save_strategy = "no"
    trainer = (trainers.RunsOut if own.way == "runs out" else Trainer)(
        model=trainers.model(own.dropout),
        args=arguments,
        train_dataset=trainers.Endless() if own.way == "endless" else trainers.rows(trainers.ROWS, 1),
        eval_dataset=trainers.rows(32, 2),
        compute_metrics=trainers.accuracy,
    )
    if "KILL_AT" in os.environ:
        trainers.kill_at(trainer, int(os.environ["DRYFIT_ATTEMPT"]))
    trainer.train()
    if own.way == "twice":
        trainer.train()
    if own.way == "two":
        rows = trainers.rows(16, 1)
        Trainer(model=trainers.model(), args=arguments, train_dataset=rows, eval_dataset=rows).train()
    if own.way == "exit":
        sys.exit(4)
    if arguments.eval_strategy == "no" and own.way != "never":
        trainer.evaluate()
        if os.environ.get("DRYFIT_ATTEMPT") == "1" and own.way == "late":
            os.kill(os.getpid(), 9)
    if own.way != "never":
        trainer.evaluate(trainers.rows(16, 3), metric_key_prefix="test")
    trainer.save_model()


if __name__ == "__main__":
    main()
