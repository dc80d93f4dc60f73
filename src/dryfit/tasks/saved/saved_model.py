"""Saved models: write a trained model into a folder, and load any model (``dryfit.load``)."""

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.analysis import ANALYSIS_FILE
from dryfit.core.settings.tables import ModelSettings
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.core.wire import canonical_json, empty_beside, publish_folder, sync_path, write_text_atomic
from dryfit.meta.construction.construction import build
from dryfit.meta.files.checkpoint_files import open_checkpoint
from dryfit.meta.files.reading import ReadMode
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.adapters import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    attach_adapter,
    base_of_adapter,
    fill_adapter,
    relative_base,
    save_adapter,
    save_adapter_config,
)
from dryfit.meta.loading.configs import load_config
from dryfit.meta.loading.filling import fill
from dryfit.meta.loading.frozen_weights import load_frozen
from dryfit.meta.loading.matching import LoadOptions, Missing
from dryfit.meta.loading.pretrained import Kind, load_pretrained, make_model
from dryfit.tasks.base import TaskModel
from dryfit.tasks.registry import make_task
from dryfit.tasks.saved.model_input import BASE, DRYFIT_FILE, FORMAT, read_base, read_model_input

WEIGHTS_FILE = "model.safetensors"
_CONFIG_FILE = "config.json"
_NOT_OURS = frozenset(
    {_CONFIG_FILE, DRYFIT_FILE, ADAPTER_FILE, "README.md", "modules.json", "config_sentence_transformers.json"}
    | {"example.py", ANALYSIS_FILE}  # which the card speaks of
)
_COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py"})


def load(
    source: str | Path,
    *,
    task: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    attach: str | Path | None = None,
    trust: bool = False,
    missing: Missing = "error",
    mapped: bool = False,
) -> nn.Module:
    """Load a model in eval mode, every parameter, buffer and plain tensor accounted for.

    Where each of them came from is said in the model's ``load_report``, a :class:`dryfit.meta.LoadReport`.

    Args:
        source: A folder saved by a trial or by ``dryfit train``, any other model folder, a hub id or ``minilm``.
        task: What stands on the model: ``encoder``, ``causal-lm``, ``masked-lm``, ``seq2seq-lm``,
            ``sequence-classification``, ``token-classification``, ``question-answering`` or ``multiple-choice``. None:
            a trial's folder gives its encoder with its head, any other the bare encoder.
        device: Where to put it.
        dtype: Type of the weights; None: fp32, or for weights that were frozen beside adapters, the type they had then.
            Quantised ones become the matrices that their layers compute with. Tables that are not trained (rotary
            frequencies) keep their type, and adapters are in fp32.
        attach: Folder of a PEFT adapter to put on it.
        trust: Run code that comes with the model, and that of a task of your own.
        missing: Patterns of weights the files may lack, for a head that is to be trained: ``["classifier.*"]``. They
            are drawn at random from a fixed seed. ``"init"`` allows every one.
        mapped: Use the files' own pages instead of copies: for looking and inference while nobody writes to them.

    Raises:
        LoadError: A file or weight is missing, damaged, of another shape, or has no place.
        ConfigError: There is no such task, or the architecture has no such head.
    """
    folder = Path(source).expanduser()
    mode = ReadMode.MAPPED if mapped else ReadMode.PRIVATE
    model: nn.Module
    if task is None and (folder / DRYFIT_FILE).is_file():
        trained = trained_model(folder, trust=trust, dtype=dtype, device=device).eval()
        restore(trained, folder, LoadOptions(torch.device(device), dtype, missing, mode=mode))
        model = trained
    else:
        pretrained = FolderSource(str(source), trust_remote_code=trust)
        kind = Kind.ENCODER if task is None else kind_of(task)
        model, _ = load_pretrained(pretrained, kind, device=device, dtype=dtype, missing=missing, mode=mode)
    return model if attach is None else attach_adapter(model, Path(attach), device=device)


def kind_of(task: str) -> Kind:
    """Return the kind of pretrained model that a word names.

    Raises:
        ConfigError: There is no such task.
    """
    if task not in list(Kind):
        raise ConfigError("loading a model", f"there is no task {task!r}", allowed=", ".join(Kind))
    return Kind(task)


