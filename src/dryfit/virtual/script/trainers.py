"""End the training loops of libraries by their own means, so that they evaluate and save as at their natural end."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from dryfit.virtual.import_hooks import when_imported

_MOST_BYTES = 2**28
"""No larger predictions are completed."""
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def end_trainers(done: Callable[[], bool], goes_past_evaluation: Callable[[], bool]) -> None:
    """Stop every trainer of transformers and Lightning after the step at which enough was seen.

    Lightning validates and saves whenever it is told to stop; transformers does with what its arguments say: a trainer
    that evaluates or saves every so many steps does so here, and one that does after each epoch ends its epoch. Where
    they evaluate and would train on, they make one step more.

    Args:
        done: Whether enough steps were made.
        goes_past_evaluation: Wants one more step, and says whether it does: once.
    """
    ends = _end_of_transformers
    when_imported("transformers.trainer", _complete_predictions)
    when_imported(
        "transformers.trainer", lambda module: _adding(module.Trainer, ends(module, done, goes_past_evaluation))
    )
    for name in _LIGHTNING:
        when_imported(
            name, lambda module: _adding(module.Trainer, _end_of_lightning(module, done, goes_past_evaluation))
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
    if not isinstance(rows, np.ndarray) or not 0 < len(rows) < count or rows.nbytes / len(rows) * count > _MOST_BYTES:
        return rows
    return np.resize(rows, (count, *rows.shape[1:]))


def _adding(trainer: Any, add: Callable[[Any], None]) -> None:
    """Let each new trainer be given a callback."""
    original = trainer.__init__

    @wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add(self)

    trainer.__init__ = initialise


def _end_of_transformers(
    module: Any, done: Callable[[], bool], goes_past_evaluation: Callable[[], bool]
) -> Callable[[Any], None]:
    class TransformersEnd(module.TrainerCallback):
        """Evaluates and saves after the steps of a rehearsal, trains for one step more, and stops."""

        def __init__(self) -> None:
            self._went_past = False

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
    module: Any, done: Callable[[], bool], goes_past_evaluation: Callable[[], bool]
) -> Callable[[Any], None]:
    class LightningEnd(module.Callback):
        """Asks the trainer to stop after the last step of a rehearsal, and to go on once after it has validated."""

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
