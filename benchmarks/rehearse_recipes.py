"""What the recipes of examples/ take at full size: rehearsed for common cards, as a table.

    python benchmarks/rehearse_recipes.py [--only dpo_lora,...] [--devices t4,a100-80]

Models are folders with the published sizes and a tokenizer of letters, and no weights, so nothing is downloaded. Rows
are made up by the recipes; the shape of the largest batch stands beside the memory that it needs. The same by hand:

    dryfit rehearse --device rtx4090 examples/dpo_lora.py --model Qwen/Qwen2.5-0.5B --sentences 20 --max_length 1024 ...
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

import dryfit
from dryfit.settings.rehearsal_messages import RehearsalAnswer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DEVICES = ("rtx3060", "rtx4090")
QWEN2 = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}
MODELS = {
    "Qwen2.5-0.5B": (
        "qwen2",
        {
            **QWEN2,
            "intermediate_size": 4864,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "architectures": ["Qwen2ForCausalLM"],
        },
    ),
    "ModernBERT-base": ("modernbert", {}),
    "mpnet-base": ("mpnet", {}),
    "vit-base-patch16-224": ("vit", {"architectures": ["ViTForImageClassification"]}),
}
"""Type and sizes, where they are not transformers' own defaults for the type."""

TRAINER = "--bf16 True --report_to none --eval_strategy epoch --output_dir out"
RECIPES = {
    "dpo_lora": (
        "Qwen2.5-0.5B",
        f"--sentences 20 --max_length 1024 --rows 32 --per_device_train_batch_size 8 {TRAINER}",
    ),
    "token_classifier": ("ModernBERT-base", f"--sentences 16 --rows 64 --per_device_train_batch_size 32 {TRAINER}"),
    "sentence_embeddings": ("mpnet-base", "--sentences 3 --rows 512 --batch_size 128"),
    "image_classifier": (
        "vit-base-patch16-224",
        f"--rows 256 --remove_unused_columns False --per_device_train_batch_size 64 {TRAINER}",
    ),
    "lightning_module": ("", "--rows 64 --output_dir out"),
}
"""Model and arguments."""


def write_model(folder: Path, name: str) -> Path:
    """Write a config and a tokenizer."""
    kind, sizes = MODELS[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    AutoConfig.for_model(kind, **({} if kind == "vit" else ids), dtype="float32", **sizes).save_pretrained(folder)
    special = ("[PAD]", "[SEP]", "[UNK]")
    letters = {letter: number for number, letter in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    core = Tokenizer(BPE(letters, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    names = {"pad_token": "[PAD]", "eos_token": "[SEP]", "cls_token": "[SEP]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **names).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(RECIPES))
    parser.add_argument("--devices", default=",".join(DEVICES))
    options = parser.parse_args()
    devices = options.devices.split(",")
    print(f"| recipe | model | largest batch | {' | '.join(devices)} |\n|---|---|---|{'---|' * len(devices)}")
    with tempfile.TemporaryDirectory() as name:
        for recipe in options.only.split(","):
            model, words = RECIPES[recipe]
            given = ["--model", str(write_model(Path(name, model), model))] if model else []
            script = str(EXAMPLES / f"{recipe}.py")
            answers = [dryfit.rehearse(script, device=device, arguments=[*given, *words.split()]) for device in devices]
            cells, largest = map(said, answers), answers[0].worst_batch
            shape = max(largest.shapes.values(), key=math.prod) if largest is not None else ()
            batch = " x ".join(map(str, shape))
            print(
                f"| `{recipe}.py` | {model or 'its own'} | {batch or 'not known'} | {' | '.join(cells)} |", flush=True
            )


def said(answer: RehearsalAnswer) -> str:
    """Say what memory a device must have, and whether this one has it."""
    if answer.memory is None:
        print(answer.traceback, file=sys.stderr)
        return f"unknown: {'; '.join(answer.reasons)}"
    needed = f"{answer.memory.required_bytes / 2**30:.1f} GiB"
    if answer.fits:
        return needed
    return f"{needed}: no"


if __name__ == "__main__":
    main()
