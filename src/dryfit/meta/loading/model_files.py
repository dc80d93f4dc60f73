"""Checks of a model's JSON files before a library reads them: requested code, and plausible sizes."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from transformers.utils.import_utils import is_flash_attn_2_available, is_kernels_available

from dryfit.core.errors import FileError, LoadError
from dryfit.core.regular_files import read_bounded
from dryfit.core.text.json_text import MOST_DEPTH, is_too_deep
from dryfit.core.text.words import brief, first_line
from dryfit.meta.files.checkpoint_files import open_checkpoint

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
