"""The step that is traced is the step that runs: operator for operator, beside the live Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import encoders
import spans
import tiny
import tiny_lms
from dryfit.gpu.device import VirtualGpu
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import PlanSubject, adapters
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec
from dryfit.tasks import causal_lm
from dryfit.tasks.guard import BatchGuard
from dryfit.training import trainer as loop
from dryfit.training.optimizer import optimizer_plan
from dryfit.training.step import micro_batches
from dryfit.training.step_tracer import StepParts, SubjectSteps, step_parts
from trials import Trial, small

_STEP = 2
"""The step compared, from 0: the optimizer has its state by then."""


class Operators(TorchDispatchMode):
    """Writes down each operator with the shapes of its tensors; arithmetic on single numbers is left out.

    The Trainer adds up losses, reads norms and counts: numbers of one element, whose memory is 512 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.numel() > 1 for tensor in tensors):
            self.seen.append((str(func), tuple(tuple(tensor.shape) for tensor in tensors)))
        return out


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Watch one step of whatever trains next: from the start of its forward pass to the end of its gradients."""
    kept: dict[str, Any] = {"steps": 0}
    training_step, on_step_end = loop.TrialTrainer.training_step, loop.TrialCallback.on_step_end

    def begin(self: loop.TrialTrainer, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        kept["steps"] += 1
        if kept["steps"] == _STEP + 1:
            kept["batch"] = {name: value.clone() for name, value in inputs.items()}
            kept["parts"] = self._parts
            kept["mode"] = Operators()
            kept["mode"].__enter__()
        return training_step(self, model, inputs, num_items_in_batch)

    def end(self: loop.TrialCallback, *args: Any, **kwargs: Any) -> None:
        if kept["steps"] == _STEP + 1 and "seen" not in kept:
            kept["mode"].__exit__(None, None, None)
            kept["seen"] = kept["mode"].seen
        on_step_end(self, *args, **kwargs)

    monkeypatch.setattr(loop.TrialTrainer, "training_step", begin)
    monkeypatch.setattr(loop.TrialCallback, "on_step_end", end)
    # It reads the batch on the host, without a tensor of the step.
    monkeypatch.setattr(BatchGuard, "check_batch", lambda *_: None)
    return kept


def rehearsed(trial: Trial, parts: Any, batch: dict[str, torch.Tensor]) -> list[Any]:
    """The same step, rehearsed with the trial's own model and data."""
    config = parts.request.config
    data = config.data
    subject = PlanSubject(
        task=config.task, settings=trial.settings, num_labels=data.num_labels, multi_label=data.multi_label
    )
    steps = SubjectSteps(StepParts(parts.model, parts.task, subject), DeviceKind.CPU, optimizer_plan(trial.plan))
    parts.model.zero_grad()
    for _ in range(_STEP):
        steps.micro(batch)
        steps.update()
    micros = list(micro_batches(batch, trial.plan.micro_batch, parts.task.padded))
    with Operators() as mode:
        for micro in micros:
            steps.micro(micro)
        steps.update()
    return mode.seen


def assert_rehearsed(trial: Trial, live: dict[str, Any]) -> None:
    """The rehearsed step runs the operators of the live one."""
    seen = rehearsed(trial, live["parts"], live["batch"])
    assert len(seen) > 100
    assert seen == live["seen"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"train": {"precision": "bf16"}},
        {"optim": {"name": "sgd"}},
        {"optim": {"name": "adafactor"}},
        {"optim": {"name": "nadam"}},
        {"regularization": {"max_grad_norm": 0.0}},
        {"regularization": {"freeze_layers": 1}},
        {"regularization": {"freeze_layers": 1, "frozen_dropout": False, "dropout": 0.2}},
        {"execution": {"checkpointing": True}},
        {"loss": {"name": "focal", "class_balance": "weighted"}, "head": {"layers": 1, "pooling": "max"}},
        {"loss": {"name": "focal", "alpha": 0.3}, "head": {"pooling": "attention", "activation": "silu", "layers": 1}},
        {"study": {"task": "share"}, "span": {"doc_stride": 4}},
        {
            "study": {"task": "share"},
            "multitask": {"weighting": "uncertainty", "criteria_share": 0.5},
            "loss": {"class_balance": "weighted", "label_smoothing": 0.1},
            "span": {"doc_stride": 4, "negatives": 1.0},
            "train": {"precision": "bf16", "max_length": 16},
            "execution": {"checkpointing": True},
        },
        *(
            {"study": {"task": "joint"}, "span": {"doc_stride": 4}, "joint": {"fusion": fusion, "share_ratio": ratio}}
            for fusion, ratio in (("concat", 0.0), ("attention", 0.5))
        ),
        {
            "study": {"task": "joint"},
            "span": {"doc_stride": 4},
            "joint": {"fusion": "gate", "share_ratio": 0.5},
            "optim": {"layer_decay": 0.9},
            "regularization": {"freeze_layers": 1},
            "train": {"precision": "bf16", "max_length": 16},
            "execution": {"checkpointing": True},
        },
    ],
    ids=str,
)
def test_rehearsal_runs_the_operators_of_the_live_trainer(tmp_path: Path, live: dict[str, Any], tables: Any) -> None:
    trial = small(tmp_path, encoder=tiny.model(tmp_path / "m"), **tables)
    trial.run()
    assert_rehearsed(trial, live)


