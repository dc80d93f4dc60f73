"""Configs of well-known models, for planning without a network; none of their weights.

``catalogue.json`` beside this file holds, by hub id, the fields of each model's published config.json that decide its
structure, its dropouts and its limits, with the values they have there (``torch_dtype`` under its newer name
``dtype``), and the further ids under which the same config is published. A test builds each model and compares its
number of parameters with the published one.

Only planning may ask here. Training needs weights, and gets its config from where they are.
"""

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import Any, TypedDict

from huggingface_hub import is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from dryfit.core.errors import ConfigError
from dryfit.meta.files.source import FolderSource, ModelSource, local_folder
from dryfit.meta.loading.configs import read_config

_ALLOWED = "`minilm`, a folder with a config.json, a hub id in the local cache, or a name in the catalogue"


class CatalogueEntry(TypedDict):
    """One model of ``catalogue.json``; aliases are older ids, and ids of models that share its config."""

    aliases: list[str]
    config: dict[str, Any]


@cache
def catalogue_entries() -> dict[str, CatalogueEntry]:
    """Return the models of the catalogue by hub id, sorted."""
    text = files("dryfit.meta.loading").joinpath("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)


@cache
def _ids() -> dict[str, str]:
    """Return the hub id for each name and alias."""
    return {name: hub_id for hub_id, entry in catalogue_entries().items() for name in (hub_id, *entry["aliases"])}


def catalogue_config(name: str) -> PreTrainedConfig | None:
    """Return a new config of a hub id or alias; None where the catalogue does not have it."""
    hub_id = _ids().get(name)
    if hub_id is None:
        return None
    fields = catalogue_entries()[hub_id]["config"]
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields)))
    config.name_or_path = name
    return config


def planning_config(source: ModelSource) -> PreTrainedConfig:
    """Return the config of a model that is planned and not loaded: its weights are not needed.

    Sources, in order: ``minilm`` or the folder named; the local cache of the hub; the catalogue, unless a revision
    is asked for, which it does not know; the hub, unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        ConfigError: None of them has it.
        LoadError: A folder, or the cache, has a config that transformers does not know.
    """
    try:
        folder = local_folder(source)
        cached = folder or try_to_load_from_cache(source.name, "config.json", revision=source.revision)
    except (OSError, HFValidationError) as error:  # it is too long for a path, or breaks the hub's rules
        raise _not_found(source, "it is neither a folder nor a hub id") from error
    if folder is not None:
        return read_config(source)
    if isinstance(cached, str):
        return read_config(FolderSource(cached.removesuffix("config.json"), trust_remote_code=source.trust_remote_code))
    config = catalogue_config(source.name) if source.revision is None else None
    if config is not None:
        return config
    if is_offline_mode():
        raise _not_found(source, "neither the cache nor the catalogue has it, and HF_HUB_OFFLINE is set")
    try:
        return read_config(source)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise _not_found(source, f"neither the cache nor the catalogue has it, and the hub says: {reason}") from error


def _not_found(source: ModelSource, reason: str) -> ConfigError:
    name = source.name if source.revision is None else f"{source.name} at revision {source.revision}"
    near = _near(source.name)
    if source.revision is not None and source.name in _ids():
        hint = "leave the revision out to plan with the catalogue's config"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "save the model's config.json in a folder and name the folder: planning needs no more"
    return ConfigError(f"looking for the config of {name}", reason, _ALLOWED, hint)


def _near(name: str) -> list[str]:
    """Return names of the catalogue with a similar spelling, whatever the case and the owner."""
    plain = {known.lower(): known for known in _ids()}
    short = {known.rpartition("/")[2]: real for known, real in plain.items()}
    wanted = name.lower()
    near_names = [plain[near] for near in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.7)]
    near_names += [short[near] for near in difflib.get_close_matches(wanted.rpartition("/")[2], short, n=3, cutoff=0.7)]
    return list(dict.fromkeys(near_names))[:4]
