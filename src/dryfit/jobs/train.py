"""Child job TRAIN: one trial, from its request to its result."""

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from dryfit.core.jobs import ChildResult, StopReason, TrainRequest, TrainResult
from dryfit.core.seeds import derive_seed
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.trial import FoldScore, TrialConfig, best_point, fold_means
from dryfit.core.wire import Checkpointed, Note, Phase
from dryfit.meta.files.source import model_folder
from dryfit.parallel.layout.processes import SINGLE_PROCESS, ProcessGroup, run_in_process_group
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.folds import Fold, study_folds
from dryfit.tasks.metrics import check_metrics
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.tasks.tokens.token_set import Tokens
from dryfit.train.batches import epoch_size
from dryfit.train.checkpoint import Checkpoint, newest_good, save_checkpoint
from dryfit.train.device import observed_memory, prepare_device
from dryfit.train.ineffective_settings import check_effect
from dryfit.train.model import lay_out
from dryfit.train.optimizer import check_divided, check_optimizer, optimizer_plan
from dryfit.train.run import ALONE, FixedLength, FoldPosition, RunState, TrialParts
from dryfit.train.trainer import run_training

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
    result = run_in_process_group(body.plan, channel, lambda group: _train(body, channel, group))
    if body.diagnostic:
        channel.send(Note(text="what ended the attempt before did not come back, although every kernel was waited for"))
    return ChildResult(train=result, error=None)


def _train(body: TrainRequest, channel: ChildChannel, group: ProcessGroup) -> TrainResult:
    if body.config.data.folds > 1:
        return _train_folds(body, channel, group)
    tokens = begin(body, channel, only=(TRAIN, VALIDATION))
    parts = trial_parts(body, channel, tokens, group=group)
    return train_result(body, run_training(parts, newest_good_of(body, channel)), group)


def _train_folds(body: TrainRequest, channel: ChildChannel, group: ProcessGroup) -> TrainResult:
    """Train once for each fold that is not done yet, each time on the rows of the others.

    Every fold has a seed of its own and draws nothing that depends on those before, so that it is the same training
    whether this process has done these, another one has, or nobody.
    """
    folds = study_folds(body.config.data)
    checkpoint = newest_good_of(body, channel)
    place = FoldPosition(len(folds), checkpoint.folds if checkpoint is not None else (), _fold_reports(body))
    tokens = begin(body, channel, only=(TRAIN, VALIDATION), fold=folds[len(place.done)])
    while True:
        within = checkpoint if checkpoint is not None and checkpoint.fold_step else None
        parts = trial_parts(body, channel, tokens, place=place, group=group)
        run, schedule_steps = run_training(parts, within), parts.total_steps
        del parts, tokens
        _let_go(body.plan.device)
        score = _fold_score(run, body.config, schedule_steps)
        if score is None or run.stopped_by not in (None, StopReason.EARLY_STOPPING):
            return _folds_result(body, place, run.stopped_by, group, steps=place.steps_before + run.step)
        place = replace(place, done=(*place.done, score))
        if len(place.done) == len(folds):
            return _folds_result(body, place, None, group, steps=place.steps_before)
        if group.rank == 0:
            _checkpoint_between(body, channel, place)
        asked = channel.stop_requested()
        if asked is not None:
            return _folds_result(body, place, asked, group, steps=place.steps_before)
        checkpoint = None
        tokens = read_tokens(body, channel, only=(TRAIN, VALIDATION), fold=folds[len(place.done)])


def _fold_reports(body: TrainRequest) -> int:
    """Numbers that each fold has for its reports: as in all trials of the study, and never fewer than it needs."""
    train = body.config.settings.train
    return max(body.fold_reports, train.epochs * train.evals_per_epoch)


def fold_seed(seed: int, fold: int) -> int:
    """The seed of one of a trial's folds; ``fold`` counts from 1."""
    return derive_seed(seed, "fold", fold)


def _fold_score(run: RunState, config: TrialConfig, schedule_steps: int) -> FoldScore | None:
    """What a run has come to as a fold; None where no validation gave a number."""
    best = best_point(run.points, config.direction)
    if best is None:
        return None
    return FoldScore(
        value=best.value,
        also=tuple(best.metrics[metric] for metric in config.also),
        best_step=best.step,
        steps=run.step,
        schedule_steps=schedule_steps,
    )


def _let_go(device: DeviceKind) -> None:
    """Give back what a fold's model and optimizer held; the Trainer and its callbacks refer to each other."""
    gc.collect()
    if device is DeviceKind.CUDA:
        torch.cuda.empty_cache()


def _checkpoint_between(body: TrainRequest, channel: ChildChannel, place: FoldPosition) -> None:
    """Keep what the folds have come to; the next one begins with nothing else."""
    step = place.steps_before
    channel.send(Phase(name="save", step=step))
    save_checkpoint(
        Path(body.checkpoint_dir),
        step=step,
        fingerprint=body.fingerprint,
        points=(),
        write=lambda _: None,
        folds=place.done,
    )
    channel.send(Checkpointed(step=step))
    channel.send(Phase(name="load", step=step))


