"""Pretrained models, whole or with frozen weights in any format."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from dryfit.gpu.private_apis.torch_modes import without_dispatch_modes
from dryfit.gpu.slots import slots
from dryfit.meta.checkpoint_files import ModelSource, local_folder, open_checkpoint, weights_folder
from dryfit.meta.configs import UNFIT, is_quantised, load_config, set_dropouts
from dryfit.meta.construction import build
from dryfit.meta.file_formats import StoredTensor
from dryfit.meta.filling import REPORT, fill, kept_in_fp32_patterns
from dryfit.meta.matching import LoadOptions, Missing
from dryfit.meta.private_apis.transformers_auto import AUTO, classes_of
from dryfit.meta.quantised_layers import LayerSize, Quantiser, check_backend, expect_stored, quantiser_of
from dryfit.meta.reading import ReadMode
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.choices import Precision
from dryfit.settings.errors import ConfigError, LoadError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.private_names import require
from dryfit.settings.tables import RegularizationSettings
from dryfit.settings.text import few, first_line

# Load pretrained models: the class of a config, built without memory, then filled with weights.


# Relative embeddings, normalised once and used by every layer.
_SHARES_ACROSS_LAYERS = frozenset({"deberta", "deberta-v2"})
_POOLER = ("pooler.*", "*.pooler.*")


class Kind(StrEnum):
    """The head on a pretrained model, in the words of ``dryfit.load(..., task=...)``."""

    ENCODER = "encoder"
    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"


_CLASSES: dict[Kind, Any] = {
    Kind.ENCODER: AutoModel,
    Kind.CAUSAL_LM: AutoModelForCausalLM,
    Kind.MASKED_LM: AutoModelForMaskedLM,
    Kind.SEQ2SEQ_LM: AutoModelForSeq2SeqLM,
    Kind.SEQUENCE_CLASSIFICATION: AutoModelForSequenceClassification,
    Kind.TOKEN_CLASSIFICATION: AutoModelForTokenClassification,
    Kind.QUESTION_ANSWERING: AutoModelForQuestionAnswering,
    Kind.MULTIPLE_CHOICE: AutoModelForMultipleChoice,
}


def make_model(config: PreTrainedConfig, kind: Kind, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Construct the model of a config, in fp32; inside :func:`dryfit.meta.build` it takes no memory.

    Poolers are left out of encoders: we pool ourselves.

    Raises:
        ConfigError: The architecture has no such head, or its code comes with the model and is not trusted.
        LoadError: Values of the config do not fit together.
    """
    extra = _without_pooler(config) if kind is Kind.ENCODER else {}
    try:
        # Without a dtype transformers leaves the process's default dtype alone.
        return _CLASSES[kind].from_config(config, dtype=None, trust_remote_code=trust_remote_code, **extra)
    except ValueError as error:
        raise ConfigError(
            f"building a {config.model_type} model",
            str(error).strip().splitlines()[0],
            allowed="a task that this architecture has a head for; one with its own code needs trust",
        ) from error
    except UNFIT as error:
        raise LoadError(
            f"building a {config.model_type} model",
            f"{_keys_with(config, error)}{type(error).__name__}: {first_line(error)}",
            allowed="a config.json whose values the architecture knows and that fit together",
        ) from error


def _keys_with(config: PreTrainedConfig, error: Exception) -> str:
    """Return the key of the value that an error names, as one of an unknown activation does."""
    named = error.args[0] if isinstance(error, KeyError) and error.args else None
    keys = [key for key, value in config.to_dict().items() if isinstance(named, str) and value == named]
    return f"{' and '.join(keys)}: " if keys else ""


def stored_kind(config: PreTrainedConfig) -> Kind | None:
    """Return the head of the model that a config was saved with; None where it names none that we build."""
    require("telling the head of a model from its config", AUTO)
    named = set(config.architectures or ())
    own_code: dict[str, str] = getattr(config, "auto_map", None) or {}
    for kind, auto in _CLASSES.items():
        known = {cls.__name__ for cls in classes_of(auto, config)}
        if named & {*known, str(own_code.get(auto.__name__, "")).rpartition(".")[2]}:
            return kind
    return None


def cannot_checkpoint(config: PreTrainedConfig, kind: Kind, *, reentrant: bool) -> str | None:
    """Return why a model cannot recompute its activations; None where it can, or has code of its own."""
    require("telling whether a model can recompute its activations", AUTO)
    classes = classes_of(_CLASSES[kind], config)
    return class_cannot_checkpoint(classes[0], config, reentrant=reentrant) if classes else None


