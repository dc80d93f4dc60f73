"""Read plain values from a snapshot file; nothing in it is trusted, and nothing in it runs."""

import io
import json
import pickle
from pathlib import Path
from typing import TypeAlias, cast

from dryfit.core.errors import ConfigError

Item: TypeAlias = dict[str, object]

# A damaged pickle raises nearly anything; this is what its opcodes and the reader of JSON raise without running code.
_DAMAGED = (
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle containers, strings and numbers only; any class or function in the file is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def load(path: Path) -> Item:
    """Return the dictionary in a file, pickled by torch or written as JSON.

    Raises:
        ConfigError: The file cannot be read, or is neither, or asks for more than plain values.
    """
    doing = f"reading {path}"
    allowed = "a file of torch.cuda.memory._dump_snapshot, or the same as JSON"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(doing, str(error), allowed) from error
    try:
        is_json = content.lstrip()[:1] == b"{"
        data: object = json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise ConfigError(doing, f"no plain values: {error}", allowed) from error
    if not isinstance(data, dict):
        raise ConfigError(doing, f"a {type(data).__name__}", allowed)
    return cast("Item", data)


def items(path: Path, item: Item, key: str) -> list[Item]:
    """Return a value that must be a list of dictionaries."""
    value = item.get(key)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in cast("list[object]", value)):
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a list of dictionaries")
    return cast("list[Item]", value)


def integer(path: Path, item: Item, key: str) -> int:
    """Return a value that must be a whole number from 0 on."""
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a whole number from 0 on")
    return value


def pair(path: Path, item: Item, key: str) -> tuple[int, int]:
    """Return the name of a memory pool; that of the common pool where there is none, as in files of older versions."""
    value = item.get(key, (0, 0))
    if isinstance(value, list | tuple):
        parts = cast("list[object] | tuple[object, ...]", value)
        if len(parts) == 2:
            return integer(path, {key: parts[0]}, key), integer(path, {key: parts[1]}, key)
    raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "two whole numbers")


def text(path: Path, item: object, key: str) -> str:
    """Return a string; empty where there is none, as in files of older versions."""
    value = cast("Item", item).get(key, "") if isinstance(item, dict) else ""
    if not isinstance(value, str):
        raise ConfigError(f"reading {path}", f"{key!r} is {_kind(value)}", "a string")
    return value


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}: {value!r:.60}"
