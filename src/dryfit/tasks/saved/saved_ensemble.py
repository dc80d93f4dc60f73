"""Ensembles: several trained models in one folder, written by ``dryfit train``.

``dryfit.json`` (format 3) names the members, each a saved model in a subfolder. So the whole can be copied, and a
member can be used alone.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, final

import torch
from pydantic import Field, ValidationError, field_validator
from torch import nn

from dryfit.core.errors import ConfigError, LoadError
from dryfit.core.settings.tables import Settings
from dryfit.core.settings.task_facts import task_word
from dryfit.core.wire import canonical_json, empty_beside, publish_folder
from dryfit.tasks.averaging import AveragingTask, averaging
from dryfit.tasks.base import Outputs
from dryfit.tasks.registry import make_task
from dryfit.tasks.saved.model_input import (
    DRYFIT_FILE,
    ENSEMBLE_FORMAT,
    MEMBERS,
    ModelInput,
    read_dryfit_file,
    read_model_input,
)

_WHOLE: Final = "the whole folder, as `dryfit train --trial topK` wrote it"


class Membership(Settings):
    """Members of an ensemble, as in its ``dryfit.json``.

    Attributes:
        members: Their subfolders; the first one's settings decode the mean into an answer.
        fitted: Numbers chosen by their mean on the validation rows.
    """

    members: tuple[str, ...] = Field(min_length=2)
    fitted: dict[str, float]

    @field_validator("members")
    @classmethod
    def _inside(cls, members: tuple[str, ...]) -> tuple[str, ...]:
        for name in members:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"{name!r} is no folder within the ensemble's own")
        if len(set(members)) < len(members):
            raise ValueError("a member is named twice")
        return members


@dataclass(frozen=True, slots=True)
class EnsembleFolder:
    """A checked folder of an ensemble: its members exist and belong together.

    Attributes:
        folders: Of the members.
        reads: Input format of each.
        fitted: As in :class:`Membership`.
    """

    folders: tuple[Path, ...]
    reads: tuple[ModelInput, ...]
    fitted: Mapping[str, float]

    @property
    def task(self) -> AveragingTask:
        """Return the first member's task, which averages all of them."""
        return averaging(make_task(self.reads[0].task, self.reads[0].context))


def is_ensemble(folder: Path) -> bool:
    """Return whether a folder's ``dryfit.json`` is one of several models; False where it cannot be read."""
    try:
        meta = json.loads((folder / DRYFIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and meta.get("format") == ENSEMBLE_FORMAT


def read_ensemble(folder: Path, *, trust: bool = False) -> EnsembleFolder:
    """Check an ensemble's folder, without reading any weights.

    Args:
        folder: The ensemble's.
        trust: Run code that comes with a model.

    Raises:
        LoadError: The folder is damaged, a member is missing, or members do not belong together.
        ConfigError: The members' task has no mean.
    """
    doing = f"reading the ensemble in {folder}"
    meta = read_dryfit_file(folder, doing, _WHOLE)
    try:
        membership = Membership.model_validate_json(json.dumps(meta.get("ensemble")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(("ensemble", *map(str, first["loc"])))
        raise LoadError(doing, f"{where}: {first['msg']}", _WHOLE, "the folder is damaged") from error
    folders = tuple(folder / name for name in membership.members)
    for member, name in zip(folders, membership.members, strict=True):
        if not (member / DRYFIT_FILE).is_file():
            problem = f"its member {name} is not there" if not member.is_dir() else f"{name} has no {DRYFIT_FILE}"
            raise LoadError(doing, problem, _WHOLE, "copy the folder again, or repeat `dryfit train`")
    reads = tuple(read_model_input(member).with_task_folder(member, trust=trust) for member in folders)
    _check_agreement(doing, dict(zip(membership.members, reads, strict=True)))
    ensemble = EnsembleFolder(folders, reads, membership.fitted)
    _ = ensemble.task  # raises where there is no mean
    return ensemble


def _check_agreement(doing: str, members: Mapping[str, ModelInput]) -> None:
    """Refuse members with other tasks, columns or labels.

    Raises:
        LoadError: Two members differ.
    """
    (first, read), *others = members.items()
    wanted = dict(_common(read))
    for name, other in others:
        for what, value in _common(other):
            if value != wanted[what]:
                raise LoadError(
                    doing,
                    f"{name} has {what} {value!r}, and {first} {wanted[what]!r}",
                    "members with the same task, columns and labels",
                    f"{_WHOLE}, with no member of another",
                )


def _common(read: ModelInput) -> Iterator[tuple[str, object]]:
    yield "task", task_word(read.task)
    yield "id column", read.id
    yield "text column", read.text
    yield "criterion column", read.criterion
    yield "data.num_labels", read.num_labels
    yield "data.labels", read.labels
    yield "data.multi_label", read.multi_label


@final
class Ensemble(nn.Module):
    """The models of an ensemble, in order; ``dryfit predict`` averages their answers.

    Each reads tokens of its own tokenizer. ``members[0]`` is the first.

    Args:
        members: At least two, in eval mode.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> tuple[Outputs, ...]:
        """Return each member's outputs for its own inputs; nothing is averaged.

        Args:
            inputs: Keyword arguments of each member.

        Raises:
            ConfigError: There is not one for each member.
        """
        if len(inputs) != len(self.members):
            raise ConfigError(
                "calling an ensemble",
                f"{len(inputs)} inputs for {len(self.members)} members",
                "the inputs of each member, in order",
                "each reads what its own tokenizer makes",
            )
        return tuple(member(**one) for member, one in zip(self.members, inputs, strict=True))


def save_ensemble(
    folder: Path,
    models: Sequence[Path],
    *,
    fitted: Mapping[str, float],
    facts: Mapping[str, Any],
    texts: Mapping[str, str],
) -> None:
    """Put saved models into one folder, which appears by one rename and is on disk when this returns.

    Weights are linked where the file system can (a saved model's file is replaced, never written into), else copied.

    Args:
        folder: Target.
        models: Folders of the members, the best first.
        fitted: Numbers chosen by their mean.
        facts: Further entries of ``dryfit.json``.
        texts: Further files, by name.
    """
    names = tuple(f"{MEMBERS}/{place}" for place in range(1, len(models) + 1))
    membership = Membership(members=names, fitted=dict(fitted)).model_dump(mode="json")
    text = canonical_json({"format": ENSEMBLE_FORMAT, **facts, "ensemble": membership})
    temporary = empty_beside(folder)
    for name, model in zip(names, models, strict=True):
        shutil.copytree(model, temporary / name, copy_function=_take)
    publish_folder(temporary, folder, {**texts, DRYFIT_FILE: text})


def _take(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        with suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copyfile(source, target)
