"""The first step of a training process: set up its device and check its settings."""

import os
from collections.abc import Mapping

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ChangedError, InternalError
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.settings.choices import Precision
from dryfit.core.user_code import demand_unchanged
from dryfit.core.wire import Note, Phase
from dryfit.meta.files.source import local_folder, model_identity
from dryfit.tasks.base import Task
from dryfit.tasks.metrics import check_metrics
from dryfit.train.data import trial_task
from dryfit.train.device import check_precisions, prepare_device
from dryfit.train.ineffective_settings import check_effect
from dryfit.train.optim.optimizer import check_optimizer, check_sharded, optimizer_plan


def start_training(request: TrainRequest, channel: ChildChannel) -> Task:
    """Make this process ready to train, and check the trial's settings before its data is read.

    Returns:
        The trial's task, without facts of its data.

    Raises:
        DryfitError: A setting is wrong.
    """
    torch.set_num_threads(request.plan.threads)
    if request.visible_device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.visible_device
    for note in prepare_device(request.plan, os.environ, fraction=request.memory_fraction).notes:
        channel.send(Note(text=note))
    check_precisions((request.config.settings.train.precision,), request.plan.device)
    if request.config.settings.train.precision is Precision.TF32:
        torch.set_float32_matmul_precision("high")
    if request.diagnostic:
        channel.send(Note(text="every kernel is waited for, to find where an earlier attempt failed: this is slow"))
    if request.file_sharing:
        # Names instead of open files: no limit on those is reached. The memory itself is /dev/shm's all the same.
        torch.multiprocessing.set_sharing_strategy("file_system")
    channel.send(Phase(name="load"))
    config, plan = request.config, request.plan
    if config.settings.train.batch_size != plan.effective_batch:
        raise InternalError(
            "starting a trial",
            f"the plan is for batches of {plan.effective_batch}, not of {config.settings.train.batch_size}",
        )
    demand_unchanged(request.own_file, request.own_hash)
    task = trial_task(config)
    check_metrics(task, (config.metric, *config.also))
    check_effect(config)
    check_optimizer(config.settings.optim, optimizer_plan(plan), plan.device)
    check_sharded(config.settings, plan)
    _check_models(task, request.revisions)
    return task


def _check_models(task: Task, revisions: Mapping[str, str]) -> None:
    """Refuse a model folder that was changed since the session looked at it: trials on other weights do not compare.

    Raises:
        ChangedError: The content of a folder is not what it was.
    """
    for model in task.sources().values():
        known = revisions.get(model.name)
        if known is not None and local_folder(model) is not None and model_identity(model) != known:
            raise ChangedError(
                f"loading the model {model.name} for a trial",
                "its files have changed since the study was started or resumed",
                "the model that the trials before it began from",
                "put it back; or keep it, and `dryfit resume` goes on with it and says so",
            )
