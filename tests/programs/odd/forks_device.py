"""A worker process of its uses the device that the parent has used already."""

import multiprocessing

import torch
from one_layer import device, step

step()
context = multiprocessing.get_context("fork")


def work(answers):
    try:
        answers.put(float(torch.ones(3, device=device).sum()))
    except RuntimeError as error:
        answers.put(str(error))


answers = context.Queue()
worker = context.Process(target=work, args=(answers,))
worker.start()
said = answers.get()
worker.join()
print(said)
assert device == "cpu" or "Cannot re-initialize CUDA in forked subprocess" in str(said)
step()
