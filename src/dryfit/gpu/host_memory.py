"""Host memory of tensors without values: what an offload would take of the host, and takes nothing of here.

Pageable tensors live as long as their storages. Pinned ones come from torch's caching allocator of the host, which
rounds a size up to a power of two and keeps freed blocks for later requests of the same size
(``ATen/core/CachingHostAllocator.h``, ``allocate`` and ``maybe_cache_block``; torch 2.13).
"""

import weakref
from collections import Counter
from typing import Any

import torch

from dryfit.gpu.private_apis.torch_fakes import FakeTensor
from dryfit.gpu.private_apis.torch_tensors import key_of

_SMALL_BYTES = 1 << 10
"""Below so many bytes a pageable storage is not followed: there are many, and together they are nothing."""


class HostMemory:
    """Counts the storages of one process.

    Attributes:
        pageable_bytes: Held now, not pinned.
        pinned_bytes: Page-locked now, with rounding and freed blocks that are kept.
        peak_bytes: Most of both together.
    """

    def __init__(self) -> None:
        self.pageable_bytes = self.pinned_bytes = self.peak_bytes = 0
        self._followed: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        self._free: Counter[int] = Counter()
        """Pinned blocks that nobody holds, by size."""

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self.pageable_bytes + self.pinned_bytes

    def note(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor, if the tensor is a fake of the host."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        if key_of(storage) not in self._followed and storage.nbytes() >= _SMALL_BYTES:
            self._follow(storage, is_pinned=False)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that has another size; nothing where it is not followed."""
        entry = self._followed.get(key_of(storage))
        if entry is not None:
            self._drop(key_of(storage))
            self._follow(storage, is_pinned=entry[2])

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a new tensor lie in pinned memory; return the tensor."""
        storage: Any = tensor.untyped_storage()
        storage.dryfit_pinned = True
        if key_of(storage) in self._followed:
            self._drop(key_of(storage))
        if isinstance(tensor, FakeTensor) and storage.nbytes():
            self._follow(storage, is_pinned=True)
        return tensor

    def _follow(self, storage: torch.UntypedStorage, *, is_pinned: bool) -> None:
        key, size = key_of(storage), storage.nbytes()
        if is_pinned:
            size = 1 << (size - 1).bit_length()
            if self._free[size]:
                self._free[size] -= 1
            else:
                self.pinned_bytes += size
        else:
            self.pageable_bytes += size
        self._followed[key] = weakref.ref(storage, lambda _: self._drop(key)), size, is_pinned
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _drop(self, key: int) -> None:
        """Free a storage; called by whatever drops the last reference, so it must not raise."""
        _, size, is_pinned = self._followed.pop(key)
        if is_pinned:
            self._free[size] += 1
        else:
            self.pageable_bytes -= size


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in pinned memory."""
    return tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), "dryfit_pinned")
