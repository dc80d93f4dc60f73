"""Tiny models, each with one thing wrong."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tiny


def shard_missing(folder: Path) -> Path:
    """Two shards in the index, one on the disk."""
    tiny.model(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: weights[key] for key in keys}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def without_padding(folder: Path) -> Path:
    """A tokenizer that has no token to pad rows with."""
    tiny.model(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "pad_token"})
    )
    return folder


def few_embeddings(folder: Path) -> Path:
    """Twenty embeddings, and a tokenizer of a hundred words."""
    return tiny.model(folder, vocab_size=20)


def few_positions(folder: Path) -> Path:
    """Positions for 24 tokens."""
    return tiny.model(folder, max_position_embeddings=24)


def nan_weights(folder: Path) -> Path:
    """One NaN among the weights, where every row meets it."""
    tiny.model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def aborting(folder: Path) -> Path:
    """Code of its own that ends the process where the model is called."""
    return tiny.own_code(tiny.model(folder), "os.abort()")
