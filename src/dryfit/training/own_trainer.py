"""A Trainer of the user's own as a trial: made, set up, followed by one callback."""

import functools
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from dryfit.gpu.training_arguments import ArgumentWatch
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import NonFiniteError, ObjectiveError
from dryfit.settings.files import publishing
from dryfit.settings.ladder import arguments_of
from dryfit.settings.rehearsal_messages import BATCH, ArgumentValue
from dryfit.settings.training_messages import (
    ObjectiveRequest,
    OwnTrainingRequest,
    StopReason,
    TrainerRequest,
    TrainResult,
)
from dryfit.settings.user_code import source_file
from dryfit.settings.wire import Note, Phase, Progress
from dryfit.training.current_trial import (
    Evaluation,
    Goals,
    OwnLine,
    Trial,
    completed,
    mark_whole,
    newest_whole,
    numbers_of,
)
from dryfit.training.objective import called, import_function, limit_memory, seed_libraries

# Random numbers that are drawn while batches are made, by masking or augmentation, over a stop inside an epoch.
#
# A Trainer's checkpoint has the states of the generators at the end of its step. The batch of the next step was made
# before that, as accelerate reads one batch ahead (``DataLoaderShard.__iter__``). An attempt that goes on makes it once
# more, by other numbers, and all that follows is drawn by others too. So the states from before that batch are kept
# beside those of the Trainer, and given back in the order in which they came.
#
# Loaders with workers have generators of their own, and streams no sampler of batches: nothing is done of them.


_FILE: Final = ".dryfit-batch-numbers.pt"


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of this process's global generators of the CPU, of ``random``, NumPy and PyTorch."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> "GeneratorStates":
        """Return them as they are."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Make them as they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def plain(self) -> dict[str, Any]:
        """Return what ``torch.load(weights_only=True)`` reads."""
        name, keys, *rest = self.numpy
        return {
            "python": self.python,
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": self.torch,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "GeneratorStates":
        """Return what :meth:`plain` has written."""
        name, keys, *rest = plain["numpy"]
        return cls(plain["python"], (name, keys.numpy().astype(np.uint32), *rest), plain["torch"])


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Where a checkpoint goes on inside an epoch: the number of its next batch, and the states before and after it."""

    batch: int
    before: GeneratorStates
    after: GeneratorStates


