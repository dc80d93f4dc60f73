"""Stand-ins hold the bytes that the real optimizers hold."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dryfit.core.settings.execution import OptimizerImpl
from dryfit.core.settings.tables import OptimSettings
from dryfit.train.optim.optimizer import IMPLEMENTATIONS, OptimizerPlan, make_optimizer
from dryfit.train.rehearsal.optimizer_stand_ins import ModelledOptimizer, adamw8bit_state
from parts import need_package


def held(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[torch.dtype, int]]]:
    """Type and elements of each parameter's state, maps left out."""
    return {
        str(tuple(parameter.shape)): sorted(
            (
                (value.dtype, value.numel())
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and not name.startswith("qmap")
            ),
            key=str,
        )
        for parameter, state in optimizer.state.items()
    }


def model_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(70, 64), nn.Linear(64, 64), nn.Linear(64, 63), nn.Linear(63, 66))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_eight_bit_state_by_hand() -> None:
    big, small = nn.Parameter(torch.zeros(4097)), nn.Parameter(torch.zeros(4095))
    assert {name: (value.dtype, value.numel()) for name, value in adamw8bit_state(big).items()} == {
        "state1": (torch.uint8, 4097),
        "state2": (torch.uint8, 4097),
        "absmax1": (torch.float32, 17),
        "absmax2": (torch.float32, 17),
    }
    assert {(value.dtype, value.numel()) for value in adamw8bit_state(small).values()} == {(torch.float32, 4095)}


@pytest.mark.filterwarnings("ignore")  # its import warns of what it does itself
def test_eight_bit_state_is_the_librarys() -> None:
    need_package("bitsandbytes")
    found = []
    for modelled in (False, True):
        model = model_with_gradients()
        before = model[1].weight.detach().clone()
        optimizer = make_optimizer(model, OptimSettings(name="adamw8bit"), OptimizerPlan(modelled=modelled))
        optimizer.step()
        found.append(held(optimizer))
        assert torch.equal(before, model[1].weight) is modelled
    assert found[0] == found[1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_holds_what_torchs_does(momentum: float) -> None:
    found = []
    for modelled in (False, True):
        model = model_with_gradients()
        plan = OptimizerPlan(OptimizerImpl.FUSED, modelled=modelled)
        optimizer = make_optimizer(model, OptimSettings(name="sgd", beta1=momentum), plan)
        optimizer.step()
        found.append({key: values for key, values in held(optimizer).items() if values})
    assert found[0] == found[1]
    assert bool(found[0]) is (momentum > 0)


@pytest.mark.parametrize(
    ("name", "impl"), [(name, impl) for name, has in IMPLEMENTATIONS.items() for impl in (OptimizerImpl.AUTO, *has)]
)
def test_every_optimizer_steps_without_data(name: str, impl: OptimizerImpl) -> None:
    with FakeTensorMode():
        model = nn.Linear(80, 80)
        optimizer = make_optimizer(model, OptimSettings(name=name), OptimizerPlan(impl, modelled=True))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    assert optimizer.state


def test_state_on_the_host_takes_nothing() -> None:
    plan = OptimizerPlan(offload=True, modelled=True)
    with FakeTensorMode():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(64, 64, device="cuda"))
        optimizer = make_optimizer(model, OptimSettings(), plan)
        model.weight.grad = torch.empty_like(model.weight)
        optimizer.step()
    assert not any(optimizer.state.values())


def test_parameters_without_gradient_get_no_state() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = ModelledOptimizer([{"params": [parameter], "lr": 1.0}], adamw8bit_state)
    optimizer.step()
    assert not optimizer.state
