"""Read configs and tokenizers of pretrained models.

A tokenizer that is a bare sentencepiece model is checked: for the packages that read it, and for wrong readings.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import import_protobuf

from dryfit.core.errors import ConfigError, LoadError, MachineError
from dryfit.core.settings.choices import BaseFormat
from dryfit.core.settings.weight_formats import WeightFormat
from dryfit.core.text.words import brief, first_line
from dryfit.meta.files.source import ModelSource, local_folder, model_folder
from dryfit.meta.loading.model_files import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    UNFIT,
    check_layers,
    read_model_json,
    untrusted,
)

_MODEL_FILES = ("sentencepiece.bpe.model", "spiece.model", "spm.model", "tokenizer.model")
_NEEDS = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}  # modules and their packages


def sentencepiece_file(folder: Path) -> Path | None:
    """Return a folder's sentencepiece model; None where a tokenizer.json stands beside it."""
    if (folder / "tokenizer.json").is_file():
        return None
    return next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)


def check_packages(path: Path) -> None:
    """Refuse a sentencepiece model that this installation cannot read; transformers would ask for tiktoken.

    Raises:
        MachineError: A package is not installed.
    """
    missing = [package for module, package in _NEEDS.items() if not _is_there(module)]
    if missing:
        raise MachineError(
            f"loading the tokenizer in {path}",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            allowed="sentencepiece and protobuf, or a folder with a tokenizer.json",
            hint=f"pip install {' '.join(missing)}",
        )


