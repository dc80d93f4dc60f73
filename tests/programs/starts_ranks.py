"""Begin the ranks of a training in one of the ways that scripts and tutorials use."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def train(model: nn.Module, backward=torch.Tensor.backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        backward(model(torch.randn(4, 8, device="cuda")).sum())
        optimizer.step()
        optimizer.zero_grad()


def spawned(rank: int, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    train(DistributedDataParallel(nn.Linear(8, 8).to(rank), device_ids=[rank]))
    dist.destroy_process_group()


def launched() -> None:
    from accelerate import Accelerator

    train(Accelerator().prepare(nn.Linear(8, 8)))


def fabric(ranks: int) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="gpu", devices=str(ranks), strategy="fsdp")
    runner.launch()
    with runner.rank_zero_first():
        model = runner.setup_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    train(model, runner.backward)


def trainer(devices: int, nodes: int = 1) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, rows, _):
            return self.layer(rows).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 4}
    rows = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    lightning.Trainer(accelerator="gpu", devices=devices, num_nodes=nodes, **options).fit(Module(), rows)


def main(way: str, ranks: int) -> None:
    if way == "spawn":
        mp.spawn(spawned, args=(ranks,), nprocs=ranks, join=True)
    elif way == "notebook":
        from accelerate import notebook_launcher

        notebook_launcher(launched, num_processes=ranks)
    elif way == "mesh":
        mesh = init_device_mesh("cuda", (ranks,))
        print(mesh, dist.get_world_size(mesh.get_group()))
        train(nn.Linear(8, 8).cuda())
    elif way == "lightning":
        trainer(ranks)
    elif way == "two nodes":
        trainer(ranks // 2, nodes=2)
    elif way == "fabric":
        fabric(ranks)
    elif way == "alone":
        assert dist.is_nccl_available()
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("nccl")
        dist.new_group(backend="gloo")
        dist.barrier()
        train(DistributedDataParallel(nn.Linear(8, 8).cuda()))
    elif way == "store":
        store = dist.TCPStore("localhost", 29511, ranks, is_master=True)
        store.set("rank0", "here")
        print(store.get("rank0"), store.get("rank1"))
    elif way == "group's store":
        dist.init_process_group("nccl")
        dist.PrefixStore("a", dist.distributed_c10d._get_default_store()).get("rank1")
    elif way == "forgotten":
        dist.init_process_group("nccl")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
