"""Child job MERGE: save a base model and its adapters as one model, which needs neither dryfit nor PEFT."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ConfigError
from dryfit.core.jobs.child import ChildResult
from dryfit.core.jobs.train import MergeRequest, MergeResult
from dryfit.core.settings.choices import BaseFormat
from dryfit.core.wire import Phase, sync_path
from dryfit.tasks.base import TaskModel
from dryfit.tasks.lm.decoder import BASE_DTYPES
from dryfit.tasks.saved.model_input import read_model_input
from dryfit.tasks.saved.saved_model import copy_tokenizer, load


def merge(body: MergeRequest, channel: ChildChannel) -> ChildResult:
    """Merge a saved model's adapters into its base, in fp32, and save it in the format its base had.

    Where the base was read in 8 bits, the weights of its files are taken, in fp16.

    Raises:
        LoadError: The folder is not one that dryfit saved, or the base is no longer where it was.
        ConfigError: The folder holds no adapters.
    """
    torch.set_num_threads(body.threads)
    channel.send(Phase(name="load"))
    folder, target = Path(body.model_dir), Path(body.out)
    read = read_model_input(folder)
    model = load(folder, dtype=torch.float32, trust=body.trust)
    adapted: Any = model.adapted() if isinstance(model, TaskModel) else None
    if adapted is None:
        raise ConfigError(f"merging the adapters of {folder}", "it holds none", "a model with LoRA adapters")
    channel.beat()
    whole: Any = adapted.merge_and_unload(safe_merge=True)
    base = read.settings.lora.base or BaseFormat(read.settings.train.precision)
    dtype = torch.float16 if base is BaseFormat.INT8 else BASE_DTYPES[base]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    channel.send(Phase(name="save"))
    whole.to(dtype).save_pretrained(temporary)
    copy_tokenizer(folder, temporary)
    temporary.rename(target)
    sync_path(target.parent)
    size = sum(path.stat().st_size for path in target.iterdir())
    return ChildResult(merge=MergeResult(out=str(target), size_bytes=size), error=None)
