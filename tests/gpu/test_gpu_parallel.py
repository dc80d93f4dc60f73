"""On CUDA devices: ranks draw and train as on the CPU, with NCCL between devices where there are two.

python -m pytest tests/gpu -m gpu
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shard_plans as made
from dryfit.meta import materialise
from dryfit.parallel.apply import apply
from dryfit.parallel.collectives import AbsentRanks, RegionStream
from rank_loading import LoadedRank

# NCCL takes one process for each device.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import shard_plans as made
from dryfit.meta import materialise
from dryfit.parallel.apply import apply, check_ranks
from dryfit.parallel.collectives import ProcessRanks

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
module = made.on_meta("llama")
materialise(module, missing="init", device="cuda")
module.double()
expected = module(**{name: value.cuda() for name, value in made.batch().items()}).logits
module = made.on_meta("llama")
materialise(module, missing="init", device="cuda")
plan = made.llama_plan(module, 2, vocabulary=True)
ranks = ProcessRanks()
module = apply(module.double(), plan, ranks)
torch.manual_seed(0)
check_ranks(module, plan, ranks)
found = module(**{name: value.cuda() for name, value in made.batch().items()}).logits
found.square().sum().backward()
print(json.dumps(float((found - expected).abs().max())))
dist.destroy_process_group()
"""


def test_a_rank_reads_its_slices_onto_the_device(tmp_path: Path):
    module = made.on_meta("bert")
    materialise(module, missing="init")
    module.save_pretrained(tmp_path)  # pyright: ignore
    plan = made.bert_plan(module, 2)
    expected = apply(copy.deepcopy(module), plan, AbsentRanks(1, 2))

    part = LoadedRank(lambda: made.on_meta("bert"), plan, tmp_path, 1, device="cuda").module

    for name, parameter in expected.named_parameters():
        assert torch.equal(part.get_parameter(name).cpu(), parameter), name
        assert part.get_parameter(name).is_cuda


def test_regions_of_a_device_have_numbers_of_their_own_and_the_same_again_when_recomputed():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    inside, outside = [], []
    for rank in (0, 1, 1):
        torch.cuda.set_rng_state(state)
        stream = RegionStream(rank)
        stream.enter(device)
        inside.append(torch.rand(4, device=device))
        stream.leave(device)
        outside.append(torch.rand(4, device=device))

    assert not torch.equal(inside[0], inside[1])
    assert torch.equal(inside[1], inside[2])
    assert torch.equal(outside[0], outside[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_compute_what_one_does(tmp_path: Path):
    paths = [str(Path(made.__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]

    found = [child.communicate(timeout=300)[0] for child in children]

    assert [child.returncode for child in children] == [0, 0]
    assert all(json.loads(text.splitlines()[-1]) < 1e-6 for text in found)  # norms round to fp32