def save_trained(
    folder: Path,
    model: TaskModel,
    *,
    tokenizer_folders: Mapping[str, Path],
    facts: Mapping[str, Any],
    place: Path | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Save a model so that :func:`load` can build it again; atomic, also over an earlier one.

    A new folder appears by one rename. In a folder that is already there only the weights and ``dryfit.json`` change,
    each by one rename, weights first: at every moment the folder can be loaded. It is on disk when this returns:
    a later record of it holds even over a power cut.

    Args:
        folder: Target.
        model: The model; weights are written in their own dtype.
        tokenizer_folders: Where to copy each pretrained model's tokenizer from, and the code that comes with it; by
            folder, as :meth:`~dryfit.tasks.base.TaskModel.pretrained`.
        facts: Entries of ``dryfit.json``; its ``input`` is a :class:`~dryfit.tasks.saved.model_input.ModelInput`,
            by which the model is built again.
        place: Where the folder will be moved to: the path to an adapter's base counts from there. None: it stays.
        texts: Further files of a new folder, by name.
    """
    adapted = model.adapted()
    base = None if adapted is None else relative_base(adapted, place or folder)
    text = canonical_json({"format": FORMAT, **facts, **({} if base is None else {BASE: base})})
    weights = weights_file(model)
    if (folder / DRYFIT_FILE).is_file():
        temporary = folder / f".{weights}.{os.getpid()}.tmp"
        save_weights(model, temporary)
        sync_path(temporary)
        temporary.replace(folder / weights)
        write_text_atomic(folder / DRYFIT_FILE, text)
        return
    temporary = empty_beside(folder)
    save_weights(model, temporary / weights)
    if adapted is not None:
        save_adapter_config(adapted, temporary, revision=_revision(facts))
    for part, base in model.pretrained().items():
        (temporary / part).mkdir(exist_ok=True)
        if adapted is None:
            _named(base.config, facts).to_json_file(temporary / part / _CONFIG_FILE, use_diff=False)
        copy_tokenizer(tokenizer_folders[part], temporary / part)
    publish_folder(temporary, folder, {**texts, DRYFIT_FILE: text})


def _named(config: PreTrainedConfig, facts: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config that has the names of the classes, where they have names."""
    names = facts.get("input", {}).get("labels") or ()
    if not names:
        return config
    named = copy.deepcopy(config)
    named.id2label = dict(enumerate(names))
    named.label2id = {name: number for number, name in enumerate(names)}
    return named


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, and the code that comes with its model."""
    for path in source.iterdir():
        ours = path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_OURS
        if path.is_file() and ours and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def weights_file(model: TaskModel) -> str:
    """Return the name of the file of a model's trained weights; of a model with adapters, of these alone."""
    return WEIGHTS_FILE if model.adapted() is None else ADAPTER_WEIGHTS


def save_weights(model: TaskModel, path: Path) -> None:
    """Write the trained weights, as :func:`restore` reads them."""
    adapted = model.adapted()
    if adapted is None:
        save_model(model, str(path), metadata={"format": "pt"})
    else:
        save_adapter(adapted, path)


def restore(model: TaskModel, folder: Path, options: LoadOptions) -> None:
    """Fill a model with weights that a trial saved; every tensor of the file must be used.

    Raises:
        LoadError: A weight is missing, has no place or another shape, or the file is damaged.
    """
    stored = open_checkpoint(folder / weights_file(model))
    adapted = model.adapted()
    if adapted is None:
        fill(model, stored, replace(options, exact=True))
    else:
        fill_adapter(adapted, stored, device=options.device)


def _revision(facts: Mapping[str, Any]) -> str | None:
    return facts["input"]["settings"]["model"]["revision"] if "input" in facts else None


def trained_model(
    folder: Path, *, trust: bool, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TaskModel:
    """Return the model of a trial's folder, without its trained weights.

    Args:
        folder: The trial's.
        trust: Run code that comes with the model.
        dtype: Of frozen weights; None: that of the training.
        device: Of frozen weights.

    Raises:
        LoadError: ``dryfit.json`` or a config is damaged, or of a later dryfit; or frozen weights are not where they
            were in training.
    """
    read = read_model_input(folder, doing=f"loading the trained model in {folder}", to_load=True)
    read = read.with_task_folder(folder, trust=trust)
    base = base_of_adapter(folder, trust=trust, relative=read_base(folder))

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del source
        if base is None:
            config = load_config(FolderSource(str(folder / part), trust_remote_code=trust))
            return build(lambda: make_model(config, kind, trust_remote_code=trust))
        if dtype is None or (frozen is not None and frozen.quantised):
            return load_frozen(base, kind, frozen, device=device, as_matrices=dtype)
        return load_pretrained(base, kind, device=device, dtype=dtype)[0]

    return make_task(read.task, read.context).model(make)
