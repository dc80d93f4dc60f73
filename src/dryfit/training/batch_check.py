"""Child job BATCH_CHECK: check all batches of a model, and do one training step on the largest.

The job looks for models that cannot be trained, so their errors are part of the answer. Only what ends the process is
left to the control process.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedConfig

from dryfit.meta.pretrained import Kind, pretrained_config
from dryfit.processes.channel import ChildChannel
from dryfit.settings.check_messages import (
    BatchCheckRequest,
    BatchCheckResult,
    BatchWalk,
    PointCheck,
    ProbeFailure,
    StepCheck,
)
from dryfit.settings.errors import DataError, DryfitError
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import TrialConfig
from dryfit.settings.wire import ErrorParts, Note, Phase
from dryfit.tasks.guard import BatchGuard, config_bounds
from dryfit.tasks.rows import TRAIN
from dryfit.tasks.tokens import Tokens
from dryfit.training.batches import evaluation_batches, first_epoch, read_tokens, trial_task
from dryfit.training.device import prepare_device
from dryfit.training.model import build_model, trial_parts
from dryfit.training.run import TrialParts
from dryfit.training.start import check_effect
from dryfit.training.trainer import TrialSteps

_MOST_FAULTS = 5
_POINT_ROWS = 2


def batch_check(body: BatchCheckRequest, channel: ChildChannel) -> BatchCheckResult:
    """Check every batch, then load the model and do one step of its largest batch and of each point."""
    trial = body.trial
    torch.set_num_threads(trial.plan.threads)
    findings = _Findings()
    with findings.stage("device"):
        for note in prepare_device(trial.plan, os.environ).notes:
            channel.send(Note(text=note))
    if findings.failures:
        return findings.result()
    tokens: Tokens | None = None
    for length in body.lengths:
        with findings.stage(f"tokens, train.max_length = {length}"):
            task = trial_task(_of_length(trial.config, length))
            made = read_tokens(trial, task, only=None)
            encoder = pretrained_config(trial.config.settings.model, Kind.ENCODER)
            findings.walks += walk_batches(trial, made, encoder, length, channel.beat)
            findings.remarks += task.remarks(made)
            if length == trial.config.settings.train.max_length:
                tokens = made
    parts: TrialParts | None = None
    with findings.stage("weights"):
        if tokens is None:
            build_model(trial, trial_task(trial.config))  # what is wrong with it is said all the same
        else:
            parts = trial_parts(trial, channel, tokens)
    # A batch that is wrong would end the step in an error that says less.
    if tokens is not None and parts is not None and not any(walk.faults for walk in findings.walks):
        channel.send(Phase(name="train"))
        with findings.stage("step"):
            check_effect(trial.config)
            largest = _largest(trial.config, tokens)
            findings.step = _step(parts, *largest)
        del parts  # the points build their own
        for point in body.points:
            findings.points.append(_point(trial, point, channel))
    return findings.result()


class _Findings:
    """The answer so far."""

    def __init__(self) -> None:
        self.walks: list[BatchWalk] = []
        self.remarks: list[str] = []
        self.step: StepCheck | None = None
        self.points: list[PointCheck] = []
        self.failures: list[ProbeFailure] = []

    @contextmanager
    def stage(self, name: str) -> Generator[None, None, None]:
        """Write a dryfit error down, and go on behind the block."""
        try:
            yield
        except DryfitError as error:
            self.failures.append(ProbeFailure(stage=name, error=ErrorParts.of(error)))

    def result(self) -> BatchCheckResult:
        return BatchCheckResult(
            walks=tuple(self.walks),
            remarks=tuple(self.remarks),
            step=self.step,
            points=tuple(self.points),
            failures=tuple(self.failures),
        )


def _of_length(config: TrialConfig, max_length: int) -> TrialConfig:
    settings = config.settings
    train = settings.train.model_copy(update={"max_length": max_length})
    return config.model_copy(update={"settings": settings.model_copy(update={"train": train})})


def walk_batches(
    request: TrainRequest, tokens: Tokens, config: PreTrainedConfig, max_length: int, beat: Callable[[], None]
) -> Iterator[BatchWalk]:
    """Collate every batch of every split, as the first epoch and a validation would, and check its numbers.

    Args:
        request: Seed, batch size and plan decide which rows meet.
        tokens: The rows.
        config: The encoder's, which says what it has embeddings for.
        max_length: What the rows were truncated to.
        beat: Called for each batch.
    """
    trial = request.config
    task = trial_task(trial, tokens)
    bounds = replace(config_bounds(config), segments=_segments(config), labels=task.classes)
    for name, split in tokens.splits.items():
        if name == TRAIN:
            grouped, size = trial.settings.train.group_by_length, trial.settings.train.batch_size
            order = first_epoch(task, split, seed=trial.seed, batch_size=size, group_by_length=grouped)
        else:
            order = evaluation_batches(split.lengths_R, request.plan.eval_rows)
        guard, faults = BatchGuard(name, split, bounds), list[str]()
        for rows in order:
            try:
                guard.check_batch(task.collate(split, rows), partial(list, rows))
            except DataError as error:
                faults.append(f"{error.found}; allowed: {error.allowed}")
            beat()
        yield BatchWalk(
            max_length=max_length,
            split=name,
            rows=len(split),
            batches=len(order),
            longest=int(split.lengths_R.max()),
            faults=tuple(faults[:_MOST_FAULTS]),
        )


def _segments(config: PreTrainedConfig) -> int | None:
    """Return how many segments an encoder tells apart; None where it takes no segments."""
    count = getattr(config, "type_vocab_size", None)
    return count if isinstance(count, int) and count > 1 else None


def _largest(trial: TrialConfig, tokens: Tokens) -> tuple[list[int], list[int]]:
    """Return the rows of a trial's largest batch, and of one of median length."""
    lengths_R = tokens.splits[TRAIN].lengths_R
    order = torch.argsort(lengths_R, descending=True, stable=True).tolist()
    count = min(trial.settings.train.batch_size, len(order))
    middle = (len(order) - count) // 2
    return order[:count], order[middle : middle + count]


