"""Train a small language model with DeepSpeed: any stage of ZeRO, precision, offload and optimizer.

Run it with ``deepspeed`` or ``torchrun``. Without ``--stage`` it trains the same model in plain PyTorch.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int)
parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--offload-optimizer", action="store_true")
parser.add_argument("--offload-parameters", action="store_true")
parser.add_argument("--checkpoint", action="store_true", help="recompute activations by DeepSpeed's own function")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--tokens", type=int, default=8)
parser.add_argument("--rows", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save", help="where to save a checkpoint")
parser.add_argument("--local_rank", type=int, default=-1)
arguments = parser.parse_args()
VOCABULARY = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """A pair of layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.shrink(nn.functional.gelu(self.grow(self.norm(hidden))))


class Model(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            if arguments.checkpoint:
                hidden = deepspeed.checkpointing.checkpoint(block, hidden)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def batches() -> Any:
    """Yield token numbers, rows x tokens."""
    for _ in range(4 * arguments.accumulate):
        yield torch.randint(0, VOCABULARY, (arguments.rows, arguments.tokens), device="cuda")


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


if arguments.stage is None:
    model = Model(arguments.width, arguments.layers).to("cuda", DTYPES[arguments.precision])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for ids in batches():
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit

import deepspeed  # noqa: E402  # the plain loop runs without it

config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": arguments.rows,
    "gradient_accumulation_steps": arguments.accumulate,
    "optimizer": {"type": arguments.optimizer, "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": arguments.stage,
        "reduce_bucket_size": 50_000,
        "allgather_bucket_size": 50_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    },
}
if arguments.precision != "fp32":
    config[arguments.precision] = {"enabled": True}
if arguments.offload_optimizer:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
if arguments.offload_parameters:
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}

with deepspeed.zero.Init(config_dict_or_path=config, enabled=arguments.stage == 3):
    model = Model(arguments.width, arguments.layers)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for ids in batches():
    loss = loss_of(engine(ids), ids)
    engine.backward(loss)
    engine.step()
if arguments.save:
    engine.save_checkpoint(arguments.save)
