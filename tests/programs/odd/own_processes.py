"""Starts processes by itself: ``ranks`` that train, ``helpers`` that give it numbers, ``actors`` that compute them."""

import multiprocessing
import sys

import torch
from torch import nn


def train(rank, numbers):
    """Train on one device."""
    model = nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.full((64, 2048), float(numbers()), device="cuda")).sum().backward()
        optimizer.step()
    print(f"rank {rank} has trained", flush=True)


def one():
    """The number that a rank needs."""
    return 1.0


def feed(queue):
    """Give numbers."""
    for number in range(3):
        queue.put(number)


def act(queue, model):
    """Give numbers that a device computes, with a copy of a model of the host."""
    model = model.cuda()
    for _ in range(3):
        queue.put(int(model(torch.ones(64, 2048, device="cuda")).shape[0]))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    if sys.argv[1] == "ranks":
        started = [context.Process(target=train, args=(rank, one)) for rank in range(2)]
    else:
        queue = context.Queue()
        target, given = (feed, ()) if sys.argv[1] == "helpers" else (act, (nn.Linear(2048, 2048).share_memory(),))
        torch.ones(1, device="cuda")
        started = [context.Process(target=target, args=(queue, *given))]
    for process in started:
        process.start()
    if sys.argv[1] != "ranks":
        train(0, queue.get)
        started[0].join()
        assert started[0].exitcode == 0
