"""The validation batch is an execution choice: it changes what a validation takes, and no value that it gives."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

import tiny
import tiny_lms
import trials
from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.events import Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource
from dryfit.plans.ladder import PlannedTrial, plan_by_ladder
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import Confidence, DeviceKind, DeviceSpec, OptimizerImpl, StepPhase, VerdictKind
from dryfit.settings.plan_messages import MemoryCase, PlanAnswer
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.tasks import causal_lm
from dryfit.tasks.base import Outputs
from dryfit.training import model, trainer
from dryfit.training.batches import evaluation_batches, read_tokens, trial_task
from dryfit.training.calibrate import planned
from dryfit.training.measured_step import fill, run_case
from dryfit.training.model import build_model, cannot_offload_activations, offload_layer_inputs
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.step_tracer import StepTracer, SubjectSteps, step_parts
from profiled import profiled_peak_bytes

PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TRAIN = {"epochs": 1, "evals_per_epoch": 2, "batch_size": 8}
LM = {"format": "both", "max_new_tokens": 3, "generate_rows": 6, "answers": "never, always walk"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"encoder": tiny.model(root / "bert"), "decoder": tiny_lms.causal_lm(root / "qwen2")}


def trial(folder: Path, model: Path, **execution: Any) -> trials.Trial:
    """A trial of five steps with dropout; a decoder answers prompts too."""
    data = tiny.data(folder / "data", train=40, validation=20)
    if model.name == "bert":
        tables: dict[str, Any] = {"head": {"dropout": 0.3}, "train": {**TRAIN, "max_length": 64}}
    else:
        tables = {"study": {"task": "causal-lm"}, "lm": LM, "lora": {"r": 4, "dropout": 0.1}}
        tables["train"] = {**TRAIN, "max_length": 160}
    return trials.Trial(folder, encoder=model, data=data, execution=execution, **tables)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Rows that were scored, and prompts that were answered, at once; filled while trials run."""
    seen: dict[str, set[int]] = {"scored": set(), "answered": set()}

    def noted(lengths_R: torch.Tensor, batch_rows: int) -> Sequence[Sequence[int]]:
        batches = evaluation_batches(lengths_R, batch_rows)
        seen["scored"].add(max(map(len, batches)))
        return batches

    answering = causal_lm.answer

    def answered(*args: Any, batch_rows: int, **known: Any) -> list[str]:
        seen["answered"].add(batch_rows)
        return answering(*args, batch_rows=batch_rows, **known)

    monkeypatch.setattr(trainer, "evaluation_batches", noted)
    monkeypatch.setattr(causal_lm, "answer", answered)
    return seen


@PEFT_ASKS
@pytest.mark.parametrize(
    ("name", "weights"), [("encoder", "model"), pytest.param("decoder", "adapter_model", marks=pytest.mark.slow)]
)
def test_training_validates_what_is_planned_at_once_and_learns_the_same(
    tmp_path: Path, folders: dict[str, Path], at_once: dict[str, set[int]], name: str, weights: str
) -> None:
    usual = trials.undisturbed(trial(tmp_path / "usual", folders[name]))
    assert at_once["scored"] == {20 if name == "encoder" else 32}
    assert at_once["answered"] == (set() if name == "encoder" else {6})
    for found in at_once.values():
        found.clear()
    small = trial(tmp_path / "small", folders[name], eval_batch=3)
    result, channel = small.run()
    assert at_once["scored"] == {3}
    assert at_once["answered"] == (set() if name == "encoder" else {3})
    assert len(channel.points) == len(usual.points) == 2
    for point, other in zip(channel.points, usual.points, strict=True):
        assert point.metrics == pytest.approx(other.metrics, rel=1e-5)
        assert (point.n, point.step) == (other.n, other.step)
    assert result.steps == usual.result.steps
    file = f"{weights}.safetensors"
    assert trials.same_weights(small.best_weights(file), usual.trial.best_weights(file))


def test_an_attempt_goes_on_with_another_validation_batch(
    tmp_path: Path, folders: dict[str, Path], at_once: dict[str, set[int]]
) -> None:
    """As after a validation that ran out of memory."""
    usual = trials.undisturbed(trial(tmp_path / "usual", folders["encoder"]))
    other = trial(tmp_path / "other", folders["encoder"], eval_batch=20)
    _, before = other.run(stop_at=3)
    at_once["scored"].clear()
    other.plan = other.plan.model_copy(update={"eval_batch": 2})
    result, after = other.run()
    assert at_once["scored"] == {2}
    values = [point.value for point in (*before.points, *after.points)]
    assert values == pytest.approx([point.value for point in usual.points], rel=1e-5)
    assert trials.same_weights(other.best_weights(), usual.trial.best_weights())
    assert result.steps == usual.result.steps


