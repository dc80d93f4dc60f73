"""Asks DeepSpeed for what cannot be rehearsed, one after another, and says what came of it."""

from collections.abc import Callable

import deepspeed
import torch
from torch import nn

deepspeed.init_distributed()
table = torch.zeros(2**20, device="cuda")


def engine(**zero: object) -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
    deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**config, "zero_optimization": {"stage": 3, **zero}}
    )


def automatic() -> None:
    model = nn.Linear(2, 2)
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": "auto"})


attempts: dict[str, Callable[[], object]] = {
    "pipeline": lambda: deepspeed.pipe.PipelineModule([nn.Linear(2, 2)] * 4, num_stages=2),
    "inference": lambda: deepspeed.init_inference(nn.Linear(2, 2), dtype=torch.half),
    "disk": lambda: engine(offload_optimizer={"device": "nvme", "nvme_path": "disk"}),
    "operator": lambda: deepspeed.ops.op_builder.QuantizerBuilder().load(),
    "automatic": automatic,
}
said = []
for name, attempt in attempts.items():
    try:
        attempt()
    except Exception as error:
        said.append(f"{name}: {type(error).__name__}: {error}")
raise SystemExit("\n".join(["", *said]))
