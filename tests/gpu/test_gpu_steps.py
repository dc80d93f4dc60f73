"""On a CUDA device: a step waits once, fused optimizers and compiled layers compute what plain ones do, TF32 is on.

python -m pytest tests/gpu -m gpu
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import device_steps
from dryfit.settings.memory_terms import OptimizerImpl
from dryfit.settings.tables import OptimSettings
from dryfit.training.optimizer import IMPLEMENTATIONS, OptimizerPlan, make_optimizer


def run(folder: Path, **tables: Any) -> dict[str, Any]:
    """What a trial on the device came to, in a process of its own: what it sets cannot be taken back."""
    command = [sys.executable, device_steps.__file__, str(folder), json.dumps(tables)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_torch_counts_one_wait_a_step(tmp_path: Path, precision: str) -> None:
    found = run(tmp_path, train={"precision": precision}, execution={"micro_batch": 4})
    assert found["pinned"] is True
    # One for the loss and the norm; one for each micro-batch, which transformers asks whether it has padding.
    assert all(count <= 1 + found["micro"] for count in found["waits"][2:]), found["waits"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_implementations_agree_on_the_device_and_go_on_from_each_other(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).double().cuda()
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    optim = OptimSettings(name=name, lr=1e-2, weight_decay=0.1)
    found = []
    for impl in (*IMPLEMENTATIONS[name], None):
        plain.load_state_dict(start)
        optimizer = make_optimizer(plain, optim, OptimizerPlan(impl or OptimizerImpl.PLAIN))
        for step in range(6):
            if impl is None and step == 3:
                saved = optimizer.state_dict()
                optimizer = make_optimizer(plain, optim, OptimizerPlan(OptimizerImpl.FUSED))
                optimizer.load_state_dict(saved)
            rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64).cuda()
            plain(rows).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]))
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) < 1e-12


def test_tf32_is_on_in_its_trial_alone(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a device with TF32")
    tables = {"regularization": {"dropout": 0.0, "attention_dropout": 0.0}}
    plain, short = run(tmp_path / "fp32", **tables), run(tmp_path / "tf32", **tables, train={"precision": "tf32"})
    assert (plain["products"], short["products"]) == ("highest", "high")
    assert short["value"] == pytest.approx(plain["value"], rel=0.05)
    assert short["allocated"] == pytest.approx(plain["allocated"], rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_compiled_layers_come_to_what_plain_ones_do(tmp_path: Path, precision: str) -> None:
    train = {"precision": precision}
    plain = run(tmp_path / "plain", train=train)
    compiled = run(tmp_path / "compiled", train=train, execution={"compiled": True})
    assert compiled["notes"] == plain["notes"]  # it was not given up
    assert compiled["value"] == pytest.approx(plain["value"], rel=0.02)
