"""On a CUDA device: optimizer state on the host changes no number that matters, saves its memory and goes on.

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
import tiny
import trials
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import OptimSettings
from dryfit.settings.training_messages import TrainResult
from dryfit.training.optimizer import IMPLEMENTATIONS, OptimizerPlan, make_optimizer

# Without dropout: the device's own random numbers are the same in both runs, but the sums need not be.
TABLES: dict[str, dict[str, Any]] = {
    "train": {"evals_per_epoch": 2},
    "regularization": {"dropout": 0.0, "attention_dropout": 0.0, "max_grad_norm": 0.1},
    "head": {"dropout": 0.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=1024, num_hidden_layers=4)


def trial_on_cuda(folder: Path, model: Path, *, offload: bool, **tables: dict[str, Any]) -> trials.Trial:
    trial = trials.small(folder, encoder=model, **(TABLES | tables))
    trial.plan = trial.plan.model_copy(update={"device": DeviceKind.CUDA, "offload_optimizer": offload})
    return trial


def losses(channel: trials.ScriptedChannel) -> list[float]:
    return [point.metrics["loss"] for point in channel.points]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_equal_losses(tmp_path: Path, model: Path, name: str, precision: str) -> None:
    """Clipping clips in every step, and the loss scaler of fp16 scales: both must reach the host."""
    found = []
    for offload in (False, True):
        train = TABLES["train"] | {"precision": precision}
        tables = {"optim": {"name": name, "lr": 1e-3}, "train": train}
        _, channel = trial_on_cuda(tmp_path / str(offload), model, offload=offload, **tables).run()
        found.append(losses(channel))
    assert found[0] == pytest.approx(found[1], rel=1e-4 if precision == "fp32" else 2e-2)


def test_less_memory(model: Path) -> None:
    """By the optimizer's state, to within a block of the allocator for each tensor."""
    held = {}
    for offload in (False, True):
        module = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        weights_bytes = sum(parameter.nbytes for parameter in module.parameters())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        optimizer = make_optimizer(module, OptimSettings(), OptimizerPlan(offload=offload))
        optimizer.step()
        optimizer.step()
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        del optimizer, module
    assert held[True] == 0
    assert held[False] >= 2 * weights_bytes


def test_the_whole_trial_takes_less(tmp_path: Path, model: Path) -> None:
    peaks: dict[bool, TrainResult] = {}
    for offload in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        peaks[offload], _ = trial_on_cuda(tmp_path / str(offload), model, offload=offload).run()
    saved = (peaks[False].peak_allocated_bytes or 0) - (peaks[True].peak_allocated_bytes or 0)
    sizes = json.loads((model / "config.json").read_text())
    layers_bytes = 4 * sizes["num_hidden_layers"] * 12 * sizes["hidden_size"] ** 2
    assert saved > 1.5 * layers_bytes


@pytest.mark.parametrize("step", [4, 7])
def test_a_stopped_trial_goes_on(tmp_path: Path, model: Path, step: int) -> None:
    whole, channel = trial_on_cuda(tmp_path / "whole", model, offload=True).run()
    trial = trial_on_cuda(tmp_path / "parts", model, offload=True)
    _, before = trial.run(stop_at=step)
    result, after = trial.run()
    assert result.steps == whole.steps
    assert losses(before) + losses(after) == pytest.approx(losses(channel), rel=1e-4)


def test_a_checkpoint_goes_on_in_the_other_place(tmp_path: Path, model: Path) -> None:
    _, channel = trial_on_cuda(tmp_path / "whole", model, offload=False).run()
    trial = trial_on_cuda(tmp_path / "parts", model, offload=True)
    _, before = trial.run(stop_at=4)
    trial.plan = trial.plan.model_copy(update={"offload_optimizer": False})
    _, after = trial.run()
    assert losses(before) + losses(after) == pytest.approx(losses(channel), rel=1e-4)


# ---- On a CUDA device: a step waits once, fused optimizers and compiled layers compute what plain ones do, TF32 is o


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
