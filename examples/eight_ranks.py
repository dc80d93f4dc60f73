"""Plan eight ranks on a laptop: a decoder whose layers FSDP2 shards over eight GPUs, in plain PyTorch.

    dryfit rehearse --device h100-80 torchrun --nproc-per-node 8 examples/eight_ranks.py
    dryfit rehearse --device h100-80 torchrun --nproc-per-node 4 examples/eight_ranks.py
    dryfit rehearse --device a100-40,a100-80,h100-80 torchrun --nproc-per-node 8 examples/eight_ranks.py

The default is a model of eight billion parameters with a batch of one sequence for each rank.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--layers", type=int, default=36)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--words", type=int, default=128_000)
parser.add_argument("--tokens", type=int, default=4096)
parser.add_argument("--batch", type=int, default=1)
arguments = parser.parse_args()


class Layer(nn.Module):
    """Causal self-attention and two linear layers, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.inwards, self.outwards = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return new states: batch x tokens x width."""
        parts = self.inwards(self.norms[0](x)).unflatten(-1, (3, arguments.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.outwards(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))


class Decoder(nn.Module):
    """Embeddings, layers that are computed again for the backward pass, and scores of all words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(arguments.words, arguments.width)
        self.layers = nn.ModuleList(Layer(arguments.width) for _ in range(arguments.layers))
        self.head = nn.Linear(arguments.width, arguments.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores: batch x tokens x words."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
with torch.device("meta"):
    model = Decoder()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (*model.layers, model):
    fully_shard(part, mp_policy=policy)
model.to_empty(device=device)  # each rank has its share alone; load a checkpoint or initialise here
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(arguments.words, (arguments.batch, arguments.tokens + 1), device=device)
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.3f}")
dist.destroy_process_group()
