"""The training loop: Hugging Face's Trainer with our step, our batches and our way to stop and go on."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import NonFiniteError
from dryfit.core.jobs import StopReason, TrainRequest
from dryfit.core.plan import DeviceKind
from dryfit.core.seeds import derive_seed
from dryfit.core.settings import Precision
from dryfit.core.trial import MetricPoint, best_point, better
from dryfit.core.wire import Checkpointed, FirstStep, Phase, Progress
from dryfit.meta.matching import Wishes
from dryfit.meta.offload import refuse_early_optimizer, refuse_offload
from dryfit.tasks.base import Batch, Task
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.heads import EncoderWithHead
from dryfit.tasks.load import WEIGHTS_FILE, restore, save_trained
from dryfit.tasks.model_input import ModelInput
from dryfit.tasks.rows import TRAIN, VALIDATION
from dryfit.tasks.tokens import TokenSet
from dryfit.train.batches import EpochBatchSampler, RowDataset, train_loader
from dryfit.train.checkpoint import Checkpoint, save_checkpoint
from dryfit.train.device import taken_of_device
from dryfit.train.evaluate import evaluate, evaluation_rows, evaluation_steps, stopped_early
from dryfit.train.optim import make_optimizer, make_schedule, optimizer_plan
from dryfit.train.step import backward_batch

_PROGRESS_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class FixedLength:
    """How long to train where no validation can say which weights are the best.

    Attributes:
        schedule_steps: Length of the learning rate's schedule.
        last_step: The step to stop after; the schedule is left where it then is.
    """

    schedule_steps: int
    last_step: int


@dataclass(frozen=True, slots=True)
class TrialParts:
    """All that one training run is made of.

    Attributes:
        model_input: What the saved model needs to know of its rows.
        length: None: all epochs, validated on the way.
    """

    request: TrainRequest
    channel: ChildChannel
    model: EncoderWithHead
    task: Task
    train: TokenSet
    validation: TokenSet
    tokenizer_folder: Path
    model_input: ModelInput
    length: FixedLength | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return -(-len(self.train) // self.request.plan.effective_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        if self.length is not None:
            return self.length.schedule_steps
        return self.steps_per_epoch * self.request.config.settings.train.epochs

    @property
    def last_step(self) -> int:
        """The step that training ends with, unless something ends it before."""
        return self.total_steps if self.length is None else self.length.last_step


@dataclass(slots=True)
class RunState:
    """What a run has come to.

    Attributes:
        points: Validations so far, those before the checkpoint it went on from included.
        stopped_by: Why it ended before its time.
        step: Optimizer steps done.
    """

    points: tuple[MetricPoint, ...] = ()
    stopped_by: StopReason | None = None
    step: int = 0


@final
class TrialTrainer(Trainer):
    """The Trainer of one trial.

    It sees effective batches only (``gradient_accumulation_steps=1``); :func:`backward_batch` cuts them. Clipping,
    the optimizer call and mixed precision stay the Trainer's and Accelerate's.
    """

    def __init__(self, parts: TrialParts, sampler: EpochBatchSampler) -> None:
        self._parts = parts
        self._sampler = sampler
        self.step_loss = torch.tensor(0.0)
        dataset = RowDataset(parts.train, parts.task)
        super().__init__(model=parts.model, args=_arguments(parts), train_dataset=dataset)
        self.remove_callback(PrinterCallback)
        self._dataset = dataset
        self._guard = BatchGuard(TRAIN, parts.train, model_bounds(parts.model))

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Our loader as it is: Accelerate's wrapper would draw from the global random state."""
        config = self._parts.request.config
        workers = self._parts.request.plan.loader_workers
        return train_loader(self._dataset, self._sampler, workers=workers, seed=derive_seed(config.seed, "loader"))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The study's optimizer over its own parameter groups."""
        if self.optimizer is None:
            request = self._parts.request
            plan = optimizer_plan(request.plan)
            self.optimizer = make_optimizer(self._parts.model, request.config.settings.optim, plan)
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
        """Gradients of one effective batch."""
        model.train()
        self._guard.check_batch(inputs, self._rows)
        found = backward_batch(
            model,
            {name: values.to(self.args.device) for name, values in inputs.items()},
            self._parts.task,
            micro_batch=self._parts.request.plan.micro_batch,
            backward=self.accelerator.backward,
            autocast=self.compute_loss_context_manager,
            check=self._check_outputs,
        )
        self.step_loss = found.loss
        return found.loss

    def _rows(self) -> list[int]:
        """Rows of the batch of this step: the sampler says them again."""
        return list(self._sampler)[self.state.global_step % self._parts.steps_per_epoch]

    def _check_outputs(self, outputs: torch.Tensor, first: int, count: int) -> None:
        self._guard.check_outputs(outputs, count, lambda: self._rows()[first : first + count])

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> float:
        """The Trainer's gradient norm, which it computes anyway, checked before the optimizer can spread it."""
        found: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = float(found)
        loss = float(self.step_loss)
        if math.isfinite(norm) and math.isfinite(loss):
            return norm
        scaler = self.accelerator.scaler
        if scaler is not None and math.isfinite(loss) and scaler.get_scale() >= 1:
            return norm  # fp16: the scaler skips this step and tries a smaller scale
        lr = self.lr_scheduler.get_last_lr()[0]
        raise NonFiniteError(
            f"training step {self.state.global_step + 1} of {self.state.max_steps}",
            f"loss {loss}, gradient norm {norm}, learning rate {lr:.3g}",
            hint="a smaller optim.lr, a longer sched.warmup_ratio or a smaller regularization.max_grad_norm",
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Strictly: the Trainer's own loading goes on with missing weights."""
        path = Path(resume_from_checkpoint) / WEIGHTS_FILE
        restore(self._parts.model, path, Wishes(self.args.device))

    def write_state(self, folder: Path) -> None:
        """Write all the Trainer needs to go on from here, in its own files."""
        save_model(self._parts.model, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))


