"""Inputs of checkpointed layers in host memory: the same gradients bit for bit, and refused where it does nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import tiny
import tiny_lms
import trials
from dryfit.gpu.events import Shape
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import PlanSubject
from dryfit.settings.memory_terms import DeviceKind, OptimizerImpl
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.training import model
from dryfit.training.measured_step import fill
from dryfit.training.model import cannot_offload_activations, offload_layer_inputs
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.step_tracer import SubjectSteps, step_parts

PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SHAPE = Shape(rows=3, length=20)
MODELS: dict[str, Callable[[Path], Path]] = {
    "bert": tiny.model,
    "deberta-v2": lambda folder: tiny.model(folder, "deberta-v2"),
    "modernbert": lambda folder: tiny.model(folder, "modernbert"),
    "qwen2": tiny_lms.causal_lm,
    "gpt2": lambda folder: tiny_lms.causal_lm(folder, "gpt2"),
}


class Copies(saved_tensors_hooks):
    """Stands in for a device's memory: what is packed is copied, what is unpacked is a copy again."""

    packed: list[tuple[int, ...]] = []  # noqa: RUF012  # the test empties it

    def __init__(self, *, pin_memory: bool) -> None:
        assert not pin_memory, "there is no device here"
        super().__init__(self.pack, torch.Tensor.clone)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tuple(tensor.shape))
        return tensor.clone()


def subject(folder: Path, name: str) -> PlanSubject:
    decoder = name in ("qwen2", "gpt2")
    tables: dict[str, Any] = {"model": {"name": str(MODELS[name](folder))}}
    if not decoder:
        tables["regularization"] = {"dropout": 0.2}
    return PlanSubject(
        task=BuiltInTask.CAUSAL_LM if decoder else BuiltInTask.CRITERIA,
        settings=TrialSettings.model_validate_json(json.dumps(tables)),
        lora=LoraSettings(r=4, dropout=0.1) if name == "qwen2" else None,
    )


def gradients(asked: PlanSubject, *, reentrant: bool, offload: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    parts = step_parts(asked, checkpointing=True, reentrant=reentrant)
    if offload:
        offload_layer_inputs(parts.model)
    fill(parts.model, "cpu")
    steps = SubjectSteps(parts, DeviceKind.CPU, OptimizerPlan(impl=OptimizerImpl.PLAIN))
    batch = steps.batch(SHAPE)
    for key, values in batch.items():
        values.random_(0, {"input_ids": 30, "labels": 2}.get(key, 1))
    batch["attention_mask"].fill_(1)[1:, -5:] = 0
    torch.manual_seed(1)
    steps.micro(batch)
    return {name: one.grad for name, one in parts.model.named_parameters() if one.grad is not None}


@PEFT_ASKS
@pytest.mark.every(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [*MODELS])
def test_gradients_are_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reentrant: bool
) -> None:
    if reentrant and name == "deberta-v2":
        pytest.skip("it shares a tensor between its layers")
    asked = subject(tmp_path, name)
    kept = gradients(asked, reentrant=reentrant, offload=False)
    monkeypatch.setattr(model, "save_on_cpu", Copies)
    Copies.packed.clear()
    moved = gradients(asked, reentrant=reentrant, offload=True)
    assert kept.keys() == moved.keys() and kept
    assert all(torch.equal(kept[one], moved[one]) for one in kept)
    assert any(bool(one.count_nonzero()) for one in kept.values())
    # What each layer is recomputed from, and nothing of what it computes.
    assert {shape[:2] for shape in Copies.packed if len(shape) == 3} == {(SHAPE.rows, SHAPE.length)}
    assert sum(len(shape) == 3 for shape in Copies.packed) >= 2


def test_without_checkpointed_layers_it_is_an_error(tmp_path: Path) -> None:
    parts = step_parts(subject(tmp_path, "bert"), checkpointing=False, reentrant=False)
    with pytest.raises(ConfigError, match="no layer that transformers checkpoints"):
        offload_layer_inputs(parts.model)


def test_it_is_refused_where_it_does_nothing(tmp_path: Path) -> None:
    assert cannot_offload_activations(DeviceKind.CUDA) is None
    assert cannot_offload_activations(DeviceKind.CUDA, processes=2) is not None
    execution = {"checkpointing": True, "offload_activations": True}
    trial = trials.small(tmp_path, encoder=tiny.model(tmp_path / "model"), execution=execution)
    with pytest.raises(ConfigError) as caught:
        trial.run()
    assert caught.value.found == "on the CPU they lie in host memory already"
    assert "execution.offload_activations" in str(caught.value)
