"""The header of a safetensors file, read strictly.

The checks are our own and stricter than the library's, which tolerates what two readers may understand differently
(duplicate keys, unknown fields). Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.core.errors import LoadError
from dryfit.core.text.json_text import unique_keys
from dryfit.core.text.words import few
from dryfit.meta.files.file_guard import FileStamp, is_lfs_pointer, open_file

MOST_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""

_MOST_NUMBER = 2**63 - 1
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_LENGTH_BYTES = 8

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F4": torch.float4_e2m1fn_x2,
}
"""The format's names. F6_E2M3 and F6_E3M2 are missing: torch has no such type."""

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of one tensor in a file.

    Attributes:
        key: Its name in the checkpoint.
        file: The file that holds it.
        dtype: Its type in the file.
        shape: Its shape.
        offset_bytes: Of its first element, from the start of the file.
        size_bytes: How many bytes of the file it spans.
        stride: Steps between elements, where they do not lie in row-major order; else None.
        value: The tensor itself, where the file's format allows no reading in parts.
    """

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    stride: tuple[int, ...] | None = None
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What one file holds, in either format.

    Attributes:
        tensors: Every tensor by its key, in the order of the data.
        stamp: The state of the file when it was looked at.
        notes: What was left out.
    """

    tensors: Mapping[str, StoredTensor]
    stamp: FileStamp
    notes: tuple[str, ...] = ()


class _RefusedError(ValueError):
    """A fault of a header, without the file's name."""


