"""The first step of a training process: set up its device and check its settings."""

import os

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import InternalError
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.wire import Note, Phase
from dryfit.tasks.base import Task
from dryfit.tasks.metrics import check_metrics
from dryfit.train.data import trial_task
from dryfit.train.device import prepare_device
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
    task = trial_task(config)
    check_metrics(task, (config.metric, *config.also))
    check_effect(config)
    check_optimizer(config.settings.optim, optimizer_plan(plan), plan.device)
    check_sharded(config.settings, plan)
    return task
