"""End the training loops of libraries by their own means, so that they evaluate and save as at their natural end."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from dryfit.virtual.import_hooks import when_imported

_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def end_trainers(done: Callable[[], bool]) -> None:
    """Stop every trainer of transformers and Lightning after the step at which enough was seen.

    Lightning validates and saves whenever it is told to stop; transformers does with what its arguments say: a trainer
    that evaluates or saves every so many steps does so here, and one that does after each epoch ends its epoch.
    """
    when_imported("transformers.trainer", lambda module: _adding(module.Trainer, _end_of_transformers(module, done)))
    for name in _LIGHTNING:
        when_imported(name, lambda module: _adding(module.Trainer, _end_of_lightning(module, done)))


def _adding(trainer: Any, add: Callable[[Any], None]) -> None:
    """Let each new trainer be given a callback."""
    original = trainer.__init__

    @wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add(self)

    trainer.__init__ = initialise


def _end_of_transformers(module: Any, done: Callable[[], bool]) -> Callable[[Any], None]:
    class TransformersEnd(module.TrainerCallback):
        """Evaluates, saves and stops after the last step of a rehearsal."""

        def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Do at the last step what the trainer does every so many steps."""
            if done():
                control.should_training_stop = True
                control.should_evaluate |= args.eval_strategy == "steps"
                control.should_save |= args.save_strategy == "steps"

        def on_epoch_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
            """Evaluate although the epoch ended before the first evaluation was due."""
            if done():
                control.should_evaluate |= args.eval_strategy == "epoch"

    return lambda trainer: trainer.add_callback(TransformersEnd())


def _end_of_lightning(module: Any, done: Callable[[], bool]) -> Callable[[Any], None]:
    class LightningEnd(module.Callback):
        """Asks the trainer to stop after the last step of a rehearsal."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Ask: it validates and saves before it does, also where it was to go on for some epochs before that."""
            if done():
                trainer.should_stop = True
                trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
                trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch and 1

    return lambda trainer: trainer.callbacks.insert(0, LightningEnd())  # savers have to stay the last