@PEFT_ASKS
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_what_is_kept_of_a_row_depends_on_no_other_row(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    """In fp64: a row is padded to other lengths among other rows, and scored the same."""
    request = trial(tmp_path, folders[name]).request()
    tokens = read_tokens(request, trial_task(request.config), only=None)
    task = trial_task(request.config, tokens)
    model = build_model(request, task).double().eval()
    split = tokens.splits["validation"]

    def kept(rows: int) -> Outputs:
        collate = partial(task.collate, split)
        return trainer.kept_in_order(model, split, task, collate, batch_rows=rows, beat=lambda: None)

    whole = kept(64)
    for rows in (1, 2, 3, 7):
        torch.testing.assert_close(kept(rows), whole, rtol=1e-12, atol=1e-12)


# ---- what is planned, and what is taken


def subject(folder: Path) -> PlanSubject:
    """A small decoder with adapters whose scores of words take more than all else."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=20_000, intermediate_size=128, pad_token_id=0, **sizes)
    config.save_pretrained(folder)
    tables = {"model": {"name": str(folder)}, "train": {"batch_size": 4, "max_length": 64}}
    settings = TrialSettings.model_validate_json(json.dumps({**tables, "lm": {"generate_rows": 0}}))
    return PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=LoraSettings(r=8, base=BaseFormat.FP32))


def cpu(capacity_bytes: int) -> Device:
    spec = DeviceSpec(name="cpu", kind=DeviceKind.CPU, capacity_bytes=capacity_bytes)
    constants = DeviceConstants(0, 0, Confidence.UNCALIBRATED)
    return Device(spec, constants, AllocatorSettings(expandable_segments=True), torch=torch.__version__)


def climbed(asked: PlanSubject, capacity_bytes: int = 2**40) -> PlanAnswer:
    """The plan of the decoder on a CPU with so much memory."""
    device = cpu(capacity_bytes)
    known = PlannedTrial(effective_batch=4, lengths=Lengths(64), optimizer_impls=(OptimizerImpl.FOREACH,))
    source = SegmentSource(StepTracer(asked, device.spec))
    return plan_by_ladder(known, ExecutionSettings(), source, device, resubject=lambda _: None)


class Quiet:
    """Measures nothing: the profiler does."""

    def phase(self, phase: StepPhase) -> None: ...

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        yield


def case(asked: PlanSubject, choice: ExecutionChoice) -> MemoryCase:
    return MemoryCase(name="a", family="decoder LoRA", subject=asked, execution=choice)


@pytest.mark.slow
@PEFT_ASKS
def test_a_validation_takes_what_is_planned_and_fewer_rows_at_once_make_a_trial_fit(tmp_path: Path) -> None:
    asked = subject(tmp_path)
    whole = climbed(asked)
    assert whole.memory is not None and whole.execution is not None
    assert (whole.memory.peak_at.phase, whole.memory.worst_batch.rows) == (StepPhase.EVALUATE, 16)
    fewer = climbed(asked, whole.memory.required_bytes - 1)
    assert fewer.memory is not None and fewer.execution is not None
    assert fewer.verdict is VerdictKind.FITS_WITH
    assert fewer.execution == whole.execution.model_copy(update={"eval_batch": 8})
    for answer in (whole, fewer):
        assert answer.memory is not None and answer.execution is not None
        run = case(asked, answer.execution)
        assert planned(run, cpu(2**40))[0].peak_allocated_bytes == answer.memory.peak_allocated_bytes
        taken = profiled_peak_bytes(lambda run=run: run_case(run, "cpu", Quiet()))
        assert 0.98 <= taken / answer.memory.peak_allocated_bytes <= 1.001


# ---- Inputs of checkpointed layers in host memory: the same gradients bit for bit, and refused where it does nothing

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


def offloaded(folder: Path, name: str) -> PlanSubject:
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
    asked = offloaded(tmp_path, name)
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
    parts = step_parts(offloaded(tmp_path, "bert"), checkpointing=False, reentrant=False)
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
