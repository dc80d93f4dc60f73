"""Tensors without values are saved as their shapes: with them a file has its exact size told, and is read back.

``torch.save``, and every other pickle, takes a small description in the place of a fake tensor; the rest is really
written. ``safetensors`` gets a file with its true header and no data. Large real tensors of nothing but zeros are
descriptions too: a fake that comes back to the host is one. Whoever reads such a file gets fakes again.
"""

import copyreg
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.virtual.loading import addresses
from dryfit.virtual.writes.written import Saved

_LARGE_BYTES: Final = 1 << 20
"""From so many bytes on, real tensors are looked at whether they are all zeros."""
_RECORD_BYTES: Final = 200
"""What a storage takes of a file of ``torch.save`` besides its data: two headers with its name, and alignment."""
_ALIGNMENT: Final = 64
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

    Installed after :mod:`dryfit.virtual.loading`: what the script itself saved is known here.
    """
    _make.append(make)
    copyreg.pickle(FakeTensor, _reduced)  # pyright: ignore[reportArgumentType]
    torch.serialization.add_safe_globals([restored, described, zeros])
    files = TorchFiles(saved)
    addresses.install()
    return {torch.save: files.save, torch.load: files.load, pickle.dump: files.dump}


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