def class_cannot_checkpoint(cls: type[PreTrainedModel], config: PreTrainedConfig, *, reentrant: bool) -> str | None:
    """Return why models of a class cannot recompute their activations; None where they can."""
    if not cls.supports_gradient_checkpointing:
        return f"{config.model_type} has no activation checkpointing"
    if reentrant and config.model_type in _SHARES_ACROSS_LAYERS:
        return f"{config.model_type} shares tensors between its layers, which reentrant autograd goes through twice"
    return None


def may_lack(kind: Kind, missing: Missing = "error") -> Missing:
    """Return what a model's files may lack: what the caller allowed, and an encoder's unused pooler."""
    if kind is not Kind.ENCODER or missing == "init":
        return missing
    return _POOLER if missing == "error" else (*_POOLER, *missing)


def load_pretrained(
    source: ModelSource,
    kind: Kind,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    mode: ReadMode = ReadMode.PRIVATE,
) -> tuple[PreTrainedModel, LoadReport]:
    """Load a pretrained model in eval mode, every tensor accounted for.

    Args:
        source: Hub id, folder or ``minilm``, with revision and trust.
        kind: Its head.
        device: Where tensors go.
        dtype: Type of the weights; None: fp32.
        missing: What the files may lack, a new head's weights for example.
        mode: Private memory or the mapped files.

    Raises:
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: The architecture has no such head.
    """
    config = load_config(source)
    model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code)).eval()
    options = LoadOptions(torch.device(device), dtype, missing, mode=mode)
    return model, fill_pretrained(model, source, kind, options)


def fill_pretrained(model: PreTrainedModel, source: ModelSource, kind: Kind, options: LoadOptions) -> LoadReport:
    """Fill a model built from a source's config with the source's weights, or slices of them.

    Args:
        model: Without memory.
        source: Where its weights are.
        kind: Its head.
        options: Device, type and slices of the weights.

    Raises:
        LoadError: A weight is missing, of another shape, or stray.
    """
    folder = weights_folder(source)
    report = fill(model, open_checkpoint(folder), replace(options, missing=may_lack(kind, options.missing)))
    model.config.dtype = options.dtype if options.dtype is not None else torch.float32
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return report


def empty_stack(
    source: ModelSource, kind: Kind, regularization: RegularizationSettings, frozen: WeightFormat | None = None
) -> PreTrainedModel:
    """Return a pretrained encoder or decoder without memory, in eval mode, with the dropouts that are set.

    Args:
        source: Where its config is.
        kind: Its head.
        regularization: The dropouts.
        frozen: The format that its weights will have under adapters; None: they are trained.

    Raises:
        LoadError: The folder holds no config that transformers knows.
        ConfigError: The architecture has no such dropout, or is an encoder-decoder.
    """
    config = pretrained_config(source, kind, frozen)
    set_dropouts(config, dropout=regularization.dropout, attention_dropout=regularization.attention_dropout)
    return build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code)).eval()


def stack_bytes(source: ModelSource, kind: Kind) -> int:
    """Return the bytes of an encoder's or decoder's fp32 weights on disk, tied ones once; only its config is read.

    Raises:
        LoadError: The folder holds no config that transformers knows.
        ConfigError: The model is an encoder-decoder.
    """
    config = pretrained_config(source, kind)
    model = build(lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code))
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


STACKS = {Kind.ENCODER: "an encoder", Kind.CAUSAL_LM: "a decoder"}
"""The models that are trained, in words: encoders and decoders, no model of both."""


def pretrained_config(source: ModelSource, kind: Kind, frozen: WeightFormat | None = None) -> PreTrainedConfig:
    """Read the config of an encoder or of a decoder.

    Raises:
        LoadError: The folder holds no config that transformers knows.
        ConfigError: The model is both.
    """
    return one_stack(load_config(source, frozen), source, allowed=STACKS[kind])


def one_stack(config: PreTrainedConfig, source: ModelSource, *, allowed: str) -> PreTrainedConfig:
    """Return a config, if it is of an encoder or a decoder and not of both.

    Args:
        allowed: The kind that is wanted, for the message: ``an encoder``.

    Raises:
        ConfigError: It is of both: of some, transformers would build the decoder without the encoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        where = local_folder(source) or source.name
        raise ConfigError(f"reading the config of {where}", f"{config.model_type} is an encoder-decoder", allowed)
    return config


def _without_pooler(config: PreTrainedConfig) -> dict[str, bool]:
    """``add_pooling_layer=False`` where the architecture takes it.

    Code that comes with a model keeps its pooler: transformers maps such a config to its class once the first model is
    built, so the answer would change within a process.
    """
    if type(config).__module__.startswith("transformers_modules."):
        return {}
    cls: Any = MODEL_MAPPING.get(type(config), None)
    takes = inspect.isclass(cls) and "add_pooling_layer" in inspect.signature(cls).parameters
    return {"add_pooling_layer": False} if takes else {}


# Load pretrained models with frozen weights in any format; quantised layers equal those of their library.


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
