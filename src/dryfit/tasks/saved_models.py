"""Trained models as folders: written by a trial, checked, loaded by anyone."""

import copy
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from pydantic import Field, ValidationError
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from dryfit.meta.adapters import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    attach_adapter,
    base_of_adapter,
    fill_adapter,
    relative_base,
    save_adapter,
    save_adapter_config,
)
from dryfit.meta.checkpoint_files import FolderSource, local_folder, open_checkpoint
from dryfit.meta.checkpoint_health import Candidate, adapter_health, health, pretrained_candidate
from dryfit.meta.configs import load_config
from dryfit.meta.construction import build
from dryfit.meta.filling import fill
from dryfit.meta.matching import LoadOptions, Missing
from dryfit.meta.pretrained import Kind, load_frozen, load_pretrained, make_model
from dryfit.meta.reading import ReadMode
from dryfit.settings.check_messages import Health, Subject
from dryfit.settings.choices import DEFAULT_TASK
from dryfit.settings.errors import ConfigError, LoadError
from dryfit.settings.execution import WeightFormat
from dryfit.settings.files import publishing, sync_path, write_text_atomic
from dryfit.settings.tables import DataSettings, ModelSettings, Settings, TrialSettings
from dryfit.settings.task_facts import TaskName, facts_of, task_word
from dryfit.settings.training_messages import ANALYSIS_FILE, DRYFIT_FILE, MODEL_FOLDER
from dryfit.settings.user_code import FunctionName
from dryfit.settings.wire import canonical_json
from dryfit.tasks.base import TaskContext, TaskModel
from dryfit.tasks.own import make_task, saved_name
from dryfit.tasks.tokens import TokenFacts

# Input format of a trained model (columns, length, labels, settings), kept in its ``dryfit.json``.


MEMBERS = "members"
"""Folder with the models of an ensemble, which earlier versions wrote."""
BASE = "base"
"""Key of :data:`DRYFIT_FILE`: the path from the folder to the base of the adapters in it, if that is a folder."""
FORMAT = 2
"""Format of :data:`DRYFIT_FILE`. Format 1 had only the task ``criteria``, and the shape of its head."""
ENSEMBLE_FORMAT = 3
"""Format of a folder with several models, which earlier versions averaged."""


class ModelInput(Settings):
    """How a row becomes a model's input, and the model's output a prediction.

    Attributes:
        task: Its task; a class of the user's own without the folder it lies in.
        id: Column with the row's id.
        text: Column with the text.
        criterion: Column with the criterion; None: the model reads text alone.
        max_length: Tokens a row, or a window of it, is cut to.
        pad_id: The token that rows are padded with.
        num_labels: Classes of the data it was trained on.
        labels: Names of the classes; empty: they are numbers.
        multi_label: Each class has a probability of its own.
        cls_last: The classification token is each row's last one.
        settings: Settings of the training; of a model's folder only the last part of its path.
        fitted: Numbers chosen on the validation rows.
    """

    task: TaskName = DEFAULT_TASK
    id: str
    text: str
    criterion: str | None
    max_length: int
    pad_id: int
    num_labels: int = 2
    labels: tuple[str, ...] = ()
    multi_label: bool
    cls_last: bool = False
    settings: TrialSettings = TrialSettings()
    fitted: dict[str, float] = Field(default_factory=dict[str, float])

    def with_task_folder(self, folder: Path, *, trust: bool) -> Self:
        """Return a copy whose task has the folder that a class of the user's own is imported from.

        Args:
            folder: The model's.
            trust: Whether code that is not dryfit's may be run.

        Raises:
            LoadError: It may not, or the class's file is not found.
        """
        if not facts_of(self.task).own:
            return self
        return self.model_copy(update={"task": saved_name(self.task, folder, trust=trust)})

    @property
    def context(self) -> TaskContext:
        """Return the context to make the task with."""
        train = self.settings.train.model_copy(update={"max_length": self.max_length})
        data = DataSettings(
            id=self.id,
            text=self.text,
            num_labels=self.num_labels,
            labels=self.labels,
            multi_label=self.multi_label,
        )
        return TaskContext(
            settings=self.settings.model_copy(update={"train": train}),
            data=data if self.criterion is None else data.model_copy(update={"criterion": self.criterion}),
            facts=TokenFacts(pad_id=self.pad_id, cls_last=self.cls_last, pairs=self.criterion is not None),
            fitted=self.fitted,
        )


