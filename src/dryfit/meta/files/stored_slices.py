"""Slices of stored tensors: their bytes in the file, and the source slices of a conversion."""

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
    """Ranges of a tensor along one dimension, concatenated in the order given.

    Attributes:
        dim: The dimension.
        ranges: Begin and end of each range.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the slice's shape, for a tensor of this shape."""
        size = sum(end - begin for begin, end in self.ranges)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor, in memory of its own."""
        slices = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return (
            torch.cat(slices, self.dim) if len(slices) > 1 else slices[0].clone(memory_format=torch.contiguous_format)
        )


def spans(stored: StoredTensor, part: StoredSlice) -> Iterator[tuple[int, int]]:
    """Yield offset and length of a slice's bytes in the file, in the slice's order.

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
    """Return the slices of its sources that a slice of a converted tensor is made of.

    Args:
        conversion: A conversion that makes a single tensor.
        stored: Every tensor of the checkpoint.
        part: The slice of the tensor it makes.

    Returns:
        By key, the slice to convert, or None for all of it; other sources are not needed. None where the conversion
        is not known to work slice by slice.
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
    needed_by_key: dict[str, StoredSlice | None] = {}
    for pattern, wanted in needed.items():
        if merged is None and len(by_pattern[pattern]) != 1:
            return None
        needed_by_key |= _unstacked(by_pattern[pattern], merged, wanted)
    return needed_by_key


def _size(stored: Mapping[str, StoredTensor], keys: Sequence[str], merged: int | None, dim: int) -> int:
    """Return the length of one pattern's tensors along a dimension, after they were stacked."""
    if merged is None:
        return stored[keys[0]].shape[dim]
    return len(keys) if dim == merged else stored[keys[0]].shape[dim - (dim > merged)]


def _apart(patterns: Sequence[str], sizes: Sequence[int], dim: int, part: StoredSlice) -> dict[str, StoredSlice]:
    """Return the slice of each pattern's tensors that makes up a slice of their concatenation."""
    if part.dim != dim:
        return dict.fromkeys(patterns, part)
    parts: dict[str, StoredSlice] = {}
    offset = 0
    for pattern, size in zip(patterns, sizes, strict=True):
        cut = [(max(begin - offset, 0), min(end - offset, size)) for begin, end in part.ranges]
        ranges = tuple((begin, end) for begin, end in cut if begin < end)
        if ranges:
            parts[pattern] = StoredSlice(dim, ranges)
        offset += size
    return parts


def _unstacked(keys: Sequence[str], merged: int | None, part: StoredSlice) -> dict[str, StoredSlice | None]:
    """Return the slices of stacked tensors that make up a slice of the stack."""
    if merged is None:
        return dict.fromkeys(keys, part)
    if part.dim == merged:
        return {keys[index]: None for begin, end in part.ranges for index in range(begin, end)}
    return dict.fromkeys(keys, StoredSlice(part.dim - (part.dim > merged), part.ranges))
