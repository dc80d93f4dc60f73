"""Keys of a checkpoint mapped to a module's tensors, and slices of stored tensors."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
)

from dryfit.gpu.private_apis.torch_modules import COMPILED, children_of
from dryfit.meta.file_formats import StoredTensor
from dryfit.meta.private_apis.transformers_models import useless_keys
from dryfit.settings.errors import LoadError

# Files name tensors after the module that was saved: wrapped in DDP, compiled, with a task head around the encoder,
# by an older transformers. All of that is undone here and reported.


_LEADING = ("module.", "base_model.model.", "base_model.")  # DDP and FSDP1; PEFT
_ADAPTED = "base_layer"  # PEFT, around each layer it adapts
# Tables that old versions saved and that nobody reads: https://github.com/huggingface/transformers/pull/28837
_OLD_TABLES = re.compile(r"rotary_emb\.inv_freq$|(^|\.)embeddings\.position_ids$")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of tensors of a file: experts are stacked, projections merged or split.

    Attributes:
        converter: transformers' own description of it.
        sources: (pattern of the converter, key in the file), in the order they are stacked.
        target: The name the converter is asked for.
    """

    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]
    target: str

    def apply(self, tensors: Mapping[str, torch.Tensor], module: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Convert tensors, by key, to the module's, by name; on meta for a look at the shapes."""
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.sources:
            # A callable is what it takes for a tensor that is not loaded yet; it asks for no more.
            converter.add_tensor(self.target, key, pattern, lambda key=key: tensors[key])  # pyright: ignore
        made: Mapping[str, Any] = converter.convert(self.target, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(slots=True)
class KeyMap:
    """Where each tensor of a file goes.

    Attributes:
        direct: Key in the file by name in the module.
        conversions: Those that take more than a new name.
        unexpected: Keys without a name whose part of the model is not there: heads of another task.
        stray: Keys without a name inside a part that is there: the config and the file do not belong together.
        ignored: Keys that the architecture declares useless.
        renamed: What was undone, for the report: ``{"bert.": 199}``.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    renamed: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def map_keys(module: nn.Module, keys: Sequence[str], names: Sequence[str], aliases: Mapping[str, str]) -> KeyMap:
    """Find the name of every key.

    Args:
        module: The module to fill.
        keys: Of the checkpoint.
        names: All tensors of the module that a checkpoint can fill, tied ones under each of their names.
        aliases: Names by key, where the file names tensors in a way of its own; all other keys have no name then.

    Raises:
        LoadError: Two keys claim one name.
    """
    namer = _Namer(module, names)
    key_map = KeyMap()
    gathered: defaultdict[str, list[tuple[str, str, WeightConverter]]] = defaultdict(list)
    for key in sorted(keys, key=dot_natural_key) if namer.converts else keys:  # experts are stacked in their order
        name, converter, pattern = (
            (aliases.get(key, key), None, None) if aliases else namer.name_of(key, key_map.renamed)
        )
        if converter is not None and pattern is not None and name in namer.places:
            gathered[name].append((pattern, key, converter))
        elif name in namer.places:
            place = namer.places[name]
            if place in key_map.direct:
                raise LoadError(
                    "finding the places of weights",
                    f"the keys {key_map.direct[place]} and {key} both name {place}",
                    allowed="one key for each weight",
                    hint="the file mixes weights of two models; save it again",
                )
            key_map.direct[place] = key
        elif namer.is_ignored(name):
            key_map.ignored.append(key)
        elif namer.is_inside(name):
            key_map.stray.append(key)
        else:
            key_map.unexpected.append(key)
    for name, parts in gathered.items():
        sources = tuple((pattern, key) for pattern, key, _ in parts)
        key_map.conversions.append(Conversion(parts[0][2], sources, name))
    return key_map


class _Namer:
    """Finds names for keys, for one module."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self.places = {_plain_adapter(name): name for name in names} | {name: name for name in names}
        self._prefix = ""
        self._renamings: list[WeightRenaming] = []
        self._converters: list[WeightConverter] = []
        self._ignored: tuple[str, ...] = ()
        if isinstance(module, PreTrainedModel):
            self._prefix = f"{module.base_model_prefix}." if module.base_model_prefix else ""
            transforms = get_model_conversion_mapping(module)
            self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
            self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
            self._ignored = useless_keys(module)

    def name_of(self, key: str, renamed: dict[str, int]) -> tuple[str, WeightConverter | None, str | None]:
        """Return a key's name in the module, the converter it needs, and the pattern that chose it."""
        known = (step for step in _steps(key) if step in self.places)
        bare = key if key in self.places else next(known, _bare(key))
        name, converter, pattern = self._converted(bare)
        if name not in self.places and bare in self.places:
            name, converter, pattern = bare, None, None
        if converter is None and name != key:
            taken = next((part for part in (self._prefix, *_LEADING) if part and key == part + name), None)
            added = self._prefix if self._prefix and name == self._prefix + key else None
            renamed[taken or (f"+{added}" if added else f"{COMPILED}." if COMPILED in key else "older names")] += 1
        return name, converter, pattern

    def _converted(self, key: str) -> tuple[str, WeightConverter | None, str | None]:
        for renaming in self._renamings:
            if _touches(renaming, key):
                key, _ = renaming.rename_source_key(key)
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(key)
            if pattern is not None:
                return self._with_prefix(renamed), converter, pattern
        return self._with_prefix(key), None, None

    @property
    def converts(self) -> bool:
        """Whether some tensors of a file may have to be converted."""
        return bool(self._converters)

    def _with_prefix(self, key: str) -> str:
        """Return a key with the base model's prefix removed or added, where that is a name."""
        if not self._prefix or key in self.places:
            return key
        for candidate in (key.removeprefix(self._prefix), self._prefix + key):
            if candidate in self.places:
                return candidate
        return key

    def is_ignored(self, name: str) -> bool:
        """Whether the architecture declares a key useless."""
        return any(re.search(pattern, name) for pattern in self._ignored) or bool(_OLD_TABLES.search(name))

    def is_inside(self, name: str) -> bool:
        """Whether a key without a name belongs to a part of the model that is there."""
        base = getattr(self._module, self._prefix.rstrip("."), None) if self._prefix else None
        if not isinstance(base, nn.Module):  # the module is the base model itself
            return _is_inside(self._module, name.removeprefix(self._prefix), "")
        first = name.partition(".")[0]
        of_base = first not in children_of(self._module) and first in children_of(base)
        return _is_inside(self._module, self._prefix + name if of_base else name, self._prefix)


def _touches(renaming: WeightRenaming, key: str) -> bool:
    """Whether a renaming may change a key; a plain one goes by its pattern alone."""
    plain = type(renaming) is WeightRenaming and renaming.scope_prefix is None
    return not plain or renaming.compiled_sources.search(key) is not None


def _is_inside(module: nn.Module, name: str, prefix: str) -> bool:
    """Whether the part a key names is one the model would have if it were built for this file.

    What may be absent stands at the top: a pooler or head beside the encoder, or one of several heads. Inside the
    encoder, in a numbered stack or at a layer that is there, an absent part means that the config is another model's.
    """
    *parts, _ = name.split(".")
    at: nn.Module = module
    for depth, part in enumerate(parts):
        below = getattr(at, part, None)
        if isinstance(below, nn.Module):
            at = below
            continue
        head = bool(prefix) and not name.startswith(prefix)
        stacked = any(step.isdigit() for step in parts[: depth + 1])
        return not (
            depth == 0 or isinstance(at, PreTrainedModel) or (head and not stacked and len(children_of(at)) > 0)
        )
    return True


def _bare(key: str) -> str:
    """Return a key without what wrappers added."""
    *_, last = _steps(key)
    return _plain_adapter(last)


def _steps(key: str) -> Iterator[str]:
    """Yield a key with fewer and fewer wrappers: a module may have a part with a wrapper's name itself."""
    yield key
    key = ".".join(part for part in key.split(".") if part != COMPILED)
    yield key
    while prefix := next((prefix for prefix in _LEADING if key.startswith(prefix)), None):
        if prefix == "base_model.model.":
            yield key.removeprefix("base_model.")
        key = key.removeprefix(prefix)
        yield key


def _plain_adapter(name: str) -> str:
    """Return the name a layer had before PEFT wrapped it."""
    if _ADAPTED not in name and not name.startswith(_LEADING[1:]):
        return name
    for prefix in _LEADING[1:]:
        name = name.removeprefix(prefix)
    return ".".join(part for part in name.split(".") if part != _ADAPTED)


# Slices of stored tensors: their bytes in the file, and the source slices of a conversion.


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
