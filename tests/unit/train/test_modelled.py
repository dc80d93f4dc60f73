"""Stand-ins hold the bytes that the real optimizers hold."""

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dryfit.gpu.kernels import route_attention
from dryfit.settings.errors import ConfigError
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import OptimSettings
from dryfit.training.optimizer import (
    IMPLEMENTATIONS,
    ModelledOptimizer,
    OptimizerPlan,
    adamw8bit_state,
    cannot_offload,
    check_optimizer,
    make_optimizer,
    paged_adamw,
    paged_state,
)
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


@pytest.mark.parametrize(("bits", "bytes_"), [(32, 4), (8, 1)])
def test_paged_state_of_large_tensors_is_on_the_host(bits: int, bytes_: int) -> None:
    with FakeTensorMode():
        large, small = (nn.Parameter(torch.empty(size, device="cuda")) for size in (100_000, 99_999))
        for parameter, device in ((large, "cpu"), (small, "cuda")):
            state = paged_state(parameter, bits=bits)
            for name in ("state1", "state2"):
                assert (state[name].device.type, state[name].nbytes) == (device, bytes_ * parameter.numel())
            scales = {name: one for name, one in state.items() if name.startswith("absmax")}
            assert len(scales) == (2 if bits == 8 else 0)
            assert {one.device.type for one in scales.values()} <= {"cuda"}


@pytest.mark.filterwarnings("ignore")  # its import warns of what it does itself, and it pages nothing on a CPU
@pytest.mark.parametrize("bits", [32, 8])
def test_paged_state_is_the_librarys_and_is_paged_again_after_a_resumption(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_package("bitsandbytes")
    cls = paged_adamw(bits)
    # As of a machine with CUDA, but for where the memory is.
    paged: list[tuple[int, torch.dtype]] = []

    def buffer(self: object, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        paged.append((parameter.numel(), dtype))
        return torch.zeros_like(parameter, dtype=dtype)

    monkeypatch.setattr(cls, "get_state_buffer", buffer)

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
        for seed in range(steps):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    model = model_with_gradients()
    optimizer = cls(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 2)
    modelled = ModelledOptimizer([{"params": list(model.parameters()), "lr": 1.0}], partial(paged_state, bits=bits))
    modelled.step()
    assert held(optimizer) == held(modelled)
    again = model_with_gradients()
    again.load_state_dict(model.state_dict())
    resumed = cls(again.parameters(), lr=1e-2)
    written = io.BytesIO()
    torch.save(optimizer.state_dict(), written)
    written.seek(0)
    paged.clear()
    resumed.load_state_dict(torch.load(written, weights_only=True))
    sizes = sorted(2 * [one.numel() for one in again.parameters()])
    assert sorted(size for size, _ in paged) == sizes
    assert torch.equal(stepped(again, resumed, 3), stepped(model, optimizer, 3))


def test_a_paged_optimizer_needs_cuda() -> None:
    for name in ("paged_adamw", "paged_adamw8bit"):
        with pytest.raises(ConfigError, match="memory that CUDA moves"):
            check_optimizer(OptimSettings(name=name), OptimizerPlan(), DeviceKind.CPU)
        check_optimizer(OptimSettings(name=name), OptimizerPlan(), DeviceKind.CUDA)
        assert "by itself" in (cannot_offload(OptimSettings(name=name), DeviceKind.CUDA) or "")


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
    ("name", "impl"),
    [
        (name, impl)
        for name, has in IMPLEMENTATIONS.items()
        if not name.startswith("paged")  # they need CUDA
        for impl in (OptimizerImpl.AUTO, *has)
    ],
)
def test_every_optimizer_steps_without_data(name: str, impl: OptimizerImpl) -> None:
    with route_attention("cpu", (8, 0)), FakeTensorMode():
        model = nn.Linear(80, 80)
        optimizer = make_optimizer(model, OptimSettings(name=name), OptimizerPlan(impl, modelled=True))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
    assert optimizer.state


def test_parameters_without_gradient_get_no_state() -> None:
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = ModelledOptimizer([{"params": [parameter], "lr": 1.0}], adamw8bit_state)
    optimizer.step()
    assert not optimizer.state
