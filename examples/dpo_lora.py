"""Preference tuning with adapters: TRL's DPOTrainer with LoRA, as a script that knows nothing of dryfit.

    dryfit init dpo --script examples/dpo_lora.py -- --model Qwen/Qwen2.5-0.5B-Instruct --eval_strategy epoch
    dryfit tune dpo

Needs ``pip install trl peft``. The model without its adapters is the reference, so one copy of it is in memory.
"""

from dataclasses import dataclass

from datasets import Dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class Own:
    """What the script adds to TRL's arguments."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    rank: int = 16
    rows: int = 400
    sentences: int = 1


def preferences(first: int, count: int, sentences: int) -> Dataset:
    """Questions with a short answer that is preferred to a long one: put your own rows here."""
    short, long = "It is {0}.", " Well, let me think about that: it may be {0}, or not."
    made = []
    for n in range(first, first + count):
        total = n + n % 7
        made.append(
            {
                "prompt": f"What is {n} plus {n % 7}? ",
                "chosen": short.format(total),
                "rejected": "".join(long.format(total) for _ in range(sentences)),
            }
        )
    return Dataset.from_list(made)


def main() -> None:
    """Train, and save the adapters."""
    own, arguments = HfArgumentParser((Own, DPOConfig)).parse_args_into_dataclasses()
    trainer = DPOTrainer(
        model=own.model,
        args=arguments,
        train_dataset=preferences(0, own.rows, own.sentences),
        eval_dataset=preferences(own.rows, own.rows // 4, own.sentences),
        peft_config=LoraConfig(r=own.rank, lora_alpha=2 * own.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
