"""Child job TRAINER: an objective that makes a Trainer by the user's own function, adds one callback, and trains."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Trainer

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import ObjectiveError
from dryfit.core.jobs.train import TrainerRequest, TrainResult
from dryfit.core.process import peak_rss_bytes
from dryfit.core.sharding.argument_ladder import arguments_of
from dryfit.core.user_code import demand_unchanged
from dryfit.core.wire import Note, Phase
from dryfit.jobs.own.made_trainer import make_trainer
from dryfit.jobs.own.objective import beating, use_threads
from dryfit.jobs.own.objective_files import make_checkpoint_folder
from dryfit.jobs.own.objective_trial import Trial, as_values
from dryfit.jobs.own.trainer_callback import TrialTerms
from dryfit.jobs.own.trainer_checkpoints import newest_whole
from dryfit.jobs.own.trainer_goals import Goals
from dryfit.jobs.own.trainer_setup import connect


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
        make_checkpoint_folder(calling)
        if body.memory_fraction is not None and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(body.memory_fraction)
        trial = Trial(calling, channel)
        trainer, notes = make_trainer(calling, trial, arguments_of(body.choice))
        for note in notes:
            channel.send(Note(text=note))
        channel.send(Phase(name="train"))
        return _train(trainer, trial, channel, body)


def _train(trainer: Trainer, trial: Trial, channel: ChildChannel, body: TrainerRequest) -> TrainResult:
    goals = Goals.of(body.calling.objective)
    found = newest_whole(trial.folder)
    best_dir = Path(body.best_dir) if body.best_dir is not None else None
    callback = connect(trainer, trial, channel, TrialTerms(goals, best_dir, body.checkpoint_every_s), found)
    if found is None or not found[1].done:
        trainer.train(resume_from_checkpoint=str(found[0]) if found is not None else None)
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


def _on_device(measure: Callable[[], int]) -> int | None:
    return measure() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
