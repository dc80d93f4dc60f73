"""Child job MERGE: save a base model and its adapters as one model, which needs neither dryfit nor PEFT."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError
from dryfit.core.jobs.export import MergeRequest, MergeResult
from dryfit.core.settings.weight_formats import base_format
from dryfit.core.wire import Phase, empty_beside, publish_folder
from dryfit.meta.loading.frozen_weights import DTYPES
from dryfit.tasks.base import TaskModel
from dryfit.tasks.saved.model_input import ModelInput, read_model_input
from dryfit.tasks.saved.saved_model import copy_tokenizer, load


def merge(body: MergeRequest, channel: ChildChannel) -> MergeResult:
    """Merge a saved model's adapters into its base, in fp32, and save it in the format its base had.

    Where the base was quantised, they are merged into the matrices that its layers computed with, as in training, and
    saved in the format it computed in.

    Raises:
        LoadError: The folder is not one that dryfit saved, or the base is no longer where it was.
        ConfigError: The folder holds no adapters.
    """
    torch.set_num_threads(body.threads)
    channel.send(Phase(name="load"))
    folder, target = Path(body.model_dir), Path(body.out)
    model = load(folder, dtype=torch.float32, trust=body.trust)
    if not isinstance(model, TaskModel) or model.adapted() is None:
        raise ConfigError(f"merging the adapters of {folder}", "it holds none", "a model with LoRA adapters")
    channel.beat()
    whole = merged(model, read_model_input(folder))
    temporary = empty_beside(target)
    channel.send(Phase(name="save"))
    whole.save_pretrained(temporary)
    copy_tokenizer(folder, temporary)
    publish_folder(temporary, target, {})
    size = sum(path.stat().st_size for path in target.iterdir())
    return MergeResult(out=str(target), size_bytes=size)


def merged(model: TaskModel, read: ModelInput) -> PreTrainedModel:
    """Return a model's base with its adapters merged into it, in the format that the base had in training.

    Args:
        model: With adapters, in fp32; it is changed.
        read: What is known of its training.
    """
    adapted: Any = model.adapted()
    whole: Any = adapted.merge_and_unload(safe_merge=True)
    return whole.to(DTYPES[base_format(read.settings.lora, read.settings.train).compute])
