"""Check whether :func:`dryfit.tasks.saved.saved_model.load` could load a folder, without loading it."""

from pathlib import Path

import torch

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.jobs.checkpoint_health import Health, Subject
from dryfit.meta.files.source import FolderSource, local_folder
from dryfit.meta.loading.adapters import ADAPTER_FILE
from dryfit.meta.loading.checkpoint_health import Candidate, adapter_health, health, pretrained_candidate
from dryfit.meta.loading.matching import LoadOptions
from dryfit.tasks.saved.model_input import DRYFIT_FILE, MEMBERS
from dryfit.tasks.saved.saved_model import WEIGHTS_FILE, kind_of, trained_model

_CONFIG_FILE = "config.json"


def folder_health(source: str, task: str | None = None, *, trust: bool = False) -> Health:
    """Return the health of a model's folder.

    Args:
        source: Folder of a trial, of any other model or of an adapter, or ``minilm``.
        task: As in ``dryfit.load``; None: a trial's encoder with its head, else what the folder's config names.
        trust: Run code that comes with the model.

    Raises:
        LoadError: There is no such folder.
        ConfigError: There is no such task, the architecture has no such head, or its code is not trusted.
    """
    kind = kind_of(task) if task is not None else None
    model = FolderSource(source, trust_remote_code=trust)
    folder = local_folder(model)
    if folder is None:
        raise LoadError(
            f"looking at {source}", "there is no such folder", allowed="a model's folder; nothing is downloaded"
        )
    if kind is None and (folder / DRYFIT_FILE).is_file() and (folder / MEMBERS).is_dir():
        return _ensemble(folder, trust=trust)
    if kind is None and (folder / DRYFIT_FILE).is_file() and not (folder / ADAPTER_FILE).is_file():
        return health(folder / WEIGHTS_FILE, Subject.TRAINED, lambda: _trained(folder, trust=trust))
    if (folder / ADAPTER_FILE).is_file() and not (folder / _CONFIG_FILE).is_file():
        if task is not None:
            raise ConfigError(
                f"looking at the adapter in {folder}", f"the task {task!r} was asked for", allowed="no task"
            )
        return adapter_health(folder)
    return health(folder, Subject.MODEL, lambda: pretrained_candidate(model, kind))


def _ensemble(folder: Path, *, trust: bool) -> Health:
    """Return the health of each model in a folder of several, which earlier versions wrote."""
    members = tuple(folder_health(str(one), trust=trust) for one in sorted((folder / MEMBERS).iterdir()))
    errors = tuple(error for one in members for error in one.errors)
    return Health(
        folder=str(folder),
        subject=Subject.ENSEMBLE,
        healthy=all(one.healthy for one in members),
        errors=errors,
        members=members,
    )


def _trained(folder: Path, *, trust: bool) -> Candidate:
    model = trained_model(folder, trust=trust)
    return Candidate(Subject.TRAINED, "", "", lambda: model, LoadOptions(torch.device("cpu"), exact=True))
