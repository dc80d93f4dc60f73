"""Configs and tokenizers of pretrained models: files checked, configs of well-known models."""

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import transformers
from huggingface_hub import is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.utils.import_utils import is_flash_attn_2_available, is_kernels_available

from dryfit.meta.checkpoint_files import FolderSource, ModelSource, local_folder, model_folder, open_checkpoint
from dryfit.settings.choices import BaseFormat
from dryfit.settings.errors import ConfigError, FileError, LoadError, MachineError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.files import read_bounded
from dryfit.settings.text import brief, first_line
from dryfit.settings.wire import MOST_DEPTH, is_too_deep

# Checks of a model's JSON files before a library reads them: requested code, and plausible sizes.


UNFIT: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""What libraries raise for values of a config that do not fit together."""

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer_config.json"

_MOST_BYTES: Final = 2**26
_MOST_SIZE: Final = 2**31 - 1
_SPARE_LAYERS: Final = 64
"""Layers that a config may have beyond twice those of its file: the loader then says which weights are missing."""

_IMPLEMENTATION: Final = re.compile(r"_*(attn|experts)_implementation(_internal)?")
_BUILT_IN: Final = frozenset(
    {"eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
    | {"batched_mm", "grouped_mm"}
)
"""Implementations that transformers has itself; it looks for any other name on the hub, and runs what it finds."""

_WITHOUT: Final = "a model without it"

_MAY_BE_NONE: Final = frozenset({"encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"})
"""Layers of a half that some models are without."""

_LAYERS: Final = _MAY_BE_NONE | {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "depths"}
_EXPERTS: Final = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
        "moe_num_experts",
        "num_shared_experts",
    }
)
_MOST_EXPERTS: Final = 4096
"""Experts of a layer; the largest models have 512. Each may be a module of its own, which takes time to build."""

_SIZES: Final = _LAYERS | {
    *("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "intermediate_size", "d_ff", "hidden_dim"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "head_dim", "d_kv", "vocab_size"),
}


def read_model_json(path: Path, *, trust: bool) -> dict[str, Any]:
    """Read a JSON file of a model and check it.

    Args:
        path: ``config.json``, ``tokenizer_config.json`` or ``adapter_config.json``.
        trust: The model may run code of its own.

    Raises:
        LoadError: It is no JSON object, nested too deeply, or too large; it asks for code that is not trusted; or a
            size in it is one that no model has. The message names the key.
    """
    doing = f"reading the config of {path.parent}, {path.name}"
    try:
        content = json.loads(read_bounded(path, _MOST_BYTES, links=True))
    except FileError as error:
        raise LoadError(doing, error.found, error.allowed) from error
    except OSError as error:
        raise LoadError(doing, f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(doing, f"not JSON that can be read: {first_line(error)}", "one JSON object") from error
    if not isinstance(content, dict):
        raise LoadError(doing, f"it is {brief(content, 60)}, no object", "one JSON object")
    if is_too_deep(content):
        raise LoadError(doing, f"it is nested deeper than {MOST_DEPTH} levels", "one JSON object")
    document = cast("dict[str, Any]", content)
    check_entries(document, path, trust=trust)
    return document


def check_entries(document: Mapping[str, Any], path: Path, *, trust: bool) -> None:
    """Check the entries of a model's JSON file, those of nested objects included.

    Raises:
        LoadError: As of :func:`read_model_json`.
    """
    doing = f"reading the config of {path.parent}, {path.name}"
    for place, key, value in _entries(document):
        if not trust and _asks_for_code(key, value):
            allowed = f"one of {', '.join(sorted(_BUILT_IN))}" if _IMPLEMENTATION.fullmatch(key) else _WITHOUT
            raise untrusted(doing, place, value, allowed)
        if key == "quantization_config" and not (value is None or isinstance(value, dict)):
            raise LoadError(doing, f"{place} is {brief(value, 80)}", "an object, or a model without it")
        if key in _EXPERTS and not _is_size(value, 0, _MOST_EXPERTS):
            raise LoadError(doing, f"{place} is {brief(value, 80)}", f"an integer from 0 to {_MOST_EXPERTS}")
        least = 0 if key in _MAY_BE_NONE else 1
        if key in _SIZES and not _is_size(value, least):
            raise LoadError(doing, f"{place} is {brief(value, 80)}", f"an integer from {least} to {_MOST_SIZE}")


def untrusted(doing: str, place: str, value: object, allowed: str = _WITHOUT) -> LoadError:
    """Return the error for an entry that would make a library fetch or run code that is not trusted."""
    return LoadError(
        doing,
        f"{place} is {brief(value, 80)}: code from elsewhere would be fetched and run",
        allowed,
        "trust_remote_code = true runs what the model asks for: read it first",
    )


def check_layers(document: Mapping[str, Any], folder: Path) -> None:
    """Refuse a config with far more layers than the files beside it have: building them would take minutes.

    Args:
        document: The content of ``config.json``.
        folder: The model's; one without readable weights is not checked, as these may not be needed.

    Raises:
        LoadError: There are more than twice as many and 64.
    """
    claimed = [
        (number, place)
        for place, key, value in _entries(document)
        if key in _LAYERS
        for number in (cast("list[int]", value) if isinstance(value, list) else [value])
        if number is not None
    ]
    most, place = max(claimed, default=(0, ""))
    if most <= _SPARE_LAYERS:
        return
    try:
        keys = open_checkpoint(folder).tensors
    except LoadError:
        return
    numbers = (int(part) for key in keys for part in key.split(".") if re.fullmatch(r"[0-9]{1,9}", part))
    stored = 1 + max(numbers, default=0)
    if most > 2 * stored + _SPARE_LAYERS:
        raise LoadError(
            f"comparing {folder / CONFIG_FILE} with the weights beside it",
            f"{place} is {most}, and the weights have {stored} layers at most",
            f"as many layers as the weights have, and at most {2 * stored + _SPARE_LAYERS}",
        )


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the dotted place, key and value of every entry, those of nested objects included."""
    level: list[tuple[str, Any]] = [("", document)]
    while level:
        inner: list[tuple[str, Any]] = []
        for place, value in level:
            if isinstance(value, dict):
                for key, item in cast("dict[str, Any]", value).items():
                    yield f"{place}{key}", key, item
                    inner.append((f"{place}{key}.", item))
            elif isinstance(value, list):
                inner += [(place, item) for item in cast("list[Any]", value)]
        level = inner