def read_safetensors_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file; no data is read.

    Raises:
        LoadError: The file cannot be read or its header is not exactly what the format allows.
    """
    doing = f"reading the safetensors header of {path}"
    descriptor, stamp = open_file(path, doing)
    try:
        text = _header_text(descriptor, stamp.size_bytes)
        begin = _LENGTH_BYTES + len(text)
        tensors = _parse(_json(text), path, begin, stamp.size_bytes - begin)
        stamp.compare(os.fstat(descriptor))
    except _RefusedError as error:
        pointer = is_lfs_pointer(descriptor)
        raise LoadError(
            doing,
            "the file is a git-lfs pointer, not weights" if pointer else str(error),
            allowed="a complete safetensors file",
            hint="run `git lfs pull`" if pointer else "download or save the file again",
        ) from error
    except OSError as error:
        raise LoadError(doing, f"it cannot be read ({error.strerror})") from error
    finally:
        os.close(descriptor)
    return FileHeader(tensors, stamp)


def _header_text(descriptor: int, size_bytes: int) -> bytes:
    if size_bytes < _LENGTH_BYTES:
        raise _RefusedError(f"the file has {size_bytes} bytes, the length of the header alone takes {_LENGTH_BYTES}")
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if length > MOST_HEADER_BYTES:
        raise _RefusedError(f"the header claims {length} bytes, at most {MOST_HEADER_BYTES} are allowed")
    if length > size_bytes - _LENGTH_BYTES:
        raise _RefusedError(f"the header claims {length} bytes and the file has {size_bytes}: it is cut short")
    text = os.pread(descriptor, length, _LENGTH_BYTES)
    if len(text) != length:
        raise _RefusedError(f"only {len(text)} of the header's {length} bytes could be read")
    return text


def parse_json(text: bytes) -> Any:
    """Parse JSON of an untrusted file: UTF-8, no duplicate keys, no ``-0``.

    Raises:
        ValueError: Anything else; the message says what.
    """
    try:
        decoded = text.decode("utf-8")
        # The library's parser takes -0 for a float. A function per number costs time, so only where it may matter.
        return json.loads(
            decoded,
            object_pairs_hook=unique_keys,
            parse_int=_natural if "-0" in decoded else None,
            parse_constant=_natural,
        )
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _json(text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _RefusedError(f"the header is no valid JSON: {_short(str(error))}") from error
    if not isinstance(header, dict):
        raise _RefusedError(f"the header is {_short(header)}, not an object")
    return header


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{_short(text)} is no natural number")
    return int(text)


def _parse(header: dict[str, Any], path: Path, begin: int, data_bytes: int) -> dict[str, StoredTensor]:
    _check_metadata(header.pop(_METADATA, {}))
    spans: list[tuple[int, int, StoredTensor]] = []
    for key, entry in header.items():
        try:
            spans.append(_entry(key, entry, path, begin))
        except _RefusedError as error:
            raise _RefusedError(f"the entry of {_short(key)}: {error}") from error
    spans.sort(key=_by_span)
    _check_spans(spans, data_bytes)
    return {stored.key: stored for _, _, stored in spans}


def _by_span(span: tuple[int, int, StoredTensor]) -> tuple[int, int]:
    return span[:2]


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise _RefusedError(f"{_METADATA} is {_short(metadata)}, not an object")
    for key, value in metadata.items():
        _check_text(key)
        if not isinstance(value, str):
            raise _RefusedError(f"{_METADATA}: the value of {_short(key)} is {_short(value)}, not a string")
        _check_text(value)


def _entry(key: str, entry: Any, path: Path, begin: int) -> tuple[int, int, StoredTensor]:
    _check_text(key)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        fields = few(map(_short, entry)) if isinstance(entry, dict) else _short(entry)
        raise _RefusedError(f"it has {fields}; exactly {', '.join(sorted(_FIELDS))} are allowed")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    item_bytes = _ITEM_BYTES.get(name) if isinstance(name, str) else None
    if item_bytes is None:
        raise _RefusedError(f"dtype is {_short(name)}; known are {', '.join(DTYPES)}")
    _check_naturals("shape", shape)
    _check_naturals("data_offsets", offsets)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _RefusedError(f"data_offsets is {_short(offsets)}, not [begin, end] with begin <= end")
    if name == "F4":
        shape = _packed(shape)
    sizes = tuple(shape)
    if len(sizes) > _MOST_DIMENSIONS:
        raise _RefusedError(f"shape has {len(sizes)} dimensions, at most {_MOST_DIMENSIONS} are allowed")
    size_bytes = math.prod(sizes) * item_bytes
    # torch multiplies the other dimensions for the strides even where one is 0.
    if size_bytes > _MOST_NUMBER or (not size_bytes and math.prod(size or 1 for size in sizes) > _MOST_NUMBER):
        raise _RefusedError(f"shape is {_short(shape)}: its size overflows 64 bits")
    if offsets[1] - offsets[0] != size_bytes:
        raise _RefusedError(
            f"data_offsets {_short(offsets)} span {offsets[1] - offsets[0]} bytes, "
            f"{name} of shape {_short(shape)} takes {size_bytes}"
        )
    stored = StoredTensor(key, path, DTYPES[name], sizes, begin + offsets[0], size_bytes)
    return offsets[0], offsets[1], stored


def _check_naturals(field: str, values: Any) -> None:
    if not isinstance(values, list):
        raise _RefusedError(f"{field} is {_short(values)}, not a list")
    for value in values:
        if type(value) is not int or not 0 <= value <= _MOST_NUMBER:  # a bool is an int to isinstance
            raise _RefusedError(f"{field} holds {_short(value)}; allowed are whole numbers from 0 to 2**63 - 1")


def _packed(shape: list[int]) -> list[int]:
    """Return the shape in bytes: two 4-bit numbers share one, which is one element to torch."""
    if not shape or shape[-1] % 2:
        raise _RefusedError(f"shape is {_short(shape)}: the last dimension of F4 must be even")
    return [*shape[:-1], shape[-1] // 2]


def _check_spans(spans: Iterable[tuple[int, int, StoredTensor]], data_bytes: int) -> None:
    """Check that the tensors cover the data once, from its first byte to the last."""
    covered = 0
    before = "the start"
    for begin, end, stored in spans:
        if begin != covered:
            kind = "overlaps with" if begin < covered else "leaves a hole after"
            raise _RefusedError(
                f"the entry of {_short(stored.key)}: data_offsets [{begin}, {end}] {kind} {before}, "
                f"which ends at {covered}"
            )
        if end > data_bytes:
            raise _RefusedError(
                f"the entry of {_short(stored.key)}: data_offsets [{begin}, {end}] lead out of the file, "
                f"which has {data_bytes} bytes of data: it is cut short"
            )
        covered = end
        before = _short(stored.key)
    if covered != data_bytes:
        raise _RefusedError(f"the entries end at byte {covered} of the data, the file has {data_bytes} bytes of data")


def _check_text(text: str) -> None:
    """Refuse lone surrogates: JSON can spell them, but no encoding can write them."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _RefusedError(f"{_short(text)} is no valid Unicode")


def _short(value: Any) -> str:
    """Shorten a value for a message; hostile ones may be long, deep, or integers too long to print."""
    match value:
        case dict() | list() if len(value) > 8 or any(isinstance(inner, dict | list) for inner in value):
            return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
        case dict():
            return "{" + ", ".join(f"{_short(key)}: ..." for key in value) + "}"
        case list():
            return "[" + ", ".join(map(_short, value)) + "]"
        case int() if abs(value) >= 10**40:
            return f"a number of {value.bit_length()} bits"
        case _:
            text = ascii(value)
            return text if len(text) <= 120 else f"{text[:117]}..."
