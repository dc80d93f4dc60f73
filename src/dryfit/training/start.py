"""The first and the last step of a training process: settings checked, its run turned into a result."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dryfit.meta.checkpoint_files import local_folder, model_identity
from dryfit.parallel.processes import ProcessGroup
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import Precision
from dryfit.settings.errors import ChangedError, ConfigError, InternalError
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.tables import TRIAL_NEEDS
from dryfit.settings.training_messages import StopReason, TrainRequest, TrainResult
from dryfit.settings.trial import FoldScore, TrialConfig, best_point, fold_means
from dryfit.settings.user_code import demand_unchanged
from dryfit.settings.wire import Note
from dryfit.tasks.answers import check_metrics
from dryfit.tasks.base import Task
from dryfit.training.batches import trial_task
from dryfit.training.device import check_precisions, observed_memory, prepare_device
from dryfit.training.optimizer import check_optimizer, check_sharded, optimizer_plan
from dryfit.training.run import FoldPosition, RunState, TrialParts

# Refuse settings that would have no effect.


def check_effect(config: TrialConfig) -> None:
    """Refuse keys that are set away from their default and act on nothing.

    Where the switch itself is searched, an idle key is no mistake: it acts in other trials.

    Raises:
        ConfigError: Such a key is set.
        InternalError: The number format was not decided.
    """
    if config.settings.train.precision is Precision.AUTO:
        raise InternalError("checking train.precision of a trial", "it is auto", "a number format")
    for needs in TRIAL_NEEDS:
        value, switched = config.settings.value(needs.key), config.settings.value(needs.switch)
        if switched in needs.values or needs.switch in config.params or needs.may_idle:
            continue
        if not config.settings.is_changed(needs.key):
            continue
        raise ConfigError(
            f"checking {needs.key} = {value!r}",
            f"it has no effect with {needs.switch} = {switched!r}",
            allowed=f"{needs.key} only with {needs.condition}",
            hint="leave the key out (in a search: give it a `when`)",
        )


# The first step of a training process: set up its device and check its settings.


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


def train_result(request: TrainRequest, run: RunState, group: ProcessGroup) -> TrainResult:
    """Return the result of a trial that trains once."""
    best = best_point(run.points, request.config.direction)
    return TrainResult(
        value=best.value if best else None,
        also=tuple(best.metrics[metric] for metric in request.config.also) if best else (),
        best=best.n if best else None,
        steps=run.step,
        stopped_by=run.stopped_by,
        **_peaks(request.plan.device, group),
    )


def fold_score(parts: TrialParts, run: RunState) -> FoldScore | None:
    """Return the score of a fold; None: it was stopped before its end, or no validation gave a number."""
    config = parts.request.config
    best = best_point(run.points, config.direction)
    if best is None or run.stopped_by not in (None, StopReason.EARLY_STOPPING):
        return None
    return FoldScore(
        value=best.value,
        also=tuple(best.metrics[metric] for metric in config.also),
        best_step=best.step,
        steps=run.step,
        schedule_steps=parts.total_steps,
        collapsed=best.collapsed,
    )


def folds_result(
    request: TrainRequest,
    position: FoldPosition,
    stopped_by: StopReason | None,
    group: ProcessGroup,
    *,
    fold_steps: int = 0,
) -> TrainResult:
    """Return the result of a trial of several folds, whether all of them are done or not.

    Args:
        request: What was asked.
        position: The folds that are done.
        stopped_by: Why those to come were not trained; None: nothing stopped them.
        group: The processes that train it.
        fold_steps: Optimizer steps of a fold that was begun and is not done.
    """
    value, *also = fold_means(position.done) if position.is_complete else (None,)
    if stopped_by is None and any(fold.stopped_early for fold in position.done):
        stopped_by = StopReason.EARLY_STOPPING
    return TrainResult(
        value=value,
        also=tuple(also),
        best=None,
        steps=position.steps_before + fold_steps,
        folds=position.done,
        stopped_by=stopped_by,
        **_peaks(request.plan.device, group),
    )


def _peaks(device: DeviceKind, group: ProcessGroup) -> dict[str, Any]:
    """Return the most memory that was used: of a device by the rank that took most, of the host by all together."""
    peaks = group.collect(observed_memory(device))
    return {
        "peak_allocated_bytes": _combined(max, (peak.allocated_bytes for peak in peaks)),
        "peak_reserved_bytes": _combined(max, (peak.reserved_bytes for peak in peaks)),
        "peak_rss_bytes": _combined(sum, (peak.rss_bytes for peak in peaks)),
    }


def _combined(combine: Callable[[list[int]], int], peaks: Iterable[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return combine(known) if known else None
