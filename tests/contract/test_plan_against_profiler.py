"""What a trace says a training step takes, beside what torch's profiler sees the real step take, on the CPU."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import tiny
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.gpu.work import WorkCounter
from dryfit.plans.tracer import Variant
from dryfit.processes.channel import ChildChannel
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceKind, DeviceSpec, OptimizerImpl, StepPhase
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.tasks import causal_lm
from dryfit.tasks.causal_lm import CausalLm
from dryfit.tasks.generation import answer
from dryfit.tasks.prompts import PromptTokenizer
from dryfit.training.measured_step import fill
from dryfit.training.optimizer import OptimizerPlan
from dryfit.training.plan_job import plan
from dryfit.training.step_tracer import StepTracer, SubjectSteps, step_parts
from parts import need_package
from profiled import peak_bytes, profiled_peak_bytes

SHAPE = Shape(rows=8, length=128)
GPU = DeviceSpec(name="rtx4090", capacity_bytes=24 * 2**30, capability=(8, 9))
CPU = DeviceSpec(name="cpu", kind=DeviceKind.CPU, capacity_bytes=2**40)
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 160,
    "vocab_size": 2000,
}
V3 = {"position_buckets": 32, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SLOW = pytest.mark.slow
UNTRACKED = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def encoder(folder: Path, architecture: str, precision: str = "fp32", optimizer: str = "adamw") -> PlanSubject:
    """A trial of a small encoder with a head."""
    name = "deberta-v2" if architecture == "deberta-v3" else architecture
    tiny.model(folder, name, **SIZES, **(V3 if architecture == "deberta-v3" else {}))
    settings = {"model": {"name": str(folder)}, "train": {"precision": precision}, "optim": {"name": optimizer}}
    return PlanSubject(task=BuiltInTask.CRITERIA, settings=TrialSettings.model_validate_json(json.dumps(settings)))


def decoder(
    folder: Path, architecture: str, precision: str = "fp32", *, words: int = 500, rank: int = 8
) -> PlanSubject:
    """A small causal language model, with adapters or, of rank 0, without."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(architecture, vocab_size=words, intermediate_size=128, pad_token_id=0, **sizes)
    config.save_pretrained(folder)
    settings = {"model": {"name": str(folder)}, "train": {"precision": precision}}
    lora = LoraSettings(r=rank, alpha=16.0, base=BaseFormat(precision)) if rank else None
    parsed = TrialSettings.model_validate_json(json.dumps(settings))
    return PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=parsed, lora=lora)


def measured_peak_bytes(subject: PlanSubject, variant: Variant, *, reentrant: bool) -> int:
    """What a late step of real training takes beside what lives before it."""
    torch.manual_seed(0)
    parts = step_parts(
        subject, checkpointing=variant.checkpointing, reentrant=reentrant, chunked_loss=variant.chunked_loss
    )
    fill(parts.model, "cpu")
    steps = SubjectSteps(parts, DeviceKind.CPU, OptimizerPlan(impl=variant.optimizer_impl))
    steps_before = 6 if subject.settings.optim.name == "radam" else 2  # it takes more from the sixth on
    batch = steps.batch(SHAPE)
    for name, values in batch.items():
        high = {"input_ids": 30, "labels": 2}.get(name, 1)
        values.random_(0, high)
    batch["attention_mask"].fill_(1)[1:, -5:] = 0  # padded: transformers leaves a mask of ones out

    def step() -> None:
        steps.micro(batch)
        steps.update()

    for _ in range(steps_before):
        step()
    return profiled_peak_bytes(step)


def traced_peak_bytes(subject: PlanSubject, variant: Variant, *, reentrant: bool) -> int:
    """The same of the traced step."""
    tracer = StepTracer(subject, CPU, reentrant=reentrant)
    micro = tracer.trace(SegmentKind.MICRO_FIRST, variant, SHAPE)
    update = tracer.trace(SegmentKind.UPDATE, variant, None)
    return peak_bytes([*micro.deltas, *update.deltas])


def difference(
    subject: PlanSubject,
    *,
    checkpointing: bool = False,
    reentrant: bool = False,
    impl: str = "",
    chunked_loss: bool = False,
) -> float:
    """Traced beside measured, as a fraction."""
    variant = Variant(checkpointing, OptimizerImpl(impl or "auto"), chunked_loss=chunked_loss)
    measured = measured_peak_bytes(subject, variant, reentrant=reentrant)
    traced = traced_peak_bytes(subject, variant, reentrant=reentrant)
    assert measured > 10_000_000
    return traced / measured - 1


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        *[(name, "fp32") for name in ("bert", "deberta-v3")],
        *[pytest.param(name, "fp32", marks=SLOW) for name in ("roberta", "electra", "deberta-v2", "modernbert")],
        *[pytest.param(name, "bf16", marks=SLOW) for name in ("bert", "roberta", "modernbert")],
    ],
)
def test_encoder_steps_take_what_the_trace_says(tmp_path: Path, architecture: str, precision: str) -> None:
    assert abs(difference(encoder(tmp_path, architecture, precision))) <= 0.001


@pytest.mark.slow
def test_attention_pooling_and_several_labels_take_what_the_trace_says(tmp_path: Path) -> None:
    plain = encoder(tmp_path, "bert")
    tables = {
        **plain.settings.model_dump(mode="json"),
        "head": {"pooling": "attention", "layers": 1, "activation": "silu"},
        "loss": {"name": "focal", "alpha": 0.25, "class_balance": "effective"},
    }
    settings = TrialSettings.model_validate_json(json.dumps(tables))
    subject = PlanSubject(task=BuiltInTask.CRITERIA, settings=settings, num_labels=400, multi_label=True)
    assert abs(difference(subject)) <= 0.001


