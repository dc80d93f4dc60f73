"""What a trial learns from, and which rows form which batch."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dryfit.processes.channel import ChildChannel
from dryfit.processes.process import die_with_parent
from dryfit.settings.splits import derive_seed
from dryfit.settings.training_messages import TrainRequest
from dryfit.settings.trial import TrialConfig
from dryfit.settings.wire import Note
from dryfit.tasks.base import Batch, Task, TaskContext
from dryfit.tasks.own import make_task
from dryfit.tasks.prepare import Fold, prepared_tokens
from dryfit.tasks.tokens import Tokens, TokenSet

# What a trial learns from: its task and its tokens.


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


# Which rows form which batch: a pure function of (seed, epoch, lengths, effective batch).


_MOST_BATCHES_SORTED = 50
_LEAST_MEGA_BATCHES = 4


def epoch_batches(
    lengths: torch.Tensor,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    group_by_length: bool,
    rows: torch.Tensor | None = None,
) -> list[list[int]]:
    """The batches of one epoch; each row that is trained on is in exactly one.

    Grouping shuffles all rows, sorts runs of several batches by length, cuts them into batches and shuffles those:
    rows of a batch have similar lengths, and chance still decides who meets whom. The run length is that of
    transformers' own grouping (50 batches, at least four runs a data set).

    Args:
        lengths: Tokens of each row, 1-dimensional.
        seed: Seed of the trial's batch order.
        epoch: From 0.
        batch_size: Rows behind one optimizer step; the batch with the rest may be smaller.
        group_by_length: Whether to group; else a plain shuffle.
        rows: The rows that are trained on; None: all.
    """
    if rows is not None:
        among = epoch_batches(
            lengths[rows], seed=seed, epoch=epoch, batch_size=batch_size, group_by_length=group_by_length
        )
        return [rows[batch].tolist() for batch in among]
    count = len(lengths)
    generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
    order = torch.randperm(count, generator=generator)
    if not group_by_length:
        return [chunk.tolist() for chunk in order.split(batch_size)]
    run_batches = max(1, min(count // (batch_size * _LEAST_MEGA_BATCHES), _MOST_BATCHES_SORTED))
    batches: list[list[int]] = []
    for run in order.split(batch_size * run_batches):
        by_length = run[torch.argsort(lengths[run], descending=True, stable=True)]
        batches += [chunk.tolist() for chunk in by_length.split(batch_size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def first_epoch(task: Task, tokens: TokenSet, *, seed: int, batch_size: int, group_by_length: bool) -> list[list[int]]:
    """The batches of a trial's first epoch; arguments as of :func:`epoch_batches`."""
    rows = task.epoch_rows(tokens, seed=seed, epoch=0)
    return epoch_batches(
        tokens.lengths_R, seed=seed, epoch=0, batch_size=batch_size, group_by_length=group_by_length, rows=rows
    )


def epoch_size(tokens: TokenSet, task: Task) -> int:
    """Rows of the training split that each epoch trains on."""
    return _count(task.epoch_rows(tokens, seed=0, epoch=0), tokens.lengths_R)


def evaluation_batches(lengths: torch.Tensor, batch_size: int) -> list[list[int]]:
    """Batches of all rows, longest first: least padding, and the largest batch meets the memory first."""
    order = torch.argsort(lengths, descending=True, stable=True)
    return [chunk.tolist() for chunk in order.split(batch_size)]


@final
class EpochBatchSampler(Sampler[list[int]]):
    """Batch sampler over :func:`epoch_batches`; set the epoch before iterating.

    Args:
        lengths: Tokens of each row of the training split.
        seed: Seed of the trial's batch order.
        batch_size: Rows behind one optimizer step.
        group_by_length: Whether rows of similar length are batched together.
        chosen: Rows that an epoch trains on, as many in each; None: all.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        *,
        seed: int,
        batch_size: int,
        group_by_length: bool,
        chosen: Callable[[int], torch.Tensor | None] = lambda _: None,
    ) -> None:
        self._batches = partial(
            epoch_batches, lengths, seed=seed, batch_size=batch_size, group_by_length=group_by_length
        )
        self._chosen = chosen
        self._length = -(-_count(chosen(0), lengths) // batch_size)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next iteration is of."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches(epoch=self._epoch, rows=self._chosen(self._epoch)))


def _count(rows: torch.Tensor | None, lengths: torch.Tensor) -> int:
    return len(lengths) if rows is None else len(rows)


@final
class RowDataset(Dataset[Batch]):
    """Makes whole batches: the loader asks for all rows of a batch at once. Set the epoch before iterating.

    Args:
        tokens: The training split.
        task: Makes the batches.
        seed: Seed of the trial's batch order.
    """

    def __init__(self, tokens: TokenSet, task: Task, *, seed: int) -> None:
        self._tokens = tokens
        self._task = task
        self._seed = seed
        self._entries: Batch | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next batches are of."""
        self._entries = self._task.epoch_entries(self._tokens, seed=self._seed, epoch=epoch)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """Make the batch of some rows (the loader's own protocol for batched fetching)."""
        picked = list(rows)
        if self._entries is None:
            self.set_epoch(0)
        assert self._entries is not None
        entries = {name: values[picked] for name, values in self._entries.items()}
        return self._task.collate(self._tokens, picked) | entries


def train_loader(
    dataset: RowDataset, sampler: EpochBatchSampler, *, workers: int, seed: int, pin: bool = False
) -> DataLoader[Batch]:
    """A loader that draws nothing from the global random state.

    Args:
        dataset: Makes the batches.
        sampler: Orders them.
        workers: Loader processes; 0: none. They die with this process.
        seed: Seed of the loader's own generator, which only seeds its workers.
        pin: Whether batches lie in page-locked memory, from which a CUDA device copies while the host goes on.
    """
    start: Callable[[int], None] | None = partial(_start_worker, os.getpid()) if workers else None
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_as_is,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=start,
        pin_memory=pin,
    )


def _as_is(batch: Any) -> Any:
    """The dataset has collated already."""
    return batch


def _start_worker(parent_pid: int, _worker: int) -> None:
    die_with_parent(parent_pid)
