"""Child job TRAIN: train one trial, from its request to its result."""

# Imported before the fork, so that a trial need not do it: what most studies train.
import transformers.models.bert.modeling_bert
import transformers.models.distilbert.modeling_distilbert
import transformers.models.electra.modeling_electra
import transformers.models.modernbert.modeling_modernbert
import transformers.models.roberta.modeling_roberta  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.train import TrainRequest, TrainResult
from dryfit.core.wire import Note
from dryfit.parallel.layout.processes import ProcessGroup, run_in_process_group
from dryfit.tasks.rows.checked_rows import TRAIN, VALIDATION
from dryfit.train.checkpoint import newest_checkpoint, save_between_folds
from dryfit.train.data import read_tokens, send_remarks
from dryfit.train.device import release_memory
from dryfit.train.model import trial_parts
from dryfit.train.results import fold_score, folds_result, train_result
from dryfit.train.run import FoldPosition
from dryfit.train.start import start_training
from dryfit.train.trainer import run_training

# Compiles a thousand patterns on its first call (0.1 s) and keeps them: once before the fork, not in each trial.
get_checkpoint_conversion_mapping("bert")


def train(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Train one trial, or go on with it from its newest good checkpoint.

    Args:
        body: What to learn, how to run it and where its files lie.
        channel: How to report, and to hear verdicts and stop requests.

    Returns:
        The best validation, and why training ended.

    Raises:
        DryfitError: A setting, the data, the model's weights or a checkpoint is wrong, or the loss is not finite.
    """
    result = run_in_process_group(body.plan, channel, lambda group: _train(body, channel, group))
    if body.diagnostic:
        channel.send(Note(text="what ended the attempt before did not come back, although every kernel was waited for"))
    return result


def _train(body: TrainRequest, channel: ChildChannel, group: ProcessGroup) -> TrainResult:
    """Train once, or once for each fold that is not done yet, each time on the rows of the others.

    Every fold has a seed of its own and draws nothing that depends on those before, so that it is the same training
    whether this process has done these, another one has, or nobody.
    """
    task = start_training(body, channel)
    checkpoint = newest_checkpoint(body, channel)
    position = first = FoldPosition.of(body, () if checkpoint is None else checkpoint.folds)
    while True:
        tokens = read_tokens(body, task, only=(TRAIN, VALIDATION), fold=position.fold(body.config.data))
        if position is first:  # once: each fold has all rows, on one side or the other
            send_remarks(channel, task, tokens)
        parts = trial_parts(body, channel, tokens, position=position, group=group)
        run = run_training(parts, checkpoint)
        if position.folds == 1:
            return train_result(body, run, group)
        score = fold_score(parts, run)
        if score is None:
            return folds_result(body, position, run.stopped_by, group, fold_steps=run.step)
        del parts, tokens
        release_memory(body.plan.device)
        position = position.after(score)
        if position.is_complete:
            return folds_result(body, position, None, group)
        if group.rank == 0:
            save_between_folds(body, channel, position)
        stop = channel.stop_requested()
        if stop is not None:
            return folds_result(body, position, stop, group)
        checkpoint = None
