"""Find the files of a checkpoint and the tensors in them; no data is read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from dryfit.core.errors import LoadError
from dryfit.core.text.words import few
from dryfit.meta.files.file_guard import FileGuard, FileStamp, open_file
from dryfit.meta.files.pickle_file import read_pickle_header
from dryfit.meta.files.safetensors_file import (
    MOST_HEADER_BYTES,
    FileHeader,
    StoredTensor,
    parse_json,
    read_safetensors_header,
)

MODEL_STEM: Final = "model"
ADAPTER_STEM: Final = "adapter_model"

_INDEX = ".index.json"
_MOST_NAME = 255  # more no file system takes, and the look-ups below would raise for


class CheckpointFormat(Enum):
    """The format of a checkpoint's files.

    Attributes:
        SAFETENSORS: A JSON header and raw data.
        PICKLE: ``torch.save``; only ever loaded with ``weights_only=True``.
    """

    SAFETENSORS = "safetensors"
    PICKLE = "pickle"


_SUFFIXES: Final = {
    CheckpointFormat.SAFETENSORS: (".safetensors",),
    CheckpointFormat.PICKLE: (".bin", ".pt", ".pth"),
}
_READERS: Final = {
    CheckpointFormat.SAFETENSORS: read_safetensors_header,
    CheckpointFormat.PICKLE: read_pickle_header,
}


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint on disk.

    Attributes:
        where: The folder or file that was opened.
        format: How its files are written.
        files: The files with tensors, in reading order.
        tensors: Every tensor by its key.
        notes: For a report, e.g. files that were not used.
        guard: The state of every file when it was read, the index included.
    """

    where: Path
    format: CheckpointFormat
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]
    guard: FileGuard


def open_checkpoint(path: Path, *, stem: str = MODEL_STEM) -> CheckpointFiles:
    """Find the tensors of a folder or of a single file, reading headers only.

    In a folder, ``<stem>.safetensors`` or ``<stem>.safetensors.index.json`` with its shards are taken, else the
    same with ``pytorch_model.bin`` (``<stem>.bin`` for other stems than ``model``).

    Args:
        path: A folder, or a .safetensors, .bin or .pt file.
        stem: File name of the weights in a folder; ``adapter_model`` for an adapter's.

    Raises:
        LoadError: There are no weights, a file is damaged or refused, the folder holds both a file and an index,
            or an index and its shards disagree.
    """
    try:
        if path.is_dir():
            return _open_folder(path, stem)
        there = path.exists()
    except OSError as error:
        raise LoadError(f"opening the checkpoint {path}", f"{error.filename}: {error.strerror}") from error
    if not there:
        raise LoadError(f"opening the checkpoint {path}", "there is no such file or folder", hint="check the path")
    for kind, suffixes in _SUFFIXES.items():
        if path.name.endswith(suffixes):
            return _whole(path, path, kind, ())
    raise LoadError(
        f"opening the checkpoint {path}",
        f"the file's name ends in {path.suffix or 'nothing'!r}",
        allowed="a folder, or a file ending in " + ", ".join(sum(_SUFFIXES.values(), ())),
        hint=f"open the folder {path.parent}" if path.name.endswith(_INDEX) else "",
    )


def _open_folder(folder: Path, stem: str) -> CheckpointFiles:
    names = {CheckpointFormat.SAFETENSORS: f"{stem}.safetensors", CheckpointFormat.PICKLE: f"{_pickle_stem(stem)}.bin"}
    present = sorted(os.listdir(folder))
    for kind, name in names.items():
        # A broken link is not skipped: opening it names it as such.
        single, index = name in present, f"{name}{_INDEX}" in present
        if single and index:
            raise LoadError(
                f"opening the checkpoint {folder}",
                f"both {name} and {name}{_INDEX} are there, and nothing tells which is newer",
                allowed="one file, or an index with its shards",
                hint="remove or move away the one that is out of date",
            )
        if single:
            return _whole(folder, folder / name, kind, _unused(present, {name}, names))
        if index:
            return _sharded(folder, folder / f"{name}{_INDEX}", kind, (present, names))
    looked = [looked for name in names.values() for looked in (name, f"{name}{_INDEX}")]
    raise LoadError(
        f"opening the checkpoint {folder}",
        f"it holds no weights; it holds {few(present, 12) or 'nothing'}",
        allowed="one of " + ", ".join(looked),
        hint="name the file itself if it is called otherwise" if present else "check the path",
    )


def _pickle_stem(stem: str) -> str:
    return f"pytorch_{stem}" if stem == MODEL_STEM else stem


def _unused(present: Sequence[str], used: set[str], names: Mapping[CheckpointFormat, str]) -> tuple[str, ...]:
    """Name the files that look like weights of the same model and were not used."""
    stems = tuple(name.rpartition(".")[0] for name in names.values())
    ends = (*sum(_SUFFIXES.values(), ()), _INDEX)
    over = [
        name
        for name in present
        if name not in used
        and name.endswith(ends)
        and any(name.startswith(stem) and name[len(stem)] in ".-" for stem in stems)
    ]
    return (f"not used: {few(over)}",) if over else ()


