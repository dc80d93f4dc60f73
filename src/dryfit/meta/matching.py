"""Match a checkpoint's tensors to a module's, from headers alone: before anything is read or changed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.gpu.private_apis.torch_tensors import storage_key
from dryfit.gpu.slots import Slot, SlotKind, is_plain, slots
from dryfit.meta.checkpoint_files import CheckpointFiles
from dryfit.meta.file_formats import StoredTensor
from dryfit.meta.keys import Conversion, KeyMap, StoredSlice, map_keys
from dryfit.meta.private_apis.transformers_models import computed_keys
from dryfit.meta.reading import ReadMode
from dryfit.meta.tape import is_deferred
from dryfit.settings.errors import LoadError
from dryfit.settings.text import few

Missing = Literal["error", "init"] | Sequence[str]
"""What a checkpoint may lack: nothing, anything, or the names that match one of some patterns (``classifier.*``)."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to fill a module; see :func:`dryfit.meta.materialise`.

    Attributes:
        aliases: Names by key, where a file names tensors in a way of its own.
        partial: Whether tensors that have data already may stay as they are.
        exact: Whether every key must have a target: for files of our own.
        parts: The slice wanted of a weight, by any of its names; weights without a name here are read whole. Checks
            are made on the whole weights, which the module has when it is filled.
        made_by: By the first name of a weight that is to be quantised, what makes the parameter of the tensor read.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    missing: Missing = "error"
    unexpected: tuple[str, ...] = ()
    mode: ReadMode = ReadMode.PRIVATE
    aliases: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    exact: bool = False
    parts: Mapping[str, StoredSlice] = field(default_factory=dict)
    made_by: Mapping[str, Callable[[torch.Tensor], nn.Parameter]] = field(default_factory=dict)

    def part_of(self, target: "Target") -> StoredSlice | None:
        """Return the slice that is wanted of a weight; None: all of it."""
        return next((self.parts[name] for name in target.names if name in self.parts), None)


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of a module, with every slot it is tied into.

    Attributes:
        slots: Where it is; the first gives it its name.
        names: All its names.
        tensor: What it is now, possibly without data.
        persistent: Whether a checkpoint of the module holds it.
        is_parameter: Whether it may be trained.
    """

    slots: tuple[Slot, ...]
    names: tuple[str, ...]
    tensor: torch.Tensor
    persistent: bool
    is_parameter: bool

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass(slots=True)
class Match:
    """Where each tensor of a module comes from.

    Attributes:
        targets: All tensors of the module.
        from_file: Target of each key whose tensor fills it as it is.
        duplicates: First key by each further key of a tied target; their tensors must be equal.
        conversions: Those whose results fill ``converted``.
        converted: The target of each name that a conversion makes.
        made_of: The keys that each of those names is made of, for the report.
        constructed: Targets that keep their constructor's value.
        views: Targets without data that view a part of another's memory, with that other; they stay views of it.
        redundant: Keys for tables that the constructor computes and the file holds too; they must be equal.
        keys: How keys became names.
    """

    targets: list[Target]
    from_file: dict[str, Target] = field(default_factory=dict)
    duplicates: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    converted: dict[str, Target] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    constructed: list[Target] = field(default_factory=list)
    views: list[tuple[Target, Target]] = field(default_factory=list)
    redundant: dict[str, Target] = field(default_factory=dict)
    keys: KeyMap = field(default_factory=KeyMap)


@dataclass(slots=True)
class Complaints:
    """All problems of a match, so that one error can name them.

    Attributes:
        missing: Names the file has nothing for.
        shapes: Sentences about tensors of another shape.
        kinds: Sentences about tensors of another kind of number.
        strays: Keys without a target inside a part of the model that is there.
        named: Targets (by id) that a sentence already names.
    """

    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    named: set[int] = field(default_factory=set)

    def shape_of(self, target: Target, stored: StoredTensor | torch.Tensor) -> None:
        """Note a tensor of another shape."""
        self.shapes.append(f"{target.name}: {list(stored.shape)} in the file, not {list(target.tensor.shape)}")
        self.named.add(id(target))

    def raise_if_any(self, checkpoint: CheckpointFiles | None) -> None:
        """Raise one error that names everything.

        Raises:
            LoadError: Something is wrong.
        """
        where = checkpoint.where if checkpoint is not None else None
        parts = [
            f"{len(names)} {what} ({few(names)})"
            for names, what in (
                (self.missing, "missing"),
                (self.shapes, "of another shape"),
                (self.kinds, "of another kind of number"),
                (self.strays, "without a place in a part of the model that is there"),
            )
            if names
        ]
        if not parts:
            return
        raise LoadError(
            f"loading weights from {where}" if where else "filling a model without a checkpoint",
            "weights: " + "; ".join(parts),
            allowed="a file with every weight of the model and none too many in the parts it has"
            if where
            else "a checkpoint, or missing=... for the weights that may be drawn at random",
            hint=self._hint(),
        )

    def _hint(self) -> str:
        if any("lora_" in name for name in self.strays):
            return "the file holds adapters: load its base model and pass attach=FOLDER"
        if self.strays and not self.missing:
            return "check that config.json and the weights belong together: the file is of a larger model"
        if self.kinds:
            return "quantised checkpoints cannot be loaded; take the unquantised one"
        if self.shapes:
            return "check that config.json and the weights belong together; missing=['NAME*'] draws a new head"
        return "check that config.json and the weights belong together; missing=['NAME*'] allows a new head"


def targets(module: nn.Module) -> list[Target]:
    """List every tensor of a module once, with its ties: one tensor object, or equal views of one memory.

    Raises:
        LoadError: A tensor is sharded, quantised or lazy.
    """
    groups: dict[object, list[Slot]] = {}
    wrapped: list[str] = []
    for slot in slots(module):
        if not is_plain(slot.tensor):
            wrapped.append(f"{slot.name} ({type(slot.tensor).__name__})")
        else:
            groups.setdefault(memory_of(slot.tensor), []).append(slot)
    if wrapped:
        raise LoadError(
            "filling a model",
            f"{len(wrapped)} parameters are no plain tensors: {few(wrapped)}",
            allowed="plain tensors, on meta or with data",
            hint="fill the model first; then shard or quantise it (a lazy module: run it once on an example first)",
        )
    return [_target_of(group) for group in groups.values()]


def _target_of(group: list[Slot]) -> Target:
    first = group[0]
    if len(group) == 1:
        return Target((first,), first.names, first.tensor, first.persistent, first.kind is SlotKind.PARAMETER)
    group.sort(key=lambda slot: slot.kind is not SlotKind.PARAMETER)
    first = group[0]
    names = tuple(dict.fromkeys(name for slot in group for name in slot.names))
    persistent = any(slot.persistent for slot in group)
    return Target(tuple(group), names, first.tensor, persistent, first.kind is SlotKind.PARAMETER)


def match(module: nn.Module, checkpoint: CheckpointFiles | None, options: LoadOptions) -> Match:
    """Decide where each tensor of a module comes from.

    Args:
        module: What to fill.
        checkpoint: Its weights; None: there are none.
        options: What may be missing and what may be left over.

    Raises:
        LoadError: A weight is missing, of another shape or kind, or stray, with the names of all of them.
    """
    matched, complaints = examine(module, checkpoint, options)
    complaints.raise_if_any(checkpoint)
    return matched


def examine(module: nn.Module, checkpoint: CheckpointFiles | None, options: LoadOptions) -> tuple[Match, Complaints]:
    """Match as :func:`match` does, and return the problems as a value.

    Raises:
        LoadError: Two keys claim one target.
    """
    every = targets(module)
    by_name = {name: target for target in every for name in target.names}
    fillable = [name for name, target in by_name.items() if target.persistent or target.is_parameter]
    stored = checkpoint.tensors if checkpoint is not None else {}
    matched = Match(every, keys=map_keys(module, list(stored), fillable, options.aliases))
    complaints = Complaints()
    _take_direct(matched, by_name, stored, options.missing, complaints)
    _take_converted(matched, module, by_name, stored, complaints)
    filled = {id(target) for table in (matched.from_file, matched.converted) for target in table.values()}
    rest = [target for target in every if id(target) not in filled]
    wholes = _wholes(every) if any(is_deferred(target.tensor) for target in rest) else {}
    for target in rest:
        whole = wholes.get(storage_key(target.tensor)) if is_deferred(target.tensor) else None
        if whole is not None and whole is not target and whole.tensor.dtype == target.tensor.dtype:
            matched.views.append((target, whole))
            continue
        matched.constructed.append(target)
        kept = not is_deferred(target.tensor) and (checkpoint is None or options.partial)
        if id(target) in complaints.named:
            continue
        if target.persistent and not kept and not _may_lack(target, options.missing, module):
            complaints.missing.append(target.name)
    _judge_strays(matched, by_name, options.unexpected, complaints)
    if options.exact:
        complaints.strays += matched.keys.unexpected
    return matched, complaints


def _wholes(every: Sequence[Target]) -> dict[int, Target]:
    """Return the targets without data that are all of their storage, by storage."""
    return {
        storage_key(target.tensor): target
        for target in every
        if is_deferred(target.tensor)
        and target.tensor.is_contiguous()
        and target.tensor.nbytes == target.tensor.untyped_storage().nbytes()
    }


def allowed_by(names: Iterable[str], missing: Missing) -> bool:
    """Whether a caller allowed a checkpoint to lack a tensor with these names."""
    if isinstance(missing, str):
        return missing == "init"
    return any(fnmatchcase(name, pattern) for name in names for pattern in missing)


def memory_of(tensor: torch.Tensor) -> object:
    """Identify the memory a tensor views, and how: equal for tensors that are the same."""
    shape = tensor.shape
    if shape.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), shape, tensor.stride(), tensor.dtype


def _take_direct(
    matched: Match,
    by_name: Mapping[str, Target],
    stored: Mapping[str, StoredTensor],
    missing: Missing,
    complaints: Complaints,
) -> None:
    first: dict[int, str] = {}
    for name, key in matched.keys.direct.items():
        target, tensor = by_name[name], stored[key]
        if tuple(tensor.shape) != tuple(target.tensor.shape):
            # A new head in the place of an old one: allowed by name, and then drawn anew.
            if isinstance(missing, str) or not allowed_by(target.names, missing):
                complaints.shape_of(target, tensor)
            else:
                matched.keys.unexpected.append(key)
            continue
        if not _same_kind(tensor.dtype, target.tensor.dtype):
            complaints.kinds.append(f"{name}: {tensor.dtype} in the file, not {target.tensor.dtype}")
            complaints.named.add(id(target))
            continue
        if id(target) in first:
            matched.duplicates[key] = first[id(target)]
        else:
            first[id(target)] = key
            matched.from_file[key] = target


def _take_converted(
    matched: Match,
    module: nn.Module,
    by_name: Mapping[str, Target],
    stored: Mapping[str, StoredTensor],
    complaints: Complaints,
) -> None:
    for conversion in matched.keys.conversions:
        assert isinstance(module, PreTrainedModel)  # only they have conversions
        shapes = {
            key: torch.empty(stored[key].shape, dtype=stored[key].dtype, device="meta") for _, key in conversion.sources
        }
        try:
            made = conversion.apply(shapes, module)
        except (RuntimeError, ValueError, IndexError) as error:
            keys = few(key for _, key in conversion.sources)
            complaints.shapes.append(f"{conversion.target}: cannot be made of {keys} ({error})")
            continue
        for name, tensor in made.items():
            target = by_name.get(name)
            if target is None:
                complaints.strays.append(name)
            elif tuple(tensor.shape) != tuple(target.tensor.shape):
                complaints.shape_of(target, tensor)
            else:
                matched.converted[name] = target
                matched.made_of[target.name] = few((key for _, key in conversion.sources), most=1)
        matched.conversions.append(conversion)


def _may_lack(target: Target, missing: Missing, module: nn.Module) -> bool:
    """Whether a target that a checkpoint usually fills may keep the constructor's value."""
    if allowed_by(target.names, missing):
        return True
    # Tables that the architecture declares to be right as its constructor computes them.
    ignored = computed_keys(module)
    computed = not target.is_parameter and not is_deferred(target.tensor)
    return computed and isinstance(module, PreTrainedModel) and any(key in target.name for key in ignored)


def _judge_strays(
    matched: Match, by_name: Mapping[str, Target], unexpected: Sequence[str], complaints: Complaints
) -> None:
    for key in matched.keys.stray:
        table = by_name.get(key)
        if table is not None and not table.persistent and not is_deferred(table.tensor):
            matched.redundant[key] = table
        elif any(fnmatchcase(key, pattern) for pattern in unexpected):
            matched.keys.unexpected.append(key)
        else:
            complaints.strays.append(key)
    matched.keys.stray = []


def _same_kind(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a stored number can become the wanted one: floating ones among themselves, others only as they are."""
    if stored == wanted:
        return True
    if stored.is_complex or wanted.is_complex or min(stored.itemsize, wanted.itemsize) < 2:
        return False  # one byte: a quantised weight, which means nothing without its scales
    return stored.is_floating_point and wanted.is_floating_point
