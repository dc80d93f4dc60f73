"""Train a language model that is cut over two processes, and compare it with the whole model.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py FOLDER

FOLDER, or a hub id, is any causal language model whose heads two processes can share; without one a tiny random one is
made. It runs on the CPU, or on a CUDA device for each process.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from dryfit.parallel import parallelize


def tiny_model(folder: str) -> None:
    """A random Llama."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """The loss of a fixed batch, the same on each rank."""
    device = next(model.parameters()).device
    ids = torch.arange(48, device=device).view(2, 24) % 100 + 5
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def main() -> None:
    """Compare the losses of three steps."""
    with tempfile.TemporaryDirectory() as made:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        given = sys.argv[1] if len(sys.argv) > 1 else None
        folders = [made if given is None else given]
        if given is None and dist.get_rank() == 0:
            tiny_model(made)
        dist.broadcast_object_list(folders, src=0)
        model = parallelize(folders[0], 2, dtype=torch.float64).train()
        whole = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float64).train()
        dist.barrier()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, whole)]
    for step in range(3):
        losses = [loss_of(one) for one in (model, whole)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            parallel, alone = (loss.item() for loss in losses)
            print(f"step {step}: {parallel:.6f} on two ranks, {alone:.6f} on one, apart by {abs(parallel - alone):.0e}")
    held = [0] * dist.get_world_size()
    dist.all_gather_object(held, sum(one.numel() for one in model.parameters()))
    if dist.get_rank() == 0:  # one process writes: the lines of two can run into each other
        for rank, numbers in enumerate(held):
            print(f"rank {rank} holds {numbers:,} of {sum(one.numel() for one in whole.parameters()):,} numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
