"""Fill a module with weights, in place: every tensor is accounted for, or an error comes before any change."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from dryfit.gpu.private_apis.torch_modes import MODES, without_dispatch_modes, without_function_modes
from dryfit.gpu.private_apis.torch_modules import MODULES
from dryfit.gpu.private_apis.torch_tensors import TENSORS, on_same_memory
from dryfit.gpu.slots import current, put
from dryfit.meta.checkpoint_files import CheckpointFiles, open_checkpoint
from dryfit.meta.file_formats import FileGuard
from dryfit.meta.keys import Conversion, StoredSlice, parts_of_sources
from dryfit.meta.matching import LoadOptions, Match, Missing, Target, match
from dryfit.meta.moves import existing_device, refuse_early_optimizers
from dryfit.meta.private_apis.transformers_models import MODELS, kept_in_fp32
from dryfit.meta.propagation import allow_real_inputs, is_mapped, watch_files
from dryfit.meta.reading import CheckpointReader, ReadMode
from dryfit.meta.tape import is_deferred, tape_of
from dryfit.settings.check_messages import LoadReport, TensorOrigin
from dryfit.settings.errors import InternalError, LoadError
from dryfit.settings.private_names import require
from dryfit.settings.text import few

REPORT = "load_report"
"""Attribute of a filled module that holds its :class:`LoadReport`."""


def materialise(
    module: nn.Module,
    checkpoint: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    missing: Missing = "error",
    unexpected: Sequence[str] = (),
    mode: ReadMode = ReadMode.PRIVATE,
) -> LoadReport:
    """Fill a module with weights, in place.

    Works on modules from :func:`dryfit.meta.build` and on modules that already have weights. Everything is checked from
    headers first; only a file that becomes unreadable, or changes meanwhile, may leave a module that had weights
    half filled.

    Args:
        module: The module; its flags, ties and parameters' attributes stay.
        checkpoint: A folder or file; None: every weight is missing.
        device: Where tensors go.
        dtype: Type of floating parameters; None keeps each one's own. Buffers and plain tensors keep theirs.
        missing: Weights the checkpoint may lack. They get what their constructor would have given them; random values
            are a function of the seed of the construction.
        unexpected: Patterns of keys that may have no place although their part of the model is there.
        mode: Private memory, or the mapped file itself (for looking and inference only).

    Returns:
        Where each tensor came from.

    Raises:
        LoadError: A tensor would be neither from the file, nor tied, nor built by its constructor, nor allowed to be
            random; or an optimizer already holds parameters that are about to be replaced.
        MachineError: There is no such device.
    """
    stored = open_checkpoint(Path(checkpoint)) if checkpoint is not None else None
    options = LoadOptions(torch.device(device), dtype, missing, tuple(unexpected), mode)
    return fill(module, stored, options)


def fill(module: nn.Module, stored: CheckpointFiles | None, options: LoadOptions) -> LoadReport:
    """Fill a module from an opened checkpoint; see :func:`materialise`."""
    # A constructor may load a part of its model like this: our own modes must not act here.
    require("giving a model its weights", MODES, MODULES, TENSORS, MODELS)
    with without_function_modes(), without_dispatch_modes():
        device = existing_device(options.device, f"filling a {type(module).__name__}")
        return _fill(module, stored, replace(options, device=device))


def _fill(module: nn.Module, stored: CheckpointFiles | None, options: LoadOptions) -> LoadReport:
    started = time.perf_counter()
    if options.device.type == "meta":
        raise LoadError("filling a model", "device is meta, which holds no data", allowed="cpu, cuda, ...")
    # First, because it is cheap while nothing of ours refers to the parameters.
    refuse_early_optimizers(module, doing=f"filling a {type(module).__name__} with weights")
    matched = match(module, stored, options)
    _refuse_views_of_parts(matched, options)
    filler = _Filler(module, options, kept_in_fp32_patterns(module, options.dtype))
    made = filler.construct(matched)  # first: it may fail while nothing has changed
    if stored is not None:
        with CheckpointReader(stored, options.mode) as reader:
            filler.compare(matched, reader)
            filler.read(matched, reader)
    for target, tensor in made:
        _replace(target, tensor)
    for target, whole in matched.views:
        _replace(target, _view_like(target.tensor, current(whole.slots[0])))
    left = [slot.name for target in matched.targets for slot in target.slots if is_deferred(current(slot))]
    if left:
        raise InternalError("filling a model", f"{len(left)} tensors are still on meta ({few(left)})")
    report = filler.report(matched, stored, time.perf_counter() - started)
    allow_real_inputs(module)
    mapped = stored if options.mode is ReadMode.MAPPED else None
    watch_files(module, mapped.guard if mapped is not None else FileGuard(()))
    vars(module)[REPORT] = report
    return report


@dataclass(slots=True)
class _Filler:
    """The state of one materialisation."""

    module: nn.Module
    options: LoadOptions
    in_fp32: list[re.Pattern[str]]
    random: list[str] = field(default_factory=list)
    casts: Counter[str] = field(default_factory=Counter)
    whole: list[str] = field(default_factory=list)

    def compare(self, matched: Match, reader: CheckpointReader) -> None:
        """Compare tied weights that the file holds twice, and tables that the constructor computes too.

        Raises:
            LoadError: Tied weights differ, or a table is not that of the config.
        """
        keys = {*matched.duplicates, *matched.duplicates.values()}
        values = dict(reader.tensors(keys, self._parts(matched)))
        for key, first in matched.duplicates.items():
            if not _equal(values[key], values[first]):
                raise LoadError(
                    f"loading tied weights from {reader.where}",
                    f"{first} and {key} are one weight in the model and differ in the file",
                    allowed="equal values, or one of the two",
                    hint="if they are meant to differ, set tie_word_embeddings = false in config.json",
                )
        for key, stored in reader.tensors(matched.redundant):
            table = matched.redundant[key].tensor
            if not _equal(stored, table.to(device=stored.device, dtype=stored.dtype)):
                raise LoadError(
                    f"comparing the tables of {reader.where}",
                    f"{key} in the file is not what the constructor computes from the config",
                    allowed="the table of this config",
                    hint="check that config.json and the weights belong together",
                )

    def read(self, matched: Match, reader: CheckpointReader) -> None:
        """Fill every target that the file has a tensor for."""
        fresh: list[tuple[Target, torch.Tensor]] = []
        for key, tensor in reader.tensors(matched.from_file, self._parts(matched)):
            self._fill(matched.from_file[key], tensor, fresh)
        for conversion in matched.conversions:
            for target, tensor in self._convert(conversion, matched, reader):
                self._fill(target, tensor.contiguous(), fresh)
        for target, tensor in fresh:
            if target.name in self.options.made_by:
                for slot in target.slots:
                    put(slot, tensor)
            else:
                _replace(target, tensor)

    def _parts(self, matched: Match) -> dict[str, StoredSlice]:
        """Return the slice wanted of each key that is not read whole."""
        keys = {key: target for key, target in matched.from_file.items() if self.options.part_of(target) is not None}
        keys |= {key: keys[first] for key, first in matched.duplicates.items() if first in keys}
        return {key: part for key, target in keys.items() if (part := self.options.part_of(target)) is not None}

    def _convert(
        self, conversion: Conversion, matched: Match, reader: CheckpointReader
    ) -> Iterator[tuple[Target, torch.Tensor]]:
        """Convert tensors, reading no more than the wanted slices of the sources."""
        assert isinstance(self.module, PreTrainedModel)
        keys: dict[str, StoredSlice | None] = {key: None for _, key in conversion.sources}
        target = matched.converted.get(conversion.target)
        part = self.options.part_of(target) if target is not None else None
        if part is not None and (needed := parts_of_sources(conversion, reader.stored, part)) is not None:
            keys = needed
            conversion = replace(conversion, sources=tuple(pair for pair in conversion.sources if pair[1] in keys))
        parts = {key: part for key, part in keys.items() if part is not None}
        values = dict(reader.tensors(keys, parts))
        for name, tensor in conversion.apply(values, self.module).items():
            target = matched.converted[name]
            part = self.options.part_of(target)
            if part is None or tensor.shape != target.tensor.shape:
                yield target, tensor
            else:  # its sources had to be read whole
                self.whole.append(name)
                yield target, part.of(tensor)

    def _fill(self, target: Target, tensor: torch.Tensor, fresh: list[tuple[Target, torch.Tensor]]) -> None:
        wanted = self._dtype_of(target)
        quantised = self.options.made_by.get(target.name)
        if quantised is not None:
            made = quantised(tensor.to(wanted))
            self.casts[f"{_name(tensor.dtype)} to {_name(made.dtype)}"] += 1
            fresh.append((target, made))
            return
        if tensor.dtype != wanted:
            self.casts[f"{_name(tensor.dtype)} to {_name(wanted)}"] += 1
        old = target.tensor
        in_place = not is_deferred(old) and (old.device, old.dtype) == (self.options.device, wanted)
        in_place = in_place and not is_mapped(old)  # pages of a file go with it, even those that were written to
        in_place = in_place and old.shape == tensor.shape
        if in_place and self.options.mode is ReadMode.PRIVATE:  # whatever holds this parameter stays right
            with torch.no_grad():
                old.copy_(tensor)
        else:
            here = tensor.dtype is wanted and tensor.device == self.options.device
            fresh.append((target, tensor if here else tensor.to(device=self.options.device, dtype=wanted)))

    def construct(self, matched: Match) -> list[tuple[Target, torch.Tensor]]:
        """Make the values of all other targets: what their constructor computed, or would have."""
        made: list[tuple[Target, torch.Tensor]] = []
        for target in matched.constructed:
            tensor, drawn = target.tensor, False
            if is_deferred(tensor):
                tensor, drawn = _constructed(target)
            if drawn:
                self.random += target.names[:1]
            part = self.options.part_of(target)
            tensor = tensor if part is None else part.of(tensor.detach())
            tensor = tensor.to(device=self.options.device, dtype=self._dtype_of(target))
            if tensor is not target.tensor:
                made.append((target, tensor))
        return made

    def _dtype_of(self, target: Target) -> torch.dtype:
        """Return a target's type: floating parameters take the one asked for, tables keep their own."""
        old = target.tensor.dtype
        if self.options.dtype is None or not target.is_parameter or not old.is_floating_point:
            return old
        kept = any(pattern.search(name) for name in target.names for pattern in self.in_fp32)
        return torch.float32 if kept else self.options.dtype

    def _notes(self) -> tuple[str, ...]:
        return (f"read whole and cut here, for their conversion: {few(self.whole)}",) if self.whole else ()

    def report(self, matched: Match, stored: CheckpointFiles | None, seconds: float) -> LoadReport:
        """Report where each tensor came from; parts loaded earlier keep what their reports said."""
        earlier = _earlier(self.module)
        from_file = {target.name: key for key, target in matched.from_file.items()} | matched.made_of
        drawn = set(self.random)
        random, constructed = list(self.random), []
        for name in (target.name for target in matched.constructed if target.name not in drawn):
            origin, key = earlier.get(unwrapped(name), (TensorOrigin.CONSTRUCTOR, ""))
            if origin is TensorOrigin.FILE:
                from_file[name] = key
            else:
                (random if origin is TensorOrigin.RANDOM else constructed).append(name)
        looking = {name: whole.name for target, whole in matched.views for name in target.names}
        filled = [*matched.from_file.values(), *matched.converted.values(), *matched.constructed]
        return LoadReport.model_construct(  # each value is of its type: we made it
            source=str(stored.where) if stored is not None else "",
            files=tuple(str(path) for path in stored.files) if stored is not None else (),
            from_file=from_file,
            tied={name: target.name for target in filled for name in target.names[1:]} | looking,
            constructed=tuple(constructed),
            random=tuple(random),
            unexpected=tuple(matched.keys.unexpected),
            ignored=(*matched.keys.ignored, *matched.redundant),
            renamed=dict(matched.keys.renamed),
            casts=dict(self.casts),
            notes=(*(stored.notes if stored is not None else ()), *self._notes()),
            seconds=round(seconds, 4),
        )


