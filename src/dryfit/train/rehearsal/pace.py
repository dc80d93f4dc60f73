"""Child job PACE: time optimizer steps of a trial, beside other children that do the same."""

import os
import statistics
import time
from pathlib import Path
from typing import Final

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.diagnostics import PaceRequest, PaceResult
from dryfit.core.wire import Phase
from dryfit.tasks.rows.checked_rows import TRAIN
from dryfit.train.batches import epoch_batches
from dryfit.train.data import read_tokens, trial_task
from dryfit.train.device import prepare_device
from dryfit.train.model import trial_parts
from dryfit.train.trainer import TrialSteps

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
    train, seed = tokens.splits[TRAIN], trial.config.seed
    steps = TrialSteps(trial_parts(trial, channel, tokens))
    first = epoch_batches(
        train.lengths_R,
        seed=seed,
        epoch=0,
        batch_size=trial.config.settings.train.batch_size,
        group_by_length=False,
        rows=trial_task(trial.config, tokens).epoch_rows(train, seed=seed, epoch=0),
    )[0][: body.rows]
    steps.trainer.micro_batch = len(first)
    channel.send(Phase(name="train"))
    _seconds(steps, first)
    together = _meet(Path(body.meeting), body.child, body.side_by_side)
    times_s: list[float] = []
    while sum(times_s) < body.measured_s:
        times_s.append(_seconds(steps, first))
    return PaceResult(step_s=statistics.median(times_s), steps=len(times_s), together=together)


def _seconds(steps: TrialSteps, rows: list[int]) -> float:
    began_s = time.perf_counter()
    steps.gradients(rows)
    steps.update()
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