def check_algorithm(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a BPE model that was read as a unigram one: the same pieces, cut in other places.

    transformers 5 builds the tokenizers of most architectures as unigram models, whatever the file says.

    Raises:
        LoadError: The model was read wrongly.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "Unigram":
        return
    generated: Any = import_protobuf()  # its classes are made when it is imported: no stub knows them
    proto = generated.ModelProto()
    proto.ParseFromString(path.read_bytes())
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        reader = f"{type(tokenizer).__name__} of transformers {transformers.__version__}"
        raise LoadError(
            f"loading the tokenizer in {path}",
            f"it is a BPE model, and {reader} reads it as a unigram one, which cuts text differently",
            allowed="a unigram sentencepiece model, or a tokenizer.json",
            hint='add its tokenizer.json, and tokenizer_class = "PreTrainedTokenizerFast" in tokenizer_config.json',
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


# Each architecture names its dropouts in its own way; the first row whose names the config knows is used.
_HIDDEN_DROPOUTS = (
    ("hidden_dropout_prob",),  # BERT, RoBERTa, ELECTRA, ALBERT, DeBERTa, MPNet
    ("hidden_dropout",),
    ("embedding_dropout", "mlp_dropout"),  # ModernBERT
    ("resid_pdrop", "embd_pdrop"),
    ("dropout",),  # DistilBERT, XLNet
)
_ATTENTION_DROPOUTS = (
    ("attention_probs_dropout_prob",),
    ("attention_dropout",),  # DistilBERT, ModernBERT
    ("attn_pdrop",),
)
# These number positions from the padding token on.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm"})


def load_config(source: ModelSource, frozen: WeightFormat | None = None) -> PreTrainedConfig:
    """Read a model's config.

    Args:
        source: Where it is.
        frozen: The format that its weights shall have under adapters; None: they are trained, or looked at.

    Raises:
        LoadError: The folder holds no config that transformers knows, or it is of a model that is quantised otherwise.
    """
    config = read_config(source)
    check_stored_format(config, source, frozen)
    return config


def read_config(source: ModelSource) -> PreTrainedConfig:
    """Read a model's config, whatever the format of its weights, if any that can be read.

    Raises:
        LoadError: The folder holds no config that transformers knows, or its weights are in a format that is not read.
    """
    folder = local_folder(source)
    where = str(folder or source.name)
    if folder is not None:
        _check_files(folder, source)
    try:
        config = AutoConfig.from_pretrained(where, **_how(source, folder))
    except (OSError, *UNFIT, StrictDataclassError) as error:
        if isinstance(error, ValueError):
            _check_own_code(source)
        if folder is None:  # the hub's own errors tell a network fault from a wrong name
            raise
        raise LoadError(
            f"reading the config of {where}",
            " ".join(" ".join(str(error).strip().splitlines()[:2]).split()) or type(error).__name__,
            allowed="a config.json that transformers knows; one with its own code needs trust_remote_code = true",
        ) from error
    if folder is None:
        _check_files(model_folder(source), source)
    if is_quantised(config) and _format_of(_stored(config)) is None:
        check_stored_format(config, source, None)
    return config


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether a config is of a checkpoint that holds quantised weights."""
    return getattr(config, "quantization_config", None) is not None


def check_stored_format(config: PreTrainedConfig, source: ModelSource, frozen: WeightFormat | None) -> None:
    """Refuse a quantised checkpoint where weights in that very format are not wanted.

    Raises:
        LoadError: It is one.
    """
    if not is_quantised(config):
        return
    stored = _stored(config)
    name = _format_of(stored)
    double_quant = name is BaseFormat.NF4 and bool(stored.get("bnb_4bit_use_double_quant"))
    if name is not None and frozen is not None and (frozen.name, frozen.double_quant) == (name, double_quant):
        return
    doing, hint = f"reading the config of {local_folder(source) or source.name}", "take the model it was made of"
    if name is None:
        found = f"its weights are quantised (quantization_config of {brief(stored.get('quant_method'), 40)})"
        allowed = "weights in fp32, fp16 or bf16, or those that bitsandbytes quantised to nf4 or int8"
        raise LoadError(doing, found, allowed, hint)
    words = f'lora.base = "{name}"'
    if name is BaseFormat.NF4:
        words += f", lora.double_quant = {str(double_quant).lower()}"
    found = f"its weights are quantised to {name}" + (" with double quantisation" * double_quant)
    raise LoadError(doing, found, f"adapters beside them: {words}", hint)


def _stored(config: PreTrainedConfig) -> dict[str, Any]:
    stored: Any = getattr(config, "quantization_config", None)
    return stored if isinstance(stored, dict) else stored.to_dict()


def _format_of(stored: Mapping[str, Any]) -> BaseFormat | None:
    """Return the format that a ``quantization_config`` names; None for one that is not read here."""
    if stored.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return None
    if stored.get("load_in_8bit"):
        return BaseFormat.INT8
    is_nf4 = stored.get("bnb_4bit_quant_type") == "nf4" and stored.get("bnb_4bit_quant_storage", "uint8") == "uint8"
    return BaseFormat.NF4 if stored.get("load_in_4bit") and is_nf4 else None


def _check_files(folder: Path, source: ModelSource) -> None:
    """Check a model's configs; transformers itself says where one is missing."""
    if (path := folder / CONFIG_FILE).is_file():
        check_layers(read_model_json(path, trust=source.trust_remote_code), folder)
    if (path := folder / TOKENIZER_FILE).is_file():
        read_model_json(path, trust=source.trust_remote_code)


def _check_own_code(source: ModelSource) -> None:
    """Say it in our words where transformers refused a config for code of its own that is not trusted.

    One whose architecture transformers knows is read without that code.
    """
    if source.trust_remote_code:
        return
    document = read_model_json(model_folder(source) / CONFIG_FILE, trust=False)
    mapped, known = document.get("auto_map"), document.get("model_type") in tuple(CONFIG_MAPPING)
    if isinstance(mapped, dict) and "AutoConfig" in mapped and not known:
        where = local_folder(source) or source.name
        raise untrusted(f"reading the config of {where}, {CONFIG_FILE}", "auto_map.AutoConfig", mapped["AutoConfig"])


def _how(source: ModelSource, folder: Path | None) -> dict[str, Any]:
    """Return how transformers shall read a source; its folder is None for a model of the hub."""
    return {
        "revision": source.revision if folder is None else None,
        "trust_remote_code": source.trust_remote_code,
        "local_files_only": folder is not None,
    }


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        LoadError: The folder holds none, or one that transformers would read wrongly.
        MachineError: It is a sentencepiece model, and a package that reads them is not installed.
    """
    folder = local_folder(source)
    where = str(folder or source.name)
    if folder is not None:
        _check_files(folder, source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **_how(source, folder))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        # TypeError: a class that was not made for this tokenizer.json
        if (path := sentencepiece_file(model_folder(source))) is not None:
            check_packages(path)
        if folder is None:
            raise
        raise LoadError(f"loading the tokenizer of {where}", first_line(error)) from error
    if (path := sentencepiece_file(model_folder(source))) is not None:
        check_algorithm(path, tokenizer)
    return tokenizer


def set_dropouts(config: PreTrainedConfig, *, dropout: float | None, attention_dropout: float | None) -> None:
    """Write dropout probabilities into the places an architecture keeps them; None leaves them alone.

    Raises:
        ConfigError: The architecture knows no such dropout.
    """
    for key, value, table in (
        ("dropout", dropout, _HIDDEN_DROPOUTS),
        ("attention_dropout", attention_dropout, _ATTENTION_DROPOUTS),
    ):
        if value is None:
            continue
        names = next((row for row in table if all(hasattr(config, name) for name in row)), None)
        if names is None:
            raise ConfigError(
                f"setting regularization.{key} = {value}",
                f"{config.model_type} has no such dropout",
                hint="leave the key out for this model (in a search: give it a `when`)",
            )
        for name in names:
            setattr(config, name, value)


def most_tokens(config: PreTrainedConfig) -> int | None:
    """Return the longest input an architecture has positions for; None where it has no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0 or not getattr(config, "position_biased_input", True):
        return None
    if config.model_type in _OFFSET_POSITIONS:
        limit -= (config.pad_token_id or 0) + 1
    return limit
