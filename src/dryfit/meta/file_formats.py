"""Headers of safetensors and ``torch.save`` files, read strictly and without running anything."""

import json
import math
import os
import pickle
import stat
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.gpu.private_apis.torch_modes import without_function_modes
from dryfit.gpu.stored_types import STORED_TYPES
from dryfit.settings.errors import LoadError
from dryfit.settings.text import few
from dryfit.settings.wire import unique_keys

# Check that a file is still the one whose header was read.


_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """The state of a file when its header was read.

    Attributes:
        path: The file, as it was named; links are followed.
        device: Number of the file system.
        inode: Number of the file in it.
        size_bytes: Its length.
        mtime_ns: When its content last changed.
    """

    path: Path
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    def compare(self, now: os.stat_result) -> None:
        """Compare with the file's present state.

        Raises:
            LoadError: The file was replaced, has another length, or was written to.
        """
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            what = f"another file took its place (inode {self.inode}, now {now.st_ino})"
        elif now.st_size != self.size_bytes:
            what = f"its size changed from {self.size_bytes} to {now.st_size} bytes"
        elif now.st_mtime_ns != self.mtime_ns:
            what = f"it was written to (mtime {self.mtime_ns} ns, now {now.st_mtime_ns} ns)"
        else:
            return
        raise changed(self.path, what)


@dataclass(frozen=True, slots=True)
class FileGuard:
    """The files that weights came from, as they were when their headers were read.

    Tensors of a mapped file *are* the file: overwritten in place it changes their values, cut short it kills the
    process with SIGBUS. So call :meth:`check` before each use of mapped tensors. What remains: a change between the
    check and the use is not seen, nor one that keeps inode, size and mtime alike (two writes within one tick of the
    file system's clock, or a time put back on purpose). Where that matters, read private copies.
    """

    files: tuple[FileStamp, ...]

    def check(self) -> None:
        """Compare every file with its state when it was read.

        Raises:
            LoadError: One was changed, replaced, cut short or removed.
        """
        for stamp in self.files:
            try:
                now = stamp.path.stat()
            except OSError as error:
                raise changed(stamp.path, f"it cannot be looked at any more ({error.strerror})") from error
            stamp.compare(now)


