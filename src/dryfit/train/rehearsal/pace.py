"""Child job PACE: time optimizer steps of a trial, beside other children that do the same."""

import os
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.diagnostics import PaceRequest, PaceResult
from dryfit.core.settings.choices import Precision
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.wire import Phase
from dryfit.meta.loading.frozen_weights import DTYPES
from dryfit.tasks.base import Batch, Task, TaskModel
from dryfit.tasks.rows.checked_rows import TRAIN
from dryfit.train.batches import epoch_batches
from dryfit.train.data import read_tokens, trial_task
from dryfit.train.device import prepare_device
from dryfit.train.model import build_model
from dryfit.train.optim.optimizer import make_optimizer, optimizer_plan
from dryfit.train.optim.step import backward_batch, on_device

_MEETING_S: Final = 10.0
_POLL_S: Final = 0.002


def pace(body: PaceRequest, channel: ChildChannel) -> PaceResult:
    """Time steps of a trial's first batch.

    Raises:
        DryfitError: The model or its rows cannot be read.
    """
    trial = body.trial
    torch.set_num_threads(trial.plan.threads)
    prepare_device(trial.plan, os.environ)
    channel.send(Phase(name="load"))
    tokens = read_tokens(trial, trial_task(trial.config), only=None)
    task, train = trial_task(trial.config, tokens), tokens.splits[TRAIN]
    model = build_model(trial, task)
    model.train()
    optimizer = make_optimizer(model, trial.config.settings.optim, optimizer_plan(trial.plan))
    first = epoch_batches(
        train.lengths_R,
        seed=trial.config.seed,
        epoch=0,
        batch_size=trial.config.settings.train.batch_size,
        group_by_length=False,
        rows=task.epoch_rows(train, seed=trial.config.seed, epoch=0),
    )[0]
    device = next(model.parameters()).device
    batch = on_device(task.collate(train, first[: body.rows]), device)
    step = partial(_step, trial.config.settings.train.precision, model, task, batch, optimizer)
    channel.send(Phase(name="train"))
    step()
    channel.beat()
    together = _meet(Path(body.meeting), body.child, body.side_by_side)
    times_s: list[float] = []
    while sum(times_s) < body.measured_s:
        times_s.append(step())
        channel.beat()
    return PaceResult(step_s=statistics.median(times_s), steps=len(times_s), together=together)


def _step(precision: Precision, model: TaskModel, task: Task, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """Do an optimizer step; return its seconds."""
    device = next(iter(batch.values())).device.type

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(device, dtype=DTYPES[precision]) if precision.is_half else nullcontext()

    began_s = time.perf_counter()
    backward_batch(
        model,
        batch,
        task,
        micro_batch=len(batch["attention_mask"]),
        backward=lambda loss: loss.backward(),
        autocast=autocast,
    )
    optimizer.step()
    optimizer.zero_grad()
    if device == DeviceKind.CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def _meet(folder: Path, child: int, side_by_side: int) -> bool:
    """Wait until all children have come so far; False: some did not in time."""
    (folder / str(child)).touch()
    deadline_s = time.monotonic() + _MEETING_S
    while len(list(folder.iterdir())) < side_by_side:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