def _whole(where: Path, path: Path, kind: CheckpointFormat, notes: tuple[str, ...]) -> CheckpointFiles:
    header = _READERS[kind](path)
    return CheckpointFiles(
        where=where,
        format=kind,
        files=(path,),
        tensors=MappingProxyType(dict(header.tensors)),
        notes=(*notes, *header.notes),
        guard=FileGuard((header.stamp,)),
    )


def _sharded(
    folder: Path, index: Path, kind: CheckpointFormat, around: tuple[Sequence[str], Mapping[CheckpointFormat, str]]
) -> CheckpointFiles:
    present, names = around
    weight_map, stamp = _read_index(index, kind)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise _disagree(index, f"{len(missing)} of {len(shards)} shards are missing: {few(missing)}")
    headers = {name: _READERS[kind](folder / name) for name in shards}
    _check_shards(index, weight_map, headers)
    return CheckpointFiles(
        where=folder,
        format=kind,
        files=tuple(header.stamp.path for header in headers.values()),
        tensors=MappingProxyType({key: stored for one in headers.values() for key, stored in one.tensors.items()}),
        notes=(
            *_unused(present, {index.name, *shards}, names),
            *(note for header in headers.values() for note in header.notes),
        ),
        guard=FileGuard((*(header.stamp for header in headers.values()), stamp)),
    )


def _read_index(index: Path, kind: CheckpointFormat) -> tuple[dict[str, str], FileStamp]:
    doing = f"reading the index {index}"
    descriptor, stamp = open_file(index, doing)
    with os.fdopen(descriptor, "rb") as file:
        if stamp.size_bytes > MOST_HEADER_BYTES:
            raise LoadError(doing, f"it has {stamp.size_bytes} bytes", f"at most {MOST_HEADER_BYTES}")
        text = file.read(MOST_HEADER_BYTES)
        stamp.compare(os.fstat(file.fileno()))
    allowed = 'a JSON object with "weight_map", which names the shard of each key'
    try:
        content = parse_json(text)
    except ValueError as error:
        raise LoadError(doing, f"it is no valid JSON: {str(error)[:200]}", allowed) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(doing, f"weight_map is {ascii(weight_map)[:80]}", allowed)
    for key, name in weight_map.items():
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise LoadError(doing, f"weight_map: the shard of {key!a} is {ascii(name)[:80]}", allowed)
    root = index.parent.resolve()
    for name in sorted(set(weight_map.values())):
        _check_name(name, root, kind, doing)
    return weight_map, stamp


def _check_name(name: str, root: Path, kind: CheckpointFormat, doing: str) -> None:
    """Check that a shard lies in the folder; it may be a link, as in the hub's cache, its folders may not lead out."""
    parts = PurePosixPath(name).parts
    plain = (
        bool(parts)
        and "/".join(parts) == name  # neither absolute, nor with empty or "." parts
        and ".." not in parts
        and not set("\\\0:") & set(name)
        and name.isprintable()
    )
    if not plain or not _parent(root / name).is_relative_to(root):
        raise LoadError(
            doing,
            f"weight_map names the shard {ascii(name)[:200]}, which lies outside the folder",
            allowed="names of files in the index's folder",
            hint="do not load from this source: the index was made to reach other files, or is damaged",
        )
    if not name.endswith(_SUFFIXES[kind]):
        raise LoadError(
            doing,
            f"weight_map names the shard {ascii(name)[:200]}",
            allowed="names ending in " + ", ".join(_SUFFIXES[kind]),
        )


def _parent(path: Path) -> Path:
    try:
        resolved = path.parent.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return Path("/")
    return Path("/") if resolved.is_symlink() else resolved  # as Python 3.13 leaves a circle


def _check_shards(index: Path, weight_map: Mapping[str, str], headers: Mapping[str, FileHeader]) -> None:
    """Check that index and shards agree about every key."""
    holders: dict[str, str] = {}
    for name, header in headers.items():
        for key in header.tensors:
            if key in holders:
                raise _disagree(index, f"the key {few([key])} is in two shards, {holders[key]} and {name}")
            holders[key] = name
    lost = sorted(weight_map.keys() - holders.keys())
    extra = sorted(holders.keys() - weight_map.keys())
    moved = sorted(key for key, name in weight_map.items() if key in holders and holders[key] != name)
    differences = [
        f"{len(keys)} keys {what}: {few(f'{key} ({shard[key]})' for key in keys)}"
        for keys, what, shard in (
            (lost, "are not in the shard that the index names", weight_map),
            (extra, "of the shards are not in the index", holders),
            (moved, "are in another shard than the index says", holders),
        )
        if keys
    ]
    if differences:
        raise _disagree(index, "; ".join(differences))


def _disagree(index: Path, found: str) -> LoadError:
    return LoadError(
        f"comparing {index} with its shards",
        found,
        allowed=f"shards that hold exactly the keys that {index.name} names",
        hint="the index or a shard is from another checkpoint, or the download is incomplete: get all files again",
    )