def open_file(path: Path, doing: str) -> tuple[int, FileStamp]:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        LoadError: There is no such file, it cannot be read, or it is a folder, pipe or device.
    """
    try:
        # Without O_NONBLOCK a pipe in a file's place would hang here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LoadError(doing, f"{path} cannot be opened ({error.strerror})", "a file that can be read") from error
    now = os.fstat(descriptor)
    if not stat.S_ISREG(now.st_mode):
        os.close(descriptor)
        raise LoadError(doing, f"{path} is no regular file", "a file")
    return descriptor, FileStamp(path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)


def is_lfs_pointer(descriptor: int) -> bool:
    """Whether a file is a git-lfs pointer to a file that was not fetched."""
    return os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER


def changed(path: Path, what: str) -> LoadError:
    """Return the error for a file that changed."""
    return LoadError(
        f"reading weights from {path}",
        f"the file changed since its header was read: {what}",
        allowed="a file that nobody writes to while its weights are in use",
        hint="load again; write new weights to a new file and rename it",
    )


# The header of a safetensors file, read strictly.
#
# The checks are our own and stricter than the library's, which tolerates what two readers may understand differently
# (duplicate keys, unknown fields). Format: https://github.com/huggingface/safetensors#format


MOST_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""

_MOST_NUMBER = 2**63 - 1
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_LENGTH_BYTES = 8

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in STORED_TYPES.items()}


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
        raise _RefusedError(f"dtype is {_short(name)}; known are {', '.join(STORED_TYPES)}")
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
    stored = StoredTensor(key, path, STORED_TYPES[name], sizes, begin + offsets[0], size_bytes)
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


# Read the header of a ``.bin`` or ``.pt`` file of ``torch.save``, without running or reading more than needed.
#
# torch maps the file with ``weights_only=True``, which reads its pickle alone. The place of each mapped storage in
# the file follows from its address, because the storages are exactly the records of the file's zip directory. So
# these files are read, guarded and checked as safetensors files are.


# The pickled number that begins a file of torch.save before 1.6 (torch.serialization.MAGIC_NUMBER).
_OLD_START: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_WRAPPERS: Final = ("state_dict", "model_state_dict")
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_MOST_EXPANDED_BYTES = 64 << 20
# What torch raises for a torn or hostile file; a plain pickle error, or whatever its restricted machine trips over.
_TORN = (
    pickle.UnpicklingError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    struct.error,
)


def read_pickle_header(path: Path) -> FileHeader:
    """List the tensors of a file written by ``torch.save``; no data is read.

    A file from before torch 1.6 cannot be read in parts: its tensors are read here, and a note says so.

    Raises:
        LoadError: The file is torn, holds more than weights, or tensors without data.
    """
    doing = f"reading the weights' places in {path}"
    descriptor, stamp = open_file(path, doing)
    try:
        if os.pread(descriptor, len(_OLD_START), 0) == _OLD_START:
            return _read_old(path, stamp, doing)
        records = _records(path, descriptor, doing)
        whole, storages = _load(path, doing)
        content, notes = _state_dict(whole, path, doing)
        named = list(_tensors(content, doing))
        begin = _begin(storages, records, doing)
        stored = [_stored(key, value, stamp, begin) for key, value in named]
        FileGuard((stamp,)).check()  # by its name: zipfile and torch have opened it once more
    except OSError as error:
        raise LoadError(doing, f"it cannot be read ({error.strerror or error})") from error
    finally:
        os.close(descriptor)
    stored.sort(key=lambda tensor: (tensor.offset_bytes, tensor.key))
    return FileHeader({tensor.key: tensor for tensor in stored}, stamp, notes)


def _read_old(path: Path, stamp: FileStamp, doing: str) -> FileHeader:
    """Read a file of torch's format from before 1.6 whole."""
    whole, _ = _load(path, doing, mapped=False)
    content, notes = _state_dict(whole, path, doing)
    tensors: dict[str, StoredTensor] = {}
    for key, value in _tensors(content, doing):
        _refuse_expanded(key, value, stamp)
        tensors[key] = StoredTensor(key, path, value.dtype, tuple(value.shape), 0, value.nbytes, value=value.detach())
    FileGuard((stamp,)).check()
    return FileHeader(tensors, stamp, (*notes, f"{path.name}: torch's format from before 1.6, read whole"))


def _records(path: Path, descriptor: int, doing: str) -> dict[int, int]:
    """Return offset and size of each storage's record; empty ones are left out."""
    records: dict[int, int] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.rpartition("/")[2]
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise LoadError(doing, f"its record {entry.filename!r} is compressed or encrypted")
                if name == "data.pkl" and entry.file_size > MOST_HEADER_BYTES:
                    raise LoadError(doing, f"its pickle has {entry.file_size} bytes", f"at most {MOST_HEADER_BYTES}")
                if name == "byteorder" and (
                    entry.file_size > 16 or archive.read(entry).strip() != sys.byteorder.encode()
                ):
                    raise LoadError(doing, "it was written on a machine of another byte order", sys.byteorder)
                if not entry.filename.endswith(f"/data/{name}") or not entry.file_size:
                    continue
                # The directory names the place of a local header; the data begin after its name and padding.
                head = os.pread(descriptor, _LOCAL_HEADER.size, entry.header_offset)
                signature, *lengths = _LOCAL_HEADER.unpack(head)
                if signature != b"PK\3\4":
                    raise zipfile.BadZipFile(f"no record begins at byte {entry.header_offset}")
                records[entry.header_offset + _LOCAL_HEADER.size + sum(lengths)] = entry.file_size
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError) as error:
        lfs = is_lfs_pointer(descriptor)
        old = b"ustar" in os.pread(descriptor, 512, 0)
        raise LoadError(
            doing,
            "the file is a git-lfs pointer, not weights"
            if lfs
            else "the file has torch's first format, a tar archive"
            if old
            else f"the file is no zip archive of torch.save ({error})",
            allowed="a complete file written by torch.save since torch 1.6, or safetensors",
            hint="run `git lfs pull`"
            if lfs
            else "if you trust it, save it again: torch.save(torch.load(file, weights_only=True), file)"
            if old
            else "download or save the file again",
        ) from error
    return records


