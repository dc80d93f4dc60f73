"""What dryfit does to a Trainer of the user's own before it trains: its folder, its checkpoints, its losses."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import NonFiniteError, ObjectiveError
from dryfit.core.jobs.rehearsal import ArgumentValue
from dryfit.core.sharding.argument_ladder import BATCH
from dryfit.jobs.own.batch_numbers import BatchNumbers
from dryfit.jobs.own.objective_trial import Trial
from dryfit.jobs.own.trainer_callback import ReportingCallback, TrialTerms
from dryfit.jobs.own.trainer_checkpoints import CheckpointMark

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


def connect(
    trainer: Trainer, trial: Trial, channel: ChildChannel, terms: TrialTerms, found: tuple[Path, CheckpointMark] | None
) -> ReportingCallback:
    """Connect a Trainer that is about to be trained with its trial.

    Args:
        trainer: The Trainer; one that was trained to its end only reports from now on.
        trial: Its trial.
        channel: How it reports.
        terms: What its callback needs to know.
        found: The checkpoint that it goes on from; None: it begins.

    Returns:
        Its last callback, which reports.
    """
    folder, mark = found or (None, None)
    callback = ReportingCallback(trainer, trial, channel, terms, mark)
    if mark is None or not mark.done:
        if folder is not None:
            trainer.args.eval_on_start = False  # it was done by the attempt that began
            _restore_callbacks(trainer, folder)
        _watch_losses(trainer)
        BatchNumbers(trainer, folder).install()
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
