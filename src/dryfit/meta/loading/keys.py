"""Map the keys of a checkpoint to the names of a module's tensors.

Files name tensors after the module that was saved: wrapped in DDP, compiled, with a task head around the encoder, by
an older transformers. All of that is undone here and reported.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

from dryfit.core.errors import LoadError
from dryfit.meta.private_apis.torch_modules import COMPILED, children_of
from dryfit.meta.private_apis.transformers_models import useless_keys

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
