import os
import random
import signal
import time

import numpy as np
import pytest
import torch

import tasks
from dryfit.settings.errors import ConfigError
from dryfit.tasks.tokens import TokenSet
from dryfit.training.batches import EpochBatchSampler, RowDataset, epoch_batches, train_loader
from dryfit.training.trainer import evaluation_steps


def padding(batches: list[list[int]], lengths: torch.Tensor) -> int:
    return sum(int(lengths[batch].max()) * len(batch) - int(lengths[batch].sum()) for batch in batches)


def test_grouping_saves_padding_and_keeps_chance() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(5, 160, (800,))
    plain = epoch_batches(lengths, seed=1, epoch=0, batch_size=16, group_by_length=False)
    grouped = epoch_batches(lengths, seed=1, epoch=0, batch_size=16, group_by_length=True)
    assert padding(grouped, lengths) < 0.2 * padding(plain, lengths)
    other = epoch_batches(lengths, seed=1, epoch=1, batch_size=16, group_by_length=True)
    assert not {frozenset(batch) for batch in grouped} & {frozenset(batch) for batch in other}
    first_lengths = [int(lengths[batch].max()) for batch in grouped]
    assert first_lengths != sorted(first_lengths, reverse=True)


def test_seed_and_epoch_change_the_order() -> None:
    lengths = torch.full((64,), 7)
    args = {"batch_size": 8, "group_by_length": False}
    orders = {str(epoch_batches(lengths, seed=seed, epoch=epoch, **args)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def loader_parts(workers: int = 0):
    lengths = torch.arange(3, 23)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.arange(int(starts[-1]), dtype=torch.int32)
    tokens = TokenSet(ids, None, starts, torch.arange(20) % 2)
    task = tasks.criteria(num_labels=2, train_counts={0: 10, 1: 10}, pad_id=0)
    sampler = EpochBatchSampler(lengths, seed=4, batch_size=6, group_by_length=True)
    return sampler, train_loader(RowDataset(tokens, task, seed=1), sampler, workers=workers, seed=1)


def test_loader_makes_the_samplers_batches_and_draws_nothing_global() -> None:
    sampler, loader = loader_parts()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    batches = list(loader)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    for rows, batch in zip(sampler, batches, strict=True):
        assert batch["labels"].tolist() == [row % 2 for row in rows]
        assert batch["attention_mask"].sum(dim=1).tolist() == [row + 3 for row in rows]


def test_workers_give_the_same_batches() -> None:
    _, alone = loader_parts()
    _, helped = loader_parts(workers=2)
    for want, have in zip(alone, helped, strict=True):
        assert all(torch.equal(want[name], have[name]) for name in want)


@pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc"), reason="needs /proc")
def test_workers_die_with_a_killed_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        _, loader = loader_parts(workers=2)
        iterator = iter(loader)
        next(iterator)
        os.write(write, " ".join(str(worker.pid) for worker in iterator._workers).encode())
        signal.pause()
        os._exit(0)
    workers = [int(pid) for pid in os.read(read, 100).split()]
    assert len(workers) == 2
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline_s = time.monotonic() + 120
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not [pid for pid in workers if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_validations_than_steps_is_an_error() -> None:
    with pytest.raises(ConfigError, match="evals_per_epoch is 6 and an epoch has 5 steps"):
        evaluation_steps(steps_per_epoch=5, evals_per_epoch=6, epochs=1)
