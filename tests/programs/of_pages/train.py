"""What the pages of docs/ call your own script: a small language model, trained by the Trainer of transformers.

A small model stands for the one that ``--model_name_or_path`` names.
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Own:
    model_name_or_path: str = ""
    config: str = ""
    rows: int = 64
    layers: int = 2
    width: int = 64
    length: int = 64
    batch_size: int = 8
    lr: float = 1e-3


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.full((self.length,), 7)
        return {"input_ids": tokens, "labels": tokens}


def train(rows=64, own=None, arguments=None):
    own = own or Own()
    sizes = {"hidden_size": own.width, "intermediate_size": 4 * own.width, "num_hidden_layers": own.layers}
    config = AutoConfig.for_model("qwen2", vocab_size=32000, num_attention_heads=4, num_key_value_heads=2, **sizes)
    arguments = arguments or TrainingArguments("out", per_device_train_batch_size=own.batch_size, report_to="none")
    Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=Rows(rows, own.length)).train()


if __name__ == "__main__":
    own, arguments = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
    train(own.rows, own, arguments)
