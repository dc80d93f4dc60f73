"""Tensors without values in files: true headers and exact sizes, no data."""

import copyreg
import io
import itertools
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import nn

from dryfit.gpu import fake_tensors
from dryfit.gpu.import_hooks import rebind, when_imported
from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.stored_types import STORED_TYPES
from dryfit.gpu.view import path_of
from dryfit.gpu.written import Saved
from dryfit.settings.errors import TraceError

# Tensors without values are saved as their shapes: with them a file has its exact size told, and is read back.
#
# ``torch.save``, and every other pickle, takes a small description in the place of a fake tensor; the rest is really
# written. ``safetensors`` gets a file with its true header and no data. Large real tensors of nothing but zeros are
# descriptions too: a fake that comes back to the host is one. Whoever reads such a file gets fakes again.


_LIBRARY: Final = "safetensors"
_LARGE_BYTES: Final = 1 << 20
"""From so many bytes on, real tensors are looked at whether they are all zeros."""
_RECORD_BYTES: Final = 200
"""What a storage takes of a file of ``torch.save`` besides its data: two headers with its name, and alignment."""
_ALIGNMENT: Final = 64
_REPLACE_A_FILE: Final = ("os.rename", "shutil.copyfile")
"""Audit events of functions that replace the file that their second argument names: ``os.replace`` is a rename."""
_state = threading.local()
_make: list[Callable[[Any, torch.dtype], torch.Tensor]] = []


@dataclass(slots=True, eq=False)
class _Counted:
    """What a file does not get; the storages are kept so that none is counted twice."""

    storages: dict[int, Any] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = storage

    @property
    def bytes(self) -> int:
        return sum(
            -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT + _RECORD_BYTES for storage in self.storages.values()
        )


class Description(NamedTuple):
    """What a file has in the place of a fake tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    is_parameter: bool


class _Handle:
    """A fake tensor on its way into a pickle, or, where ``copy.copy`` asked, right into :func:`restored`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor
        counted = getattr(_state, "counted", None)
        if counted is not None:
            counted.add(tensor)
        shape = tuple(int(size) for size in tensor.shape)
        parameter = isinstance(tensor, nn.Parameter)
        return described, (shape, tensor.dtype, str(tensor.device), tensor.requires_grad, parameter)


def described(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool, is_parameter: bool
) -> Description:
    """Return a description, as a pickle calls for it."""
    return Description(shape, dtype, device, requires_grad, is_parameter)


def restored(saved: Description | _Handle) -> torch.Tensor:
    """Return a tensor without values for a description, where ``torch.load`` was asked to put it."""
    if isinstance(saved, _Handle):
        tensor = saved.tensor.detach()
        is_parameter, requires_grad = isinstance(saved.tensor, nn.Parameter), saved.tensor.requires_grad
    else:
        device = _mapped(saved.device)
        tensor = _make[-1](saved.shape, saved.dtype)
        tensor = tensor if tensor.device == device else tensor.to(device)
        is_parameter, requires_grad = saved.is_parameter, saved.requires_grad
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a real tensor of zeros, as a pickle calls for it."""
    tensor = torch.zeros(shape, dtype=dtype)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def is_large_zero(tensor: Any) -> bool:
    """Whether a tensor is a real one on the CPU, large, and has nothing but zeros."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.is_sparse:
        return False
    if tensor.nbytes < _LARGE_BYTES or not tensor.is_contiguous():
        return False
    data = tensor.detach().view(-1).view(torch.uint8)
    return not data[:4096].any() and not data.any()


class SmallPickler(pickle.Pickler):
    """A pickler that writes fakes, of whatever class, and large tensors of zeros as their shapes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is written."""
        if isinstance(obj, FakeTensor):
            return _reduced(obj)
        if not is_large_zero(obj):
            return NotImplemented
        counted = getattr(_state, "counted", None)
        if counted is not None:
            counted.add(obj)
        return zeros, (tuple(obj.shape), obj.dtype, obj.requires_grad, isinstance(obj, nn.Parameter))


