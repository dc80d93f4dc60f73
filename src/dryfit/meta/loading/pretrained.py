"""Load pretrained models: the class of a config, built without memory, then filled with weights."""

import inspect
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
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

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.private_names import require
from dryfit.core.settings.tables import RegularizationSettings
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.core.text.words import first_line
from dryfit.meta.construction.construction import build
from dryfit.meta.files.checkpoint_files import open_checkpoint
from dryfit.meta.files.reading import ReadMode
from dryfit.meta.files.source import ModelSource, local_folder, weights_folder
from dryfit.meta.loading.configs import load_config, set_dropouts
from dryfit.meta.loading.filling import fill
from dryfit.meta.loading.matching import LoadOptions, Missing
from dryfit.meta.loading.model_files import UNFIT
from dryfit.meta.private_apis.transformers_auto import AUTO, classes_of

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
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    mode: ReadMode = ReadMode.PRIVATE,
) -> tuple[PreTrainedModel, LoadReport]:
    """Load a pretrained model in eval mode, every tensor accounted for.

    Args:
        source: Hub id, folder or ``minilm``, with revision and trust.
        kind: Its head.
        config: Its config, changed or not; None: as it comes.
        device: Where tensors go.
        dtype: Type of the weights; None: fp32.
        missing: What the files may lack, a new head's weights for example.
        mode: Private memory or the mapped files.

    Raises:
        LoadError: A weight is missing, of another shape, or stray.
        ConfigError: The architecture has no such head.
    """
    config = config if config is not None else load_config(source)
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