def model_input(task: TaskName, context: TaskContext) -> ModelInput:
    """Return the input format of a model that was trained in this context."""
    data, facts, model = context.data, context.facts, context.settings.model
    joint = context.settings.joint
    criteria = None if joint.criteria_model is None else _without_path(joint.criteria_model)
    lm = context.settings.lm
    metric = None if lm.metric is None else FunctionName.parse(lm.metric).short
    shortened = {
        "lm": lm.model_copy(update={"metric": metric}),
        "model": model.model_copy(update={"name": _without_path(model.name)}),
        "joint": joint.model_copy(update={"criteria_model": criteria}),
    }
    return ModelInput(
        task=task_word(task) if facts_of(task).own else task,
        id=data.id,
        text=data.criterion if _instructs(task, context) else data.text,
        criterion=data.criterion if facts.pairs else None,
        max_length=context.settings.train.max_length,
        pad_id=facts.pad_id,
        num_labels=data.num_labels,
        labels=data.labels,
        multi_label=data.multi_label,
        cls_last=facts.cls_last,
        settings=context.settings.model_copy(update=shortened),
        fitted=dict(context.fitted),
    )


def _without_path(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", ".")) else name


def _instructs(task: TaskName, context: TaskContext) -> bool:
    """Return whether the text is an answer: rows to predict have only the instruction."""
    return facts_of(task).decoder and context.settings.lm.format == "instruction"


def read_model_input(folder: Path, *, doing: str = "", to_load: bool = False) -> ModelInput:
    """Read the input format from a model's folder.

    Args:
        folder: The model's.
        doing: For messages.
        to_load: The format of rows may be missing, as for loading weights alone.

    Raises:
        LoadError: The folder holds no model of dryfit's, or its format of rows is missing.
    """
    doing = doing or f"reading {folder / DRYFIT_FILE}"
    allowed = MODEL_FOLDER
    meta = read_dryfit_file(folder, doing, allowed)
    if meta.get("format") == ENSEMBLE_FORMAT:
        hint = f"predict with each, the first is {folder / MEMBERS / '1'}, and average the probabilities"
        raise LoadError(doing, "it holds several models, which earlier versions averaged", "one model", hint)
    if meta.get("format") not in (1, FORMAT):
        raise LoadError(doing, f"format {meta.get('format')!r}", allowed=f"1 or {FORMAT}", hint="upgrade dryfit")
    if "input" not in meta and not to_load:
        hint = "an earlier dryfit saved it: train it once more with `dryfit train`"
        raise LoadError(doing, "it does not say what rows the model reads", allowed, hint)
    try:
        return ModelInput.model_validate_json(json.dumps(_of_format_2(meta)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LoadError(doing, f"input.{'.'.join(map(str, first['loc']))}: {first['msg']}", allowed) from error


def read_base(folder: Path) -> str | None:
    """Return the value of :data:`BASE` in a model's folder; None where it is missing.

    Raises:
        LoadError: The file cannot be read.
    """
    base = read_dryfit_file(folder, f"reading {folder / DRYFIT_FILE}", "a folder that dryfit saved").get(BASE)
    return base if isinstance(base, str) else None


def read_dryfit_file(folder: Path, doing: str, allowed: str) -> dict[str, Any]:
    """Return the content of ``dryfit.json``.

    Raises:
        LoadError: The file is missing or damaged.
    """
    try:
        meta = json.loads((folder / DRYFIT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(doing, str(error).strip().splitlines()[0], allowed, "the folder is damaged") from error
    if not isinstance(meta, dict):
        raise LoadError(doing, f"{DRYFIT_FILE} holds no object", allowed, "the folder is damaged")
    return meta


def _of_format_2(meta: Mapping[str, Any]) -> Any:
    if meta["format"] == FORMAT:
        return meta.get("input")
    unknown = {"id": "id", "text": "text", "criterion": "criterion", "max_length": 8, "pad_id": 0, "multi_label": False}
    return {
        **unknown,
        **meta.get("input", {}),
        "num_labels": meta.get("num_outputs"),
        "cls_last": meta.get("cls_last"),
        "multi_label": meta.get("multi_label", False),
        "settings": {"head": meta.get("head")},
    }


# Saved models: write a trained model into a folder, and load any model (``dryfit.load``).


WEIGHTS_FILE = "model.safetensors"
_CONFIG_FILE = "config.json"
_NOT_OURS = frozenset(
    {_CONFIG_FILE, DRYFIT_FILE, ADAPTER_FILE, "README.md", "modules.json", "config_sentence_transformers.json"}
    | {"example.py", ANALYSIS_FILE}  # which the card speaks of
)
_COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py"})


def load(
    source: str | Path,
    *,
    task: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    attach: str | Path | None = None,
    trust: bool = False,
    missing: Missing = "error",
    mapped: bool = False,
) -> nn.Module:
    """Load a model in eval mode, every parameter, buffer and plain tensor accounted for.

    Where each of them came from is said in the model's ``load_report``, a :class:`dryfit.meta.LoadReport`.

    Args:
        source: A folder saved by a trial or by ``dryfit train``, any other model folder, a hub id or ``minilm``.
        task: What stands on the model: ``encoder``, ``causal-lm``, ``masked-lm``, ``seq2seq-lm``,
            ``sequence-classification``, ``token-classification``, ``question-answering`` or ``multiple-choice``. None:
            a trial's folder gives its encoder with its head, any other the bare encoder.
        device: Where to put it.
        dtype: Type of the weights; None: fp32, or for weights that were frozen beside adapters, the type they had then.
            Quantised ones become the matrices that their layers compute with. Tables that are not trained (rotary
            frequencies) keep their type, and adapters are in fp32.
        attach: Folder of a PEFT adapter to put on it.
        trust: Run code that comes with the model, and that of a task of your own.
        missing: Patterns of weights the files may lack, for a head that is to be trained: ``["classifier.*"]``. They
            are drawn at random from a fixed seed. ``"init"`` allows every one.
        mapped: Use the files' own pages instead of copies: for looking and inference while nobody writes to them.

    Raises:
        LoadError: A file or weight is missing, damaged, of another shape, or has no place.
        ConfigError: There is no such task, or the architecture has no such head.
    """
    folder = Path(source).expanduser()
    mode = ReadMode.MAPPED if mapped else ReadMode.PRIVATE
    model: nn.Module
    if task is None and (folder / DRYFIT_FILE).is_file():
        trained = trained_model(folder, trust=trust, dtype=dtype, device=device).eval()
        restore(trained, folder, LoadOptions(torch.device(device), dtype, missing, mode=mode))
        model = trained
    else:
        pretrained = FolderSource(str(source), trust_remote_code=trust)
        kind = Kind.ENCODER if task is None else kind_of(task)
        model, _ = load_pretrained(pretrained, kind, device=device, dtype=dtype, missing=missing, mode=mode)
    return model if attach is None else attach_adapter(model, Path(attach), device=device)


def kind_of(task: str) -> Kind:
    """Return the kind of pretrained model that a word names.

    Raises:
        ConfigError: There is no such task.
    """
    if task not in list(Kind):
        raise ConfigError("loading a model", f"there is no task {task!r}", allowed=", ".join(Kind))
    return Kind(task)


def save_trained(
    folder: Path,
    model: TaskModel,
    *,
    tokenizer_folders: Mapping[str, Path],
    facts: Mapping[str, Any],
    place: Path | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Save a model so that :func:`load` can build it again; atomic, also over an earlier one.

    A new folder appears by one rename. In a folder that is already there only the weights and ``dryfit.json`` change,
    each by one rename, weights first: at every moment the folder can be loaded. It is on disk when this returns:
    a later record of it holds even over a power cut.

    Args:
        folder: Target.
        model: The model; weights are written in their own dtype.
        tokenizer_folders: Where to copy each pretrained model's tokenizer from, and the code that comes with it; by
            folder, as :meth:`~dryfit.tasks.base.TaskModel.pretrained`.
        facts: Entries of ``dryfit.json``; its ``input`` is a :class:`~dryfit.tasks.saved_models.ModelInput`,
            by which the model is built again.
        place: Where the folder will be moved to: the path to an adapter's base counts from there. None: it stays.
        texts: Further files of a new folder, by name.
    """
    adapted = model.adapted()
    base = None if adapted is None else relative_base(adapted, place or folder)
    text = canonical_json({"format": FORMAT, **facts, **({} if base is None else {BASE: base})})
    weights = weights_file(model)
    if (folder / DRYFIT_FILE).is_file():
        temporary = folder / f".{weights}.{os.getpid()}.tmp"
        save_weights(model, temporary)
        sync_path(temporary)
        temporary.replace(folder / weights)
        write_text_atomic(folder / DRYFIT_FILE, text)
        return
    with publishing(folder) as temporary:
        save_weights(model, temporary / weights)
        if adapted is not None:
            save_adapter_config(adapted, temporary, revision=_revision(facts))
        for part, base in model.pretrained().items():
            (temporary / part).mkdir(exist_ok=True)
            if adapted is None:
                _named(base.config, facts).to_json_file(temporary / part / _CONFIG_FILE, use_diff=False)
            copy_tokenizer(tokenizer_folders[part], temporary / part)
        for name, content in {**texts, DRYFIT_FILE: text}.items():
            (temporary / name).write_text(content, encoding="utf-8")


def _named(config: PreTrainedConfig, facts: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config that has the names of the classes, where they have names."""
    names = facts.get("input", {}).get("labels") or ()
    if not names:
        return config
    named = copy.deepcopy(config)
    named.id2label = dict(enumerate(names))
    named.label2id = {name: number for number, name in enumerate(names)}
    return named


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, and the code that comes with its model."""
    for path in source.iterdir():
        ours = path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_OURS
        if path.is_file() and ours and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def weights_file(model: TaskModel) -> str:
    """Return the name of the file of a model's trained weights; of a model with adapters, of these alone."""
    return WEIGHTS_FILE if model.adapted() is None else ADAPTER_WEIGHTS


def save_weights(model: TaskModel, path: Path) -> None:
    """Write the trained weights, as :func:`restore` reads them."""
    adapted = model.adapted()
    if adapted is None:
        save_model(model, str(path), metadata={"format": "pt"})
    else:
        save_adapter(adapted, path)


def restore(model: TaskModel, folder: Path, options: LoadOptions) -> None:
    """Fill a model with weights that a trial saved; every tensor of the file must be used.

    Raises:
        LoadError: A weight is missing, has no place or another shape, or the file is damaged.
    """
    stored = open_checkpoint(folder / weights_file(model))
    adapted = model.adapted()
    if adapted is None:
        fill(model, stored, replace(options, exact=True))
    else:
        fill_adapter(adapted, stored, device=options.device)


def _revision(facts: Mapping[str, Any]) -> str | None:
    return facts["input"]["settings"]["model"]["revision"] if "input" in facts else None


def trained_model(
    folder: Path, *, trust: bool, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> TaskModel:
    """Return the model of a trial's folder, without its trained weights.

    Args:
        folder: The trial's.
        trust: Run code that comes with the model.
        dtype: Of frozen weights; None: that of the training.
        device: Of frozen weights.

    Raises:
        LoadError: ``dryfit.json`` or a config is damaged, or of a later dryfit; or frozen weights are not where they
            were in training.
    """
    read = read_model_input(folder, doing=f"loading the trained model in {folder}", to_load=True)
    read = read.with_task_folder(folder, trust=trust)
    base = base_of_adapter(folder, trust=trust, relative=read_base(folder))

    def make(
        source: ModelSettings, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None
    ) -> PreTrainedModel:
        del source
        if base is None:
            config = load_config(FolderSource(str(folder / part), trust_remote_code=trust))
            return build(lambda: make_model(config, kind, trust_remote_code=trust))
        if dtype is None or (frozen is not None and frozen.quantised):
            return load_frozen(base, kind, frozen, device=device, as_matrices=dtype)
        return load_pretrained(base, kind, device=device, dtype=dtype)[0]

    return make_task(read.task, read.context).model(make)


# Check whether :func:`dryfit.tasks.saved_models.load` could load a folder, without loading it.


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
