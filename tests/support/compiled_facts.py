"""What compiled functions keep for their backward pass: by inductor's own code on the CPU, or on a virtual GPU."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dryfit

ROWS, WIDTH, WORDS = 256, 64, 5000


class Perceptron(nn.Module):
    """Normalised, with GELU, around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Pictures(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).relu().mean((2, 3))


class Words(nn.Module):
    """Tokens, and the loss of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.tokens(ids).tanh()), ids)


def saved(made: torch.Tensor, known: list[torch.Tensor]) -> int:
    """Return the bytes that a compiled function's node keeps besides what was there before."""
    nodes, found = [made.grad_fn], None
    while nodes and found is None:
        node: Any = nodes.pop(0)
        found = node if "CompiledFunction" in type(node).__name__ else None
        nodes += [one for one, _ in node.next_functions if one is not None]
    before = {one.untyped_storage()._cdata for one in known}
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in found.saved_tensors}
    return sum(one.nbytes() for key, one in storages.items() if key not in before)


def saved_by(device: str) -> dict[str, int]:
    """Return what three models keep."""
    given = {
        "perceptron": (Perceptron(), torch.randn(ROWS, WIDTH)),
        "pictures": (Pictures(), torch.randn(4, 3, 32, 32)),
        "words": (Words(), torch.randint(WORDS, (ROWS,))),
    }
    answer = {}
    for name, (model, batch) in given.items():
        model, batch = model.to(device), batch.to(device)
        answer[name] = saved(torch.compile(model)(batch).sum(), [batch, *model.parameters(), *model.buffers()])
    return answer


def kept(function: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Return the bytes that stay after a function's forward pass, its output included, and most at any time."""
    x = torch.empty(ROWS, WORDS, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(x)
    after = torch.cuda.memory_allocated() - before
    out.sum().backward()
    del out
    return [after, torch.cuda.max_memory_allocated() - before]


def chain(x: torch.Tensor) -> torch.Tensor:
    """Compute element by element."""
    return ((x.sin() + 1).exp() * x).tanh().sigmoid() * 2


with dryfit.virtual_gpu("a100-80") if sys.argv[1] == "cuda" else nullcontext():
    facts: dict[str, Any] = {"saved": saved_by(sys.argv[1])}
    if sys.argv[1] == "cuda":
        labels = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        functions = {
            "chain": chain,
            "loss": lambda x: functional.cross_entropy(x, labels),
            "norm": lambda x: functional.layer_norm(x, (WORDS,)),
        }
        for name, function in functions.items():
            facts[name] = {"compiled": kept(torch.compile(function)), "eager": kept(function)}
    print(json.dumps(facts))
