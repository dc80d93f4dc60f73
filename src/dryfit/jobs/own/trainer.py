"""Child job TRAINER: an objective that makes a Trainer by the user's own function, adds one callback, and trains."""

import functools
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import NonFiniteError, ObjectiveError
from dryfit.core.jobs.train import TrainerRequest, TrainResult
from dryfit.core.process import peak_rss_bytes
from dryfit.core.user_code import demand_unchanged, source_file
from dryfit.core.wire import Note, Phase
from dryfit.jobs.own.objective import beating, seed_libraries, use_threads
from dryfit.jobs.own.objective_files import make_checkpoint_folder
from dryfit.jobs.own.objective_function import import_function
from dryfit.jobs.own.objective_trial import Trial, as_values
from dryfit.jobs.own.trainer_callback import ReportingCallback, TrialTerms
from dryfit.jobs.own.trainer_checkpoints import newest_whole
from dryfit.jobs.own.trainer_goals import Goals

_KEPT: Final = 2
"""Checkpoints of a trial that stay at least: a new one counts only once it is whole."""

_TRAINER_STATE: Final = "trainer_state.json"
_UNTRAINED: Final = "a transformers.Trainer that was not trained yet"


def run(body: TrainerRequest, channel: ChildChannel) -> TrainResult:
    """Train what a study's function makes for one trial, from the newest checkpoint that is whole.

    Raises:
        ChangedError: Its file was edited.
        ObjectiveError: It cannot be imported, makes no Trainer, or one that cannot be searched.
        CheckpointError: What is to go on from belongs to another trial.
        NonFiniteError: The loss became infinite or NaN, or every evaluation's value is.
    """
    calling = body.calling
    use_threads(calling.threads)
    channel.send(Phase(name="load"))
    with beating(channel):
        demand_unchanged(calling.own_file, calling.own_hash)
        make = import_function(calling.objective, "trainer")
        make_checkpoint_folder(calling)
        trial = Trial(calling, channel)
        seed_libraries(calling.seed)
        with _training_refused(), _OwnLine(make):
            made = make(trial)
        trainer = _checked(made, calling.objective.function)
        for note in _adapt(trainer, trial.folder):
            channel.send(Note(text=note))
        channel.send(Phase(name="train"))
        return _train(trainer, trial, channel, body)


def _train(trainer: Trainer, trial: Trial, channel: ChildChannel, body: TrainerRequest) -> TrainResult:
    goals = Goals.of(body.calling.objective)
    found = newest_whole(trial.folder)
    terms = TrialTerms(
        goals=goals,
        best_dir=Path(body.best_dir) if body.best_dir is not None else None,
        checkpoint_every_s=body.checkpoint_every_s,
        went_on_from=found[1] if found is not None else None,
    )
    callback = ReportingCallback(trainer, trial, channel, terms)
    if found is None:
        _watch_losses(trainer)
        trainer.add_callback(callback)
        trainer.train()
    elif not found[1].done:
        trainer.args.eval_on_start = False  # it was done by the attempt that began
        _restore_callbacks(trainer, found[0])
        _watch_losses(trainer)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=str(found[0]))
    steps = max(trainer.state.global_step, found[1].step if found is not None else 0)
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
    values = as_values(goals.values(callback.evaluations), goals.names)
    return TrainResult(
        value=values[0],
        also=values[1:],
        best=None,
        steps=steps,
        peak_allocated_bytes=_on_device(torch.cuda.max_memory_allocated),
        peak_reserved_bytes=_on_device(torch.cuda.max_memory_reserved),
        peak_rss_bytes=peak_rss_bytes(),
    )


class _OwnLine:
    """Adds to an exception the line of the user's file where it began: what follows are lines of libraries."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._file = str(source_file(function) or "")

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        own = [frame for frame in traceback.extract_tb(trace) if frame.filename == self._file]
        if error is not None and own:
            error.add_note(f"from {own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}")


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


def _adapt(trainer: Trainer, folder: Path) -> list[str]:
    """Let the Trainer write into the attempt's own folder, and keep enough checkpoints; return what is to be said."""
    args, notes = trainer.args, list[str]()
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


def _on_device(measure: Callable[[], int]) -> int | None:
    return measure() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
