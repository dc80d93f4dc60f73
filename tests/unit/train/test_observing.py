"""Running a case for real: on the CPU, with a meter that only listens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tiny_lms
from dryfit.settings.choices import BuiltInTask
from dryfit.settings.execution import ExecutionChoice, PlanSubject
from dryfit.settings.memory_terms import OptimizerImpl, StepPhase
from dryfit.settings.plan_messages import MemoryCase
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.study.planning import calibration_cases
from dryfit.training.measured_step import CudaMeter, fill, run_case, used_before
from dryfit.training.step_tracer import step_parts

PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PARTS = ["load", "first step", "second step", "validation", "third step", "checkpoint"]


class Listening:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.phases: list[StepPhase] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.parts.append(name)
        yield

    def phase(self, phase: StepPhase) -> None:
        self.phases.append(phase)


def case(
    model: Path | str, *, lora: bool = False, execution: dict[str, Any] | None = None, **tables: Any
) -> MemoryCase:
    tables.setdefault("train", {"batch_size": 4, "max_length": 24})
    settings = TrialSettings.model_validate_json(json.dumps({"model": {"name": str(model)}, **tables}))
    subject = PlanSubject(
        task=BuiltInTask.CAUSAL_LM if lora else BuiltInTask.CRITERIA,
        settings=settings,
        lora=LoraSettings(r=4) if lora else None,
    )
    choice = ExecutionChoice.model_validate({"micro_batch": 4, "accumulation": 1, **(execution or {})})
    return MemoryCase(name="a", family="encoder", subject=subject, execution=choice)


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "deberta-v2"])
def test_a_case_runs_all_its_parts(tmp_path: Path, architecture: str) -> None:
    tiny.model(tmp_path, architecture)
    meter = Listening()
    asked = case(tmp_path, execution={"micro_batch": 2, "accumulation": 2})
    assert run_case(asked, "cpu", meter) == 3
    assert meter.parts == PARTS
    step = [StepPhase.FORWARD, *[StepPhase.FORWARD, StepPhase.BACKWARD] * 2, StepPhase.CLIP, StepPhase.OPTIMIZER]
    assert meter.phases == [StepPhase.LOAD, *step, *step, StepPhase.EVALUATE, *step, StepPhase.SAVE]


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("task", [BuiltInTask.SHARE, BuiltInTask.JOINT])
def test_two_heads_run_too(tmp_path: Path, task: BuiltInTask) -> None:
    """Windows with all entries of a batch; of two encoders both recompute."""
    tiny.model(tmp_path)
    meter = Listening()
    tables = {"multitask": {"criteria_share": 0.5}, "joint": {"fusion": "attention", "criterion_length": 8}}
    asked = case(tmp_path, execution={"checkpointing": True}, **tables)
    asked = asked.model_copy(update={"subject": asked.subject.model_copy(update={"task": task})})
    assert run_case(asked, "cpu", meter) == 3
    assert meter.parts == PARTS


@pytest.mark.slow
@PEFT_ASKS
def test_adapters_run_too(tmp_path: Path) -> None:
    tiny_lms.config_alone(tmp_path)
    meter = Listening()
    lora = case(tmp_path, lora=True, execution={"checkpointing": True, "optimizer_impl": OptimizerImpl.FOREACH})
    assert run_case(lora, "cpu", meter) == 3
    assert meter.parts == PARTS


def test_values_are_small_and_ties_stay(tmp_path: Path) -> None:
    tiny.model(tmp_path, "bert")
    asked = case(tmp_path)
    model = step_parts(asked.subject, checkpointing=False, reentrant=False).model
    model.register_parameter("tied", next(model.parameters()))
    fill(model, "cpu")
    assert model.get_parameter("tied") is next(model.parameters())
    for value in (*model.parameters(), *model.buffers()):
        assert value.device.type == "cpu"
        if value.is_floating_point():
            assert value.isfinite().all() and value.abs().max() < 1
        else:
            assert not value.any()


def test_what_others_use_is_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ntest "$4" = 3 && echo 512\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert used_before(0) == 512 << 20
    monkeypatch.setenv("PATH", "/nowhere")
    assert used_before(0) == 0


@PEFT_ASKS
def test_the_cases_of_a_calibration_differ_and_can_be_built(tmp_path: Path) -> None:
    cases = calibration_cases(tmp_path)
    assert len({one.name for one in cases}) == len(cases) >= 8
    (tmp_path / "again").mkdir()
    assert [one.name for one in calibration_cases(tmp_path / "again", quick=True)] == [one.name for one in cases[:3]]
    for one in cases[:3]:
        parts = step_parts(one.subject, checkpointing=one.execution.checkpointing, reentrant=False)
        assert sum(parameter.numel() for parameter in parts.model.parameters()) > 20_000_000


@pytest.mark.slow
def test_the_meter_of_a_device_keeps_the_peaks_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    peaks = iter(range(100, 700, 100))
    monkeypatch.setattr(torch.cuda, "init", lambda: said.append("init"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: said.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", said.append)
    tiny.model(tmp_path, "bert")
    meter = CudaMeter()
    run_case(case(tmp_path), "cpu", meter)
    assert [part.part for part in meter.parts] == PARTS
    assert [part.allocated_bytes for part in meter.parts] == [100, 200, 300, 400, 500, 600]
    assert said[:3] == ["init", "load", "reset"]
    assert said.count("reset") == len(PARTS)
    assert {word for word in said if word not in ("init", "reset")} == {phase.value for phase in StepPhase}