def test_the_work_of_a_step_is_what_torch_counts(tmp_path: Path) -> None:
    subject, rest = encoder(tmp_path, "bert"), Shape(rows=4, length=128)
    work = WorkCounter()
    StepTracer(subject, GPU).count(work, Variant(), [SHAPE, SHAPE, SHAPE, rest])
    told = work.work(GPU)

    parts = step_parts(subject, checkpointing=False, reentrant=False)
    fill(parts.model, "cpu")
    steps = SubjectSteps(parts, DeviceKind.CPU, OptimizerPlan())
    with FlopCounterMode(display=False) as counted:
        for shape in (SHAPE, SHAPE, SHAPE, rest):
            batch = steps.batch(shape)
            for values in batch.values():
                values.fill_(1)
            steps.micro(batch)
        steps.update()

    assert told is not None and told.step_time is not None and told.least_step_s is not None
    # On a GPU the backward pass of fused attention multiplies queries and keys again, in each of three layers.
    again = 3 * 2 * 28 * 128**2 * SIZES["hidden_size"]
    assert told.flops_per_step == counted.get_total_flops() + again
    assert told.least_step_s < told.step_time.low_s < told.step_time.high_s
    # AdamW reads and writes weight, gradient and two moments, at least.
    weights = sum(one.numel() for one in parts.model.parameters())
    assert told.bytes_per_step > 7 * 4 * weights


@pytest.mark.slow
def test_deberta_in_bf16(tmp_path: Path) -> None:
    assert abs(difference(encoder(tmp_path, "deberta-v3", "bf16"))) <= 0.01


@pytest.mark.every(3)
@UNTRACKED
@pytest.mark.parametrize(
    "optimizer",
    [
        "adafactor",
        *[
            pytest.param(name, marks=SLOW)
            for name in ("adamw:foreach", "adamw:plain", "sgd", "radam:plain", "radam:foreach", "nadam:plain")
        ],
    ],
)
def test_optimizers_take_what_the_trace_says(tmp_path: Path, optimizer: str) -> None:
    name, _, impl = optimizer.partition(":")
    assert abs(difference(encoder(tmp_path, "bert", optimizer=name), impl=impl)) <= 0.001


# DeBERTa shares its relative embeddings between layers, which reentrant autograd cannot go through twice.
@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("architecture", "reentrant"),
    [
        ("bert", True),
        ("deberta-v3", False),
        *(("bert", False), ("modernbert", False), ("modernbert", True)),
    ],
)
def test_checkpointed_steps_take_what_the_trace_says(tmp_path: Path, architecture: str, reentrant: bool) -> None:
    # The rest is the random state that is put aside for each layer, which a trace has none of.
    found = difference(encoder(tmp_path, architecture), checkpointing=True, reentrant=reentrant)
    assert abs(found) <= 0.002


@pytest.mark.slow
@pytest.mark.each_value
@PEFT_ASKS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_adapters_take_what_the_trace_says(tmp_path: Path, architecture: str, precision: str) -> None:
    assert abs(difference(decoder(tmp_path, architecture, precision))) <= 0.001


@pytest.mark.slow
@PEFT_ASKS
@pytest.mark.parametrize("base", [BaseFormat.NF4, BaseFormat.INT8])
def test_adapters_on_a_quantised_base_take_what_the_trace_says(tmp_path: Path, base: BaseFormat) -> None:
    need_package("bitsandbytes")
    asked = decoder(tmp_path, "qwen2", "bf16")
    lora = LoraSettings(r=8, alpha=16.0, base=base, double_quant=base is BaseFormat.NF4)
    # On the CPU a product dequantises out of a trace's sight: for a moment, and little beside 1 024 tokens.
    assert abs(difference(asked.model_copy(update={"lora": lora}))) <= 0.005


@pytest.mark.slow
@pytest.mark.every(2)
@PEFT_ASKS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_adapters_take_what_the_trace_says(tmp_path: Path, reentrant: bool) -> None:
    assert abs(difference(decoder(tmp_path, "qwen2"), checkpointing=True, reentrant=reentrant)) <= 0.002


@PEFT_ASKS
@pytest.mark.parametrize(
    ("architecture", "precision", "rank"),
    [
        ("gemma2", "bf16", 0),
        pytest.param("qwen2", "bf16", 8, marks=[SLOW, pytest.mark.nightly]),
        pytest.param("qwen2", "fp16", 8, marks=SLOW),
        pytest.param("llama", "fp32", 0, marks=[SLOW, pytest.mark.nightly]),
    ],
)
def test_a_loss_in_chunks_takes_what_the_trace_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, precision: str, rank: int
) -> None:
    monkeypatch.setattr(causal_lm, "chunk_tokens", lambda _: 192)  # the last of six is shorter
    subject = decoder(tmp_path, architecture, precision, words=6000, rank=rank)
    assert abs(difference(subject, chunked_loss=True)) <= 0.001
    whole, chunked = (
        traced_peak_bytes(subject, Variant(chunked_loss=in_chunks), reentrant=False) for in_chunks in (False, True)
    )
    assert chunked < 0.75 * whole


# ---- What a plan says that generated answers take, beside what torch's profiler sees generating them take, on the CP

ROWS, LENGTH, NEW, LAYERS = 8, 96, 24, 3


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
