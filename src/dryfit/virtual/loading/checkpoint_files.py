"""Files of weights, read as fakes: ``torch.load``, ``safetensors.torch.load_file`` and ``safetensors.safe_open``.

Large tensors are fakes of the shape and type that the file's header says; small ones are real, as a script may look at
them (step counters, schedules, positions).
"""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dryfit.meta.construction.walk import put_all
from dryfit.meta.files.safetensors_file import DTYPES
from dryfit.meta.private_apis.torch_fakes import FakeTensor
from dryfit.meta.private_apis.torch_tensors import storage_key
from dryfit.virtual.import_hooks import rebind, when_imported
from dryfit.virtual.loading.tensor_classes import Make

_REAL_BELOW_BYTES = 64 << 10
_MAPPED_FROM_BYTES = 1 << 20
_CPU = torch.device("cpu")


def install(make: Make) -> None:
    """Let files of weights be read as fakes.

    Args:
        make: Makes a fake.
    """
    rebind(torch.load, _loading(torch.load, make))
    when_imported("safetensors", lambda module: rebind(module.safe_open, _opening(module.safe_open, make)))
    when_imported("safetensors.torch", lambda module: rebind(module.load_file, _whole_file(module.safe_open)))


def _whole_file(safe_open: Any) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function in the place of ``safetensors.torch.load_file``, which opens files as given."""

    def load_file(filename: Any, device: str | int = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        with safe_open(filename, framework="pt", device=device, **options) as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}

    return load_file


def _opening(original: Any, make: Make) -> Any:
    """Return a class in the place of ``safetensors.safe_open``."""

    class FakeFile:
        """An open safetensors file, whose large tensors have no values."""

        def __init__(
            self, filename: Any, framework: str = "pt", device: str | int | torch.device = "cpu", **options: Any
        ) -> None:
            is_torch = framework in ("pt", "torch", "pytorch")
            self._device = torch.device(device) if is_torch else None
            self._file = original(filename, framework, **({} if is_torch else {"device": device}), **options)

        def __enter__(self) -> "FakeFile":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Any:
            """Return a tensor of the file."""
            if self._device is None:
                return self._file.get_tensor(name)
            stored = self._file.get_slice(name)
            shape, dtype = torch.Size(stored.get_shape()), DTYPES[stored.get_dtype()]
            if shape.numel() * dtype.itemsize >= _REAL_BELOW_BYTES:
                return make(shape, dtype, self._device, False)
            return self._file.get_tensor(name).to(self._device)

        def get_slice(self, name: str) -> Any:
            """Return a tensor of the file that is read in parts."""
            return (
                self._file.get_slice(name) if self._device is None else _Slice(self, self._file.get_slice(name), name)
            )

    return FakeFile


class _Slice:
    """A tensor of a file of which parts are taken."""

    def __init__(self, file: Any, stored: Any, name: str) -> None:
        self._file, self._stored, self._name = file, stored, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


def _loading(original: Callable[..., Any], make: Make) -> Callable[..., Any]:
    """Return a function in the place of ``torch.load``."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        devices: dict[int, torch.device] = {}

        def keep(storage: Any, location: str) -> Any:
            device = _device(map_location, storage, location)
            if storage.nbytes() and device.type == "cuda":
                devices[storage.data_ptr()] = device
            return storage

        if _is_large(f):
            kwargs = {**kwargs, "mmap": True}
        content = original(f, keep, *args, **kwargs)
        return _Content(devices, make).without_data(content)

    return load


def _device(map_location: Any, storage: Any, location: str) -> torch.device:
    """Return where ``torch.load`` would put a storage."""
    if callable(map_location):
        try:
            moved: Any = map_location(storage, location)
        except (AssertionError, RuntimeError):  # torch cannot move a real storage to a device that is not there
            return torch.device("cuda")
        return torch.device(location) if moved is None else moved.device
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        return torch.device(map_location)
    return torch.device(location)


def _is_large(file: Any) -> bool:
    """Whether a file is worth mapping, and can be: written by ``torch.save`` since torch 1.6."""
    if not isinstance(file, str | os.PathLike):
        return False
    path = Path(file)
    return path.is_file() and path.stat().st_size >= _MAPPED_FROM_BYTES and zipfile.is_zipfile(path)


class _Content:
    """What a file of ``torch.save`` holds, while its large tensors become fakes.

    Args:
        devices: Of storages that belong on a CUDA device, by their address.
        make: Makes a fake.
    """

    def __init__(self, devices: dict[int, torch.device], make: Make) -> None:
        self._devices = devices
        self._make = make
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is another tensor's before the end

    def without_data(self, content: Any) -> Any:
        """Return the same content with fakes in the place of large tensors; dicts, lists and modules are changed."""
        match content:
            case torch.Tensor():
                return self._tensor(content)
            case nn.Module():
                put_all(content, lambda slot: self._tensor(slot.tensor))
            case dict():
                for key, value in list(content.items()):
                    content[key] = self.without_data(value)
            case list():
                content[:] = [self.without_data(value) for value in content]
            case tuple():
                values = [self.without_data(value) for value in content]
                cls: Any = type(content)
                return cls._make(values) if hasattr(cls, "_make") else cls(values)
            case _:
                pass
        return content

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):  # a parameter
            device = next(iter(self._devices.values()), _CPU)
            return tensor if device == _CPU else tensor.to(device)
        if tensor.device != _CPU or tensor.layout is not torch.strided:
            return tensor
        self._kept.append(tensor)
        storage = storage_key(tensor)
        key = (storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        if key not in self._made:
            self._made[key] = self._new(tensor).requires_grad_(tensor.requires_grad)
        return self._made[key]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        device = self._devices.get(storage.data_ptr(), _CPU)
        if storage.nbytes() < _REAL_BELOW_BYTES:
            return tensor.detach() if device == _CPU else tensor.detach().to(device)
        key = storage_key(tensor)
        if key not in self._storages:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                self._storages[key] = self._make(tensor.shape, tensor.dtype, device, False)
                return self._storages[key]
            self._storages[key] = self._make(torch.Size([storage.nbytes()]), torch.uint8, device, False)
        whole = self._storages[key].view(-1).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
