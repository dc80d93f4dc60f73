"""Parts of stored tensors: which bytes of a file they are, and which parts of its sources a converted tensor needs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist

from dryfit.meta.files.safetensors_file import StoredTensor
from dryfit.meta.loading.keys import Conversion


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Some slices of a tensor along one dimension, put side by side in the order they are named.

    Attributes:
        dim: The dimension.
        ranges: First index and the one behind the last, of each slice.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, of a tensor of this shape."""
        size = sum(end - begin for begin, end in self.ranges)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor, in memory of its own."""
        slices = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return (
            torch.cat(slices, self.dim) if len(slices) > 1 else slices[0].clone(memory_format=torch.contiguous_format)
        )


def spans(stored: StoredTensor, part: StoredSlice) -> Iterator[tuple[int, int]]:
    """Where the bytes of a part lie in the file, offset and length, in the order the part has them.

    The tensor lies in the file in row-major order.
    """
    inner_bytes = math.prod(stored.shape[part.dim + 1 :]) * stored.dtype.itemsize
    row_bytes = stored.shape[part.dim] * inner_bytes
    for outer in range(math.prod(stored.shape[: part.dim])):
        begin_bytes = stored.offset_bytes + outer * row_bytes
        for begin, end in part.ranges:
            yield begin_bytes + begin * inner_bytes, (end - begin) * inner_bytes


def parts_of_sources(
    conversion: Conversion, stored: Mapping[str, StoredTensor], part: StoredSlice
) -> dict[str, StoredSlice | None] | None:
    """Which parts of its sources a part of a converted tensor is made of.

    Args:
        conversion: One that makes a single tensor.
        stored: Every tensor of the checkpoint.
        part: Of the tensor it makes.

    Returns:
        By key, the part to convert, or None for all of it; sources that are not named are not needed. None where the
        conversion does something to its sources that is not known to go slice by slice.
    """
    operations: list[Any] = list(conversion.converter.operations)
    by_pattern: dict[str, list[str]] = {}
    for pattern, key in conversion.sources:
        by_pattern.setdefault(pattern, []).append(key)
    patterns = [pattern for pattern in conversion.converter.source_patterns if pattern in by_pattern]
    needed = dict.fromkeys(patterns, part)
    merged = operations[0].dim if operations and type(operations[0]) is MergeModulelist else None
    rest = operations[1:] if merged is not None else operations
    if [type(operation) for operation in rest] == [Concatenate]:
        sizes = [_size(stored, by_pattern[pattern], merged, rest[0].dim) for pattern in patterns]
        needed = _apart(patterns, sizes, rest[0].dim, part)
    elif rest or len(patterns) != 1:
        return None
    found: dict[str, StoredSlice | None] = {}
    for pattern, wanted in needed.items():
        if merged is None and len(by_pattern[pattern]) != 1:
            return None
        found |= _unstacked(by_pattern[pattern], merged, wanted)
    return found


def _size(stored: Mapping[str, StoredTensor], keys: Sequence[str], merged: int | None, dim: int) -> int:
    """How long one pattern's tensors are along a dimension, after they were stacked."""
    if merged is None:
        return stored[keys[0]].shape[dim]
    return len(keys) if dim == merged else stored[keys[0]].shape[dim - (dim > merged)]


def _apart(patterns: Sequence[str], sizes: Sequence[int], dim: int, part: StoredSlice) -> dict[str, StoredSlice]:
    """Which part of each pattern's tensors a part of what they are put side by side to is."""
    if part.dim != dim:
        return dict.fromkeys(patterns, part)
    found: dict[str, StoredSlice] = {}
    offset = 0
    for pattern, size in zip(patterns, sizes, strict=True):
        cut = [(max(begin - offset, 0), min(end - offset, size)) for begin, end in part.ranges]
        ranges = tuple((begin, end) for begin, end in cut if begin < end)
        if ranges:
            found[pattern] = StoredSlice(dim, ranges)
        offset += size
    return found


def _unstacked(keys: Sequence[str], merged: int | None, part: StoredSlice) -> dict[str, StoredSlice | None]:
    """Which parts of the tensors that are stacked a part of the stack is."""
    if merged is None:
        return dict.fromkeys(keys, part)
    if part.dim == merged:
        return {keys[index]: None for begin, end in part.ranges for index in range(begin, end)}
    return dict.fromkeys(keys, StoredSlice(part.dim - (part.dim > merged), part.ranges))