def _asks_for_code(key: str, value: Any) -> bool:
    """Whether an entry makes a library fetch or run code; of ``auto_map`` transformers itself asks for trust."""
    if _IMPLEMENTATION.fullmatch(key):
        named = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else [value]
        return any(name is not None and not _is_built_in(name) for name in named)
    if key == "auto_mapping" and isinstance(value, dict):
        library = cast("dict[str, Any]", value).get("parent_library")
        return library is not None and str(library).partition(".")[0] != "transformers"
    return False


def _is_built_in(name: object) -> bool:
    if str(name).startswith("flash_attention") and is_kernels_available():
        return is_flash_attn_2_available()  # else transformers takes the kernel from the hub
    return isinstance(name, str) and name in _BUILT_IN


def _is_size(value: Any, least: int, most: int = _MOST_SIZE) -> bool:
    """Whether a value can be a size: some architectures have one for each layer, and None where they have none."""
    numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
    return all(number is None or (type(number) is int and least <= number <= most) for number in numbers)


# A tokenizer that is a bare sentencepiece model is checked: for the packages that read it, and for wrong readings.


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


def check_positions(config: PreTrainedConfig, key: str, length: int, doing: str) -> None:
    """Refuse inputs that are longer than a model has positions for.

    Args:
        config: The model's.
        key: The setting that asks for this length.
        length: Of the longest input.
        doing: What is being done, for the error.

    Raises:
        ConfigError: The model has fewer positions.
    """
    limit = most_tokens(config)
    if limit is not None and length > limit:
        raise ConfigError(doing, f"{key} is {length}", f"at most {limit}: the model has no more positions")


