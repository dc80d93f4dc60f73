"""Load, make and save PEFT adapters; every tensor of a file and of an adapter is accounted for."""

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dryfit.gpu.offline_import import keep_offline
from dryfit.meta.checkpoint_files import ADAPTER_STEM, CheckpointFiles, FolderSource, ModelSource, open_checkpoint
from dryfit.meta.configs import check_entries
from dryfit.meta.construction import build
from dryfit.meta.file_formats import parse_json
from dryfit.meta.filling import fill
from dryfit.meta.matching import LoadOptions, memory_of, targets
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.text import brief

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = f"{ADAPTER_STEM}.safetensors"
_NAME = "default"

_ELSEWHERE = ("adapters", "megatron_config", "tokenizer_kwargs", "prompt_tuning_init_state_dict_path")
"""Entries by which PEFT loads more than the adapter beside them: further adapters, a library, a tokenizer, a file."""


def attach_adapter(model: nn.Module, folder: Path, *, device: torch.device | str = "cpu") -> nn.Module:
    """Put a saved adapter on a model that has its weights.

    Args:
        model: The base model.
        folder: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT saves them.
        device: Where the adapter's tensors go: where the model is.

    Returns:
        PEFT's model around the base model, in eval mode; the base model is changed in place, as PEFT does it.

    Raises:
        LoadError: The folder holds no adapter, or one for another model: a tensor is missing, too many, or of another
            shape.
        MachineError: PEFT is not installed.
    """
    peft = _peft()
    doing = f"putting the adapter of {folder} on a {type(model).__name__}"
    if not (folder / ADAPTER_FILE).is_file():
        raise LoadError(doing, f"there is no {ADAPTER_FILE}", allowed="a folder that PEFT saved")
    stored = open_checkpoint(folder, stem=ADAPTER_STEM)
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    try:
        adapted = _put_on(model, config)
    except ValueError as error:  # no module has one of the target names
        raise LoadError(doing, str(error).strip().splitlines()[0], allowed="the model it was trained on") from error
    fill_adapter(adapted, stored, device=device)
    return adapted.eval()


def fill_adapter(adapted: nn.Module, stored: CheckpointFiles, *, device: torch.device | str) -> None:
    """Fill the adapters of PEFT's model from a file; the base stays as it is.

    Raises:
        LoadError: A tensor is missing, too many, or of another shape.
    """
    names = {memory_of(target.tensor): target.name for target in targets(adapted)}
    aliases = {key: names[memory_of(tensor)] for key, tensor in adapter_state(adapted).items()}
    fill(adapted, stored, LoadOptions(torch.device(device), aliases=aliases, partial=True))


def save_adapter(adapted: nn.Module, path: Path) -> None:
    """Write the tensors of the adapters as PEFT does: a file for :data:`ADAPTER_WEIGHTS`."""
    tensors = {key: tensor.contiguous() for key, tensor in adapter_state(adapted).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def save_adapter_config(adapted: nn.Module, folder: Path, *, revision: str | None) -> None:
    """Write ``adapter_config.json``, by which PEFT and :func:`base_of_adapter` find the base.

    Args:
        adapted: PEFT's model.
        folder: Where to.
        revision: Of the base on the hub.
    """
    model: Any = adapted
    config = copy.deepcopy(model.peft_config[_NAME])
    config.inference_mode = True
    config.base_model_name_or_path = model.get_base_model().config.name_or_path
    config.revision = revision
    config.save_pretrained(str(folder))


def relative_base(adapted: nn.Module, folder: Path) -> str | None:
    """Return the path from an adapter's folder to the folder of its base; None for a base from the hub.

    Args:
        adapted: PEFT's model.
        folder: Where the adapter is saved.
    """
    model: Any = adapted
    base = Path(model.get_base_model().config.name_or_path)
    return os.path.relpath(base, folder.resolve()) if base.is_absolute() else None


def base_of_adapter(folder: Path, *, trust: bool, relative: str | None = None) -> ModelSource | None:
    """Return the base model of a folder's adapter; None where the folder holds no adapter.

    Args:
        folder: The adapter's.
        trust: Run code that comes with the base.
        relative: Path to the base by :func:`relative_base` when it was saved, for a base that moved along.

    Raises:
        LoadError: ``adapter_config.json`` is damaged, or asks for code that is not trusted.
    """
    if not (folder / ADAPTER_FILE).is_file():
        return None
    config = adapter_config(folder)
    check_entries(config, folder / ADAPTER_FILE, trust=trust)
    for key in () if trust else _ELSEWHERE:
        if config.get(key):
            raise LoadError(
                f"reading {folder / ADAPTER_FILE}",
                f"{key} is {brief(config[key], 80)}: PEFT would load what is named there as well",
                "an adapter whose weights are beside it",
                "trust_remote_code = true loads what the adapter asks for: read it first",
            )
    name = config.get("base_model_name_or_path")
    if name is None:
        raise LoadError(f"reading {folder / ADAPTER_FILE}", "it names no base model", allowed="as PEFT saves it")
    moved = folder.resolve() / relative if relative is not None else None
    if moved is not None and moved.is_dir() and not Path(str(name)).is_dir():
        name = moved.resolve()
    return FolderSource(str(name), revision=config.get("revision"), trust_remote_code=trust)


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's ``adapter_config.json``.

    Raises:
        LoadError: It cannot be read, or is not what PEFT writes.
    """
    path = folder / ADAPTER_FILE
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"reading {path}", str(error)[:200], hint="save or download the adapter again") from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        found = "no JSON object" if not isinstance(config, dict) else f"peft_type {config.get('peft_type')!r}"
        raise LoadError(f"reading {path}", f"it holds {found}", "what PEFT writes", "save or download it again")
    return config


def adapter_state(adapted: nn.Module, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors under the keys that PEFT saves them by.

    Args:
        adapted: PEFT's model.
        state: The state dict to take them from; None: the usual one.
    """
    return _peft().get_peft_model_state_dict(adapted, state_dict=state, adapter_name=_NAME, save_embedding_layers=False)


def new_adapter(model: nn.Module, *, r: int, alpha: float, dropout: float, targets: str, seed: int = 0) -> nn.Module:
    """Put fresh LoRA adapters on a model; all else is frozen. The adapters have no data until they are filled.

    Args:
        model: The base model, with or without memory; it is changed in place.
        r: Rank.
        alpha: Adapters are scaled by ``alpha / r``.
        dropout: Before the adapters.
        targets: ``all-linear``, or ends of module names with commas between them.
        seed: Of their initial values.

    Raises:
        ConfigError: No linear layer has such a name.
        MachineError: PEFT is not installed.
    """
    peft = _peft()
    names = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    config = peft.LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, task_type="CAUSAL_LM")
    try:
        return _put_on(model, config, seed=seed)
    except ValueError as error:
        raise ConfigError(
            f"putting adapters on a {type(model).__name__}",
            str(error).strip().splitlines()[0],
            allowed='lora.targets = "all-linear", or names of its linear layers',
        ) from error


def _put_on(model: nn.Module, config: Any, *, seed: int = 0) -> nn.Module:
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5 for a property under its old name; to be removed with a PEFT that does not.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return build(lambda: _peft().get_peft_model(model, config, adapter_name=_NAME), seed=seed)


def _peft() -> Any:
    try:
        keep_offline()  # PEFT imports bitsandbytes where it is installed
        import peft
    except ImportError as error:
        raise MachineError(
            "loading an adapter", "PEFT is not installed", allowed="peft >= 0.18", hint="pip install 'dryfit[lora]'"
        ) from error
    return peft
