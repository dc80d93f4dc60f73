"""What a trial learns from: its task and its tokens."""

from pathlib import Path

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.train import TrainRequest
from dryfit.core.settings.trial import TrialConfig
from dryfit.core.wire import Note
from dryfit.tasks.base import Task, TaskContext
from dryfit.tasks.folds import Fold
from dryfit.tasks.prepare import prepared_tokens
from dryfit.tasks.registry import make_task
from dryfit.tasks.tokens.token_set import Tokens


def trial_task(config: TrialConfig, tokens: Tokens | None = None) -> Task:
    """Return a trial's task: its batches, model, loss and metrics.

    Args:
        config: What the trial learns.
        tokens: Its data, from which the task takes facts such as the number of classes; None: before it was read.
    """
    context = TaskContext(config.settings, config.data, metric=config.metric)
    context = context if tokens is None else context.with_facts(tokens.facts(config.data.num_labels))
    return make_task(config.task, context)


def read_tokens(request: TrainRequest, task: Task, *, only: tuple[str, ...] | None, fold: Fold | None = None) -> Tokens:
    """Read the tokens of some splits from the cache, or make them again.

    Args:
        request: Whose data it is.
        task: The trial's.
        only: Which splits; None: all.
        fold: Which rows are train and validation; None: those of the sources.

    Raises:
        DataError: They had to be made again and the data is no longer what the study was checked with.
    """
    cache_dir, fingerprint = Path(request.cache_dir), request.config.data_fingerprint
    return prepared_tokens(task, cache_dir=cache_dir, data_fingerprint=fingerprint, only=only, fold=fold)


def send_remarks(channel: ChildChannel, task: Task, tokens: Tokens) -> None:
    """Send what should be known of the rows, and is no error."""
    for remark in task.remarks(tokens):
        channel.send(Note(text=remark))
