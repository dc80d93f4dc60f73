"""Checks and formats of the pretrained decoder of ``causal-lm``: packing, and frozen weights in 8 bits."""

import inspect
from importlib.util import find_spec
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from dryfit.core.errors import ConfigError, LoadError, MachineError, TraceError
from dryfit.core.settings.choices import BaseFormat, Precision
from dryfit.core.text.words import few
from dryfit.meta.files.source import ModelSource, weights_folder
from dryfit.tasks.base import TaskModel

BASE_DTYPES: Final = {
    BaseFormat.FP32: torch.float32,
    BaseFormat.FP16: torch.float16,
    BaseFormat.BF16: torch.bfloat16,
    BaseFormat.INT8: torch.int8,
}
"""Torch's dtype of each format of frozen weights."""

_SAME: Final = 1e-6
"""Share of the largest score that masked tokens may change: only rounding, since their weights are zero."""

_CLOSE: Final = 2e-2
"""Share of the largest score that other shapes may change by rounding in half precision."""


def check_base(base: BaseFormat, precision: Precision) -> None:
    """Refuse frozen weights in fp16 without mixed precision: gradients would pass through them unscaled.

    Raises:
        ConfigError: The combination is refused.
    """
    if base in (BaseFormat.FP16, BaseFormat.INT8) and precision is Precision.FP32:
        raise ConfigError(
            f'checking lora.base = "{base}"',
            f"train.precision is {precision}: gradients would pass through fp16 without a scale, and vanish",
            allowed='train.precision = "fp16" or "bf16" with it',
            hint="or leave lora.base out: the base then has the format of train.precision",
        )


def check_packing(model: TaskModel) -> None:
    """Refuse packing for a decoder in which one example would change another's scores.

    The decoder is tried: a second example is scored behind two different first ones, and alone. The test holds for any
    weights, and whatever the cause.

    Raises:
        ConfigError: The second example's scores are not its own.
    """
    doing, allowed = "checking lm.packing = true", "lm.packing = false for this model"
    config = model.base().config
    name = config.model_type
    if "position_ids" not in inspect.signature(model.base().forward).parameters:
        raise ConfigError(doing, f"{name} takes no positions", allowed)
    device = next(model.parameters()).device
    ids_BL = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 8, 9, 10]], device=device) % config.vocab_size
    positions_BL = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device).expand(2, -1)
    mask_BL = torch.ones_like(ids_BL)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        packed_BLV = model(ids_BL, mask_BL, positions_BL)[:, 3:].float()
        alone_LV = model(ids_BL[:1, 3:], mask_BL[:1, 3:])[0].float()
    model.train(was_training)
    size = float(alone_LV.abs().max())
    seen = float((packed_BLV[0] - packed_BLV[1]).abs().max())
    moved = float((packed_BLV[0] - alone_LV).abs().max())
    if not (seen <= _SAME * size and moved <= _CLOSE * size):
        problem = f"examples in one sequence see each other in {name}: scores change by {max(seen, moved):.2g}"
        raise ConfigError(doing, f"{problem} of {size:.2g}", allowed)


def frozen_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast a model without data to the dtype of its frozen weights, for planning.

    Raises:
        TraceError: The format has 8 bits, whose kernels are not modelled.
    """
    if dtype is torch.int8:
        raise TraceError("planning frozen weights", 'lora.base is "int8"', '"fp32", "fp16" or "bf16"')
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def load_int8(source: ModelSource, config: PreTrainedConfig, device: torch.device | str) -> PreTrainedModel:
    """Load a decoder by transformers, which quantises weights while it reads them; the rest is in fp16.

    Raises:
        MachineError: bitsandbytes or a CUDA device is missing.
        LoadError: transformers found weights that are missing, stray or of another shape.
    """
    doing, allowed = 'loading a base in 8 bits (lora.base = "int8")', "a CUDA device and bitsandbytes"
    if torch.device(device).type != "cuda":
        raise MachineError(doing, f"the device is {device}", allowed, 'lora.base = "bf16" runs anywhere')
    if find_spec("bitsandbytes") is None:
        raise MachineError(doing, "bitsandbytes is not installed", allowed, "pip install 'dryfit[8bit]'")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        weights_folder(source),
        config=config,
        dtype=torch.float16,
        device_map={"": device},
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        trust_remote_code=source.trust_remote_code,
        output_loading_info=True,
    )
    decoder, problems = loaded
    wrong = {name: sorted(map(str, keys)) for name, keys in problems.items() if keys}
    if wrong:
        said = "; ".join(f"{name}: {few(keys)}" for name, keys in wrong.items())
        raise LoadError(f"loading {source.name} in 8 bits", said, allowed="every weight once, in its own shape")
    return decoder.eval()