@final
class BatchNumbers(TrainerCallback):
    """Writes what a checkpoint lacks into it, and gives it back to an attempt that goes on from there.

    It must come before the callback that marks checkpoints as whole.

    Args:
        trainer: The Trainer; it is connected by :meth:`install`.
        checkpoint: What it goes on from; None: it begins.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self._trainer = trainer
        self._before: dict[int, GeneratorStates] = {}
        """The states before the last batches of this epoch were made, by their numbers."""
        self._done = 0
        """How many batches of this epoch have been trained on."""
        self._resumed = None if checkpoint is None or trainer.args.ignore_data_skip else _read(checkpoint / _FILE)
        self._passed = False
        self._for_step: GeneratorStates | None = None

    def install(self) -> None:
        """Look at the batches of the Trainer from now on."""
        trainer: Any = self._trainer
        make, take = trainer.get_train_dataloader, trainer.get_batch_samples

        def loader(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            self._watch(made)
            return made

        def batches(*args: Any, **kwargs: Any) -> Any:
            taken = take(*args, **kwargs)
            if self._passed:  # the Trainer is about to restore what the generators were before
                self._for_step = GeneratorStates.now()
            self._resumed, self._passed = None, False
            return taken

        trainer.get_train_dataloader, trainer.get_batch_samples = loader, batches
        trainer.add_callback(self)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count from the epoch's first batch, or from where the checkpoint was."""
        self._before.clear()
        self._done = self._resumed.batch if self._resumed is not None else 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on with the numbers that follow those of the batches, not with those of the checkpoint."""
        if self._for_step is not None:
            self._for_step.restore()
            self._for_step = None

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a batch."""
        self._done += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count a batch."""
        self._done += 1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the states from before the batch that was read ahead; at an epoch's end there is none."""
        before, folder = self._before.get(self._done), Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if before is not None and folder.is_dir():
            after = GeneratorStates.now().plain()
            torch.save({"batch": self._done, "before": before.plain(), "after": after}, folder / _FILE)

    def _watch(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(getattr(loader, "sampler", None), BatchSampler):
            sampler = loader.sampler
        if sampler is not None and getattr(loader, "num_workers", 1) == 0:
            _tell_numbers(sampler, self._about_to_make)

    def _about_to_make(self, batch: int) -> None:
        resumed = self._resumed
        if resumed is not None and batch == resumed.batch:
            resumed.before.restore()
        elif resumed is not None and batch == resumed.batch + 1:
            resumed.after.restore()
            self._passed = True
        self._before = {number: states for number, states in self._before.items() if number == batch - 1}
        self._before[batch] = GeneratorStates.now()


def _tell_numbers(sampler: Any, tell: Callable[[int], None]) -> None:
    """Let a sampler of batches say the number of each before its rows are read."""
    cls = type(sampler)

    class Telling(cls):
        def __iter__(self) -> Iterator[Any]:
            for number, rows in enumerate(super().__iter__()):
                tell(number)
                yield rows

    Telling.__name__, Telling.__qualname__ = cls.__name__, cls.__qualname__
    with suppress(TypeError):  # a class of C, or with slots of its own
        sampler.__class__ = Telling


def _read(file: Path) -> _Resumed | None:
    if not file.is_file():
        return None
    found = torch.load(file, weights_only=True)
    return _Resumed(found["batch"], GeneratorStates.of(found["before"]), GeneratorStates.of(found["after"]))


# The callback that connects a Trainer of the user's own with its trial: reports, verdicts, stops and checkpoints.


@final
class ReportingCallback(TrainerCallback):
    """Reports evaluations, ends training when told to, and marks checkpoints that are whole.

    It must be the last callback of its Trainer: it decides over what those before it ask for. A checkpoint of a step of
    which an evaluation is still to come (at the end of an epoch) waits for it, because an attempt that goes on from
    there would pass it over.

    Args:
        trainer: The Trainer.
        trial: Its trial.
        channel: How it reports.
        body: What was asked.

    Attributes:
        goals: What the study optimises.
        begun_at: The newest whole checkpoint of earlier attempts; None: training begins anew.
        was_done: Training had ended there.
        evaluations: All so far, those of earlier attempts included.
        cut_short: Training was ended by a verdict or a stop, not by itself.
    """

    def __init__(self, trainer: Trainer, trial: Trial, channel: ChildChannel, body: OwnTrainingRequest) -> None:
        self._trainer, self._trial, self._channel, self._body = trainer, trial, channel, body
        self.goals = Goals.of(body.calling.objective)
        self.begun_at, mark = newest_whole(trial.folder) or (None, None)
        self._begun_step, self.was_done = (mark.step, mark.done) if mark is not None else (0, False)
        self.evaluations = list(mark.evaluations) if mark is not None else []
        self.cut_short = False
        self._ended = False  # by the Trainer itself, or by another callback
        self._begun = False
        self._save_later = False
        self._reported_step = self._saved_step = -1
        self._saved_at_s = time.monotonic()
        self._unread_said = False

    @property
    def steps(self) -> int:
        """Optimizer steps done, those of earlier attempts included."""
        return max(self._trainer.state.global_step, self._begun_step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put right what an earlier attempt's folder is named in."""
        if self._begun:
            raise ObjectiveError(
                "training the trial's Trainer",
                "training began anew with a smaller batch, which changes what the trial learns",
                "auto_find_batch_size=False",
                "set gradient_accumulation_steps and a per_device_train_batch_size that fits",
            )
        self._begun = True
        best = Path(args.output_dir or "") / f"checkpoint-{state.best_global_step}"
        state.best_model_checkpoint = str(best) if state.best_global_step and best.is_dir() else None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to train on for a metric that evaluations do not have."""
        self._demand_metrics()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look for a request to stop; hold a checkpoint back until the evaluation of its step."""
        self._channel.stepped()
        self._note_end(state, control)
        if not self._ended and not self.cut_short and self._trial.should_stop:
            self._cut_short(control)
        evaluates = IntervalStrategy(args.eval_strategy) == IntervalStrategy.EPOCH
        if control.should_save and evaluates and (_epoch_is_whole(state) or control.should_training_stop):
            control.should_save, self._save_later = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the checkpoint of a stop; in the middle of an epoch do nothing else that its end would do."""
        self._note_end(state, control)
        if self.cut_short:
            pruned = self._trial.stopped_by is StopReason.VERDICT
            if pruned or not _epoch_is_whole(state):
                control.should_evaluate = control.should_log = False
            control.should_save = not pruned and self._saved_step != state.global_step and not args.save_only_model
        elif self._save_later:
            control.should_save = True
        self._save_later = False

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the evaluation, keep its weights if it is the best, and end training if the verdict says so."""
        self._note_end(state, control)
        numbers, step = numbers_of(kwargs.get("metrics") or {}), state.global_step
        value = self.goals.first(numbers)
        improved = value is not None and self.goals.is_better(value, self.evaluations)
        self._keep(Evaluation(step=step, epoch=float(state.epoch or 0.0), metrics=numbers))
        if value is None or step <= self._reported_step:
            return  # of another data set, or once more
        self._reported_step = step
        stop = self._trial.report(value, step, epoch=float(state.epoch or 0.0), metrics=numbers)
        if stop and not self._ended:
            self._cut_short(control)
        if self._trial.stopped_by is StopReason.VERDICT:
            control.should_save = False
            return
        if improved and self._body.best_dir is not None:
            with publishing(Path(self._body.best_dir)) as temporary:
                self._trainer.save_model(str(temporary))
        due = time.monotonic() - self._saved_at_s >= self._body.checkpoint_every_s
        if (due or self.cut_short) and not args.save_only_model:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the checkpoint as whole, and say that the trial can go on from there."""
        step = state.global_step
        if args.save_only_model or self._saved_step == step:
            return
        self._note_end(state, control)
        folder = Path(args.output_dir or "") / f"checkpoint-{step}"
        mark_whole(folder, step=step, done=self._ended, evaluations=self.evaluations)
        self._saved_step, self._saved_at_s = step, time.monotonic()
        self._trial.checkpointed(step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say how far training is."""
        loss, epoch = (kwargs.get("logs") or {}).get("loss"), float(state.epoch or 0.0)
        if isinstance(loss, float):
            self._channel.progress(
                lambda: Progress(step=state.global_step, total_steps=state.max_steps, epoch=epoch, loss=loss)
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a training whose evaluations lack the metric."""
        self._demand_metrics()

    def _note_end(self, state: TrainerState, control: TrainerControl) -> None:
        at_end = state.global_step >= state.max_steps > 0
        self._ended = self._ended or at_end or (control.should_training_stop and not self.cut_short)

    def _cut_short(self, control: TrainerControl) -> None:
        self.cut_short = control.should_training_stop = True

    def _keep(self, evaluation: Evaluation) -> None:
        """Add an evaluation; those of several data sets at one step are one."""
        if self.evaluations and self.evaluations[-1].step == evaluation.step:
            metrics = self.evaluations.pop().metrics | evaluation.metrics
            evaluation = evaluation.model_copy(update={"metrics": metrics})
        self.evaluations.append(evaluation)

    def _demand_metrics(self) -> None:
        if not self.evaluations:
            return
        self.goals.demand(self.evaluations[-1])
        if not self._unread_said:
            self._unread_said = True
            if unread := self._trial.unread:
                said = f"nothing has read {', '.join(unread)} from trial.params: the search over it has no effect"
                self._channel.send(Note(text=said))


def _epoch_is_whole(state: TrainerState) -> bool:
    return float(state.epoch or 0.0).is_integer()


# What dryfit does to a Trainer of the user's own before it trains: its folder, its checkpoints, its losses.


_KEPT: Final = 2
"""Checkpoints of a trial that stay at least: a new one counts only once it is whole."""

_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_COMPARING_ROWS: Final = "sentence_transformers"

_TRAINER_STATE: Final = "trainer_state.json"


def adapt(trainer: Trainer, folder: Path) -> list[str]:
    """Let the Trainer write into the attempt's own folder, and keep enough checkpoints; return what is to be said.

    Raises:
        ObjectiveError: It would train by several processes.
    """
    args, notes = trainer.args, list[str]()
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            found = f"{name} is set, and a trial is one process on one device"
            raise ObjectiveError("preparing the trial's Trainer", found, f"TrainingArguments without {name}")
    if args.auto_find_batch_size:
        args.auto_find_batch_size = False
        note = "auto_find_batch_size=True: left out, as it would change what the trial learns"
        notes.append(f"{note}; its plan takes smaller micro-batches and accumulates them")
    args.output_dir = str(folder)
    if args.push_to_hub:
        args.push_to_hub = False
        notes.append("push_to_hub=True: nothing is pushed while it is searched")
    args.save_total_limit = max(_KEPT, args.save_total_limit or _KEPT)
    if args.save_only_model:
        notes.append(
            "save_only_model=True: its checkpoints hold no optimizer state, so an attempt after a stop or a kill "
            "begins anew"
        )
    elif str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        notes.append(
            "save_strategy='no': checkpoints are written at evaluations, by runtime.checkpoint_every_s, and at a stop; "
            "an attempt after an earlier kill begins anew"
        )
    return notes


def demand_changed(
    trainer: Trainer, changed: Mapping[str, ArgumentValue], replaced: Mapping[str, ArgumentValue]
) -> None:
    """Check that a Trainer has the arguments of its plan, and learns the same with them.

    Raises:
        ObjectiveError: They did not reach it, or more than rounding would change.
    """
    doing = "running the trial with what its plan changes"
    for name, value in changed.items():
        found = getattr(trainer.args, name, value)
        if found != value:
            hint = "leave args as they are once TrainingArguments(...) has made them"
            raise ObjectiveError(doing, f"its Trainer has {name} = {found!r}", f"{name} = {value!r}", hint)
    if BATCH not in replaced:
        return
    why = ""
    if trainer.args.dataloader_drop_last:
        why = "dataloader_drop_last=True leaves out other rows with smaller micro-batches"
    elif isinstance(trainer.model, nn.Module) and any(isinstance(one, _BATCH_NORMS) for one in trainer.model.modules()):
        why = "its model has batch normalization, which is computed over each micro-batch"
    elif any(cls.__module__.startswith(_COMPARING_ROWS) for cls in type(trainer).__mro__):
        why = "losses of sentence-transformers compare the rows of a micro-batch with each other"
    if why:
        raise ObjectiveError(doing, why, f"{BATCH} = {replaced[BATCH]}, as the function sets it")


def connect(trainer: Trainer, trial: Trial, channel: ChildChannel, body: OwnTrainingRequest) -> ReportingCallback:
    """Connect a Trainer that is about to be trained with its trial.

    Args:
        trainer: The Trainer; one that was trained to its end only reports from now on.
        trial: Its trial.
        channel: How it reports.
        body: What was asked.

    Returns:
        Its last callback, which reports.
    """
    callback = ReportingCallback(trainer, trial, channel, body)
    if not callback.was_done:
        if callback.begun_at is not None:
            trainer.args.eval_on_start = False  # it was done by the attempt that began
            _restore_callbacks(trainer, callback.begun_at)
        _watch_losses(trainer)
        BatchNumbers(trainer, callback.begun_at).install()
    trainer.add_callback(callback)
    return callback


def _restore_callbacks(trainer: Trainer, checkpoint: Path) -> None:
    """Give callbacks that have a state, such as early stopping, that of a checkpoint.

    By the Trainer's own ``restore_callback_states_from_checkpoint`` they would change their order, in which ours is
    the last.
    """
    stored: dict[str, Any] = vars(TrainerState.load_from_json(str(checkpoint / _TRAINER_STATE)))["stateful_callbacks"]
    for name in dict.fromkeys(type(each).__name__ for each in trainer.callback_handler.callbacks):
        same = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == name]
        states: list[Any] = stored[name] if isinstance(stored.get(name), list) else [stored.get(name, {})]
        for callback, state in zip(same, states[-len(same) :], strict=False):
            if isinstance(callback, ExportableState):
                for attribute, value in state.get("attributes", {}).items():
                    setattr(callback, attribute, value)


def _watch_losses(trainer: Trainer) -> None:
    """End training at the first loss that is not finite; the Trainer itself would leave it out of its logs."""
    step: Callable[..., torch.Tensor] = trainer.training_step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        if not torch.isfinite(loss).all():
            rows = _rows(args[1] if len(args) > 1 else kwargs.get("inputs"))
            raise NonFiniteError(
                f"training step {trainer.state.global_step + 1} of {trainer.state.max_steps}",
                f"the loss is {float(loss.float().sum())}{rows}",
                "a finite loss",
                "a smaller learning rate, a longer warmup or a smaller max_grad_norm",
            )
        return loss

    trainer.training_step = watched


def _rows(inputs: object) -> str:
    if isinstance(inputs, dict):
        for value in inputs.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                return f" in a batch of {len(value)} rows, of shape {tuple(value.shape)}"
    return ""


# A trial's Trainer: made by the user's own function with what its plan changes, and adapted to the trial.


_UNTRAINED: Final = "a transformers.Trainer that was not trained yet"


def make_trainer(
    calling: ObjectiveRequest, trial: Trial, changed: Mapping[str, ArgumentValue]
) -> tuple[Trainer, list[str]]:
    """Call the user's function, and adapt what it returns; this process belongs to the trial.

    Args:
        calling: The call.
        trial: Its argument.
        changed: Arguments that take the place of the function's own, by name.

    Returns:
        The Trainer, and what is to be said of it.

    Raises:
        ObjectiveError: It cannot be imported, makes no Trainer, one that cannot be searched, or one that cannot be
            changed so.
    """
    make = import_function(calling.objective, "trainer")
    watch = ArgumentWatch({"push_to_hub": False, **changed})
    watch.install()
    seed_libraries(calling.seed)
    with _training_refused(), OwnLine(str(source_file(make) or "")):
        made = make(trial)
    trainer = _checked(made, calling.objective.function)
    demand_changed(trainer, changed, watch.replaced)
    notes = adapt(trainer, trial.folder)
    if watch.replaced.get("push_to_hub"):
        notes.append("push_to_hub=True: nothing is pushed while it is searched")
    return trainer, notes


@contextmanager
def _training_refused() -> Generator[None, None, None]:
    """Refuse the training of any Trainer meanwhile: an attempt could not go on from where it was killed."""
    train = Trainer.train

    @functools.wraps(train)
    def refuse(self: Trainer, *args: object, **kwargs: object) -> None:
        raise ObjectiveError(
            "making the trial's Trainer",
            f"the function itself calls train() of a {type(self).__name__}",
            _UNTRAINED,
            "return it: dryfit trains it; what must be trained before goes into a script of its own",
        )

    Trainer.train = refuse  # pyright: ignore[reportAttributeAccessIssue]  # put back below
    try:
        yield
    finally:
        Trainer.train = train


def _checked(made: object, name: str) -> Trainer:
    """Refuse what is no Trainer, and one that tells nothing while it trains.

    Raises:
        ObjectiveError: Says what is wrong.
    """
    doing = f"taking what {name} returned"
    if not isinstance(made, Trainer):
        what = "None (does every path of the function return a Trainer?)" if made is None else _kind(made)
        raise ObjectiveError(doing, f"it is {what}", _UNTRAINED, "return Trainer(model=..., args=...)")
    if made.state.global_step > 0:
        raise ObjectiveError(doing, f"it has been trained for {made.state.global_step} steps", _UNTRAINED)
    if str(getattr(made.args.eval_strategy, "value", made.args.eval_strategy)) == "no":
        raise ObjectiveError(
            doing,
            "it never evaluates: eval_strategy is 'no', and the study has nothing to compare trials by",
            "eval_strategy='epoch' or 'steps', and an eval_dataset",
        )
    return made


def _kind(made: object) -> str:
    return f"the class {made.__name__}" if isinstance(made, type) else f"a {type(made).__name__}"


# Child job TRAINER: an objective that makes a Trainer by the user's own function, adds one callback, and trains.


def run(body: TrainerRequest, channel: ChildChannel) -> TrainResult:
    """Train what a study's function makes for one trial, from the newest checkpoint that is whole.

    Raises:
        ChangedError: Its file was edited.
        ObjectiveError: It cannot be imported, makes no Trainer, or one that cannot be searched.
        CheckpointError: What is to go on from belongs to another trial.
        NonFiniteError: The loss became infinite or NaN, or every evaluation's value is.
    """
    calling = body.calling
    with called(calling, channel):
        limit_memory(body.memory_fraction, torch)
        trial = Trial(calling, channel)
        trainer, notes = make_trainer(calling, trial, arguments_of(body.choice))
        for note in notes:
            channel.send(Note(text=note))
        channel.send(Phase(name="train"))
        return _train(trainer, trial, channel, body)


def _train(trainer: Trainer, trial: Trial, channel: ChildChannel, body: TrainerRequest) -> TrainResult:
    callback = connect(trainer, trial, channel, body)
    if not callback.was_done:
        trainer.train(resume_from_checkpoint=str(callback.begun_at) if callback.begun_at is not None else None)
    goals, steps = callback.goals, callback.steps
    if callback.cut_short:
        return TrainResult(value=None, best=None, steps=steps, stopped_by=trial.stopped_by)
    if not callback.evaluations:
        args = trainer.args
        raise ObjectiveError(
            f"looking for the metric {goals.names[0]}",
            f"the Trainer has done {steps} steps and no evaluation: eval_strategy is {str(args.eval_strategy)!r}, "
            f"eval_steps {args.eval_steps}, eval_delay {args.eval_delay}",
            "at least one evaluation",
        )
    return completed(goals.values(callback.evaluations), goals.names, steps)
