"""Check whether a checkpoint can be loaded, by its headers and config: no weight is read or allocated."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from dryfit.meta.adapters import ADAPTER_FILE, adapter_config
from dryfit.meta.checkpoint_files import ADAPTER_STEM, CheckpointFiles, FolderSource, open_checkpoint
from dryfit.meta.configs import load_config
from dryfit.meta.construction import DEFERRED_ABOVE_BYTES, build
from dryfit.meta.file_formats import StoredTensor
from dryfit.meta.matching import Complaints, LoadOptions, Match, examine, targets
from dryfit.meta.pretrained import Kind, make_model, may_lack, stored_kind
from dryfit.meta.tape import is_deferred
from dryfit.settings.check_messages import Adapter, Built, Health, Stored, StoredFile, Subject
from dryfit.settings.errors import LoadError
from dryfit.settings.text import few

ResultT = TypeVar("ResultT")

_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?P<rest>\.weight)?")
_MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The model that a checkpoint is compared with.

    Attributes:
        subject: What the folder holds.
        task: In the words of ``dryfit.load``; empty where there is none.
        why: Why that task was chosen.
        make: Constructs the model.
        options: How it would be filled.
    """

    subject: Subject
    task: str
    why: str
    make: Callable[[], nn.Module]
    options: LoadOptions


def pretrained_candidate(source: FolderSource, kind: Kind | None) -> Candidate:
    """Return the model of a folder's config.

    Args:
        source: The folder.
        kind: What stands on it; None: what the config says it was saved with, else nothing.

    Raises:
        LoadError: The folder holds no config that transformers knows.
    """
    config = load_config(source)
    why = "as asked"
    if kind is None:
        named = ", ".join(map(str, config.architectures or ())) or "no architecture"
        kind = stored_kind(config)
        why = f"config.json names {named}"
        if kind is None:
            kind, why = Kind.ENCODER, f"{why}, which is of no task: the bare encoder"
    return Candidate(
        Subject.MODEL,
        kind.value,
        why,
        make=lambda: make_model(config, kind, trust_remote_code=source.trust_remote_code),
        options=LoadOptions(torch.device("cpu"), missing=may_lack(kind)),
    )


def health(path: Path, subject: Subject, choose: Callable[[], Candidate]) -> Health:
    """Check a checkpoint as :func:`dryfit.meta.materialise` does, up to the point where data is read.

    Args:
        path: The folder, or the file with the weights.
        subject: What the folder is, should not even its config be readable.
        choose: Reads the folder's config.

    Returns:
        What was found; a file that cannot be opened and a config that cannot be read are findings.

    Raises:
        ConfigError: The architecture has no such head, or its code is not trusted.
    """
    errors: list[str] = []
    stored = _or_note(errors, lambda: open_checkpoint(path))
    candidate = _or_note(errors, choose)
    model = _or_note(errors, lambda: build(candidate.make)) if candidate is not None else None
    folder = str(path if path.is_dir() else path.parent)
    if candidate is None or model is None:
        return Health(
            folder=folder, subject=subject, healthy=False, stored=stored and _stored(stored), errors=tuple(errors)
        )
    judged = _or_note(errors, lambda: examine(model, stored, candidate.options)) if stored is not None else None
    matched, complaints = judged or (Match(targets(model)), Complaints())
    return _judged(
        Health(
            healthy=False,
            folder=folder,
            subject=candidate.subject,
            task=candidate.task,
            why=candidate.why,
            stored=stored and _stored(stored),
            model=_built(model, matched),
            missing=tuple(complaints.missing),
            shapes=tuple(complaints.shapes),
            kinds=tuple(complaints.kinds),
            strays=tuple(complaints.strays),
            unwritten=_unwritten(matched, complaints),
            errors=tuple(errors),
            unexpected=tuple(matched.keys.unexpected),
            ignored=tuple(matched.keys.ignored),
            notes=(*(stored.notes if stored else ()), *_not_compared(matched)),
        )
    )


def adapter_health(folder: Path) -> Health:
    """Check a PEFT adapter by its own files; its base model is not needed."""
    errors: list[str] = []
    stored = _or_note(errors, lambda: open_checkpoint(folder, stem=ADAPTER_STEM))
    config = _or_note(errors, lambda: adapter_config(folder)) or {}
    kind = config.get("peft_type", "unknown")
    tensors = stored.tensors if stored is not None else {}
    lora = _Lora.of(tensors)
    rank = config.get("r")
    notes = list(stored.notes) if stored is not None else []
    missing: list[str] = []
    shapes: list[str] = []
    if kind == "LORA":
        missing = lora.partners_missing(magnitudes=bool(config.get("use_dora")))
        shapes = list(lora.ranks_wrong(rank if isinstance(rank, int) and not config.get("rank_pattern") else None))
        if stored is not None and not lora.sides:
            errors.append(f"looking at the adapter in {folder}: its file holds no lora_A and no lora_B    [LOAD]")
        if lora.others:
            notes.append(f"{len(lora.others)} tensors beside the LoRA pairs: {few(lora.others)}")
    elif config:
        notes.append(f"the tensors of a {kind} adapter are only counted: pairs are checked for LoRA")
    return _judged(
        Health(
            healthy=False,
            folder=str(folder),
            subject=Subject.ADAPTER,
            stored=stored and _stored(stored),
            adapter=Adapter(
                kind=kind,
                base=str(config.get("base_model_name_or_path") or ""),
                layers=len({layer for layer, _ in lora.sides}),
                rank=rank if isinstance(rank, int) else None,
            ),
            missing=tuple(missing),
            shapes=tuple(shapes),
            errors=tuple(errors),
            notes=tuple(notes),
        )
    )


