"""The work between two steps of a trial: sign of life, validation, report, checkpoint, and whether to stop."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dryfit.core.jobs.train import StopReason
from dryfit.core.settings.task_facts import task_word
from dryfit.core.settings.trial import MetricPoint, best_value, better
from dryfit.core.wire import Checkpointed, Phase, Progress
from dryfit.meta.sanity import check_process
from dryfit.scoring.row_files import write_rows
from dryfit.tasks.guard import BatchGuard
from dryfit.tasks.saved.model_input import model_input
from dryfit.tasks.saved.saved_model import save_trained
from dryfit.train.checkpoint import save_checkpoint
from dryfit.train.device import taken_of_device
from dryfit.train.error_context import ErrorContext
from dryfit.train.run import RunState, TrialParts
from dryfit.train.validation import Evaluated, evaluate, evaluation_steps, stopped_early

_PROGRESS_EVERY_S = 0.25


class Training(Protocol):
    """The part of the Trainer that is used between two steps."""

    step_loss: float

    def begin_epoch(self, epoch: int) -> None:
        """Choose the batches of an epoch."""
        ...

    def write_state(self, folder: Path) -> None:
        """Write all that is needed to go on from here; called on rank 0 alone."""
        ...

    def help_write_state(self) -> None:
        """Give what is to be written to rank 0; called on all others, at the same time."""
        ...


@final
class TrialCallback(TrainerCallback):
    """After every optimizer step: sign of life, validation, report, checkpoint, and whether to stop.

    Args:
        parts: What is trained.
        run: What the run has come to; kept up to date.
        trainer: Begins epochs and writes its state.
        guard: Checks the batches of the validation split.
        at: Keeps track of the step and batch, for errors.
    """

    def __init__(
        self,
        parts: TrialParts,
        run: RunState,
        trainer: Training,
        guard: BatchGuard,
        at: ErrorContext,
    ) -> None:
        config = parts.request.config
        self._parts = parts
        self._run = run
        self._trainer = trainer
        self._guard = guard
        self._at = at
        self._eval_steps = frozenset[int]()
        if parts.length is None:
            self._eval_steps = evaluation_steps(
                steps_per_epoch=parts.steps_per_epoch,
                evals_per_epoch=config.settings.train.evals_per_epoch,
                epochs=config.settings.train.epochs,
            )
        self._checkpointed_s = time.monotonic()
        self._progress_s = -math.inf

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the epoch's batches, also when going on within one."""
        self._trainer.begin_epoch(state.global_step // self._parts.steps_per_epoch)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Do all that happens between two steps."""
        step = state.global_step
        self._run.step = step
        self._at.end_batch()
        self._sign_of_life(step)
        validated = step in self._eval_steps
        if validated:
            self._run.stopped_by = self._validate(step)
        if self._run.stopped_by is None and step < self._parts.last_step:
            asked = self._parts.channel.stop_requested()
            may_be_due = validated or self._parts.length is not None
            if asked is not None or (may_be_due and self._is_checkpoint_due()):
                self._checkpoint(step)
            self._run.stopped_by = asked
        if self._run.stopped_by is not None or step == self._parts.last_step:
            control.should_training_stop = True

    def _is_checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due by the clock of rank 0: others' may be a moment behind."""
        due = time.monotonic() - self._checkpointed_s >= self._parts.request.checkpoint_every_s
        return self._parts.layout.group.share(due)

    def _sign_of_life(self, step: int) -> None:
        channel = self._parts.channel
        channel.beat()
        channel.stepped()
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_EVERY_S:
            self._progress_s = now_s
            epoch = step / self._parts.steps_per_epoch
            channel.send(
                Progress(
                    step=self._of_trial(step),
                    total_steps=self._parts.position.total_steps(self._parts.last_step),
                    epoch=epoch,
                    loss=self._trainer.step_loss,
                    device_bytes=taken_of_device(self._parts.request.plan.device),
                )
            )

    def _validate(self, step: int) -> StopReason | None:
        parts, run = self._parts, self._run
        config = parts.request.config
        parts.channel.send(Phase(name="evaluate", step=self._of_trial(step)))
        evaluated = evaluate(
            parts.model,
            parts.validation,
            parts.task,
            batch_rows=parts.request.plan.eval_rows,
            beat=parts.channel.beat,
            guard=self._guard,
        )
        self._at.end_batch()
        rows, evaluated = evaluated.rows, parts.layout.group.share(evaluated.numbers)  # one number decides on all ranks
        evaluated.require((config.metric, *config.also), parts.task)
        check_process(f"validating after step {step}")  # what is reported is never taken back
        point = MetricPoint(
            n=len(run.points),
            step=step,
            epoch=step / parts.steps_per_epoch,
            value=evaluated.metrics[config.metric],
            metrics=evaluated.metrics,
            collapsed=evaluated.collapsed,
        )
        before = best_value(run.points, config.direction)
        run.points = (*run.points, point)
        # A fold's weights are nobody's: the others' are as good, and none has seen all rows.
        if better(point.value, before, config.direction):  # before the report: what the ledger knows of is there
            if parts.leads and rows:
                write_rows(Path(parts.request.scored_dir), parts.position.split, rows, evaluated.metrics)
            if not parts.position.number:
                self._save_best(point, evaluated)
        stalls = stopped_early(run.points, config.settings.train, config.direction)
        is_last = stalls or step == parts.last_step
        report = parts.position.reported(point, best_value(run.points, config.direction) if is_last else None)
        last = is_last and parts.position.is_last
        proceed = parts.channel.report(report, timeout_s=parts.request.verdict_timeout_s, last=last)
        parts.channel.send(Phase(name="train", step=self._of_trial(step)))
        if not proceed:
            return StopReason.VERDICT
        return StopReason.EARLY_STOPPING if stalls and step < parts.total_steps else None

    def _of_trial(self, step: int) -> int:
        """Return a step of this run, counted over all steps of the trial."""
        return self._parts.position.steps_before + step

    def _save_best(self, point: MetricPoint, evaluated: Evaluated) -> None:
        config = self._parts.request.config
        context = replace(self._parts.task.context, fitted=evaluated.fitted)
        self._parts.channel.send(Phase(name="save", step=point.step))
        whole = self._parts.layout.whole(self._parts.model)
        if whole is None:
            return
        facts = {
            "task": task_word(config.task),
            "trial": config.number,
            "metric": config.metric,
            "value": point.value,
            "step": point.step,
            "metrics": point.metrics,
            "input": model_input(config.task, context).model_dump(mode="json"),
        }
        save_trained(
            Path(self._parts.request.best_dir),
            whole,
            tokenizer_folders=self._parts.tokenizer_folders,
            facts=facts,
            place=Path(self._parts.request.kept_best_dir),
        )

    def _checkpoint(self, step: int) -> None:
        check_process(f"writing a checkpoint after step {step}")
        at = self._of_trial(step)
        self._parts.channel.send(Phase(name="save", step=at))
        if not self._parts.leads:
            self._trainer.help_write_state()
            return
        save_checkpoint(
            Path(self._parts.request.checkpoint_dir),
            step=at,
            fingerprint=self._parts.request.fingerprint,
            points=self._run.points,
            write=self._trainer.write_state,
            folds=self._parts.position.done,
        )
        self._checkpointed_s = time.monotonic()
        self._parts.channel.send(Checkpointed(step=at))
        self._parts.channel.send(Phase(name="train", step=at))
