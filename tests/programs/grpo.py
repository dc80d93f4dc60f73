"""Group relative policy optimisation by TRL: steps begin with texts that the model generates and a function scores."""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=300)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--tokens", type=int, default=40)
args = parser.parse_args()

letters = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *sorted(ByteLevel.alphabet())])}
core = Tokenizer(BPE(letters, merges=[]))
core.pre_tokenizer = ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")

config = Qwen2Config(
    vocab_size=args.vocabulary,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=3 * args.width,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
)


def length(completions: list[str], **_: object) -> list[float]:
    """The longer the better, and each text is one."""
    assert all(isinstance(text, str) for text in completions)
    return [float(len(text)) for text in completions]


trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
    reward_funcs=length,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.batch,
        num_generations=args.batch,
        max_completion_length=args.tokens,
        num_train_epochs=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{"prompt": "a word " * number} for number in range(1, 9)]),
    processing_class=tokenizer,
)
trainer.train()