class TorchFiles:
    """``torch.save`` and ``torch.load`` of tensors without values."""

    # In slots, the functions as they were are not replaced with all others.
    __slots__ = ("_dump", "_load", "_pickle", "_save", "_saved")

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._save = torch.save
        self._dump = pickle.dump
        self._load: Callable[..., Any] = torch.load
        self._pickle = ModuleType("pickle")
        vars(self._pickle).update({**vars(pickle), "Pickler": SmallPickler, "__name__": "pickle"})

    def save(self, obj: Any, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
        """Save as ``torch.save`` does, without the bytes of fakes.

        Raises:
            RuntimeError: The folder of a path is not there.
        """
        small = self._pickle if pickle_module is pickle else pickle_module
        if not isinstance(f, str | os.PathLike):
            with counting() as counted:
                self._save(obj, buffer := io.BytesIO(), small, *args, **kwargs)
            return self._pass_on(buffer.getvalue(), f, counted)
        parent = os.path.dirname(os.fspath(f))
        if not os.path.isdir(parent or "."):
            raise RuntimeError(f"Parent directory {parent} does not exist.")
        with counting() as counted, open(f, "wb") as file:
            self._save(obj, file, small, *args, **kwargs)
        if counted.storages:
            self._saved.note_file(os.fspath(f), counted.bytes)
        return None

    def dump(self, obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Pickle as ``pickle.dump`` does."""
        with counting() as counted:
            self._dump(obj, buffer := io.BytesIO(), *args, **kwargs)
        self._pass_on(buffer.getvalue(), file, counted)

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as ``torch.load`` does; what was saved without its bytes comes as tensors without values."""
        device = torch.device(map_location) if isinstance(map_location, str | int | torch.device) else None
        on_device = device is not None and device.type == "cuda"
        before = getattr(_state, "map_location", None)
        _state.map_location = map_location
        try:
            with (
                open(f, "rb") if isinstance(f, str | os.PathLike) and not kwargs.get("mmap") else nullcontext(f) as file
            ):
                loaded = self._load(file, "cpu" if on_device else map_location, *args, **kwargs)
        finally:
            _state.map_location = before
        return moved(loaded, device) if on_device else loaded

    def _pass_on(self, content: bytes, file: Any, counted: _Counted) -> None:
        """Write what was pickled to an open file, and note what it lacks."""
        file.write(content)
        if counted.storages:
            self._saved.note_bytes(content, counted.bytes)
            name = getattr(file, "name", getattr(getattr(file, "raw", None), "name", None))
            if isinstance(name, str):
                self._saved.note_part(name, counted.bytes)


@contextmanager
def counting() -> Iterator[_Counted]:
    """Within, count what this thread pickles without its bytes."""
    before, _state.counted = getattr(_state, "counted", None), _Counted()
    try:
        yield _state.counted
    finally:
        _state.counted = before


def moved(value: Any, device: Any) -> Any:
    """Return what was loaded with all tensors on a device; lists and dicts keep being the same objects."""
    if isinstance(value, torch.Tensor | nn.Module):
        return value if isinstance(value, torch.Tensor) and value.device == device else value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = moved(value[key], device)
    elif isinstance(value, list):
        value[:] = [moved(one, device) for one in value]
    elif type(value) is tuple:
        return tuple(moved(one, device) for one in value)
    return value


def install(saved: Saved, make: Callable[[Any, torch.dtype], torch.Tensor]) -> dict[Any, Any]:
    """Let fakes be pickled, and have addresses by which tied weights are found; return what stands for what.

    Installed after :mod:`dryfit.gpu`: what the script itself saved is known here.
    """
    _make.append(make)
    copyreg.pickle(FakeTensor, _reduced)  # pyright: ignore[reportArgumentType]
    torch.serialization.add_safe_globals([restored, described, zeros])
    files = TorchFiles(saved)
    fake_tensors.install_addresses()
    return {torch.save: files.save, torch.load: files.load, pickle.dump: files.dump}


class _HasNoValuesError(Exception):
    """A tensor without values was found."""


class _Probe(pickle.Pickler):
    """A pickler that finds tensors without values, and keeps the data of no others."""

    def persistent_id(self, obj: Any) -> str | None:
        """Return what is written in the place of a tensor's data."""
        return "data" if isinstance(obj, torch.TypedStorage | torch.UntypedStorage) else None

    def reducer_override(self, obj: Any) -> Any:
        """Stop at a tensor without values, on the device or brought to the host."""
        if _has_no_values(obj):
            raise _HasNoValuesError
        return NotImplemented


def keep_files(make: Callable[[Any, torch.dtype], torch.Tensor]) -> None:
    """Let tensors without values be saved and read as in a rehearsal, but over no file that this process did not save.

    Where a rehearsal keeps files out of the user's folders (:func:`install`), this does nothing.
    """
    if _make:
        return
    saved, own = Saved(), set[str]()

    def sparing(save: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(save)
        def spares(obj: Any, *args: Any, **kwargs: Any) -> Any:
            file = args[0] if args else kwargs.get(name)
            if not isinstance(file, str | os.PathLike):
                return save(obj, *args, **kwargs)
            path = os.path.realpath(file)
            if path not in own and os.path.exists(path) and _lacks_values(obj):
                raise _no_replacement(path)
            own.add(path)
            return save(obj, *args, **kwargs)

        return spares

    def spare(event: str, args: tuple[Any, ...]) -> None:
        if event not in _REPLACE_A_FILE or not saved.saves or not all(map(os.path.isfile, args[:2])):
            return
        path = os.path.realpath(args[1])
        if path not in own and saved.lacks(args[0]) and saved.lacks(path) is None:
            raise _no_replacement(path)

    SafetensorsFiles(saved, make).install()
    when_imported(
        f"{_LIBRARY}.torch", lambda library: rebind(library.save_file, sparing(library.save_file, "filename"))
    )
    for old, new in install(saved, make).items():
        rebind(old, sparing(new, "f") if old is torch.save else new)
    sys.addaudithook(spare)


def _lacks_values(obj: Any) -> bool:
    try:
        _Probe(io.BytesIO()).dump(obj)
    except _HasNoValuesError:
        return True
    return False


def _no_replacement(path: str) -> TraceError:
    return TraceError(
        f"saving {path}",
        "the file is there, and tensors of a virtual GPU have no values to take its place",
        hint="another path; dryfit rehearse SCRIPT keeps whatever a script saves out of your files",
    )


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    return restored, (_Handle(tensor),)


def _mapped(device: str) -> torch.device:
    """Return where a tensor saved from a device goes."""
    where = getattr(_state, "map_location", None)
    if where is None:
        return torch.device(device)
    if isinstance(where, dict):
        return torch.device(where.get(device, device))
    return torch.device("cpu") if callable(where) else torch.device(where)


# Files of safetensors that have their true header and no data, where tensors have no values; read back as such.
#
# After the header comes a second file of the tensors that have values: by its length such a file is known.


_NAMES: Final = {dtype: name for name, dtype in STORED_TYPES.items()}
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
    __slots__ = ("_make", "_safe_open", "_save", "_save_file", "_saved", "_serialize_file")

    def __init__(self, saved: Saved, make: Callable[[Any, torch.dtype], torch.Tensor]) -> None:
        self._saved = saved
        self._make = make
        self._save_file: Any = None
        self._safe_open: Any = None
        self._serialize_file: Any = None
        self._save: Any = None

    def install(self) -> None:
        """Take the functions' places as soon as the script has imported them."""
        when_imported(_LIBRARY, self._replace)
        when_imported(f"{_LIBRARY}.torch", self._replace_for_torch)

    def _replace(self, library: Any) -> None:
        self._safe_open, self._serialize_file = library.safe_open, library.serialize_file
        rebind(self._safe_open, self.safe_open)
        rebind(self._serialize_file, self.serialize_file)

    def _replace_for_torch(self, library: Any) -> None:
        self._save_file, self._save = library.save_file, library.save
        rebind(library.load_file, self.load_file)
        rebind(self._save_file, self.save_file)
        rebind(self._save, self.save)

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
                    known = import_module(f"{_LIBRARY}.torch").load(values) if values else {}
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


def stored_dtypes(file: BinaryIO) -> list[torch.dtype]:
    """Return the types of a file's tensors, in its order; those that nobody writes are left out."""
    kinds = (entry.get("dtype") for entry in _header_of(file).values() if isinstance(entry, dict))
    return [STORED_TYPES[kind] for kind in kinds if isinstance(kind, str) and kind in STORED_TYPES]


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
            tensor = self._make(tuple(entry["shape"]), STORED_TYPES[entry["dtype"]])
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
