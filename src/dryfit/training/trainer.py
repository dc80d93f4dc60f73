"""The training loop: Hugging Face's Trainer with our step and batches, and the work between two steps."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dryfit.meta.moves import refuse_early_optimizer, refuse_offload
from dryfit.meta.private_apis.transformers_trainer import TRAINER, StateTrainer
from dryfit.meta.sanity import check_process
from dryfit.settings.choices import Direction, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceKind, StepPhase
from dryfit.settings.private_names import require
from dryfit.settings.splits import derive_seed
from dryfit.settings.tables import TrainSettings
from dryfit.settings.task_facts import task_word
from dryfit.settings.training_messages import StopReason
from dryfit.settings.trial import MetricPoint, best_value, better
from dryfit.settings.wire import Checkpointed, Phase, Progress
from dryfit.tasks.base import Batch, Measured, Outputs, Task, TaskModel, TellsRows
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.row_metrics import collapsed
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.saved_models import model_input, save_trained, save_weights, weights_file
from dryfit.tasks.scored_rows import ScoredRow, joined, write_rows
from dryfit.tasks.tokens import TokenSet
from dryfit.training.batches import EpochBatchSampler, RowDataset, evaluation_batches, train_loader
from dryfit.training.checkpoint import Checkpoint, Reading, save_checkpoint
from dryfit.training.device import taken_of_device
from dryfit.training.model import compiled_layers
from dryfit.training.optimizer import OptimizerPlan, make_optimizer, make_schedule, optimizer_plan
from dryfit.training.run import RunState, TrialParts
from dryfit.training.step import ErrorContext, backward_batch, loss_origin, non_finite, numbers, on_device

# Validation: its steps, its batches, its metrics, and early stopping.


def evaluation_steps(*, steps_per_epoch: int, evals_per_epoch: int, epochs: int) -> frozenset[int]:
    """Return the optimizer steps (counted from 1) after which to validate: evenly spaced, the last at each epoch's end.

    Raises:
        ConfigError: More validations than steps are asked for.
    """
    if evals_per_epoch > steps_per_epoch:
        raise ConfigError(
            "planning the validations",
            f"train.evals_per_epoch is {evals_per_epoch} and an epoch has {steps_per_epoch} steps",
            allowed=f"1 to {steps_per_epoch} with this batch size and these rows",
        )
    within = [-(-steps_per_epoch * k // evals_per_epoch) for k in range(1, evals_per_epoch + 1)]
    return frozenset(epoch * steps_per_epoch + step for epoch in range(epochs) for step in within)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        metrics: Of the split.
        fitted: What the task fitted on it, or got from the validation split.
        collapsed: In words how all rows got the same answer; empty: they did not, or the task does not tell rows.
        rows: Each row with its answer; empty where the task does not tell them.
    """

    metrics: dict[str, float]
    fitted: Mapping[str, float]
    collapsed: str = ""
    rows: tuple[ScoredRow, ...] = field(default=(), repr=False)

    @property
    def numbers(self) -> "Evaluated":
        """The same without the rows, for other processes."""
        return replace(self, rows=())

    def require(self, names: Sequence[str], task: Task) -> None:
        """Refuse metrics that lack what a study asked for.

        Raises:
            ConfigError: They do.
        """
        missing = [name for name in names if name not in self.metrics]
        if missing:
            what = type(task).__name__
            raise ConfigError(
                "validating",
                f"{what}.metrics gave {', '.join(self.metrics) or 'nothing'}, and not {', '.join(missing)}",
                f"every name that {what}.metric_names says: {', '.join(task.metric_names())}",
            )


