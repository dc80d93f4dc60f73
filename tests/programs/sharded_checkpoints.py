"""Shard a model with FSDP1 or FSDP2, train it, and save and load what it and its optimizer hold, whole or by shards."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

version, kind, options = sys.argv[1], sys.argv[2], set(sys.argv[3:])
width, layers = 1024, 6
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
if version == "fsdp1":
    model = FSDP(
        model,
        auto_wrap_policy=None if "together" in options else ModuleWrapPolicy({nn.Linear}),
        device_id=torch.cuda.current_device(),
        use_orig_params="original" in options,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if "mixed" in options else None,
    )
else:
    model.cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("sharded", torch.cuda.memory_allocated())
for _ in range(4):
    model(torch.randn(4, width, device="cuda")).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("after a step", torch.cuda.memory_allocated(), "at most", torch.cuda.max_memory_allocated())
    if kind == "whole":
        if version == "fsdp1":
            config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                states = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        else:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            states = {"model": get_model_state_dict(model, options=whole)}
            states["optimizer"] = get_optimizer_state_dict(model, optimizer, options=whole)
            set_model_state_dict(model, states["model"], options=StateDictOptions(full_state_dict=True))
        torch.save(states, "whole.pt")
    elif version == "fsdp1":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            states = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
            dcp.save(states, checkpoint_id="shards")
    else:
        states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id="shards")
    del states
dist.destroy_process_group()
