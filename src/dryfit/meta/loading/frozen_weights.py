"""Load pretrained models whose weights stay frozen, in any format; quantised layers are made as their library does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dryfit.core.errors import MachineError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.choices import BaseFormat, Precision
from dryfit.core.settings.weight_formats import WeightFormat, check_planned
from dryfit.meta.construction.construction import build
from dryfit.meta.files.source import ModelSource
from dryfit.meta.loading.configs import load_config
from dryfit.meta.loading.filling import kept_in_fp32_patterns
from dryfit.meta.loading.matching import LoadOptions
from dryfit.meta.loading.pretrained import Kind, fill_pretrained, make_model

DTYPES: Final = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""Torch's type of each precision."""

_INT8_OUTLIER: Final = 6.0
"""Features that reach this are multiplied in fp16: the threshold of LLM.int8(), and of transformers."""


@dataclass(frozen=True, slots=True)
class _Quantiser:
    """How a library holds the linear layers of one format.

    Attributes:
        package: The library; imported when a model is loaded.
        extra: What of dryfit installs it.
        layer: Makes a layer without data of its own, given the library, numbers of inputs and outputs, and whether it
            has a bias.
        weight: Quantises a matrix (outputs, inputs) on a device, given the library.
        mark: Attribute of a model by which PEFT knows such layers.
    """

    package: str
    extra: str
    layer: Callable[[Any, int, int, bool], nn.Module]
    weight: Callable[[Any, torch.Tensor, torch.device], nn.Parameter]
    mark: str


def _int8_layer(library: Any, inputs: int, outputs: int, has_bias: bool) -> nn.Module:
    return library.nn.Linear8bitLt(
        inputs, outputs, has_bias, has_fp16_weights=False, threshold=_INT8_OUTLIER, device="meta"
    )


def _int8_weight(library: Any, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
    return library.nn.Int8Params(weight, requires_grad=False).to(device)


_QUANTISERS: Final = {
    BaseFormat.INT8: _Quantiser("bitsandbytes", "8bit", _int8_layer, _int8_weight, mark="is_loaded_in_8bit")
}


def load_frozen(
    source: ModelSource, kind: Kind, base: WeightFormat | None, *, device: torch.device | str
) -> PreTrainedModel:
    """Load a pretrained model in the format of its frozen weights, in eval mode; see :func:`fill_frozen`.

    Raises:
        MachineError: The format needs a library or a device that is not here.
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: The architecture has no such head.
    """
    config = load_config(source)
    model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code)).eval()
    fill_frozen(model, source, kind, base, LoadOptions(torch.device(device)))
    return model


def fill_frozen(
    model: PreTrainedModel, source: ModelSource, kind: Kind, base: WeightFormat | None, options: LoadOptions
) -> LoadReport:
    """Fill a model without memory with a source's weights, or slices of them, in a format of frozen weights.

    Each matrix is quantised when it has been read, so that never more than one is held in full.

    Args:
        model: Changed in place.
        source: Where its weights are.
        kind: Its head.
        base: The format; None: the weights are not frozen, and keep the model's type.
        options: Device and slices of the weights; their type is the format's.

    Raises:
        MachineError: The format needs a library or a device that is not here.
        LoadError: A weight is missing, of another shape, or stray.
    """
    if base is None:
        return fill_pretrained(model, source, kind, options)
    options = replace(options, dtype=DTYPES[base.compute])
    if not base.quantised:
        return fill_pretrained(model, source, kind, options)
    quantiser = _QUANTISERS[base.name]
    library = _library(quantiser, base, options.device)
    layers = _linear_layers(model, DTYPES[base.compute])

    def quantised(turned: bool, weight: torch.Tensor) -> nn.Parameter:
        return quantiser.weight(library, weight.T if turned else weight, options.device)

    made_by = {f"{name}.weight": partial(quantised, isinstance(one, Conv1D)) for name, one in layers.items()}
    report = fill_pretrained(model, source, kind, replace(options, made_by=made_by))
    made = {id(one): _with_weights(quantiser, library, one) for one in layers.values()}
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if id(part) in made:
            model.set_submodule(name, made[id(part)])
    setattr(model, quantiser.mark, True)
    return report


def empty_frozen(model: PreTrainedModel, base: WeightFormat) -> PreTrainedModel:
    """Give a model without memory the types of its frozen weights, for planning; it is changed in place.

    Raises:
        TraceError: Memory cannot be planned with this format.
    """
    check_planned(base)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[base.compute])
    return model


def _linear_layers(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, nn.Linear | Conv1D]:
    """Return the layers that are quantised: all linear ones but the output layer and what must stay in fp32.

    Classes derived from them compute in a way of their own (routers of experts, for example) and stay.
    """
    in_fp32 = kept_in_fp32_patterns(model, dtype)
    layers: dict[str, nn.Linear | Conv1D] = {}
    for name, part in model.named_modules():
        kept = part is model.get_output_embeddings() or any(one.search(f"{name}.weight") for one in in_fp32)
        if isinstance(part, nn.Linear | Conv1D) and part.__class__ in (nn.Linear, Conv1D) and not kept:
            layers[name] = part
    return layers


def _with_weights(quantiser: _Quantiser, library: Any, old: nn.Linear | Conv1D) -> nn.Module:
    """Return a quantised layer with the weight that an ordinary one has been given, which is quantised already."""
    outputs, inputs = old.weight.shape
    new: Any = quantiser.layer(library, inputs, outputs, old.bias is not None)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _library(quantiser: _Quantiser, base: WeightFormat, device: torch.device) -> Any:
    """Import what quantises, if it can work on a device.

    Raises:
        MachineError: It is missing, or needs another device.
    """
    doing = f'loading a base in {base.bits} bits (lora.base = "{base.name}")'
    allowed = f"a CUDA device and {quantiser.package}" if base.cuda_only else quantiser.package
    if base.cuda_only and device.type != "cuda":
        raise MachineError(doing, f"the device is {device}", allowed, 'lora.base = "bf16" runs anywhere')
    if find_spec(quantiser.package) is None:
        hint = f"pip install 'dryfit[{quantiser.extra}]'"
        raise MachineError(doing, f"{quantiser.package} is not installed", allowed, hint)
    return import_module(quantiser.package)