def _or_note(errors: list[str], look: Callable[[], ResultT]) -> ResultT | None:
    """Return what a check gives; None where it raises, and note the error."""
    try:
        return look()
    except LoadError as error:
        errors.append(str(error))
        return None


def _judged(report: Health) -> Health:
    return report.model_copy(update={"healthy": not report.errors and not report.faults()})


def _stored(checkpoint: CheckpointFiles) -> Stored:
    sizes = {stamp.path: stamp.size_bytes for stamp in checkpoint.guard.files}
    counts = Counter(tensor.file for tensor in checkpoint.tensors.values())
    by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.size_bytes
    return Stored(
        format=checkpoint.format.value,
        files=tuple(
            StoredFile(name=path.name, size_bytes=sizes[path], tensors=counts[path]) for path in checkpoint.files
        ),
        tensors=len(checkpoint.tensors),
        total_bytes=by_dtype.total(),
        bytes_by_dtype=dict(by_dtype.most_common()),
    )


def _built(model: nn.Module, matched: Match) -> Built:
    every = matched.targets
    filled = {id(target) for table in (matched.from_file, matched.converted) for target in table.values()}
    return Built(
        architecture=type(model).__name__,
        parameters=sum(target.tensor.numel() for target in every if target.is_parameter),
        places=sum(target.persistent for target in every),
        filled=len(filled),
        tied=tuple(target.names for target in every if len(target.names) > 1),
        renamed=dict(matched.keys.renamed),
        conversions=tuple(f"{name}: of {keys}" for name, keys in matched.made_of.items()),
    )


def _unwritten(matched: Match, complaints: Complaints) -> tuple[str, ...]:
    """Name tables that stayed empty: build computes every one of this size that a constructor fills."""
    return tuple(
        target.name
        for target in matched.constructed
        if is_deferred(target.tensor)
        and not target.is_parameter
        and target.tensor.nbytes < DEFERRED_ABOVE_BYTES
        and target.name not in complaints.missing
        and id(target) not in complaints.named
    )


def _not_compared(matched: Match) -> list[str]:
    """Note what loading compares and headers cannot show."""
    notes = []
    if matched.duplicates:
        pairs = few((f"{first} and {key}" for key, first in matched.duplicates.items()), most=2)
        notes.append(f"tied weights that the file holds twice must be equal, which is not looked at: {pairs}")
    if matched.redundant:
        names = few(matched.redundant, most=2)
        notes.append(f"tables that the config stands for must be equal to it, which is not looked at: {names}")
    return notes


@dataclass(frozen=True, slots=True)
class _Lora:
    """The low-rank pairs of an adapter's file.

    Attributes:
        sides: By (layer, kind of layer): the pair's tensors by side, ``A`` or ``B``.
        magnitudes: Layers with a magnitude vector (DoRA).
        others: Keys of anything else.
    """

    sides: Mapping[tuple[str, str], Mapping[str, StoredTensor]]
    magnitudes: frozenset[str]
    others: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> "_Lora":
        sides: defaultdict[tuple[str, str], dict[str, StoredTensor]] = defaultdict(dict)
        magnitudes: set[str] = set()
        others: list[str] = []
        for key, tensor in tensors.items():
            match = _LORA.fullmatch(key)
            layer, magnitude, _ = key.partition(f".{_MAGNITUDE}")
            if match is not None and len(tensor.shape) > 1:
                sides[match["layer"], match["kind"] or ""][match["side"]] = tensor
            elif magnitude:
                magnitudes.add(layer)
            else:
                others.append(key)
        return cls(dict(sides), frozenset(magnitudes), tuple(others))

    def partners_missing(self, *, magnitudes: bool) -> list[str]:
        """List keys that are missing although their partner is there."""
        missing = []
        for (layer, kind), pair in self.sides.items():
            end = "" if kind else ".weight"
            missing += [f"{layer}.lora_{kind}{side}{end}" for side in "AB" if side not in pair]
            if magnitudes and layer not in self.magnitudes:
                missing.append(f"{layer}.{_MAGNITUDE}")
        return missing

    def ranks_wrong(self, rank: int | None) -> Iterator[str]:
        """Describe pairs whose sides differ in rank, or have another one than the config gives to all."""
        for (layer, kind), pair in self.sides.items():
            ranks = {side: pair[side].shape[axis] for side, axis in (("A", 0), ("B", 1)) if side in pair}
            if len(set(ranks.values()) | {rank or next(iter(ranks.values()))}) > 1:
                said = ", ".join(f"lora_{kind}{side} is of rank {size}" for side, size in ranks.items())
                yield f"{layer}: {said}" + (f"; {ADAPTER_FILE} says {rank}" if rank is not None else "")
