"""PEFT adapters, put on a model exactly: every tensor of the file has its place, and every place its tensor."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dryfit.core.errors import ConfigError, LoadError, MachineError
from dryfit.meta.checkpoint import ADAPTER_STEM, open_checkpoint
from dryfit.meta.construction import build
from dryfit.meta.filling import fill
from dryfit.meta.matching import Wishes, memory_of, places

ADAPTER_FILE = "adapter_config.json"
_NAME = "default"


def attach_adapter(
    model: nn.Module, folder: Path, *, device: torch.device | str = "cpu", trainable: bool = False
) -> nn.Module:
    """Put a saved adapter on a model that has its weights.

    Args:
        model: The base model.
        folder: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT saves them.
        device: Where the adapter's tensors go: where the model is.
        trainable: Whether the adapter's weights shall take gradients.

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
    config.inference_mode = not trainable
    try:
        adapted = _put_on(model, config)
    except ValueError as error:  # no module has one of the target names
        raise LoadError(doing, str(error).strip().splitlines()[0], allowed="the model it was trained on") from error
    # PEFT itself says under which key it saves each tensor.
    saved: dict[str, Any] = peft.get_peft_model_state_dict(adapted, adapter_name=_NAME, save_embedding_layers=False)
    names = {memory_of(place.tensor): place.name for place in places(adapted)}
    wishes = Wishes(
        torch.device(device),
        aliases={key: names[memory_of(tensor)] for key, tensor in saved.items()},
        partial=True,
    )
    fill(adapted, stored, wishes)
    return adapted.eval()


def new_adapter(model: nn.Module, *, r: int, alpha: float, dropout: float, targets: str, seed: int = 0) -> nn.Module:
    """Put fresh LoRA adapters on a model; all else is frozen. They are without data until they are materialised.

    Args:
        model: The base model, with or without memory; it is changed in place.
        r: Rank.
        alpha: Adapters are scaled by ``alpha / r``.
        dropout: Before the adapters.
        targets: ``all-linear``, or ends of module names with commas between them.
        seed: Of what they begin with.

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
        import peft
    except ImportError as error:
        raise MachineError(
            "loading an adapter", "PEFT is not installed", allowed="peft >= 0.18", hint="pip install 'dryfit[lora]'"
        ) from error
    return peft
