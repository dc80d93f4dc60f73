"""Read the tensors of a checkpoint into private memory, or map them."""

import ctypes
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from dryfit.gpu.private_apis.torch_modes import without_function_modes
from dryfit.meta.checkpoint_files import CheckpointFiles
from dryfit.meta.file_formats import StoredTensor, changed, open_file
from dryfit.meta.keys import StoredSlice, spans
from dryfit.settings.errors import LoadError
from dryfit.settings.text import few

_CHUNK_BYTES: Final = 1 << 30  # one read of Linux moves at most 2 GiB less a page
_BATCH_BYTES: Final = 8 << 20
_AHEAD_BYTES: Final = 64 << 20
_THREADS: Final = 2


class ReadMode(Enum):
    """The memory of a tensor that is read.

    Attributes:
        PRIVATE: Memory of its own, filled from the file; what happens to the file later changes nothing.
        MAPPED: The file itself, copied page by page where it is written to. Fast to open, shared between
            processes, and only as reliable as the file: see :class:`dryfit.meta.file_formats.FileGuard`.
    """

    PRIVATE = "private"
    MAPPED = "mapped"


class CheckpointReader:
    """Read tensors of a checkpoint whose files must not have changed since their headers were read.

    A context manager. Private tensors can be trusted once it was left without an error: the files are compared
    when they are opened, after the last of their tensors, and on leaving. Mapped tensors stay usable
    after it was left, for as long as they live; call ``checkpoint.guard.check()`` before using them.

    Args:
        checkpoint: What to read.
        mode: Private or mapped.
    """

    def __init__(self, checkpoint: CheckpointFiles, mode: ReadMode) -> None:
        self._checkpoint = checkpoint
        self._mode = mode
        self._stamps = {stamp.path: stamp for stamp in checkpoint.guard.files}
        self._descriptors: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._compare()
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            self._maps.clear()  # not closed: each tensor keeps its mapping alive, the last one ends it

    @property
    def where(self) -> Path:
        """The folder or file that is read."""
        return self._checkpoint.where

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the checkpoint, by its key."""
        return self._checkpoint.tensors

    def tensors(
        self, keys: Iterable[str], parts: Mapping[str, StoredSlice] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors by key, in the order in which they lie on the disk.

        Every tensor is on the CPU, as the file has it in dtype and shape. Private tensors are row-major.

        Args:
            keys: What to read; a key given twice is read once.
            parts: By key, the slice to read instead of the whole; into private memory only.

        Raises:
            LoadError: A key is not in the checkpoint, or a file changed, shrank or vanished.
        """
        parts = parts or {}
        wanted = set(keys)
        unknown = sorted(wanted - self._checkpoint.tensors.keys())
        if unknown:
            raise LoadError(
                f"reading weights from {self._checkpoint.where}",
                f"{len(unknown)} keys are not in the checkpoint: {few(unknown)}",
            )
        file_order = {path: index for index, path in enumerate(self._checkpoint.files)}
        order = [self._checkpoint.tensors[key] for key in wanted]
        order.sort(key=lambda stored: (file_order[stored.file], stored.offset_bytes, stored.key))
        for stored in order:
            if stored.value is not None:  # a copy: tensors that share memory in the file need not be tied here
                yield stored.key, _copy_of(stored.value, parts.get(stored.key))
        order = [stored for stored in order if stored.value is None]
        match self._mode:
            case ReadMode.PRIVATE:
                yield from self._private([_Wanted(stored, parts.get(stored.key)) for stored in order])
            case ReadMode.MAPPED:
                assert not parts
                yield from self._mapped(order)
        self._compare()

    def _private(self, order: Sequence["_Wanted"]) -> Iterator[tuple[str, torch.Tensor]]:
        # Memory is allocated here: allocated in the threads, small tensors would fragment the heap.
        pending: deque[tuple[Future[list[torch.Tensor]], list[_Wanted], int]] = deque()
        ahead_bytes = 0
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="dryfit-read") as pool:
            try:
                for batch, size_bytes in _batches(order):
                    while pending and ahead_bytes + size_bytes > _AHEAD_BYTES:
                        ahead_bytes -= pending[0][2]
                        yield from _results(*pending.popleft()[:2])
                    descriptor = self._open(batch[0].stored.file)
                    future = pool.submit(_fill, descriptor, batch, [_memory(wanted) for wanted in batch])
                    pending.append((future, batch, size_bytes))
                    ahead_bytes += size_bytes
                while pending:
                    yield from _results(*pending.popleft()[:2])
            finally:
                pool.shutdown(cancel_futures=True)

    def _mapped(self, order: Sequence[StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for stored in order:
            yield stored.key, _view(self._map(stored.file), stored)

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            stamp = self._stamps[path]
            descriptor, _ = open_file(path, f"reading weights from {path}")
            self._descriptors[path] = descriptor
            stamp.compare(os.fstat(descriptor))
        return self._descriptors[path]

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            stamp = self._stamps[path]
            descriptor = self._open(path)
            try:
                self._maps[path] = mmap.mmap(descriptor, stamp.size_bytes, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:  # ValueError: longer than the file has become
                stamp.compare(os.fstat(descriptor))
                raise LoadError(f"mapping {path}", str(error), hint="read private copies instead") from error
        return self._maps[path]

    def _compare(self) -> None:
        for path, descriptor in self._descriptors.items():
            self._stamps[path].compare(os.fstat(descriptor))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor to read, or a slice of it.

    A tensor that is not row-major (in a pickle) is read whole and sliced afterwards.
    """

    stored: StoredTensor
    part: StoredSlice | None

    @property
    def size_bytes(self) -> int:
        if self.part is None or self.stored.stride is not None:
            return self.stored.size_bytes
        return math.prod(self.part.shape_of(self.stored.shape)) * self.stored.dtype.itemsize

    def spans(self) -> Iterator[tuple[int, int]]:
        """Offset and length of what is read, in order."""
        if self.part is None or self.stored.stride is not None:
            return iter([(self.stored.offset_bytes, self.stored.size_bytes)])
        return spans(self.stored, self.part)


def _copy_of(value: torch.Tensor, part: StoredSlice | None) -> torch.Tensor:
    return value.clone(memory_format=torch.contiguous_format) if part is None else part.of(value)


def _batches(order: Sequence[_Wanted]) -> Iterator[tuple[list[_Wanted], int]]:
    """Yield batches of neighbours in one file, large enough to be worth a thread's task."""
    batch: list[_Wanted] = []
    size_bytes = 0
    for wanted in order:
        full = size_bytes + wanted.size_bytes > _BATCH_BYTES
        if batch and (full or wanted.stored.file != batch[0].stored.file):
            yield batch, size_bytes
            batch, size_bytes = [], 0
        batch.append(wanted)
        size_bytes += wanted.size_bytes
    if batch:
        yield batch, size_bytes


def _results(future: Future[list[torch.Tensor]], batch: Sequence[_Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
    for wanted, tensor in zip(batch, future.result(), strict=True):
        yield wanted.stored.key, tensor


def _memory(wanted: _Wanted) -> torch.Tensor:
    stored = wanted.stored
    # A caller's mode or device context must not send this tensor elsewhere.
    with without_function_modes():
        if stored.stride is not None:
            return torch.empty(stored.size_bytes // stored.dtype.itemsize, dtype=stored.dtype, device="cpu")
        shape = stored.shape if wanted.part is None else wanted.part.shape_of(stored.shape)
        return torch.empty(shape, dtype=stored.dtype, device="cpu")


def _fill(descriptor: int, batch: Sequence[_Wanted], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    filled: list[torch.Tensor] = []
    for wanted, tensor in zip(batch, memory, strict=True):
        stored = wanted.stored
        if wanted.size_bytes:
            # Not through .numpy(): that marks the memory for good as not torch's own.
            memory_of = (ctypes.c_ubyte * wanted.size_bytes).from_address(tensor.data_ptr())
            view, done = memoryview(memory_of).cast("B"), 0
            for offset_bytes, size_bytes in wanted.spans():
                _read_into(descriptor, stored, offset_bytes, view[done : done + size_bytes])
                done += size_bytes
        if stored.stride is None:
            filled.append(tensor)
        else:
            whole = tensor.as_strided(stored.shape, stored.stride)
            filled.append(whole.contiguous() if wanted.part is None else wanted.part.of(whole))
    return filled


def _read_into(descriptor: int, stored: StoredTensor, offset_bytes: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(descriptor, [memory[done : done + _CHUNK_BYTES]], offset_bytes + done)
        except OSError as error:
            raise LoadError(
                f"reading {stored.key} from {stored.file}", f"the file cannot be read ({error.strerror})"
            ) from error
        if count == 0:
            raise changed(stored.file, f"it ends within {stored.key}")
        done += count


def _view(mapping: mmap.mmap, stored: StoredTensor) -> torch.Tensor:
    item_bytes = stored.dtype.itemsize
    with without_function_modes():
        if not stored.size_bytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        if stored.offset_bytes % item_bytes:
            count, offset = stored.size_bytes, stored.offset_bytes
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=offset).clone().view(stored.dtype)
        else:
            count = stored.size_bytes // item_bytes
            flat = torch.frombuffer(mapping, dtype=stored.dtype, count=count, offset=stored.offset_bytes)
        return flat.view(stored.shape) if stored.stride is None else flat.as_strided(stored.shape, stored.stride)