def begin(body: TrainRequest, channel: ChildChannel, *, only: tuple[str, ...], fold: Fold | None = None) -> Tokens:
    """Make this process ready to train, and read the tokens of some splits.

    Args:
        body: What to learn, how to run it and where its files lie.
        channel: Told what is done, and what should be known of the rows.
        only: Which splits.
        fold: Which rows are train and validation; None: those of the sources.

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
    check_divided(config.settings, body.plan)
    tokens = read_tokens(body, channel, only=only, fold=fold)
    for remark in task.remarks(tokens):  # of one fold: each has all rows, on one side or the other
        channel.send(Note(text=remark))
    return tokens


def read_tokens(body: TrainRequest, channel: ChildChannel, *, only: tuple[str, ...], fold: Fold | None) -> Tokens:
    """Read the tokens of some splits, of which train and validation may be those of a fold.

    Raises:
        DataError: They had to be made again and the data is no longer what the study was checked with.
    """
    config = body.config
    tokens = prepared_tokens(
        trial_task(config),
        cache_dir=Path(body.cache_dir),
        data_fingerprint=config.data_fingerprint,
        only=only,
        fold=fold,
    )
    channel.beat()
    return tokens


def newest_good_of(body: TrainRequest, channel: ChildChannel) -> Checkpoint | None:
    """The checkpoint to go on from; None: from the start. Damaged ones are told of."""

    def told(text: str) -> None:
        channel.send(Note(text=text))

    return newest_good(Path(body.checkpoint_dir), body.fingerprint, told, computed=body.config.fingerprint)


def train_result(body: TrainRequest, run: RunState, group: ProcessGroup) -> TrainResult:
    """What a run has come to, as the control process hears it."""
    best = best_point(run.points, body.config.direction)
    return TrainResult(
        value=best.value if best else None,
        also=tuple(best.metrics[metric] for metric in body.config.also) if best else (),
        best=best.n if best else None,
        steps=run.step,
        stopped_by=run.stopped_by,
        **_peaks(body.plan.device, group),
    )


def _folds_result(
    body: TrainRequest, place: FoldPosition, stopped_by: StopReason | None, group: ProcessGroup, *, steps: int
) -> TrainResult:
    """What a trial of several folds has come to, whether all of them are done or not."""
    value, *also = fold_means(place.done) if len(place.done) == place.folds else (None,)
    if stopped_by is None and any(fold.stopped_early for fold in place.done):
        stopped_by = StopReason.EARLY_STOPPING
    return TrainResult(
        value=value,
        also=tuple(also),
        best=None,
        steps=steps,
        folds=place.done,
        stopped_by=stopped_by,
        **_peaks(body.plan.device, group),
    )


def _peaks(device: DeviceKind, group: ProcessGroup) -> dict[str, Any]:
    """Of a device that of the rank that took most; of the host that of all ranks together."""
    peaks = group.collect(observed_memory(device))
    return {
        "peak_allocated_bytes": _of_all(max, (peak.allocated_bytes for peak in peaks)),
        "peak_reserved_bytes": _of_all(max, (peak.reserved_bytes for peak in peaks)),
        "peak_rss_bytes": _of_all(sum, (peak.rss_bytes for peak in peaks)),
    }


def _of_all(combine: Callable[[list[int]], int], peaks: Iterable[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return combine(known) if known else None


def trial_task(config: TrialConfig, tokens: Tokens | None = None) -> Task:
    """What the trial learns: its batches, model, loss and metrics; of its tokens it knows what it is told."""
    context = TaskContext(config.settings, config.data, metric=config.metric)
    context = context if tokens is None else context.knowing(tokens.facts(config.data.num_labels))
    return make_task(config.task, context)


def trial_parts(
    body: TrainRequest,
    channel: ChildChannel,
    tokens: Tokens,
    length: FixedLength | None = None,
    place: FoldPosition = ALONE,
    group: ProcessGroup = SINGLE_PROCESS,
) -> TrialParts:
    """Build the model, and put together what one training run is made of.

    Args:
        body: What to learn, how to run it and where its files lie.
        channel: How to report, and to hear verdicts and stop requests.
        tokens: The rows, of which train and validation are those of the place.
        length: None: all epochs, validated on the way.
        place: Which of the trial's trainings it is.
        group: The processes that train it.
    """
    if place.number:
        seed = fold_seed(body.config.seed, place.number)
        body = body.model_copy(update={"config": body.config.model_copy(update={"seed": seed})})
    task = trial_task(body.config, tokens)
    model, layout = lay_out(body, task, group)
    parts = TrialParts(
        request=body,
        channel=channel,
        model=model,
        task=layout.task_here(task),
        train=tokens.splits[TRAIN],
        validation=tokens.splits[VALIDATION],
        tokenizer_folders={part: model_folder(source) for part, source in task.sources().items()},
        epoch_rows=epoch_size(tokens.splits[TRAIN], task),
        length=length,
        place=place,
        layout=layout,
    )
    channel.beat()
    return parts
