"""A script shortened to a few optimizer steps, its evaluation and its saving."""

import sys
from collections.abc import Callable
from functools import wraps
from math import inf
from typing import Any

import torch

from dryfit.gpu.import_hooks import is_of, when_imported
from dryfit.gpu.left_out import FullHistory, LeftOutTokens, RepeatedMicroBatches
from dryfit.gpu.loaders import KeptOfBatch, LoaderPace, LoaderWatch, OptimizerSteps, Stock
from dryfit.gpu.private_apis.torch_modes import schema_of
from dryfit.gpu.private_apis.torch_recording import running_node_number
from dryfit.gpu.repeated_calls import RepeatedCalls, RepeatedPasses
from dryfit.gpu.script_recorder import ScriptRecorder, TrainingModes
from dryfit.gpu.work import WorkCounter
from dryfit.settings.rehearsal_messages import LargestBatch, RunTime

# End the training loops of libraries by their own means, so that they evaluate and save as at their natural end.


_MOST_BYTES = 2**28
"""No larger predictions are completed."""
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def end_trainers(
    done: Callable[[], bool], goes_past_evaluation: Callable[[], bool], planned: Callable[[float, str], None]
) -> None:
    """Stop every trainer of transformers and Lightning after the step at which enough was seen.

    Lightning validates and saves whenever it is told to stop; transformers does with what its arguments say: a trainer
    that evaluates or saves every so many steps does so here, and one that does after each epoch ends its epoch. Where
    they evaluate and would train on, they make one step more.

    Args:
        done: Whether enough steps were made.
        goes_past_evaluation: Wants one more step, and says whether it does: once.
        planned: Given the optimizer steps that a trainer would make, and who says so.
    """
    when_imported("transformers.trainer", _complete_predictions)
    when_imported(
        "transformers.trainer",
        lambda module: _adding(module.Trainer, _end_of_transformers(module, done, goes_past_evaluation, planned)),
    )
    for name in _LIGHTNING:
        when_imported(
            name, lambda module: _adding(module.Trainer, _end_of_lightning(module, done, goes_past_evaluation, planned))
        )


def _complete_predictions(module: Any) -> None:
    """Give what looks at predictions one for each row, where an evaluation was cut: those that there are, repeated."""
    original = module.Trainer.evaluation_loop

    @wraps(original)
    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        whole = {name: _repeated(getattr(output, name), output.num_samples) for name in ("predictions", "label_ids")}
        return output._replace(**whole)

    module.Trainer.evaluation_loop = evaluation_loop


def _repeated(rows: Any, count: int) -> Any:
    if isinstance(rows, tuple):
        return tuple(_repeated(part, count) for part in rows)
    if (
        not is_of(rows, "numpy", "ndarray")
        or not 0 < len(rows) < count
        or rows.nbytes / len(rows) * count > _MOST_BYTES
    ):
        return rows
    return sys.modules["numpy"].resize(rows, (count, *rows.shape[1:]))


def _adding(trainer: Any, add: Callable[[Any], None]) -> None:
    """Let each new trainer be given a callback."""
    original = trainer.__init__

    @wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add(self)

    trainer.__init__ = initialise


def _end_of_transformers(
    module: Any,
    done: Callable[[], bool],
    goes_past_evaluation: Callable[[], bool],
    planned: Callable[[float, str], None],
) -> Callable[[Any], None]:
    class TransformersEnd(module.TrainerCallback):
        """Evaluates and saves after the steps of a rehearsal, trains for one step more, and stops."""

        def __init__(self) -> None:
            self._went_past = False

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            """Learn how many steps there would be."""
            planned(state.max_steps, "TrainingArguments")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Do at the last step what the trainer does every so many steps."""
            if not done():
                return
            if self._went_past:
                control.should_training_stop = True
                control.should_evaluate = control.should_save = False
                return
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
            by_epoch = args.eval_strategy == "epoch" and state.epoch + 1 <= args.num_train_epochs
            trains_on = state.global_step < state.max_steps and (control.should_evaluate or by_epoch)
            if trains_on and goes_past_evaluation():
                self._went_past = True
                control.should_epoch_stop |= not control.should_evaluate
            else:
                control.should_training_stop = True

        def on_epoch_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Evaluate although the epoch ended before the first evaluation was due."""
            if self._went_past and done():
                control.should_evaluate = control.should_save = False
            elif done() or self._went_past:
                control.should_evaluate |= args.eval_strategy == "epoch"

    return lambda trainer: trainer.add_callback(TransformersEnd())