@pytest.mark.parametrize("loss", [{"label_smoothing": 0.1}, {"name": "focal"}], ids=str)
def test_so_it_does_for_spans(tmp_path: Path, live: dict[str, Any], loss: Any) -> None:
    data = spans.evidence_data(tmp_path / "data")
    tables: Any = {"train": {"max_length": 28}, "span": {"doc_stride": 6}, "loss": loss}
    trial = Trial(tmp_path, encoder=tiny.model(tmp_path / "m"), data=data, study={"task": "evidence"}, **tables)
    trial.run()
    assert_rehearsed(trial, live)
    # The planner makes the same batch from its sizes alone.
    rows, length = live["batch"]["input_ids"].shape
    sizes = live["parts"].task.batch_sizes(rows, length, segments=True)
    assert sizes == {name: tuple(values.shape) for name, values in live["batch"].items()}
    assert {values.dtype for values in live["batch"].values()} == {torch.int64}


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(encoders.CONFIGS))
def test_so_it_does_for_every_architecture(tmp_path: Path, live: dict[str, Any], name: str) -> None:
    trial = small(tmp_path, encoder=encoders.model(tmp_path / "m", name))
    trial.run()
    assert_rehearsed(trial, live)


def test_accumulation_adds_nothing_but_the_cutting(tmp_path: Path, live: dict[str, Any]) -> None:
    trial = small(tmp_path, encoder=tiny.model(tmp_path / "m"), execution={"micro_batch": 3})
    trial.run()
    seen = rehearsed(trial, live["parts"], live["batch"])
    cutting, rest = [], list(live["seen"])
    for operator in seen:  # what the live step does beside the rehearsed one, in between
        while rest and rest[0] != operator:
            cutting.append(rest.pop(0))
        assert rest, f"the live step has no {operator}"
        rest.pop(0)
    names = {name for name, _ in [*cutting, *rest]}
    assert names == {"aten.slice.Tensor", "aten.sum.dim_IntList", "aten.stack.default", "aten.sum.default"}
    assert len(live["seen"]) > 2 * 465


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's business
@pytest.mark.parametrize(
    "tables",
    [
        {"lora": {"r": 0}, "lm": {"format": "both", "learn_prompt": True}},
        {"lora": {"r": 4, "base": "fp16"}, "train": {"precision": "bf16"}, "lm": {"packing": True}},
        {"lora": {"r": 4, "dropout": 0.0}, "execution": {"checkpointing": True, "reentrant": True}},
        {"lora": {"r": 4}, "execution": {"chunked_loss": False}},
        {"lora": {"r": 0}, "execution": {"chunked_loss": True}, "train": {"precision": "bf16"}},
    ],
    ids=str,
)
def test_so_it_does_for_language_models(
    tmp_path: Path, live: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tables: Any
) -> None:
    monkeypatch.setattr(causal_lm, "chunk_tokens", lambda _: 192)
    train = {"max_length": 160, "epochs": 1, "batch_size": 4, **tables.get("train", {})}
    lm = {"generate_rows": 0, **tables.get("lm", {})}
    study = {"task": "causal-lm"}
    folder = tiny_lms.causal_lm(tmp_path / "m")
    trial = small(tmp_path, encoder=folder, **{**tables, "train": train, "lm": lm, "study": study})
    trial.run()
    parts = live["parts"]
    planned = step_parts(
        PlanSubject(
            task=BuiltInTask.CAUSAL_LM, settings=trial.settings, lora=adapters(BuiltInTask.CAUSAL_LM, trial.settings)
        ),
        checkpointing=trial.plan.checkpointing,
        reentrant=trial.plan.reentrant,
        chunked_loss=trial.plan.chunked_loss is not False,
    )
    assert planned.task.inputs == parts.task.inputs
    assert facts(planned.model) == facts(parts.model)
    batch = live["batch"]
    assert planned.batch_sizes(*batch["input_ids"].shape) == {name: tuple(one.shape) for name, one in batch.items()}
    assert_rehearsed(trial, live)


def facts(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(one.shape), one.dtype, one.requires_grad) for name, one in model.named_parameters()}


def test_behind_a_plan_torch_counts_no_device() -> None:
    gpu = VirtualGpu(DeviceSpec(name="made up", capacity_bytes=1 << 33))
    with gpu.stepping():
        assert torch.cuda.is_available() and torch.zeros(4, device="cuda").is_cuda
    assert not torch.cuda.is_available() and not torch.cuda.device_count()
    with gpu.stepping():
        assert torch.cuda.device_count() == 1
    assert torch.zeros(4).sum() == 0
