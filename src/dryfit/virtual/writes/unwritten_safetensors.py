"""Files of safetensors that have their true header and no data, where tensors have no values; read back as such.

After the header comes a second file of the tensors that have values: by its length such a file is known.
"""

import io
import itertools
import json
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, BinaryIO, Final

import safetensors
import safetensors.torch
import torch

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.virtual.writes.unwritten_tensors import is_large_zero
from dryfit.virtual.writes.view import path_of
from dryfit.virtual.writes.written import Saved

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_TYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_MOST_HEADER_BYTES: Final = 100_000_000  # as safetensors has it
_LENGTH_BYTES: Final = 8
"""The length of the header, before it; headers are filled up to a multiple of it."""


class SafetensorsFiles:
    """The functions of safetensors.

    Args:
        saved: Is told of files that lack bytes.
        make: Makes a tensor without values from shape and type.
    """

    # In slots, the functions as they were are not replaced with all others.
    __slots__ = ("_load_file", "_make", "_safe_open", "_save", "_save_file", "_saved", "_serialize_file")

    def __init__(self, saved: Saved, make: Callable[[Any, torch.dtype], torch.Tensor]) -> None:
        self._saved = saved
        self._make = make
        self._save_file = safetensors.torch.save_file
        self._load_file = safetensors.torch.load_file
        self._safe_open = safetensors.safe_open
        self._serialize_file = safetensors.serialize_file
        self._save = safetensors.torch.save

    def functions(self) -> dict[Any, Any]:
        """Return what stands for each function."""
        return {
            self._save_file: self.save_file,
            self._load_file: self.load_file,
            self._safe_open: self.safe_open,
            self._serialize_file: self.serialize_file,
            self._save: self.save,
        }

    def save_file(self, tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        """Write tensors, or the header of those that have no values."""
        content = self._small(tensors, metadata)
        with open(filename, "wb") as file:
            file.write(content or b"")
            path = path_of(file.fileno())
        if content is None:
            self._save_file(tensors, path, metadata)
        else:
            self._saved.note_file(os.fspath(filename), _data_bytes(content) or 0)

    def save(self, tensors: dict[str, torch.Tensor], metadata: Any = None) -> bytes:
        """Return a file's bytes; of tensors without values only its header, and the values of the others."""
        content = self._small(tensors, metadata)
        if content is None:
            return self._save(tensors, metadata)
        self._saved.note_bytes(content, _data_bytes(content) or 0)
        return content

    def _small(self, tensors: Any, metadata: Any) -> bytes | None:
        """Return the content of a file without data; None where all tensors have values."""
        if not isinstance(tensors, dict) or not any(map(_has_no_values, tensors.values())):
            return None
        _refuse_shared(tensors)
        values = {name: tensor.contiguous() for name, tensor in tensors.items() if not _has_no_values(tensor)}
        return header(tensors, metadata) + (self._save(values) if values else b"")

    def serialize_file(self, tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
        """Write real data: safetensors opens the file by itself."""
        with open(filename, "wb") as file:
            path = path_of(file.fileno())
        return self._serialize_file(tensor_dict, path, metadata=metadata)

    def load_file(self, filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Read a file; what was not written comes without values."""
        with self.safe_open(filename, "pt", device, *args, **kwargs) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping

    def safe_open(self, filename: Any, framework: str = "pt", device: Any = "cpu", *args: Any, **kwargs: Any) -> Any:
        """Open a file."""
        if isinstance(filename, str | bytes | os.PathLike) and os.path.isfile(filename):
            with open(filename, "rb") as file:
                entries = _header_of(file)
                if _lacks_data(entries, os.fstat(file.fileno()).st_size - file.tell()):
                    values = file.read()
                    known = safetensors.torch.load(values) if values else {}
                    return _HeaderOnly(entries, known, torch.device(device), self._make)
                filename = path_of(file.fileno())
        return self._safe_open(filename, framework, device, *args, **kwargs)


def _header_of(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a file; nothing where it has none."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _MOST_HEADER_BYTES:
        return {}
    try:
        entries = json.loads(file.read(length))
    except ValueError:
        return {}
    return entries if isinstance(entries, dict) else {}


def _lacks_data(entries: dict[str, Any], rest: int) -> bool:
    """Whether so many bytes after a header are fewer than it tells."""
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return bool(ends) and rest < max(ends)


def _data_bytes(content: bytes) -> int | None:
    """Return the bytes that a file lacks; None: none."""
    file = io.BytesIO(content)
    entries = _header_of(file)
    rest = len(content) - file.tell()
    if not _lacks_data(entries, rest):
        return None
    return max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__") - rest


class _HeaderOnly:
    """A file without data, as ``safe_open`` opens one."""

    def __init__(
        self,
        entries: dict[str, Any],
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        make: Callable[..., torch.Tensor],
    ) -> None:
        self._metadata = entries.pop("__metadata__", None)
        self._entries = entries
        self._values = values
        self._device = device
        self._make = make

    def __enter__(self) -> "_HeaderOnly":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def metadata(self) -> dict[str, str] | None:
        """Return what was saved besides the tensors."""
        return self._metadata

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor; it has no values unless they were known."""
        entry = self._entries[name]
        if name in self._values:
            tensor = self._values[name].clone()
        else:
            tensor = self._make(tuple(entry["shape"]), _TYPES[entry["dtype"]])
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def get_slice(self, name: str) -> "_Slice":
        """Return what can be indexed."""
        return _Slice(self, name, self._entries[name])


class _Slice:
    """A tensor of a file of which a part is asked for."""

    def __init__(self, file: _HeaderOnly, name: str, entry: dict[str, Any]) -> None:
        self._file = file
        self._name = name
        self._entry = entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Return the name of its type."""
        return self._entry["dtype"]


def header(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    """Return the first bytes of a file, as safetensors writes them: larger types first, then by name."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = at + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [int(size) for size in tensor.shape],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _has_no_values(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) or is_large_zero(tensor)


def _refuse_shared(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors that share memory, as safetensors does.

    Raises:
        RuntimeError: Some do.
    """
    areas = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in tensors.items() if tensor.nbytes)
    shared = {
        name
        for (start, size, first), (other, _, second) in itertools.pairwise(areas)
        if other < start + size and tensors[first].untyped_storage() is tensors[second].untyped_storage()
        for name in (first, second)
    }
    if shared:
        raise RuntimeError(
            f"Some tensors share memory, this will lead to duplicate memory on disk and potential differences when "
            f"loading them again: {shared}. A potential way to correctly save your model is to use `save_model`. "
            f"More information at https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )
