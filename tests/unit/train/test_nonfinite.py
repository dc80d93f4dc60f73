"""Where a loss or a gradient stopped being a number: the micro-batch and the module, the parameter and its rate."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tasks
import tiny
import trials
from dryfit.processes.child import describe_fault
from dryfit.processes.failures import classify
from dryfit.settings.errors import Evidence, FailureKind, NonFiniteError
from dryfit.settings.jobs import ChildResult
from dryfit.tasks.heads import EncoderWithHead
from dryfit.training.run import ALONE
from dryfit.training.step import loss_origin
from dryfit.training.trainer import TrialTrainer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("nonfinite"))


class Spoiled(torch.autograd.Function):
    """The same values; a gradient that is none."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.nan


def ended(trial: trials.Trial) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        trial.run()
    fault = describe_fault(caught.value)
    assert classify(Evidence(exit_code=1), ChildResult(fault=fault)).kind is FailureKind.NONFINITE
    assert "at optimizer step" in fault.context and "batch of the split train" in fault.context
    return caught.value


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_gradient_that_is_no_number_is_told_with_its_parameter_and_rate(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    """From the second layer's output back: its own last tensor is the nearest to the loss, the head is unharmed."""
    forward, steps = EncoderWithHead.forward, [0]

    def spoiled(self: EncoderWithHead, *args: Any, **inputs: Any) -> torch.Tensor:
        layer = self.encoder.encoder.layer[1].output
        if self.training:
            steps[0] += 1
        handle = layer.register_forward_hook(lambda _m, _i, out: Spoiled.apply(out) if steps[0] == 3 else out)
        try:
            return forward(self, *args, **inputs)
        finally:
            handle.remove()

    monkeypatch.setattr(EncoderWithHead, "forward", spoiled)
    optim = {"lr": 1e-3, "head_lr_factor": 5.0}
    trial = trials.small(tmp_path, encoder=encoder, optim=optim, regularization={"max_grad_norm": clip})
    error = ended(trial)
    assert error.doing == "training step 3 of 10"
    assert "gradient norm nan, learning rate" in error.found
    assert "encoder.encoder.layer.1.output.LayerNorm.bias the nearest to the loss" in error.found
    assert "pooler" not in error.found and "head" not in error.found
    rate = float(error.found.partition("learning rate ")[2].split(";")[0])
    assert rate < 5e-3, "the head's rate is five times the encoder's"


def test_a_loss_that_is_no_number_is_told_with_its_module_and_micro_batch(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = trials.small(tmp_path, encoder=encoder, execution={"micro_batch": 3})
    step = TrialTrainer.training_step

    def overflow(self: TrialTrainer, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            with torch.no_grad():  # finite, and too large for what follows
                model.encoder.encoder.layer[0].intermediate.dense.weight.fill_(3e38)
        return step(self, model, inputs, *more)

    monkeypatch.setattr(TrialTrainer, "training_step", overflow)
    error = ended(trial)
    assert error.doing == "training step 4 of 10"
    assert error.found.startswith("loss nan, ")
    assert (
        "the output of encoder.encoder.layer.0.intermediate.dense is not finite, first in micro-batch 1" in error.found
    )


def test_weights_that_are_no_numbers_are_named_and_a_sound_model_names_nothing() -> None:
    class Scores(nn.Embedding):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)

    model, task = Scores(4, 2), tasks.criteria()
    batch = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1)}
    assert loss_origin(model, batch, task, 1) == ""
    assert loss_origin(model, batch | {"input_ids": batch["input_ids"] + 9}, task, 1) == "", (
        "a pass that fails names nothing"
    )
    with torch.no_grad():
        model.weight[1, 1] = math.inf
    assert loss_origin(model, batch, task, 1) == "the weights weight are not finite themselves"
    assert model.training


def trainer(model: nn.Module, scale: float | None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
    return SimpleNamespace(
        accelerator=SimpleNamespace(scaler=scaler),
        optimizer=optimizer,
        state=SimpleNamespace(global_step=6, max_steps=9),
        args=SimpleNamespace(device="cpu"),
        _batch={},
        _parts=SimpleNamespace(position=ALONE),
    )


def test_a_step_that_the_loss_scaler_skips_is_no_fault() -> None:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    TrialTrainer._refuse_non_finite(trainer(model, 65536.0), model, math.inf, 0.7)
    TrialTrainer._refuse_non_finite(trainer(model, 1.0), model, math.nan, 0.7)
    assert model.weight.grad is not None
    model.weight.grad.fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        TrialTrainer._refuse_non_finite(trainer(model, 0.5), model, math.inf, 0.7)
    assert caught.value.doing == "training step 7 of 9"
    assert caught.value.found == (
        "loss 0.7, gradient norm inf, learning rate 0.5, loss scale 0.5; "
        "of 2 tensors 1 have such a gradient, weight the nearest to the loss"
    )
