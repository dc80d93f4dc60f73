"""Models of the catalogue can be planned: every encoder with a head, decoders of every kind with adapters."""

import json
from pathlib import Path

import pytest

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.meta.configs import catalogue_config, catalogue_entries
from dryfit.meta.pretrained import Kind, stored_kind
from dryfit.plans.timeline import peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.choices import BaseFormat, BuiltInTask
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionSettings, PlanSubject
from dryfit.settings.memory_terms import DeviceSpec, MemoryCategory, VerdictKind
from dryfit.settings.plan_messages import PlanAnswer, PlanRequest
from dryfit.settings.tables import LoraSettings, TrialSettings
from dryfit.study.child_jobs import run_alone
from dryfit.training.step_tracer import StepTracer, step_parts
from published import PUBLISHED

HUGE = DeviceSpec(name="made up", capacity_bytes=2**40, capability=(8, 0))
FP32_BYTES, FP16_BYTES = 4, 2


def task_of(name: str) -> BuiltInTask | None:
    """What a model is trained for; None for those with an encoder and a decoder."""
    config = catalogue_config(name)
    if config.is_encoder_decoder:
        return None
    return BuiltInTask.CAUSAL_LM if stored_kind(config) is Kind.CAUSAL_LM else BuiltInTask.CRITERIA


def ends_of_kinds(names: list[str]) -> tuple[list[str], list[str]]:
    """The smallest and the largest of each architecture: those between run the same code in other sizes."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda one: PUBLISHED[one].parameters):
        config = catalogue_config(name)
        kinds.setdefault(config.model_type, []).append(name)
    smallest = [found[0] for found in kinds.values()]
    return smallest, [found[-1] for found in kinds.values() if found[-1] not in smallest]


ENCODERS = [name for name in catalogue_entries() if task_of(name) is BuiltInTask.CRITERIA]
DECODERS = [name for name in catalogue_entries() if task_of(name) is BuiltInTask.CAUSAL_LM]
OTHERS = [name for name in catalogue_entries() if task_of(name) is None]


def asked(name: str, task: BuiltInTask) -> PlanSubject:
    """A small batch of a model, as most people fine-tune its kind."""
    tables = {"model": {"name": name}, "train": {"batch_size": 2, "max_length": 64, "precision": "bf16"}}
    settings = TrialSettings.model_validate_json(json.dumps(tables))
    return PlanSubject(task=task, settings=settings, lora=LoraSettings(r=8) if task is BuiltInTask.CAUSAL_LM else None)


def answers(names: list[str], task: BuiltInTask, folder: Path) -> dict[str, PlanAnswer]:
    """Plans of some models, made in one process."""
    subjects = tuple(asked(name, task) for name in names)
    request = PlanRequest(
        subjects=subjects, device=HUGE, execution=ExecutionSettings(), trace_dir=str(folder / "traces")
    )
    result = run_alone("planning the catalogue", request)
    return dict(zip(names, result.answers, strict=True))


def check(answer: PlanAnswer, weights_bytes: int) -> str:
    """What is wrong with a plan; empty where nothing is."""
    memory = answer.memory
    if answer.verdict is not VerdictKind.FITS or memory is None:
        return f"{answer.verdict}: {answer.reasons}"
    planned_bytes = memory.by_category[MemoryCategory.WEIGHTS]
    # Poolers are left out (of ALBERT a twentieth), buffers are counted, and blocks are whole.
    if not 0.94 <= planned_bytes / weights_bytes <= 1.02:
        return f"its weights are {weights_bytes} bytes, {planned_bytes} are planned"
    if not planned_bytes < memory.peak_allocated_bytes <= memory.peak_reserved_bytes:
        return f"weights {planned_bytes}, allocated {memory.peak_allocated_bytes}, {memory.peak_reserved_bytes}"
    if sum(memory.by_category.values()) != memory.peak_allocated_bytes:
        return f"{memory.by_category} are not {memory.peak_allocated_bytes}"
    return ""


def wrong(found: dict[str, PlanAnswer], element_bytes: int) -> dict[str, str]:
    """The models with a plan that cannot be true."""
    checked = {name: check(answer, PUBLISHED[name].parameters * element_bytes) for name, answer in found.items()}
    return {name: reason for name, reason in checked.items() if reason}


SMALLEST_ENCODERS, _ = ends_of_kinds(ENCODERS)
OTHER_ENCODERS = [name for name in ENCODERS if name not in SMALLEST_ENCODERS]
SMALLEST_DECODERS, LARGEST_DECODERS = ends_of_kinds(DECODERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SMALLEST_ENCODERS, id="the smallest of each kind"),
        pytest.param(OTHER_ENCODERS, id="all others", marks=pytest.mark.nightly),
    ],
)
def test_every_encoder_can_be_planned(tmp_path: Path, names: list[str]) -> None:
    assert len(names) >= 8
    assert wrong(answers(names, BuiltInTask.CRITERIA, tmp_path), FP32_BYTES) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SMALLEST_DECODERS[::12], id="some"),
        pytest.param(
            [name for name in SMALLEST_DECODERS if name not in SMALLEST_DECODERS[::12]],
            id="the smallest of each other kind",
            marks=pytest.mark.nightly,
        ),
        pytest.param(LARGEST_DECODERS, id="the largest", marks=pytest.mark.nightly),
    ],
)
def test_decoders_of_every_kind_can_be_planned_with_adapters(tmp_path: Path, names: list[str]) -> None:
    assert len(DECODERS) >= 25 and len(names) >= 2
    found = answers(names, BuiltInTask.CAUSAL_LM, tmp_path)
    assert wrong(found, FP16_BYTES) == {}
    for answer in found.values():
        assert answer.memory.by_category[MemoryCategory.ADAPTERS] > 0


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("task", [BuiltInTask.CRITERIA, BuiltInTask.CAUSAL_LM])
def test_models_with_an_encoder_and_a_decoder_are_refused(name: str, task: BuiltInTask) -> None:
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        step_parts(asked(name, task), checkpointing=False, reentrant=False)


def test_such_a_model_is_no_unknown_verdict_but_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="t5 is an encoder-decoder"):
        answers(["google-t5/t5-small"], BuiltInTask.CRITERIA, tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's business
def test_a_step_of_a_7b_model_takes_less_than_half_without_all_scores() -> None:
    """2 x 2048 tokens in fp16 with adapters of rank 128 and checkpointing, beside the weights."""
    tables = {"model": {"name": "Qwen/Qwen2.5-7B"}, "train": {"batch_size": 2, "max_length": 2048, "precision": "fp16"}}
    settings = TrialSettings.model_validate_json(json.dumps(tables))
    lora = LoraSettings(r=128, alpha=256.0, base=BaseFormat.FP16)
    tracer = StepTracer(PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=lora), HUGE)
    whole, chunked = (
        peak_bytes(tracer.trace(SegmentKind.MICRO_FIRST, Variant(True, chunked_loss=in_chunks), Shape(2, 2048))) / 2**30
        for in_chunks in (False, True)
    )
    assert whole == pytest.approx(7.79, abs=0.05) and chunked == pytest.approx(3.20, abs=0.05)