# Configs of well-known models, for planning without a network; none of their weights.
#
# ``catalogue.json`` beside this file holds, by hub id, the fields of each model's published config.json that decide its
# structure, its dropouts and its limits, with the values they have there (``torch_dtype`` under its newer name
# ``dtype``), and the further ids under which the same config is published. A test builds each model and compares its
# number of parameters with the published one.
#
# Only planning may ask here. Training needs weights, and gets its config from where they are.


_ALLOWED = "`minilm`, a folder with a config.json, a hub id in the local cache, or a name in the catalogue"


class CatalogueEntry(TypedDict):
    """One model of ``catalogue.json``; aliases are older ids, and ids of models that share its config."""

    aliases: list[str]
    config: dict[str, Any]


@cache
def catalogue_entries() -> dict[str, CatalogueEntry]:
    """Return the models of the catalogue by hub id, sorted."""
    text = files("dryfit.meta").joinpath("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)


@cache
def _ids() -> dict[str, str]:
    """Return the hub id for each name and alias."""
    return {name: hub_id for hub_id, entry in catalogue_entries().items() for name in (hub_id, *entry["aliases"])}


def catalogue_config(name: str) -> PreTrainedConfig | None:
    """Return a new config of a hub id or alias; None where the catalogue does not have it."""
    hub_id = _ids().get(name)
    if hub_id is None:
        return None
    fields = catalogue_entries()[hub_id]["config"]
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields)))
    config.name_or_path = name
    return config


def planning_config(source: ModelSource) -> PreTrainedConfig:
    """Return the config of a model that is planned and not loaded: its weights are not needed.

    Sources, in order: ``minilm`` or the folder named; the local cache of the hub; the catalogue, unless a revision
    is asked for, which it does not know; the hub, unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        ConfigError: None of them has it.
        LoadError: A folder, or the cache, has a config that transformers does not know.
    """
    try:
        folder = local_folder(source)
        cached = folder or try_to_load_from_cache(source.name, "config.json", revision=source.revision)
    except (OSError, HFValidationError) as error:  # it is too long for a path, or breaks the hub's rules
        raise _not_found(source, "it is neither a folder nor a hub id") from error
    if folder is not None:
        return read_config(source)
    if isinstance(cached, str):
        return read_config(FolderSource(cached.removesuffix("config.json"), trust_remote_code=source.trust_remote_code))
    config = catalogue_config(source.name) if source.revision is None else None
    if config is not None:
        return config
    if is_offline_mode():
        raise _not_found(source, "neither the cache nor the catalogue has it, and HF_HUB_OFFLINE is set")
    try:
        return read_config(source)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise _not_found(source, f"neither the cache nor the catalogue has it, and the hub says: {reason}") from error


def _not_found(source: ModelSource, reason: str) -> ConfigError:
    name = source.name if source.revision is None else f"{source.name} at revision {source.revision}"
    near = _near(source.name)
    if source.revision is not None and source.name in _ids():
        hint = "leave the revision out to plan with the catalogue's config"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "save the model's config.json in a folder and name the folder: planning needs no more"
    return ConfigError(f"looking for the config of {name}", reason, _ALLOWED, hint)


def _near(name: str) -> list[str]:
    """Return names of the catalogue with a similar spelling, whatever the case and the owner."""
    plain = {known.lower(): known for known in _ids()}
    short = {known.rpartition("/")[2]: real for known, real in plain.items()}
    wanted = name.lower()
    near_names = [plain[near] for near in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.7)]
    near_names += [short[near] for near in difflib.get_close_matches(wanted.rpartition("/")[2], short, n=3, cutoff=0.7)]
    return list(dict.fromkeys(near_names))[:4]
