"""Read the header of a ``.bin`` or ``.pt`` file of ``torch.save``, without running or reading more than needed.

torch maps the file with ``weights_only=True``, which reads its pickle alone. The place of each mapped storage in
the file follows from its address, because the storages are exactly the records of the file's zip directory. So these
files are read, guarded and checked as safetensors files are.
"""

import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from dryfit.core.errors import LoadError
from dryfit.core.text.words import few
from dryfit.meta.files.file_guard import FileGuard, FileStamp, is_lfs_pointer, open_file
from dryfit.meta.files.safetensors_file import MOST_HEADER_BYTES, FileHeader, StoredTensor
from dryfit.meta.private_apis.torch_modes import without_function_modes

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
