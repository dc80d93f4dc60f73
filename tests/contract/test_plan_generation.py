"""What a plan says that generated answers take, beside what torch's profiler sees generating them take, on the CPU."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoConfig

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.tracer import Variant
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, StepPhase
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.generation import answer
from dryfit.tasks.prompts import PromptTokenizer
from dryfit.training.measured_step import fill
from dryfit.training.plan_job import plan
from dryfit.training.step_tracer import StepTracer, step_parts
from profiled import peak_bytes, profiled_peak_bytes

ROWS, LENGTH, NEW, LAYERS = 8, 96, 24, 3
CPU = DeviceSpec(name="cpu", kind=DeviceKind.CPU, capacity_bytes=2**40)


class Endless:
    """Ids for prompts; no answer ever ends."""

    pad_id, end_id = 0, 10**6

    @staticmethod
    def text_of(ids: list[int]) -> str:
        return str(len(ids))


def subject(folder: Path, architecture: str, *, lora: bool, new: int = NEW, beams: int = 1) -> PlanSubject:
    """A small causal language model whose keys and values are not small."""
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4}
    extra = {"head_dim": 64} if architecture != "gpt2" else {"n_positions": 2048}
    config = AutoConfig.for_model(architecture, vocab_size=500, intermediate_size=128, pad_token_id=0, **sizes, **extra)
    config.save_pretrained(folder)
    tables = {"model": {"name": str(folder)}, "lm": {"max_new_tokens": new, "num_beams": beams}}
    adapters = LoraSettings(r=4, base=BaseFormat.FP32) if lora else LoraSettings(r=0)
    return PlanSubject(
        task=BuiltInTask.CAUSAL_LM, settings=TrialSettings.model_validate_json(json.dumps(tables)), lora=adapters
    )


def generated_peak(asked: PlanSubject) -> int:
    """What answering really takes; prompts of different lengths, so that some are padded on the left."""
    torch.manual_seed(0)
    model = step_parts(asked, checkpointing=False, reentrant=False).model
    fill(model, "cpu")
    model.eval()
    assert isinstance(model, CausalLm)
    prompts = [[5] * (LENGTH - row % 3) for row in range(ROWS)]
    new, beams = asked.settings.lm.max_new_tokens, asked.settings.lm.num_beams
    said: list[str] = []

    def work() -> None:
        endless = cast("PromptTokenizer", Endless)
        found = answer(
            model.decoder, prompts, endless, max_new_tokens=new, num_beams=beams, batch_rows=ROWS, beat=lambda: None
        )
        said.extend(found)

    work()  # what is made once and kept
    said.clear()
    taken = profiled_peak_bytes(work)
    assert said == [str(new)] * ROWS
    return taken


def planned_peak(asked: PlanSubject) -> int:
    tracer = StepTracer(asked, CPU)
    return peak_bytes(tracer.trace(SegmentKind.MEASURE, Variant(), Shape(ROWS, LENGTH)).deltas)


def ladder(folder: Path, *, generate_rows: int, capacity: int = 2**40) -> PlanAnswer:
    """The plan of a trial whose answers have room for more keys and values than all else."""
    asked = subject(folder / "model", "qwen2", lora=True, new=2000)
    tables = asked.settings.model_dump(mode="json")
    tables["lm"]["generate_rows"] = generate_rows
    tables["train"] |= {"batch_size": 8, "max_length": 64}
    changed = asked.model_copy(update={"settings": TrialSettings.model_validate_json(json.dumps(tables))})
    spec = CPU.model_copy(update={"capacity_bytes": capacity})
    request = PlanRequest(
        subjects=(changed,),
        device=spec,
        execution=ExecutionSettings(),
        trace_dir=str(folder / "traces"),
        every_fallback=False,
    )
    result = plan(request, cast("ChildChannel", Silent()))
    return result.answers[0]


class Silent:
    """A channel that nobody listens to."""

    def send(self, _message: object) -> None: ...

    def beat(self) -> None: ...


@pytest.mark.slow
def test_a_trial_is_planned_with_its_answers_and_fewer_at_once_take_less(tmp_path: Path) -> None:
    none, eight = ladder(tmp_path, generate_rows=0), ladder(tmp_path, generate_rows=64)
    assert none.memory is not None and eight.memory is not None and eight.execution is not None
    assert none.memory.peak_at.phase is not StepPhase.EVALUATE
    assert eight.memory.peak_at.phase is StepPhase.EVALUATE
    kept_bytes = LAYERS * 2 * 4 * 64 * 4 * 8 * 2064  # layers, keys and values, heads, features, fp32, prompts, tokens
    assert kept_bytes <= eight.memory.peak_allocated_bytes <= 1.3 * kept_bytes
    tight = ladder(tmp_path, generate_rows=64, capacity=eight.memory.required_bytes - kept_bytes // 4)
    assert tight.execution is not None and tight.execution.micro_batch == 8, "training stays as it is"
    assert tight.execution.eval_batch == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "lora", "new"),
    [
        ("llama", True, 1),
        ("gemma2", True, NEW),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (("qwen2", True, NEW), ("llama", False, 200), ("mistral", True, NEW), ("gpt2", False, 200))
        ),
    ],
)
def test_answers_take_what_the_plan_says(tmp_path: Path, architecture: str, lora: bool, new: int) -> None:
    asked = subject(tmp_path, architecture, lora=lora, new=new)
    generated, planned = generated_peak(asked), planned_peak(asked)
    assert generated > 1_000_000
    assert 0.99 <= planned / generated <= 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "lora", "new", "beams"),
    [("qwen2", True, NEW, 4), pytest.param("llama", False, 200, 2, marks=pytest.mark.nightly)],
)
def test_beams_take_what_the_plan_says(tmp_path: Path, architecture: str, lora: bool, new: int, beams: int) -> None:
    asked = subject(tmp_path, architecture, lora=lora, new=new, beams=beams)
    generated, planned = generated_peak(asked), planned_peak(asked)
    alone = planned_peak(subject(tmp_path, architecture, lora=lora, new=new))
    assert planned > 1.5 * alone
    assert 0.98 <= planned / generated <= 1.01