def _step(parts: TrialParts, rows: list[int], timed: list[int] | None = None) -> StepCheck:
    """Run forward, loss and backward on some rows and check the gradients; the optimizer is made, and not run.

    Args:
        parts: What is trained.
        rows: Rows of the training split.
        timed: Those of another batch whose step is only timed; None: no such batch.
    """
    model, steps = parts.model, TrialSteps(parts)
    loss, largest_s = _backward(steps, rows)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    not_finite = [name for name, grad in gradients.items() if grad is not None and not bool(grad.isfinite().all())]
    untouched = [name for name, grad in gradients.items() if grad is None or _is_dead(grad)]
    step_s = None
    if timed is not None and not not_finite:
        steps.forget()
        _, step_s = _backward(steps, timed)
    return StepCheck(
        parameters=sum(one.numel() for one in model.parameters()),
        trainable=sum(one.numel() for one in model.parameters() if one.requires_grad),
        rows=len(rows),
        length=int(parts.train.lengths_R[rows].max()),
        micro_batch=steps.trainer.micro_batch,
        loss=loss,
        largest_s=largest_s,
        step_s=step_s,
        not_finite=tuple(not_finite),
        untouched=tuple(untouched),
    )


def _is_dead(grad: torch.Tensor) -> bool:
    """Whether nothing reaches a parameter: a vector's zeros may be sums that cancel, as a bias' under a softmax do."""
    return grad.ndim > 1 and not bool(grad.count_nonzero())


def _backward(steps: TrialSteps, rows: list[int]) -> tuple[float, float]:
    """Do one backward pass; where the rows do not fit into memory at once, with half as many, and so on.

    Returns:
        The loss and seconds.
    """
    while True:
        began_s = time.perf_counter()
        try:
            return steps.gradients(rows), time.perf_counter() - began_s
        except torch.OutOfMemoryError:
            if steps.trainer.micro_batch == 1:
                raise
            steps.trainer.micro_batch //= 2
        steps.forget()
        torch.cuda.empty_cache()


def _point(trial: TrainRequest, point: TrialConfig, channel: ChildChannel) -> PointCheck:
    """Do one small step of a trial that the space can ask for."""
    plan = trial.plan.model_copy(update={"effective_batch": _POINT_ROWS, "micro_batch": _POINT_ROWS, "accumulation": 1})
    asked = trial.model_copy(update={"config": point, "plan": plan})
    try:
        check_effect(point)
        tokens = read_tokens(asked, trial_task(point), only=None)
        rows = _largest(point, tokens)[0][:_POINT_ROWS]
        step = _step(trial_parts(asked, channel, tokens), rows)
    except DryfitError as error:
        return PointCheck(params=point.params, error=ErrorParts.of(error))
    return PointCheck(params=point.params, step=step)
