"""A batch that fails with compiled layers is computed again without: like any other, or with the model's own error."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dryfit.settings.errors import DataError
from dryfit.settings.execution import ExecutionSettings, plan_execution
from dryfit.settings.memory_terms import DeviceKind
from dryfit.training.model import CompiledLayers

# torch's own, where it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def stance_kept() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(64, 8).double()


class Step:
    """Adds gradients of a random batch, and raises the errors given before it comes to an end."""

    def __init__(self, model: nn.Module, *errors: Exception) -> None:
        self.model = model
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.dropout(self.model(torch.randn(16, 64).double()), 0.5).square().mean()
        loss.backward()
        if self.errors:
            raise self.errors.pop(0)
        return loss.detach()


def steps(model: nn.Module, notes: list[str], *errors: Exception) -> tuple[list[float], list[torch.Tensor], Step]:
    layers = CompiledLayers(model, [nn.Linear(1, 1)], notes.append)
    torch.manual_seed(2)
    step, losses, gradients = Step(model, *errors), [], []
    for _ in range(3):
        losses.append(float(layers.gradients(step)))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        model.zero_grad()
    return losses, gradients, step


def test_the_second_try_is_the_step_that_it_would_have_been(model: nn.Linear, notes: list[str]) -> None:
    losses, gradients, step = steps(model, notes)
    assert (step.calls, notes) == (3, [])
    again, same, step = steps(model, notes, RuntimeError("no compiler here\nand much more"))
    assert step.calls == 4
    assert notes == ["the layers are not compiled from here on: RuntimeError: no compiler here"]
    assert again == losses
    assert all(torch.equal(one, other) for one, other in zip(same, gradients, strict=True))


def test_an_error_of_the_model_comes_again_and_says_nothing_of_compiling(model: nn.Linear, notes: list[str]) -> None:
    with pytest.raises(ValueError, match="the model's own") as error:
        steps(model, notes, ValueError("compiled"), ValueError("the model's own"))
    assert error.value.__context__ is None
    assert notes == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), DataError("checking rows", "one is empty")])
def test_what_compiling_is_not_to_blame_for_is_raised_at_once(
    model: nn.Linear, notes: list[str], error: Exception
) -> None:
    with pytest.raises(type(error)):
        steps(model, notes, error)
    assert notes == []


def test_a_model_without_layers_is_left_as_it_is(model: nn.Linear, notes: list[str]) -> None:
    layers = CompiledLayers(model, [], notes.append)
    step = Step(model, RuntimeError("its own"))
    with pytest.raises(RuntimeError, match="its own"):
        layers.gradients(step)
    assert step.calls == 1


@pytest.mark.parametrize(
    ("wish", "device", "ranks", "compiled"),
    [
        ("auto", DeviceKind.CUDA, 1, True),
        ("off", DeviceKind.CUDA, 1, False),
        ("auto", DeviceKind.CPU, 1, False),
        ("auto", DeviceKind.CUDA, 2, False),
    ],
)
def test_layers_are_compiled_on_one_cuda_device(wish: str, device: DeviceKind, ranks: int, *, compiled: bool) -> None:
    settings = ExecutionSettings.model_validate({"compile": wish, "tp": ranks})
    plan = plan_execution(settings, effective_batch=8, device=device, cores=2, parallel=1)
    assert plan.compiled is compiled