def _earlier(module: nn.Module) -> dict[str, tuple[TensorOrigin, str]]:
    """Return what reports of the module's parts say, by names in the whole module."""
    origins_by_name: dict[str, tuple[TensorOrigin, str]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        report = vars(part).get(REPORT)
        if isinstance(report, LoadReport):
            dot = f"{prefix}." if prefix else ""
            origins = report.origins().items()
            origins_by_name |= {
                unwrapped(dot + name): (origin, report.from_file.get(name, "")) for name, origin in origins
            }
    return origins_by_name


def unwrapped(name: str) -> str:
    """Undo PEFT's wrapping of a layer in a name: it may have come after an earlier loading."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def _constructed(target: Target) -> tuple[torch.Tensor, bool]:
    """Return a deferred tensor's value as its constructor would have made it, and whether it is random."""
    tape = tape_of(target.tensor)
    hint = "build the whole model with dryfit.meta.build or inside dryfit.meta.on_meta()"
    if tape is None:
        raise LoadError(
            "filling a model",
            f"{target.name} is on meta, and how its constructor filled it is not known",
            allowed="modules built by dryfit.meta.build, or weights from a checkpoint",
            hint=hint,
        )
    try:
        return tape.realise(target.tensor)
    except LoadError as error:
        raise LoadError("filling a model", f"{target.name}: {error.found}", error.allowed, error.hint) from error


def _replace(target: Target, value: torch.Tensor) -> None:
    """Put a new tensor into every slot of a target; different objects on one memory stay different objects."""
    made: dict[int, torch.Tensor] = {}
    for slot in target.slots:
        old = slot.tensor
        if id(old) not in made:
            made[id(old)] = _like(old, value)
        if made[id(old)] is not old:
            put(slot, made[id(old)])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever type; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    kind = torch.promote_types(one.dtype, other.dtype)
    one, other = one.to(kind), other.to(kind)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _refuse_views_of_parts(matched: Match, options: LoadOptions) -> None:
    views = [f"{target.name} of {whole.name}" for target, whole in matched.views if options.part_of(whole) is not None]
    if views:
        raise LoadError(
            "filling a model with parts of its weights",
            f"{len(views)} tensors are views of weights that are not wanted whole: {few(views)}",
            allowed="weights that nothing else is a view of",
        )


def _view_like(old: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the view of a new tensor that an old view was of the old one."""
    offset = whole.storage_offset() + old.storage_offset()
    return whole.detach().as_strided(old.size(), old.stride(), offset)


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as the old tensor's class; a parameter that has data stays the same object."""
    if not isinstance(old, nn.Parameter):
        return value
    if not is_deferred(old):
        old.data = value
        return old
    new = on_same_memory(type(old), value, old.requires_grad)  # on the same memory, detached
    for name, value in vars(old).items():
        setattr(new, name, value)
    return new


def kept_in_fp32_patterns(module: nn.Module, dtype: torch.dtype | None) -> list[re.Pattern[str]]:
    """Return patterns of weights that the architecture wants in fp32 although the model is in a smaller type."""
    if dtype not in (torch.float16, torch.bfloat16):
        return []
    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    patterns = {pattern for model in models for pattern in kept_in_fp32(model, dtype)}
    return [re.compile(pattern.replace("*", ".*")) for pattern in sorted(patterns)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
