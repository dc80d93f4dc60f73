"""An optimizer on the host does what it would do on the device: to the last bit, stopped and gone on or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dryfit.settings.tables import SchedSettings
from dryfit.training.optimizer import Groups, HostOptimizer, make_schedule

MAKERS: dict[str, Callable[[Groups], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, fused=True),
    "sgd": lambda groups: SGD(groups, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups),
}


class Run:
    """A small model, its optimizer and schedule; ``unused`` never has a gradient."""

    def __init__(self, make: Callable[[Groups], Optimizer], *, host: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"a": nn.Linear(5, 4), "b": nn.Linear(4, 3), "unused": nn.Linear(2, 2)})
        parameters = list(self.model.parameters())
        groups = [
            {"params": parameters[:3], "lr": 1e-2, "weight_decay": 0.1},
            {"params": parameters[3:], "lr": 3e-2, "weight_decay": 0.0},
        ]
        self.optimizer = HostOptimizer(groups, make) if host else make(groups)
        self.schedule: LRScheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def steps(self, seeds: range) -> None:
        for seed in seeds:
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
            self.model["b"](self.model["a"](x).tanh()).square().sum().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.model.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[Groups], Optimizer]:
    return MAKERS[request.param]


def test_the_same_weights_as_on_the_device(make: Callable[[Groups], Optimizer]) -> None:
    here, there = Run(make, host=False), Run(make, host=True)
    start = here.weights()
    for run in (here, there):
        run.steps(range(5))
    assert not torch.equal(here.weights(), start)
    assert torch.equal(here.weights(), there.weights())


@pytest.mark.parametrize("host_first", [True, False])
def test_a_saved_state_goes_on_in_either_place(make: Callable[[Groups], Optimizer], host_first: bool) -> None:
    whole = Run(make, host=False)
    whole.steps(range(6))
    first, second = Run(make, host=host_first), Run(make, host=not host_first)
    first.steps(range(3))
    second.go_on_from(first.state())
    second.steps(range(3, 6))
    assert torch.equal(second.weights(), whole.weights())
    assert second.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_the_device_parameters_hold_no_state(make: Callable[[Groups], Optimizer]) -> None:
    run = Run(make, host=True)
    run.steps(range(2))
    assert not run.optimizer.state
    held = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in run.model.parameters()}


def test_weights_changed_from_outside_are_taken_over_with_a_state() -> None:
    run = Run(MAKERS["adamw"], host=True)
    run.steps(range(2))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    want = run.weights()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.steps(range(2, 3))
    assert torch.equal(run.weights(), want)


def test_the_loss_scaler_of_fp16_reaches_the_host() -> None:
    """It unscales the gradients of the parameters it is shown, and skips steps that overflow."""
    plain, scaled = Run(MAKERS["sgd"], host=True), Run(MAKERS["sgd"], host=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for run, scale in ((plain, lambda loss: loss), (scaled, scaler.scale)):
        scale(run.model["b"](run.model["a"](x)).square().sum()).backward()
    plain.optimizer.step()
    scaler.step(scaled.optimizer)
    scaler.update()
    assert torch.allclose(plain.weights(), scaled.weights(), rtol=1e-6, atol=0)
    before = scaled.weights()
    for parameter in scaled.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(scaled.optimizer)
    assert torch.equal(scaled.weights(), before)


@pytest.mark.parametrize("name", ["cosine_restarts", "polynomial", "one_cycle"])
def test_every_schedule_reaches_the_host(name: str) -> None:
    runs = [Run(MAKERS["adamw"], host=host) for host in (False, True)]
    for run in runs:
        run.schedule = make_schedule(run.optimizer, SchedSettings(name=name, warmup_ratio=0.3), 8)
        run.steps(range(8))
    assert torch.equal(runs[0].weights(), runs[1].weights())