def evaluate(
    model: TaskModel,
    tokens: TokenSet,
    task: Task,
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
    fitted: Mapping[str, float] | None = None,
) -> Evaluated:
    """Compute a task's metrics on a split. Draws no random number; leaves the model in eval mode.

    Args:
        model: On its device.
        tokens: The split.
        task: Makes batches and computes metrics.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Checks each batch and its outputs.
        fitted: What was chosen on the validation split; None: this is that split, choose now.

    Raises:
        DataError: The guard finds a batch that the model has no place for.
        ConfigError: It finds outputs that are no scores of the rows.
    """
    model.eval()
    collate = partial(task.collate, tokens)
    kept = kept_in_order(model, tokens, task, collate, batch_rows=batch_rows, beat=beat, guard=guard).float()
    fitted = task.fit(kept, tokens) if fitted is None else fitted
    measured = task.measure(model, tokens, batch_rows=batch_rows, beat=beat)
    measured = measured if isinstance(measured, Measured) else Measured(measured)
    metrics = {**task.metrics(kept, tokens, fitted), **measured.metrics}
    told = enumerate(task.scored_rows(kept, tokens, fitted)) if isinstance(task, TellsRows) else ()
    rows = tuple(joined(row, measured.rows[index]) if index in measured.rows else row for index, row in told)
    plain = {name: float(value) for name, value in metrics.items()}
    return Evaluated(plain, dict(fitted), collapsed(rows, task.context.data.labels), rows)


def kept_in_order(
    model: nn.Module,
    tokens: TokenSet,
    task: Task,
    collate: Callable[[Sequence[int]], Batch],
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
) -> torch.Tensor:
    """Return what a task keeps of a model's outputs for every row; rows of similar length are batched together.

    Args:
        model: On its device, in eval mode.
        tokens: The rows.
        task: Names the model's inputs, and what is kept.
        collate: Makes the batch of some rows.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Checks each batch and its outputs.

    Returns:
        (rows, K), in the order of the rows, in the model's own number format, on the CPU.

    Raises:
        DataError: As :func:`evaluate`.
        ConfigError: As :func:`evaluate`.
    """
    kept: list[torch.Tensor] = []
    order: list[int] = []
    device = next(model.parameters()).device
    with torch.inference_mode():
        for rows in evaluation_batches(tokens.lengths_R, batch_rows):
            batch = collate(rows)
            if guard is not None:
                guard.check_batch(batch, lambda rows=rows: rows)
            batch = on_device(batch, device)
            outputs = model(**{name: batch[name] for name in task.inputs if name in batch})
            if guard is not None:
                guard.check_outputs(outputs, len(rows), lambda rows=rows: rows)
            kept.append(_kept(task.keep(outputs, batch), len(rows), kept, task).cpu())
            order.extend(rows)
            beat()
    in_order = torch.cat(kept)
    in_order[torch.tensor(order)] = in_order.clone()
    return in_order


def _kept(kept: torch.Tensor, rows: int, before: Sequence[torch.Tensor], task: Task) -> torch.Tensor:
    """Check that what a task keeps of a batch is as wide as of the others, and return it.

    Raises:
        ConfigError: It is not.
    """
    width = before[0].shape[1] if before else None
    if kept.ndim != 2 or len(kept) != rows or width not in (None, kept.shape[1]):
        allowed = f"({rows}, K), with one K for all batches" if width is None else f"({rows}, {width}), as before"
        hint = "what is kept may not depend on the batch's longest row"
        raise ConfigError("validating", f"{type(task).__name__}.keep gave {tuple(kept.shape)}", allowed, hint)
    return kept


def stopped_early(points: tuple[MetricPoint, ...], train: TrainSettings, direction: Direction) -> bool:
    """Return whether the last ``train.early_stopping`` validations brought nothing better; 0 never stops.

    A value is better if it exceeds the last better one by more than ``train.early_stopping_min_delta``: many small
    steps in one direction count once they add up to more.
    """
    reference, since = math.nan, 0
    margin = -train.early_stopping_min_delta if direction is Direction.MAXIMIZE else train.early_stopping_min_delta
    for point in points:
        since += 1
        if better(point.value + margin, reference, direction):
            reference, since = point.value, 0
    return 0 < train.early_stopping <= since


