"""The model of the task ``causal-lm`` with its weights: a pretrained decoder, with adapters beside it or without."""

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from dryfit.core.choices import BaseFormat
from dryfit.core.errors import LoadError, MachineError
from dryfit.core.load_report import LoadReport
from dryfit.core.settings import LoraSettings, ModelSettings, RegularizationSettings
from dryfit.core.words import few
from dryfit.meta.adapters import new_adapter
from dryfit.meta.configs import load_config, set_dropouts
from dryfit.meta.filling import materialise
from dryfit.meta.pretrained import Kind, load_pretrained, one_stack
from dryfit.meta.source import weights_folder

BASE_DTYPES: Final = {
    BaseFormat.FP32: torch.float32,
    BaseFormat.FP16: torch.float16,
    BaseFormat.BF16: torch.bfloat16,
}


def decoder_config(model: ModelSettings, regularization: RegularizationSettings) -> PreTrainedConfig:
    """The config of a decoder, with a trial's dropouts.

    Raises:
        LoadError: The folder holds no config that transformers knows.
        ConfigError: The model is no decoder, or has no such dropout.
    """
    config = one_stack(load_config(model), model, allowed="a decoder")
    set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
    return config


def load_decoder(
    model: ModelSettings,
    config: PreTrainedConfig,
    lora: LoraSettings | None,
    *,
    device: torch.device | str,
    seed: int,
) -> tuple[nn.Module, PreTrainedModel, LoadReport]:
    """Load a decoder and draw its adapters.

    Args:
        model: Which one.
        config: See :func:`decoder_config`.
        lora: Its adapters, with the format of the base; None: all weights are trained, in fp32.
        device: Where to put it.
        seed: Of the adapters.

    Returns:
        What is trained, the decoder in it, and where each tensor came from.

    Raises:
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: No linear layer has a name that adapters are asked for.
        MachineError: PEFT is not installed; or the base is to be int8, and bitsandbytes or a CUDA device is absent.
    """
    if lora is None:
        decoder, report = load_pretrained(model, Kind.CAUSAL_LM, config=config, device=device)
        return decoder, decoder, report
    base = lora.base or BaseFormat.FP32
    if base is BaseFormat.INT8:
        decoder, report = load_int8(model, config, device)
    else:
        decoder, report = load_pretrained(model, Kind.CAUSAL_LM, config=config, device=device, dtype=BASE_DTYPES[base])
    adapted = new_adapter(decoder, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets, seed=seed)
    return adapted, decoder, materialise(adapted, device=device, missing=["*lora_*"])


def load_int8(
    model: ModelSettings, config: PreTrainedConfig, device: torch.device | str
) -> tuple[PreTrainedModel, LoadReport]:
    """Through transformers, which quantises each weight as it reads it; the rest is in fp16.

    Raises:
        MachineError: bitsandbytes or a CUDA device is absent.
        LoadError: transformers found weights that are missing, stray or of another shape.
    """
    doing, allowed = "loading a base in int8 (lora.base)", "a CUDA device and bitsandbytes"
    if torch.device(device).type != "cuda":
        raise MachineError(doing, f"the device is {device}", allowed, 'lora.base = "bf16" runs anywhere')
    if find_spec("bitsandbytes") is None:
        raise MachineError(doing, "bitsandbytes is not installed", allowed, "pip install 'dryfit[8bit]'")
    folder = weights_folder(model)
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float16,
        device_map={"": device},
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )
    decoder, told = found
    wrong = {name: sorted(map(str, keys)) for name, keys in told.items() if keys}
    if wrong:
        said = "; ".join(f"{name}: {few(keys)}" for name, keys in wrong.items())
        raise LoadError(f"loading {model.name} in int8", said, allowed="every weight once, in its own shape")
    names = [name for name, _ in decoder.named_parameters()]
    report = LoadReport.model_construct(
        source=str(folder), from_file={name: name for name in names}, notes=("read and quantised by transformers",)
    )
    return decoder.eval(), report
