"""Search supervised fine-tuning with adapters: TRL's SFTTrainer with LoRA, as it is.

    MODEL=Qwen/Qwen2.5-0.5B python examples/sft_lora.py

Needs ``pip install trl peft``. Stop it whenever you like and start it again: it goes on. The adapters of the best
trials are in ``sft-study/trials/NNNN/best``.
"""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import dryfit

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B")
ROWS = int(os.environ.get("ROWS", "400"))


def sums(first: int, count: int) -> Dataset:
    """Prompts to add two numbers, with the answers: put your own rows here."""
    rows = [
        {"prompt": f"What is {n} plus {n % 7}? ", "completion": f"It is {n + n % 7}."}
        for n in range(first, first + count)
    ]
    return Dataset.from_list(rows)


def make_trainer(trial: dryfit.Trial) -> SFTTrainer:
    """An SFTTrainer with the trial's learning rate, rank and warm-up."""
    rank = trial.params["rank"]
    return SFTTrainer(
        model=MODEL,
        args=SFTConfig(
            output_dir=str(trial.folder),
            learning_rate=trial.params["learning_rate"],
            warmup_steps=trial.params["warmup_steps"],
            num_train_epochs=1,
            per_device_train_batch_size=8,
            bf16=torch.cuda.is_available(),
            eval_strategy="steps",
            eval_steps=0.25,
            save_strategy="steps",
            save_steps=0.25,
            report_to="none",
        ),
        train_dataset=sums(0, ROWS),
        eval_dataset=sums(ROWS, ROWS // 4),
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


if __name__ == "__main__":
    found = dryfit.tune(
        trainer=make_trainer,
        space={
            "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
            "rank": [4, 8, 16],
            "warmup_steps": [0, 10],
        },
        metric="eval_loss",
        trials=20,
        folder="sft-study",
        search={"pruner": "median"},
    )
    print(found.summary.best)