def _load(path: Path, doing: str, *, mapped: bool = True) -> tuple[Any, list[torch.UntypedStorage]]:
    """Load a file and its storages; mapped: without reading their data."""
    storages: list[torch.UntypedStorage] = []

    def keep(storage: Any, _location: str) -> Any:
        storages.append(storage)
        return storage  # where it is: on the CPU

    try:
        # A caller's mode or device context must not act here.
        with without_function_modes():
            return torch.load(path, weights_only=True, mmap=mapped, map_location=keep), storages
    except _TORN as error:
        refused = isinstance(error, pickle.UnpicklingError)
        text = " ".join(str(error).split())
        # torch's advice to load the file without protection is not passed on.
        first = text.partition("WeightsUnpickler error:")[2] or text
        raise LoadError(
            doing,
            f"{'it holds more than plain tensors, or is torn' if refused else 'it is torn'}: {first[:300]}",
            allowed="a state dict of plain tensors: nothing that runs code is loaded",
            hint="use a safetensors file, or save the state dict alone with torch.save(model.state_dict(), file)",
        ) from error


def _state_dict(content: Any, path: Path, doing: str) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    if not isinstance(content, Mapping):
        raise LoadError(
            doing, f"it holds {_kind(content)}", "a state dict, or one under " + " or ".join(map(repr, _WRAPPERS))
        )
    wrappers = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
    if not wrappers:
        return content, ()
    if len(wrappers) > 1:
        raise LoadError(doing, f"it holds two state dicts: {', '.join(map(repr, wrappers))}", "one state dict")
    others = [str(name) for name in content if name != wrappers[0]]
    note = f"{path.name}: the weights lie under {wrappers[0]!r}"
    return content[wrappers[0]], (note + (f"; not used: {few(others)}" if others else ""),)


def _tensors(content: Mapping[Any, Any], doing: str) -> Iterator[tuple[str, torch.Tensor]]:
    odd = [f"{key!r} is {_kind(value)}" for key, value in content.items() if _unusable(key, value)]
    if odd:
        raise LoadError(
            doing,
            f"{len(odd)} of {len(content)} entries are no weights: {few(odd)}",
            allowed="a dictionary of names and plain tensors with data",
            hint="save the state dict of a model that is wholly on a real device, alone: "
            "torch.save(model.state_dict(), file)",
        )
    yield from content.items()


def _unusable(key: Any, value: Any) -> bool:
    return (
        not isinstance(key, str)
        or not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.is_conj()
        or value.is_neg()
    )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    if value.device.type != "cpu":
        return f"a tensor on {value.device.type}, without data"
    if value.is_quantized or value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}, dtype {value.dtype}"
    return "a tensor"


def _begin(storages: Sequence[torch.UntypedStorage], records: Mapping[int, int], doing: str) -> int:
    """Return the address at which the file would begin if all of it were mapped."""
    places = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    if not places:
        return 0
    begin = min(places) - min(records, default=0)
    if {place - begin: size for place, size in places.items()} != records:
        raise LoadError(
            doing,
            f"its {len(places)} storages are not the {len(records)} records of its zip directory",
            allowed="a file as torch.save writes it",
            hint="save its state dict again, or use a safetensors file",
        )
    return begin


def _stored(key: str, value: torch.Tensor, stamp: FileStamp, begin: int) -> StoredTensor:
    """Place one tensor. Torch refuses one that leads out of its storage, :func:`_begin` a storage that is no record."""
    shape, stride = tuple(value.shape), tuple(value.stride())
    if not value.numel():
        return StoredTensor(key, stamp.path, value.dtype, shape, 0, 0)
    _refuse_expanded(key, value, stamp)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    size_bytes = (last + 1) * value.dtype.itemsize
    dense = value.is_contiguous()
    return StoredTensor(
        key, stamp.path, value.dtype, shape, value.data_ptr() - begin, size_bytes, None if dense else stride
    )


def _refuse_expanded(key: str, value: torch.Tensor, stamp: FileStamp) -> None:
    if value.nbytes > max(stamp.size_bytes, _MOST_EXPANDED_BYTES):  # steps of 0 make a terabyte of one number
        shape, stride = tuple(value.shape), tuple(value.stride())
        raise LoadError(
            f"reading the weights' places in {stamp.path}",
            f"{key!r} of shape {shape} and stride {stride} takes {value.nbytes} bytes, the file has {stamp.size_bytes}",
            allowed="tensors no larger than the file",
            hint="save the tensor with .contiguous()",
        )
