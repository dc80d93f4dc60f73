"""Load pretrained models with frozen weights in any format; quantised layers equal those of their library."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dryfit.core.errors import ConfigError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.core.text.words import few
from dryfit.meta.construction.construction import build
from dryfit.meta.construction.walk import slots
from dryfit.meta.files.checkpoint_files import open_checkpoint
from dryfit.meta.files.safetensors_file import StoredTensor
from dryfit.meta.files.source import ModelSource, weights_folder
from dryfit.meta.loading.configs import is_quantised, load_config
from dryfit.meta.loading.filling import REPORT, kept_in_fp32_patterns
from dryfit.meta.loading.matching import LoadOptions
from dryfit.meta.loading.pretrained import Kind, fill_pretrained, make_model
from dryfit.meta.loading.quantised_layers import LayerSize, Quantiser, check_backend, expect_stored, quantiser_of
from dryfit.meta.private_apis.torch_modes import without_dispatch_modes

DTYPES: Final = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
"""Torch's type of each precision."""
_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INTEGERS: Final = ("int8", "uint8")

Layers: TypeAlias = dict[str, nn.Linear | Conv1D]
Fill: TypeAlias = Callable[[LoadOptions], LoadReport]


def load_frozen(
    source: ModelSource,
    kind: Kind,
    base: WeightFormat | None,
    *,
    device: torch.device | str,
    as_matrices: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load a pretrained model in the format of its frozen weights, in eval mode; see :func:`fill_frozen`.

    Args:
        source: Where it is.
        kind: Its head.
        base: The format; None: the weights are not frozen.
        device: Where tensors go.
        as_matrices: Quantised layers become ordinary ones of this type, with the matrices that they compute with.

    Raises:
        MachineError: The format needs a library that is not here, or cannot compute on the device.
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: The architecture has no such head, or weights that the format cannot hold.
    """
    config = load_config(source, base)
    model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code)).eval()
    fill_frozen(model, source, kind, base, LoadOptions(torch.device(device)))
    if as_matrices is not None and base is not None and base.quantised:
        _dequantise(model, quantiser_of(base, DTYPES[base.compute]), as_matrices)
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
        MachineError: The format needs a library that is not here, or cannot compute on the device.
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: The model has weights that the format cannot hold.
    """
    if base is None:
        return fill_pretrained(model, source, kind, options)
    options = replace(options, dtype=DTYPES[base.compute])
    if not base.quantised:
        return fill_pretrained(model, source, kind, options)
    check_backend(base, options.device)
    quantiser, layers = quantiser_of(base, DTYPES[base.compute]), _linear_layers(model, base)
    fill = partial(fill_pretrained, model, source, kind)
    if is_quantised(model.config):
        stored = open_checkpoint(weights_folder(source)).tensors
        report = _fill_stored(model, fill, layers, quantiser, options, stored)
    else:
        report = _quantise_read(model, fill, layers, quantiser, options)
    setattr(model, quantiser.mark, True)
    return report


def empty_frozen(model: PreTrainedModel, base: WeightFormat) -> PreTrainedModel:
    """Give a model without memory the layers and types of its frozen weights, for planning; it is changed in place.

    Raises:
        MachineError: The format needs a library that is not here.
        ConfigError: The model has weights that the format cannot hold.
    """
    dtype = DTYPES[base.compute]
    in_fp32 = kept_in_fp32_patterns(model, dtype)
    layers = _linear_layers(model, base) if base.quantised else {}
    for name, parameter in model.named_parameters():
        kept = any(pattern.search(name) for pattern in in_fp32)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    if base.quantised:
        quantiser = quantiser_of(base, dtype)
        _put_packed(model, layers, quantiser)
        setattr(model, quantiser.mark, True)
    return model


def _dequantise(model: PreTrainedModel, quantiser: Quantiser, dtype: torch.dtype) -> None:
    layers = [part for part in model.modules() if isinstance(part, quantiser.layer_class())]
    _put_layers(model, {layer: _ordinary(quantiser.dequantise(layer), layer) for layer in layers})
    delattr(model, quantiser.mark)
    vars(model.config).pop("quantization_config", None)
    model.to(dtype)  # pyright: ignore[reportArgumentType]  # transformers' own signature is wrapped


def _ordinary(weight_NK: torch.Tensor, quantised: Any) -> nn.Linear:
    outputs, inputs = weight_NK.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight_NK, requires_grad=False), quantised.bias
    return layer


def _linear_layers(model: PreTrainedModel, base: WeightFormat) -> Layers:
    """Return the layers that are quantised: all linear ones but the output layer and what must stay in fp32.

    Classes derived from them compute in a way of their own (routers of experts, for example) and stay.

    Raises:
        ConfigError: There are none, or most weights would stay as they are: of experts in one tensor, for example.
    """
    in_fp32 = kept_in_fp32_patterns(model, DTYPES[base.compute])
    skipped = _skipped(model)
    layers: Layers = {}
    for name, part in model.named_modules():
        kept = part is model.get_output_embeddings() or any(one.search(f"{name}.weight") for one in in_fp32)
        kept = kept or any(name == one or name.startswith(f"{one}.") or one in name.split(".") for one in skipped)
        if isinstance(part, nn.Linear | Conv1D) and part.__class__ in (nn.Linear, Conv1D) and not kept:
            layers[name] = part
    _refuse_others(model, base)
    return layers


