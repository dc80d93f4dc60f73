"""A worker process of its uses the device that the parent has used already."""

import multiprocessing

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())


def step(rows=4):
    loss = model(torch.randn(rows, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


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