def _end_of_lightning(
    module: Any,
    done: Callable[[], bool],
    goes_past_evaluation: Callable[[], bool],
    planned: Callable[[float, str], None],
) -> Callable[[Any], None]:
    class LightningEnd(module.Callback):
        """Asks the trainer to stop after the last step of a rehearsal, and to go on once after it has validated."""

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            """Learn how many steps there would be."""
            planned(trainer.estimated_stepping_batches, "Lightning")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Ask: it validates and saves before it does, also where it was to go on for some epochs before that."""
            if done():
                trainer.should_stop = True
                trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
                trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch and 1

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            """Train for one step more, where training would have gone on."""
            epochs, steps = trainer.max_epochs, trainer.max_steps
            ends = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
            ends |= steps not in (None, -1) and trainer.global_step >= steps
            if done() and not trainer.sanity_checking and not ends and goes_past_evaluation():
                trainer.should_stop = False

    return lambda trainer: trainer.callbacks.insert(0, LightningEnd())  # savers have to stay the last


# Know the steps of a script that changes its weights by hand, without any optimizer of torch.
#
# Such a step begins where a weight is written to for the first time after a backward pass, outside of every module,
# and ends where a model runs again, or a backward pass where there is none.


class StepsByHand:
    """Counts them.

    Args:
        steps: Told of each.
        recorder: Knows which module runs, and what is a weight.
    """

    def __init__(self, steps: OptimizerSteps, recorder: ScriptRecorder) -> None:
        self._steps = steps
        self._recorder = recorder
        self._has_gradients = self._in_step = False

    def note(self, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
        """Look at an operator on the device that has just run."""
        if self._steps.has_optimizer:
            return
        if running_node_number() is not None:
            self._has_gradients = True
            self._recorder.trains()
            if self._in_step:  # without a module
                self._end()
        elif self._in_step and self._recorder.in_module:
            self._end()
        elif (self._has_gradients or self._in_step) and schema_of(func).is_mutable and self._writes_weight(args[0]):
            if not self._in_step:
                self._steps.begins()
            self._has_gradients, self._in_step = False, True

    def _end(self) -> None:
        self._in_step = False
        self._steps.ends_by_hand()

    def _writes_weight(self, written: Any) -> bool:
        first = written[0] if isinstance(written, list | tuple) and written else written
        return isinstance(first, torch.Tensor) and not self._recorder.in_module and self._recorder.is_weight(first)


# Shorten a script to a few optimizer steps, its evaluation and its saving, largest batch first.


def _nothing(_: int) -> None:
    pass


LONG_STEP = 100_000
"""Allocations and frees of a step after which a third one costs more than it tells: 45 s for a model of 80 layers."""
_USUAL_STEPS = 3
_LEAST_STEPS = 2
"""The first step has no optimizer state; the second has."""


class Shortening:
    """What ends a script early.

    Args:
        steps: Optimizer steps that are enough; None: three, or two where the second is long.
        worst_batch: Whether to look for the largest batch and train on it first.
        on_step_end: Called with a step's number, from 1, as its optimizer has ended.
        on_ignored: Called where a script that was ended goes on.
        stock: Says what is allocated on the device: what an evaluation keeps of each batch, what a token takes.
        work: Counts the work of micro-batches that are left out, too.
        modes: Tell which calls of modules are a part of training.
    """

    def __init__(
        self,
        steps: int | None,
        *,
        worst_batch: bool = True,
        on_step_end: Callable[[int], None] = _nothing,
        on_ignored: Callable[[], None] = lambda: None,
        stock: Callable[[], Stock] = Stock,
        work: WorkCounter | None = None,
        modes: TrainingModes | None = None,
    ) -> None:
        self._chooses_steps = steps is None
        self._is_long = False
        self._ended_at = 0
        """Allocations and frees until the last step had ended."""
        self._stock = stock
        self._on_step_end = on_step_end
        self._steps = OptimizerSteps(_USUAL_STEPS if steps is None else steps, self._ends, on_ignored)
        self._loaders = LoaderWatch(self._steps, worst_batch=worst_batch, stock=stock, modes=modes or TrainingModes())
        work = work or WorkCounter()
        self._micro_batches = RepeatedMicroBatches(work, largest=worst_batch)
        self._tokens = LeftOutTokens(work, stock)
        self._history = FullHistory()
        self._passes = RepeatedPasses(work, stock)
        self._planned: tuple[int, str] | None = None
        self._calls = RepeatedCalls(work, lambda: self._steps.ended, self._loaders.module_called, self._passes)

    def install(self) -> None:
        """Change this process for good, which belongs to the rehearsal: call it before the script begins.

        The script may be ended by ``RehearsalDone``. One that asks for the next batch by ``next(iterator)`` and does
        not expect an end fails with ``StopIteration``: where :attr:`done` is true then, it was ended, too.
        """
        self._loaders.install()
        self._steps.install(self._loaders.before_step)
        end_trainers(lambda: self._steps.done, self._loaders.goes_past_evaluation, self._trainer_begins)
        self._micro_batches.install()
        self._tokens.install()
        self._history.install()
        self._calls.install()

    def _ends(self, number: int) -> None:
        """Pass the end of a step on; the first with optimizer state is the last one where that was long."""
        before, self._ended_at = self._ended_at, self._stock().event
        if self._chooses_steps and number == _LEAST_STEPS and self._ended_at - before > LONG_STEP:
            self._steps.want(number)
            self._is_long = True
        self._on_step_end(number)

    def _trainer_begins(self, steps: float, source: str) -> None:
        """Keep what the first trainer is about to do: endless ones have no number."""
        if self._planned is None and 0 < steps < inf:
            self._planned = (int(steps), source)

    def run_time(self, *, has_ended: bool) -> RunTime | None:
        """Return how long the script trains; None: no step was seen.

        Args:
            has_ended: Whether the script came to its own end.
        """
        if not self._steps.number:
            return None
        ends_by_itself = has_ended and not self._steps.done
        steps, source = (self._steps.number, "the script") if ends_by_itself else self._planned or (None, "")
        pace = self._loaders.pace or LoaderPace(None, None, None, 0)
        return RunTime(
            steps=steps,
            source=source,
            epoch_steps=pace.epoch_steps,
            batch_share=pace.batch_share,
            batches_per_s=pace.batches_per_s,
            workers=pace.workers,
        )

    def listeners(self, recorder: ScriptRecorder) -> list[Callable[[Any, Any, Any, Any], None]]:
        """Return what is to be told of each operator on the device; follow a library's own steps."""
        recorder.on_whole_step = (self._steps.begins, self._steps.ends)
        return [StepsByHand(self._steps, recorder).note]

    @property
    def done(self) -> bool:
        """Whether enough steps were made."""
        return self._steps.done

    @property
    def wanted(self) -> int:
        """Optimizer steps that are enough."""
        return self._steps.wanted

    @property
    def steps(self) -> int:
        """Optimizer steps that have ended."""
        return self._steps.number

    @property
    def evaluating(self) -> bool:
        """Whether the modules that run are evaluating a loader's batch."""
        return self._loaders.evaluating

    @property
    def kept_of_batch(self) -> KeptOfBatch | None:
        """What an evaluation that was cut keeps of each batch; None: nothing."""
        return self._loaders.kept

    @property
    def largest_batch(self) -> LargestBatch | None:
        """The largest batch of the loader that feeds training; None where it was not looked for or is not known."""
        return self._loaders.largest

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out or cut, in words for the answer."""
        repeated, skipped = self._micro_batches.left_out, self._tokens.left_out
        left_out: list[str] = []
        if self._is_long:
            left_out.append(
                f"{_LEAST_STEPS} steps were followed, because one makes over {LONG_STEP:,} allocations and frees: what"
                " the script keeps of each step is not known; --steps 3 tells it"
            )
        if repeated:
            left_out.append(
                f"{repeated} micro-batches were left out: each takes no more than one before it in its step"
            )
        if skipped:
            left_out.append(f"{skipped} tokens of generated sequences were left out: each takes less than their last")
        if self._calls.left_out:
            left_out.append(
                f"{self._calls.left_out} calls without gradients were left out: each has the shapes of some before it"
            )
        if self._passes.left_out:
            left_out.append(
                f"{self._passes.left_out} forward and backward passes were left out: each has the shapes of some before"
                " it in its step, and began with the same memory"
            )
        if self._history.longest:
            left_out.append(
                f"LBFGS keeps its last {self._history.longest} iterations, each twice the weights: its history was"
                " taken as full after the first step"
            )
        if self._tokens.hindrance:
            left_out.append(f"every token of generated sequences is generated: {self._tokens.hindrance}")
        return (*self._loaders.notes, *left_out)
