"""A trained model as a folder: written by a trial, loaded by anyone."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dryfit.core.errors import LoadError
from dryfit.core.settings import HeadSettings
from dryfit.core.wire import canonical_json, write_text_atomic
from dryfit.meta.load import FolderSource, encoder_from_config, load_config, load_encoder
from dryfit.tasks.heads import EncoderWithHead, HeadSpec

DRYFIT_FILE = "dryfit.json"
WEIGHTS_FILE = "model.safetensors"
_FORMAT = 1
_CONFIG_FILE = "config.json"
_NOT_OURS = frozenset({_CONFIG_FILE, DRYFIT_FILE, "README.md", "modules.json", "config_sentence_transformers.json"})
_COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py"})


def load(
    source: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model in eval mode, every weight accounted for.

    Args:
        source: A folder saved by a trial: gives the encoder with its head. Any other folder, a hub id or ``minilm``:
            gives the pretrained encoder.
        device: Where to put it.
        dtype: Type of the weights; None: fp32.
        trust_remote_code: Run code that comes with the model.

    Raises:
        LoadError: The folder or a weight is missing, or has another shape.
    """
    folder = Path(source).expanduser()
    model: nn.Module
    if (folder / DRYFIT_FILE).is_file():
        model = _load_trained(folder, trust_remote_code=trust_remote_code)
    else:
        model = _load_bare(str(source), trust_remote_code=trust_remote_code)
    return model.to(device=torch.device(device), dtype=dtype).eval()


def _load_bare(name: str, *, trust_remote_code: bool) -> nn.Module:
    return load_encoder(FolderSource(name, trust_remote_code=trust_remote_code))[0]


def save_trained(folder: Path, model: EncoderWithHead, *, tokenizer_folder: Path, facts: Mapping[str, Any]) -> None:
    """Save a model so that :func:`load` can build it again; atomic, also over an earlier one.

    A new folder appears by one rename. In a folder that is already there only the weights and ``dryfit.json`` change,
    each by one rename, weights first: at every moment the folder can be loaded.

    Args:
        folder: Where to.
        model: The model; its weights are written in their own dtype.
        tokenizer_folder: Where to copy the tokenizer's files from, and the code that comes with the model.
        facts: What else ``dryfit.json`` shall say (metric, value, step).
    """
    meta = {
        "format": _FORMAT,
        "head": model.spec.settings.model_dump(mode="json"),
        "num_outputs": model.spec.num_outputs,
        "cls_last": model.spec.cls_last,
        **facts,
    }
    suffix = f"{os.getpid()}.tmp"
    text = canonical_json(meta)
    if (folder / DRYFIT_FILE).is_file():
        temporary = folder / f".{WEIGHTS_FILE}.{suffix}"
        save_model(model, str(temporary), metadata={"format": "pt"})
        temporary.replace(folder / WEIGHTS_FILE)
        write_text_atomic(folder / DRYFIT_FILE, text, durable=False)
        return
    temporary = folder.with_name(f".{folder.name}.{suffix}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_model(model, str(temporary / WEIGHTS_FILE), metadata={"format": "pt"})
    model.encoder.config.to_json_file(temporary / _CONFIG_FILE, use_diff=False)
    for path in tokenizer_folder.iterdir():
        ours = path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_OURS
        if path.is_file() and ours and not path.name.endswith(".index.json"):
            shutil.copyfile(path, temporary / path.name)
    (temporary / DRYFIT_FILE).write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # an empty folder, or one without a model
    temporary.rename(folder)


def _load_trained(folder: Path, *, trust_remote_code: bool) -> EncoderWithHead:
    doing = f"loading the trained model in {folder}"
    try:
        meta = json.loads((folder / DRYFIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(doing, str(error).strip().splitlines()[0], hint="the folder is damaged") from error
    config = load_config(FolderSource(str(folder), trust_remote_code=trust_remote_code))
    if meta.get("format") != _FORMAT:
        raise LoadError(doing, f"format {meta.get('format')!r}", allowed=str(_FORMAT), hint="upgrade dryfit")
    head = HeadSettings.model_validate_json(json.dumps(meta["head"]))
    spec = HeadSpec(head, num_outputs=meta["num_outputs"], cls_last=meta["cls_last"])
    model = EncoderWithHead(encoder_from_config(config, trust_remote_code=trust_remote_code), spec)
    load_strict(model, folder / WEIGHTS_FILE, doing)
    return model


def load_strict(model: nn.Module, path: Path, doing: str) -> None:
    """Fill a model with saved weights; every key must match.

    Raises:
        LoadError: A weight is missing, unexpected or of another shape, or the file is damaged.
    """
    try:
        load_model(model, path, strict=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        lines = " ".join(str(error).split())
        raise LoadError(
            doing, lines[:500], allowed="exactly the weights of the model", hint="the folder is damaged"
        ) from error