# The work between two steps of a trial: sign of life, validation, report, checkpoint, and whether to stop.


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
        trainer: "TrialTrainer",
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
        channel.progress(
            lambda: Progress(
                step=self._of_trial(step),
                total_steps=self._parts.position.total_steps(self._parts.last_step),
                epoch=step / self._parts.steps_per_epoch,
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


_FP16_SCALE = 1024.0
"""What the loss of a single step is multiplied by in fp16, so that small gradients do not become zero."""


@final
class TrialTrainer(StateTrainer):
    """The Trainer of one trial.

    It sees effective batches only (``gradient_accumulation_steps=1``); :func:`backward_batch` splits them. Clipping,
    the optimizer call and mixed precision stay the Trainer's and Accelerate's.

    Attributes:
        micro_batch: Rows in memory at once.
        step_loss: Of the last step.
        phases: Called with each phase of a step's passes as it begins.
    """

    def __init__(
        self, parts: TrialParts, sampler: EpochBatchSampler, guard: BatchGuard | None, at: ErrorContext
    ) -> None:
        self._parts = parts
        self._sampler = sampler
        self._guard = guard
        self._at = at
        self._batch: Batch = {}
        self.phases: Callable[[StepPhase], None] = lambda _: None
        self.micro_batch = parts.request.plan.micro_batch
        self.step_loss = 0.0
        self._loss = torch.tensor(0.0)
        dataset = RowDataset(parts.train, parts.task, seed=derive_seed(parts.request.config.seed, "batches"))
        super().__init__(model=parts.model, args=_arguments(parts), train_dataset=dataset)
        self.remove_callback(PrinterCallback)
        self._dataset = dataset
        self._layers = compiled_layers(parts)

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return our loader as it is: Accelerate's wrapper would draw from the global random state."""
        config = self._parts.request.config
        plan = self._parts.request.plan
        return train_loader(
            self._dataset,
            self._sampler,
            workers=plan.loader_workers,
            seed=derive_seed(config.seed, "loader"),
            pin=plan.device is DeviceKind.CUDA,
        )

    def begin_epoch(self, epoch: int) -> None:
        """Choose the batches of an epoch."""
        self._sampler.set_epoch(epoch)
        self._dataset.set_epoch(epoch)

    def create_optimizer(
        self, model: nn.Module | None = None, how: OptimizerPlan | None = None
    ) -> torch.optim.Optimizer:
        """The study's optimizer over its own parameter groups."""
        if self.optimizer is None:
            request = self._parts.request
            plan = how or optimizer_plan(request.plan)
            self.optimizer = make_optimizer(self._parts.model, request.config.settings.optim, plan)
            if how is None:  # else nothing will be saved
                self._parts.layout.save_whole_state(self._parts.model, self.optimizer)
            refuse_early_optimizer(self._parts.model, self.optimizer)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The study's schedule."""
        if self.lr_scheduler is None:
            sched = self._parts.request.config.settings.sched
            self.lr_scheduler = make_schedule(optimizer or self.optimizer, sched, num_training_steps)
        return self.lr_scheduler

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Compute the gradients of one effective batch."""
        model.train()
        layout = self._parts.layout
        self._batch = inputs
        with layout.drawing(self.args.device):
            loss = self._layers.gradients(lambda: self._add_gradients(model, inputs))
        self._at.end_micro_batches()
        self._loss = layout.batch_loss(loss)
        return self._loss

    def forget_batch(self) -> None:
        """Let the batch go that an error would be looked for in: it may be on the device."""
        self._batch = {}

    def _add_gradients(self, model: nn.Module, inputs: Batch) -> torch.Tensor:
        here = self._parts.layout.portions(len(inputs["attention_mask"]), self.micro_batch)
        self._at.begin_batch(self.state.global_step + 1, here)
        if self._guard is not None:
            self._guard.check_batch(inputs, self._rows)
        return backward_batch(
            model,
            inputs,
            self._parts.task,
            micro_batch=here,
            backward=self._backward,
            autocast=self._around_forward,
            check=self._check_outputs if self._guard is not None else None,
        )

    def _around_forward(self) -> AbstractContextManager[object]:
        self._at.begin_micro_batch()
        self._parts.channel.beat()
        self.phases(StepPhase.FORWARD)
        return self.compute_loss_context_manager()

    def _backward(self, loss: torch.Tensor) -> None:
        self.phases(StepPhase.BACKWARD)
        self.accelerator.backward(loss)

    def _rows(self) -> list[int]:
        """Return the rows of this step's batch, from the sampler."""
        return list(self._sampler)[self.state.global_step % self._parts.steps_per_epoch]

    def _check_outputs(self, outputs: Outputs, first: int, count: int) -> None:
        assert self._guard is not None
        self._guard.check_outputs(outputs, count, lambda: self._rows()[first : first + count])

    def clip(self, model: nn.Module, most: float | None) -> float:
        """Clip the gradients as Accelerate does for one device, and check their norm before it is used."""
        self.accelerator.unscale_gradients()
        total = self._parts.layout.gradient_norm(model)
        norm, self.step_loss = numbers(total, self._loss)  # the one wait for the device in a step
        self._refuse_non_finite(model, norm, self.step_loss)
        nn.utils.clip_grads_with_norm_(model.parameters(), math.inf if most is None else most, total)
        return norm

    def _refuse_non_finite(self, model: nn.Module, norm: float, loss: float) -> None:
        """End the trial before the optimizer applies a loss or gradient that is not finite.

        Raises:
            NonFiniteError: The loss or a gradient is infinite or NaN.
        """
        if math.isfinite(norm) and math.isfinite(loss):
            return
        scaler = self.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else None
        if scale is not None and math.isfinite(loss) and scale >= 1:
            return  # fp16: the scaler skips this step and tries a smaller scale
        origin = ""
        if not math.isfinite(loss):
            batch = on_device(self._batch, self.args.device)
            origin = loss_origin(model, batch, self._parts.task, self.micro_batch)
        doing = f"training step {self.state.global_step + 1} of {self.state.max_steps}{self._parts.position}"
        raise non_finite(doing, model, self.optimizer, loss=loss, norm=norm, scale=scale, origin=origin)

    def load_weights(self, folder: Path) -> None:
        """Load weights strictly: the Trainer's own loading goes on with missing ones."""
        with self.reading(str(folder)):
            self._parts.layout.restore(self._parts.model, folder)

    def reading(self, folder: str | None) -> AbstractContextManager[object]:
        """Return the context in which the Trainer reads a checkpoint: a damaged file gets an error of its own."""
        return Reading(folder, Path(self._parts.request.checkpoint_dir))

    def write_state(self, folder: Path) -> None:
        """Write all the Trainer needs to resume, in its own files; called on rank 0."""
        whole = self._parts.layout.whole(self._parts.model)
        assert whole is not None  # on rank 0 it is
        save_weights(whole, folder / weights_file(whole))
        self.save_step_state(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def help_write_state(self) -> None:
        """Give rank 0 what another rank holds of the model and of the optimizer's state."""
        self._parts.layout.whole(self._parts.model)
        self.optimizer.state_dict()


def run_training(parts: TrialParts, checkpoint: Checkpoint | None) -> RunState:
    """Train once, from the start, or go on from a checkpoint within this training, until the end or a stop.

    Raises:
        NonFiniteError: The loss or a gradient became infinite or NaN.
        LoadError: Part of the model is offloaded or without data: its gradients would be wrong.
        DataError: Tokens or a batch have values that the model has no place for.
        ConfigError: The model's outputs are no scores of the rows.
        CorruptCheckpointError: The checkpoint cannot be read; the next attempt does without it.
        PoisonedError: Something has changed this process's torch.
    """
    if checkpoint is not None and not checkpoint.fold_step:
        checkpoint = None  # it stands between two folds, and has no state
    require(f"training trial {parts.request.config.number}", TRAINER)
    config = parts.request.config
    bounds = model_bounds(parts.model)
    for split, tokens in ((TRAIN, parts.train), (VALIDATION, parts.validation)):
        check_tokens(split, tokens, bounds)
    refuse_offload(parts.model, doing=f"training trial {config.number}")
    run = RunState(points=checkpoint.points if checkpoint else (), step=checkpoint.fold_step if checkpoint else 0)
    if run.step >= parts.last_step:
        return run
    guards = BatchGuard(TRAIN, parts.train, bounds), BatchGuard(VALIDATION, parts.validation, bounds)
    at = ErrorContext(parts, *guards)
    at.step = run.step
    with at:
        trainer = TrialTrainer(parts, _sampler(parts), guards[0], at)
        trainer.add_callback(TrialCallback(parts, run, trainer, guards[1], at))
        parts.channel.send(Phase(name="train", step=parts.position.steps_before + run.step))
        trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
    return run


@final
class TrialSteps:
    """Single steps of a trial on rows of one's own choice, made by its Trainer; nothing is validated or saved.

    Args:
        parts: What is trained; its layers are not compiled.
        optimizer: How the optimizer works; None: as the trial's plan says.
        of_rows: Whether batches are made of the trial's rows, and checked; else they are given, on its device.
        phases: Called with each phase of a step as it begins.
    """

    def __init__(
        self,
        parts: TrialParts,
        *,
        optimizer: OptimizerPlan | None = None,
        of_rows: bool = True,
        phases: Callable[[StepPhase], None] = lambda _: None,
    ) -> None:
        plan = parts.request.plan.model_copy(update={"compiled": False})
        parts = replace(parts, request=parts.request.model_copy(update={"plan": plan}))
        guards = [BatchGuard(TRAIN, parts.train, model_bounds(parts.model))] if of_rows else []
        sampler = _sampler(parts) if of_rows else _NO_BATCHES
        self._parts = parts
        self.trainer = TrialTrainer(parts, sampler, guards[0] if guards else None, ErrorContext(parts, *guards))
        self.trainer.phases = self._phases = phases
        accelerator = self.trainer.accelerator
        if accelerator.scaler is not None:
            # The first scale of its own may be too large, and then the trial's first steps are void.
            accelerator.scaler = torch.amp.GradScaler(plan.device, init_scale=_FP16_SCALE)  # pyright: ignore
        made = self.trainer.create_optimizer(how=optimizer)
        self._model, self._optimizer = accelerator.prepare(parts.model, made, device_placement=[False, False])

    def gradients(self, rows: Sequence[int]) -> float:
        """Add the gradients of some rows of the training split to the model's; return their mean loss."""
        return float(self.trainer.training_step(self._model, self._parts.task.collate(self._parts.train, rows)))

    def batch_gradients(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of a batch to the model's; return its mean loss."""
        loss = self.trainer.training_step(self._model, batch)
        self.trainer.forget_batch()
        return loss

    def forget(self) -> None:
        """Free the gradients."""
        self._parts.model.zero_grad()

    def update(self) -> None:
        """Clip the gradients, step the optimizer and free the gradients; it is waited for.

        Raises:
            NonFiniteError: The loss or a gradient is infinite or NaN.
        """
        self._phases(StepPhase.CLIP)
        self.trainer.clip(self._model, self.trainer.args.max_grad_norm)
        self._phases(StepPhase.OPTIMIZER)
        self._optimizer.step()
        self._model.zero_grad()  # as the Trainer does
        if self._parts.request.plan.device is DeviceKind.CUDA:
            torch.cuda.synchronize()

    def begin_anew(self, optimizer: OptimizerPlan) -> None:
        """Make the optimizer anew, without state.

        Args:
            optimizer: How it works from now on.
        """
        accelerator = self.trainer.accelerator
        del self._optimizer
        self.trainer.optimizer = None  # pyright: ignore[reportAttributeAccessIssue]
        accelerator.free_memory()  # it would unscale the gradients of the former one too
        self._optimizer = accelerator.prepare(self.trainer.create_optimizer(how=optimizer), device_placement=[False])


_NO_BATCHES = EpochBatchSampler(torch.zeros(0), seed=0, batch_size=1, group_by_length=False)


def _sampler(parts: TrialParts) -> EpochBatchSampler:
    seed = derive_seed(parts.request.config.seed, "batches")
    return EpochBatchSampler(
        parts.train.lengths_R,
        seed=seed,
        batch_size=parts.request.plan.effective_batch,
        group_by_length=parts.request.config.settings.train.group_by_length,
        chosen=lambda epoch: parts.task.epoch_rows(parts.train, seed=seed, epoch=epoch),
    )


class _Arguments(TrainingArguments):
    """Arguments of a Trainer whose model is on its device already."""

    @property
    def place_model_on_device(self) -> bool | None:
        """Never: fakes cannot be moved in their places."""
        return False


def _arguments(parts: TrialParts) -> TrainingArguments:
    settings = parts.request.config.settings
    return _Arguments(
        output_dir=parts.request.checkpoint_dir,
        per_device_train_batch_size=parts.request.plan.effective_batch,
        gradient_accumulation_steps=1,
        num_train_epochs=settings.train.epochs,
        max_steps=parts.total_steps if parts.length is not None else -1,
        max_grad_norm=settings.regularization.max_grad_norm,
        seed=derive_seed(parts.request.config.seed, "train"),
        bf16=settings.train.precision is Precision.BF16,
        fp16=settings.train.precision is Precision.FP16,
        use_cpu=parts.request.plan.device is DeviceKind.CPU,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
