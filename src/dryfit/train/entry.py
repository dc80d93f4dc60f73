"""Child job TRAIN: one trial, from its request to its result."""

import os
from pathlib import Path

# Imported before the fork, so that a trial need not do it: what metrics are computed by, and what most studies train.
import sklearn.metrics  # noqa: F401
import torch
import torchmetrics.functional.classification  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.models.distilbert.modeling_distilbert
import transformers.models.electra.modeling_electra
import transformers.models.modernbert.modeling_modernbert
import transformers.models.roberta.modeling_roberta  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import InternalError
from dryfit.core.jobs import ChildResult, TrainRequest, TrainResult
from dryfit.core.trial import TrialConfig, best_point
from dryfit.core.wire import Note, Phase
from dryfit.meta.source import model_folder
from dryfit.tasks.base import Given, Task
from dryfit.tasks.metrics import check_metrics
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.tokens import Tokens
from dryfit.train.batches import epoch_size
from dryfit.train.checkpoint import Checkpoint, newest_good
from dryfit.train.device import observed_memory, prepare_device
from dryfit.train.effect import check_effect
from dryfit.train.loop import run_training
from dryfit.train.model import build_model
from dryfit.train.optim import check_optimizer, optimizer_plan
from dryfit.train.parts import FixedLength, RunState, TrialParts

# Compiles a thousand patterns on its first call (0.1 s) and keeps them: once before the fork, not in each trial.
get_checkpoint_conversion_mapping("bert")


def train(body: TrainRequest, channel: ChildChannel) -> ChildResult:
    """Train one trial, or go on with it from its newest good checkpoint.

    Args:
        body: What to learn, how to run it and where its files lie.
        channel: How to report, and to hear verdicts and stop requests.

    Returns:
        The best validation, and why training ended.

    Raises:
        DryfitError: A setting, the data, the model's weights or a checkpoint is wrong, or the loss is not finite.
    """
    tokens = begin(body, channel, only=(TRAIN, VALIDATION))
    run = run_training(trial_parts(body, channel, tokens), newest_good_of(body, channel))
    if body.diagnostic:
        channel.send(Note(text="what ended the attempt before did not come back, although every kernel was waited for"))
    return ChildResult(train=train_result(body, run), error=None)


def begin(body: TrainRequest, channel: ChildChannel, *, only: tuple[str, ...]) -> Tokens:
    """Make this process ready to train, and read the tokens of some splits.

    Raises:
        DryfitError: A setting or the data is wrong.
    """
    torch.set_num_threads(body.plan.threads)
    if body.visible_device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = body.visible_device
    for note in prepare_device(body.plan, os.environ, fraction=body.memory_fraction).notes:
        channel.send(Note(text=note))
    if body.diagnostic:
        channel.send(Note(text="every kernel is waited for, to find where an earlier attempt failed: this is slow"))
    if body.file_sharing:
        # Names instead of open files: no limit on those is reached. The memory itself is /dev/shm's all the same.
        torch.multiprocessing.set_sharing_strategy("file_system")
    channel.send(Phase(name="load"))
    config = body.config
    if config.settings.train.batch_size != body.plan.effective_batch:
        raise InternalError(
            "starting a trial",
            f"the plan is for batches of {body.plan.effective_batch}, not of {config.settings.train.batch_size}",
        )
    task = trial_task(config)
    check_metrics(task, (config.metric, *config.also))
    check_effect(config)
    check_optimizer(config.settings.optim, optimizer_plan(body.plan), body.plan.device)
    tokens = prepared_tokens(task, cache_dir=Path(body.cache_dir), data_fingerprint=config.data_fingerprint, only=only)
    channel.beat()
    for remark in task.remarks(tokens):
        channel.send(Note(text=remark))
    return tokens


def newest_good_of(body: TrainRequest, channel: ChildChannel) -> Checkpoint | None:
    """The checkpoint to go on from; None: from the start. Damaged ones are told of."""

    def told(text: str) -> None:
        channel.send(Note(text=text))

    return newest_good(Path(body.checkpoint_dir), body.config.fingerprint, told)


def train_result(body: TrainRequest, run: RunState) -> TrainResult:
    """What a run has come to, as the control process hears it."""
    best = best_point(run.points, body.config.direction)
    peak = observed_memory(body.plan.device)
    return TrainResult(
        value=best.value if best else None,
        also=tuple(best.metrics[metric] for metric in body.config.also) if best else (),
        best=best.n if best else None,
        steps=run.step,
        stopped_by=run.stopped_by,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        peak_rss_bytes=peak.rss_bytes,
    )


def trial_task(config: TrialConfig, tokens: Tokens | None = None) -> Task:
    """What the trial learns: its batches, model, loss and metrics; of its tokens it knows what it is told."""
    given = Given(config.settings, config.data)
    given = given if tokens is None else given.knowing(tokens.facts(config.data.num_labels))
    return make_task(config.task, given)


def trial_parts(
    body: TrainRequest, channel: ChildChannel, tokens: Tokens, length: FixedLength | None = None
) -> TrialParts:
    """Build the model, and put together what one training run is made of."""
    config = body.config
    task = trial_task(config, tokens)
    parts = TrialParts(
        request=body,
        channel=channel,
        model=build_model(body, task),
        task=task,
        train=tokens.splits[TRAIN],
        validation=tokens.splits[VALIDATION],
        tokenizer_folders={part: model_folder(source) for part, source in task.sources().items()},
        epoch_rows=epoch_size(tokens.splits[TRAIN], task),
        length=length,
    )
    channel.beat()
    return parts