def _skipped(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the parts that a quantised checkpoint's config says were left as they are."""
    stored: Any = getattr(model.config, "quantization_config", None)
    stored = stored if isinstance(stored, dict) or stored is None else stored.to_dict()
    return tuple((stored or {}).get("llm_int8_skip_modules") or ())


def _refuse_others(model: PreTrainedModel, base: WeightFormat) -> None:
    """Refuse weights that no linear layer holds, and that would stay in 16 or 32 bits: experts in one tensor.

    Raises:
        ConfigError: There are such weights.
    """
    others = [
        f"{name}.{key}" if name else key
        for name, part in model.named_modules()
        if not isinstance(part, _CONVOLUTIONS)
        for key, weight in part.named_parameters(recurse=False)
        if weight.ndim > 2
    ]
    if others:
        raise ConfigError(
            f'quantising {type(model).__name__} for lora.base = "{base.name}"',
            f"{len(others)} weights are of no linear layer, and have no form in {base.bits} bits: {few(others)}",
            allowed="a model whose large weights are those of linear layers",
            hint='lora.base = "bf16" holds any weight',
        )


def _quantise_read(
    model: PreTrainedModel, fill: Fill, layers: Layers, quantiser: Quantiser, options: LoadOptions
) -> LoadReport:
    """Fill a model with ordinary weights, and quantise each matrix as soon as it has been read."""
    sizes = {name: _size(layer) for name, layer in layers.items()}

    def quantised(turned: bool, weight: torch.Tensor) -> nn.Parameter:
        return quantiser.quantise(weight.T if turned else weight, options.device)

    made_by = {f"{name}.weight": partial(quantised, isinstance(one, Conv1D)) for name, one in layers.items()}
    report = fill(replace(options, made_by=made_by))
    _put_layers(model, {layer: quantiser.layer(sizes[name], layer) for name, layer in layers.items()})
    froms = [before for before, _, after in (cast.partition(" to ") for cast in report.casts) if after in _INTEGERS]
    return _reported(model, report, f"{len(layers)} weights quantised from {', '.join(sorted(froms))}")


def _fill_stored(
    model: PreTrainedModel,
    fill: Fill,
    layers: Layers,
    quantiser: Quantiser,
    options: LoadOptions,
    stored: Mapping[str, StoredTensor],
) -> LoadReport:
    """Fill a model with the integers and scales that a checkpoint holds."""
    packed = _put_packed(model, layers, quantiser)
    aliases: dict[str, str] = {}
    for name, layer in packed.items():
        expect_stored(layer, {key: stored.get(f"{name}.{quantiser.names.get(key, key)}") for key in quantiser.extra})
        aliases |= {f"{name}.{theirs}": f"{name}.{key}" for key, theirs in quantiser.names.items()}
    report = fill(replace(options, aliases=aliases))
    sizes = {name: _size(layer) for name, layer in layers.items()}
    for layer in packed.values():
        layer.weight = quantiser.unpacked(layer)
    _put_layers(model, {layer: quantiser.layer(sizes[name], layer) for name, layer in packed.items()})
    return _reported(model, report, f"{len(layers)} weights were quantised in the file")


def _reported(model: PreTrainedModel, report: LoadReport, note: str) -> LoadReport:
    """Return a report with a note, of the tensors that the model has in the end, and keep it with the model."""
    here = {slot.name for slot in slots(model)}
    from_file = {name: key for name, key in report.from_file.items() if name in here}
    report = report.model_copy(update={"notes": (*report.notes, note), "from_file": from_file})
    vars(model)[REPORT] = report
    return report


def _put_packed(model: PreTrainedModel, layers: Layers, quantiser: Quantiser) -> dict[str, Any]:
    """Put layers without memory, whose tensors are integers and scales, in the place of ordinary ones."""
    with without_dispatch_modes():  # the library makes its own classes of tensors, which no mode may see
        packed: dict[str, Any] = {name: quantiser.packed(_size(layer)) for name, layer in layers.items()}
    for name, layer in layers.items():
        packed[name].bias = layer.bias
    _put_layers(model, {layers[name]: one for name, one in packed.items()})
    return packed


def _put_layers(model: PreTrainedModel, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put layers in the place of others, wherever these are."""
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if part in new:
            model.set_submodule(name, new[part].train(part.training))


def _size(layer: nn.Linear | Conv1D) -> LayerSize:
    inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else reversed(layer.weight.shape)
    return LayerSize(inputs, outputs)
