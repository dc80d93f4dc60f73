"""Builders of tiny random models, tokenizers and data sets on disk."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

_TEXT = "i you we they sleep eat work walk talk feel good bad tired sad happy never always very not and"
WORDS = tuple(_TEXT.split())
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CRITERIA = ("feel sad", "sleep bad")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 0},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "albert": {"embedding_size": 16},
    "modernbert": {"global_attn_every_n_layers": 1, "reference_compile": False},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
}
_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 72,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}


def tokenizer(folder: Path, *, cls_last: bool = False) -> PreTrainedTokenizerFast:
    """Write a WordPiece tokenizer of some twenty words into a folder."""
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789")
    vocab = [*SPECIAL, *WORDS, *letters, *[f"##{letter}" for letter in letters]]
    core = Tokenizer(WordPiece({word: index for index, word in enumerate(dict.fromkeys(vocab))}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single, pair = ("$A:0 [SEP]:0 [CLS]:2", "$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2")
    if not cls_last:
        single, pair = ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")
    core.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
    return fast


def model(folder: Path, architecture: str = "bert", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random encoder and its tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = tokenizer(folder, cls_last=architecture == "xlnet")
    own = ARCHITECTURES[architecture]
    taken = _COMMON if architecture not in ("distilbert", "xlnet") else {"max_position_embeddings": 72}
    if architecture == "xlnet":
        taken = {}
    config = AutoConfig.for_model(architecture, **{"vocab_size": len(fast), **taken, **own, **overrides})
    torch.manual_seed(seed)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


_OWN_CODE = """
import os
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own-bert"


class OwnModel(BertModel):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        {first}
        return super().forward(*args, **kwargs)
"""


def own_code(folder: Path, first: str = "pass") -> Path:
    """Turn a model's folder into one whose code comes with it, and does something before each pass."""
    (folder / "own_code.py").write_text(_OWN_CODE.format(first=first), encoding="utf-8")
    file = folder / "config.json"
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    config = json.loads(file.read_text(encoding="utf-8")) | {"model_type": "own-bert", "auto_map": own}
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def rows(count: int, *, seed: int = 0, start: int = 0, groups: int | None = None) -> list[dict[str, Any]]:
    """Rows whose label is whether the text says what the criterion says."""
    rng = random.Random(f"{seed}-{start}")
    out: list[dict[str, Any]] = []
    for number in range(start, start + count):
        criterion = CRITERIA[number % len(CRITERIA)]
        label = rng.randrange(2)
        filler = [rng.choice(WORDS) for _ in range(rng.randrange(2, 24))]
        said = criterion if label else " ".join(rng.sample(WORDS[:10], 2))
        text = " ".join([*filler, said])
        row = {"id": f"r{number}", "criterion": criterion, "text": text, "label": label, "evidence": []}
        if label:
            row["evidence"] = [[len(text) - len(said), len(text)]]
        row["group"] = f"g{number % groups + start}" if groups else f"g{number}"
        out.append(row)
    return out


def several_labels(count: int, *, classes: int = 3, seed: int = 0, start: int = 0) -> list[dict[str, Any]]:
    """Rows that have the class of each of the first words that is in their text; the first row has none."""
    found = rows(count, seed=seed, start=start)
    for row in found:
        said = set(row["text"].split())
        row["label"] = [label for label in range(classes) if WORDS[label] in said]
    found[0]["label"] = []
    return found


def write_jsonl(path: Path, data: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    return path


def data(folder: Path, *, train: int = 40, validation: int = 20, seed: int = 0) -> dict[str, Any]:
    """Write train and validation rows; returns the paths as settings of ``[data]``."""
    return _data(folder, rows(train, seed=seed), rows(validation, seed=seed, start=train))


def multi_label_data(folder: Path, *, train: int = 40, validation: int = 20, classes: int = 3) -> dict[str, Any]:
    """The same of rows with any number of classes."""
    found = _data(
        folder, several_labels(train, classes=classes), several_labels(validation, classes=classes, start=train)
    )
    return found | {"multi_label": True, "num_labels": classes}


def _data(folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "train": str(write_jsonl(folder / "train.jsonl", train)),
        "validation": str(write_jsonl(folder / "validation.jsonl", validation)),
    }
