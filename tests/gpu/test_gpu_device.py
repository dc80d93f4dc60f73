"""On a CUDA device: the fence around a trial's memory holds, and the allocator is the one that was planned.

python -m pytest tests/gpu -m gpu
"""

import json
import subprocess
import sys

import pytest

# In a process of its own each: what is set there cannot be taken back.
SCRIPT = """
import json, os, sys
import torch
from dryfit.settings.memory_terms import Allocator, DeviceKind
from dryfit.settings.execution import ExecutionPlan
from dryfit.training.device import observed_memory, prepare_device

limit, allocator = int(sys.argv[1]) or None, Allocator(sys.argv[2])
plan = ExecutionPlan(device=DeviceKind.CUDA, effective_batch=1, micro_batch=1, accumulation=1,
                     memory_limit_bytes=limit, allocator=allocator)
done = prepare_device(plan, os.environ)
blocks, refused = [], False
try:
    for _ in range(64):
        blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    refused = True
torch.cuda.synchronize()
peak = observed_memory(DeviceKind.CUDA)
print(json.dumps({
    "allocator_bytes": done.allocator_bytes, "notes": done.notes, "refused": refused, "blocks": len(blocks),
    "reserved": peak.reserved_bytes, "allocated": peak.allocated_bytes,
    "expandable": any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()),
}))
"""
GIB = 2**30


def run(limit: int, allocator: str = "expandable") -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit), allocator], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("allocator", ["expandable", "native"])
def test_the_limit_holds(allocator: str) -> None:
    found = run(2 * GIB, allocator)
    assert found["refused"]
    assert found["expandable"] is (allocator == "expandable")
    assert found["reserved"] <= found["allocator_bytes"] < 2 * GIB
    assert found["allocator_bytes"] - found["allocated"] < 128 << 20
    assert 2 * GIB - found["allocator_bytes"] > 50 << 20, "a context takes more than that"


def test_without_a_limit_nothing_is_refused() -> None:
    found = run(0)
    assert (found["refused"], found["blocks"], found["allocator_bytes"]) == (False, 64, None)


def test_a_hand_made_configuration_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    found = run(0, "expandable")
    assert not found["expandable"]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:False is kept" in found["notes"][0]
