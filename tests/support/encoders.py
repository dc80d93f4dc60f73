"""Tiny random encoders, each with its own kind of tokenizer, made on the spot in the files its authors published."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerFast

import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind, empty_stack, fill_pretrained
from dryfit.settings.tables import RegularizationSettings

_FULL_WIDTH = " ".join("".join(chr(ord(char) + 0xFEE0) for char in word) for word in ("full", "width", "123"))
# Several scripts, full-width forms, accents and emoji: what normalisers change, and what they must not.
SCRIPTS = (
    f"{_FULL_WIDTH} ①",
    "日本語のテキスト 悲しい 中文文本",
    "مرحبا بالعالم كيف حالك",
    "emoji 😀 👍🏽 👩‍👩‍👧 sad 😢",
    "Straße naïve café Ünï",
    "Привет мир как дела",
)
TEXTS = tuple(row["text"] for row in tiny.rows(300, seed=9)) + SCRIPTS * 5

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_POSITIONS = {"max_position_embeddings": 72}
_BERT = _SMALL | _POSITIONS
_CLS_2 = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_ROBERTA = {**_BERT, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEBERTA = {
    **_BERT,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "max_relative_positions": -1,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", _ROBERTA),
    "xlm-roberta": ("xlm-roberta", _ROBERTA),
    "deberta-v2": ("deberta-v2", {**_DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v3": ("deberta-v2", _DEBERTA),
    "electra": ("electra", {**_BERT, "embedding_size": 16}),
    "albert": ("albert", {**_BERT, "embedding_size": 16, **_CLS_2}),
    "distilbert": ("distilbert", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, **_POSITIONS}),
    "convbert": ("convbert", {**_BERT, "embedding_size": 32, "conv_kernel_size": 3, "head_ratio": 2}),
    "xlnet": ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    # One layer looks at everything, the other at four tokens on each side.
    "modernbert": ("modernbert", {**_BERT, **_CLS_2, "global_attn_every_n_layers": 2, "local_attention": 8}),
}
"""The architectures by their common names: transformers' own name, and what is set away from its defaults."""

SENTENCEPIECE: dict[str, tuple[str, dict[str, Any]]] = {
    "xlm-roberta": ("sentencepiece.bpe.model", {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}),
    "xlnet": ("spiece.model", {"unk_id": 0, "bos_id": 1, "eos_id": 2, "control_symbols": "<cls>,<sep>,<pad>,<mask>"}),
    "albert": (
        "spiece.model",
        {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]"},
    ),
    "deberta-v2": (
        "spm.model",
        {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]"}
        | {"eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    ),
}
SENTENCEPIECE["deberta-v3"] = SENTENCEPIECE["deberta-v2"]
"""Whose tokenizer is a sentencepiece model: its file, and how it numbers special tokens."""


def sentencepiece_model(name: str, algorithm: str = "unigram") -> bytes:
    """A sentencepiece model as an architecture has it, trained on the spot."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=out,
        vocab_size=200,
        hard_vocab_limit=False,
        model_type=algorithm,
        character_coverage=1.0,
        minloglevel=2,
        **SENTENCEPIECE[name][1],
    )
    return out.getvalue()


def tokenizer(folder: Path, name: str) -> None:
    """Write an architecture's tokenizer, in the files its authors published, and those alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": CONFIGS[name][0]}), encoding="utf-8")
    if name in SENTENCEPIECE:
        (folder / SENTENCEPIECE[name][0]).write_bytes(sentencepiece_model(name))
    elif name in ("roberta", "modernbert"):
        bpe = ByteLevelBPETokenizer(add_prefix_space=False)
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if name == "roberta" else [*tiny.SPECIAL]
        bpe.train_from_iterator(TEXTS, vocab_size=320, special_tokens=special, show_progress=False)
        bpe.save_model(str(folder))
        if name == "modernbert":
            _byte_level(folder, bpe)
    else:
        letters = sorted({letter for text in TEXTS for letter in text if not letter.isspace()})
        pieces = [*tiny.SPECIAL, *tiny.WORDS, *letters, *(f"##{letter}" for letter in letters)]
        (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n", encoding="utf-8")


def _byte_level(folder: Path, bpe: ByteLevelBPETokenizer) -> None:
    """A tokenizer.json alone, as ModernBERT has it."""
    core = Tokenizer.from_str(bpe.to_str())
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {key: f"[{key[:-6].upper()}]" for key in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    for file in ("vocab.json", "merges.txt"):
        (folder / file).unlink()


def model(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random encoder with its own kind of tokenizer into a folder."""
    tokenizer(folder, name)
    size = len(load_tokenizer(FolderSource(str(folder))))
    architecture, settings = CONFIGS[name]
    config = AutoConfig.for_model(architecture, **{"vocab_size": size, **settings, **overrides})
    torch.manual_seed(seed)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


def with_dropouts(folder: Path, dtype: torch.dtype | None = None, **rates: float) -> PreTrainedModel:
    """A folder's model with other dropouts, as trials load it."""
    source = FolderSource(str(folder))
    encoder = empty_stack(source, Kind.ENCODER, RegularizationSettings(**rates))
    fill_pretrained(encoder, source, Kind.ENCODER, LoadOptions(torch.device("cpu"), dtype))
    return encoder


def words(count: int, seed: int) -> list[str]:
    """Random texts of all scripts, with pieces no training text had next to each other."""
    rng = torch.Generator().manual_seed(seed)
    pool = list(itertools.chain.from_iterable(text.split() for text in (*SCRIPTS, *TEXTS[:40])))
    picks = torch.randint(len(pool), (count, 9), generator=rng).tolist()
    return [" ".join(pool[index] for index in row) for row in picks]