@final
class Steward(TrainerCallback):
    """After every optimizer step: sign of life, validation, report, checkpoint, and whether to stop."""

    def __init__(self, parts: TrialParts, sampler: EpochBatchSampler, run: RunState) -> None:
        config = parts.request.config
        self._parts = parts
        self._guard = BatchGuard(VALIDATION, parts.validation, model_bounds(parts.model))
        self._sampler = sampler
        self._run = run
        self._trainer: TrialTrainer | None = None
        self._eval_steps = frozenset[int]()
        if parts.length is None:
            self._eval_steps = evaluation_steps(
                steps_per_epoch=parts.steps_per_epoch,
                evals_per_epoch=config.settings.train.evals_per_epoch,
                epochs=config.settings.train.epochs,
            )
        self._checkpointed_s = time.monotonic()
        self._progress_s = -math.inf
        self._first_step = True

    def attach(self, trainer: TrialTrainer) -> None:
        """Tell the callback whose state to write."""
        self._trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the epoch's batches, also when going on within one."""
        self._sampler.set_epoch(state.global_step // self._parts.steps_per_epoch)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All that happens between two steps."""
        step = state.global_step
        self._run.step = step
        self._sign_of_life(step)
        validated = step in self._eval_steps
        if validated:
            self._run.stopped_by = self._validate(step)
        if self._run.stopped_by is None and step < self._parts.last_step:
            asked = self._parts.channel.stop_requested()
            due = time.monotonic() - self._checkpointed_s >= self._parts.request.checkpoint_every_s
            if asked is not None or (due and (validated or self._parts.length is not None)):
                self._checkpoint(step)
            self._run.stopped_by = asked
        if self._run.stopped_by is not None or step == self._parts.last_step:
            control.should_training_stop = True

    def _sign_of_life(self, step: int) -> None:
        channel = self._parts.channel
        channel.beat()
        if self._first_step:
            self._first_step = False
            channel.send(FirstStep(after_ms=channel.since_placed_ms()))
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_EVERY_S and self._trainer is not None:
            self._progress_s = now_s
            loss = float(self._trainer.step_loss)
            epoch = step / self._parts.steps_per_epoch
            channel.send(
                Progress(
                    step=step,
                    total_steps=self._parts.last_step,
                    epoch=epoch,
                    loss=loss,
                    device_bytes=taken_of_device(self._parts.request.plan.device),
                )
            )

    def _validate(self, step: int) -> StopReason | None:
        parts, run = self._parts, self._run
        config = parts.request.config
        parts.channel.send(Phase(name="evaluate", step=step))
        metrics = evaluate(
            parts.model,
            parts.validation,
            parts.task,
            batch_rows=evaluation_rows(parts.request.plan.micro_batch),
            beat=parts.channel.beat,
            guard=self._guard,
        )
        point = MetricPoint(
            n=len(run.points),
            step=step,
            epoch=step / parts.steps_per_epoch,
            value=metrics[config.metric],
            metrics=metrics,
        )
        before = best_point(run.points, config.direction)
        run.points = (*run.points, point)
        if better(point.value, before.value if before else math.nan, config.direction):
            self._save_best(point)  # before the report: what the ledger knows of can be loaded
        proceed = parts.channel.report(point, timeout_s=parts.request.verdict_timeout_s)
        parts.channel.send(Phase(name="train", step=step))
        if not proceed:
            return StopReason.VERDICT
        patience = config.settings.train.early_stopping
        if step < parts.total_steps and stopped_early(run.points, patience=patience, direction=config.direction):
            return StopReason.EARLY_STOPPING
        return None

    def _save_best(self, point: MetricPoint) -> None:
        config = self._parts.request.config
        self._parts.channel.send(Phase(name="save", step=point.step))
        facts = {
            "task": config.task,
            "trial": config.number,
            "metric": config.metric,
            "value": point.value,
            "step": point.step,
            "metrics": point.metrics,
            "input": self._parts.model_input.model_dump(mode="json"),
        }
        save_trained(
            Path(self._parts.request.best_dir),
            self._parts.model,
            tokenizer_folder=self._parts.tokenizer_folder,
            facts=facts,
        )

    def _checkpoint(self, step: int) -> None:
        if self._trainer is None:
            raise RuntimeError("the callback has no trainer yet")
        self._parts.channel.send(Phase(name="save", step=step))
        save_checkpoint(
            Path(self._parts.request.checkpoint_dir),
            step=step,
            fingerprint=self._parts.request.config.fingerprint,
            points=self._run.points,
            write=self._trainer.write_state,
        )
        self._checkpointed_s = time.monotonic()
        self._parts.channel.send(Checkpointed(step=step))
        self._parts.channel.send(Phase(name="train", step=step))


def run_training(parts: TrialParts, checkpoint: Checkpoint | None) -> RunState:
    """Train from the start, or go on from a checkpoint, until the end or a stop.

    Raises:
        NonFiniteError: The loss or a gradient became infinite or NaN.
        LoadError: Part of the model is offloaded or without data: its gradients would be wrong.
        DataError: Tokens or a batch have values that the model has no place for.
        ConfigError: The model's outputs are no scores of the rows.
    """
    config = parts.request.config
    bounds = model_bounds(parts.model)
    for split, tokens in ((TRAIN, parts.train), (VALIDATION, parts.validation)):
        check_tokens(split, tokens, bounds)
    refuse_offload(parts.model, doing=f"training trial {config.number}")
    run = RunState(points=checkpoint.points if checkpoint else (), step=checkpoint.step if checkpoint else 0)
    sampler = EpochBatchSampler(
        parts.train.lengths_R,
        seed=derive_seed(config.seed, "batches"),
        batch_size=parts.request.plan.effective_batch,
        group_by_length=config.settings.train.group_by_length,
    )
    steward = Steward(parts, sampler, run)
    if run.step >= parts.last_step:
        return run
    trainer = TrialTrainer(parts, sampler)
    steward.attach(trainer)
    trainer.add_callback(steward)
    parts.channel.send(Phase(name="train", step=run.step))
    trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
    return run


def _arguments(parts: TrialParts) -> TrainingArguments:
    settings = parts.request.config.settings
    return TrainingArguments(
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
