"""Decoders with adapters: where weights come from, in which format, and that each adapter learns."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_lms
from dryfit.core.errors import ConfigError, LoadError, MachineError, TraceError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.choices import BaseFormat, BuiltInTask, Precision
from dryfit.core.settings.execution import PlanSubject
from dryfit.core.settings.tables import DataSettings, LoraSettings, ModelSettings, TrainSettings, TrialSettings
from dryfit.meta.loading.filling import materialise
from dryfit.meta.loading.pretrained import Kind, load_stack
from dryfit.tasks.base import TaskContext
from dryfit.tasks.lm import decoder as module
from dryfit.tasks.lm.causal_lm import CausalLm, CausalLmTask
from dryfit.tasks.lm.decoder import check_packing, load_int8
from dryfit.tasks.tokens.token_set import TokenFacts
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim.step import backward_batch
from dryfit.train.rehearsal.subjects import step_parts

FORMATS = [BaseFormat.FP32, BaseFormat.FP16, BaseFormat.BF16]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decoders")
    return {name: tiny_lms.causal_lm(root / name, name) for name in ("qwen2", "llama")}


def loaded(folder: Path, lora: LoraSettings, *, seed: int = 1) -> tuple[CausalLmTask, CausalLm, LoadReport]:
    settings = TrialSettings(
        model=ModelSettings(name=str(folder)), train=TrainSettings(precision=Precision.BF16), lora=lora
    )
    task = CausalLmTask(TaskContext(settings, DataSettings(), TokenFacts(pad_id=1)))

    def make(source: Any, kind: Kind, *, part: str = "", dtype: torch.dtype | None = None) -> Any:
        return load_stack(source, kind, dtype=dtype)[0]

    model = task.model(make, seed=seed)
    return task, model, materialise(model, missing=model.drawn)


def batch(*, rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_adapters_are_in_fp32_beside_a_base_of_any_format(
    folders: dict[str, Path], architecture: str, base: BaseFormat
) -> None:
    folder = folders[architecture]
    _, model, report = loaded(folder, LoraSettings(r=4, base=base))
    formats = {name: weight.dtype for name, weight in model.named_parameters()}
    wanted = module.BASE_DTYPES[base]
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {formats[name] for name in learned} == {torch.float32}
    assert {dtype for name, dtype in formats.items() if name not in learned} == {wanted}
    assert learned == {name for name in formats if "lora_" in name}
    assert set(report.random) == {name for name in formats if "lora_A" in name}
    # B is zero: the model begins as its base, which is the file's.
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, torch.ones_like(ids)), plain(input_ids=ids).logits)


def test_adapters_are_a_function_of_the_seed(folders: dict[str, Path]) -> None:
    drawn: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        named = loaded(folders["qwen2"], LoraSettings(), seed=seed)[1].named_parameters()
        drawn.append(torch.cat([weight.detach().flatten() for name, weight in named if "lora_A" in name]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert bool(drawn[0].any())


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_every_adapter_has_a_gradient_by_the_second_step(
    folders: dict[str, Path], architecture: str, base: BaseFormat, how: str
) -> None:
    task, model, _ = loaded(folders[architecture], LoraSettings(r=4, base=base, dropout=0.1))
    if how != "none":
        enable_checkpointing(model.base(), reentrant=how == "reentrant")
    model.train()
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-2)
    around = nullcontext if base is BaseFormat.FP32 else lambda: torch.autocast("cpu", torch.bfloat16)
    for step in (1, 2):
        optimizer.zero_grad()
        backward_batch(model, batch(), task, micro_batch=2, backward=lambda loss: loss.backward(), autocast=around)
        without = [name for name, weight in learned.items() if weight.grad is None or not weight.grad.abs().any()]
        assert without == ([name for name in learned if "lora_A" in name] if step == 1 else [])
        assert all(weight.grad.dtype == torch.float32 for weight in learned.values() if weight.grad is not None)
        optimizer.step()


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_checkpointing_changes_no_gradient(folders: dict[str, Path], architecture: str) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for how in ("none", "reentrant", "not reentrant"):
        task, model, _ = loaded(folders[architecture], LoraSettings(r=4, dropout=0.0, base=BaseFormat.FP32))
        if how != "none":
            enable_checkpointing(model.base(), reentrant=how == "reentrant")
        model.double().train()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=torch.Generator().manual_seed(1))
        backward_batch(model, batch(), task, micro_batch=2, backward=lambda loss: loss.backward(), autocast=nullcontext)
        found.append({n: w.grad for n, w in model.named_parameters() if w.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, found[0][name], rtol=1e-10, atol=1e-12)


def test_without_adapters_all_weights_are_trained_in_fp32(folders: dict[str, Path]) -> None:
    _, model, report = loaded(folders["qwen2"], LoraSettings(r=0))
    assert not report.random and model.adapted() is None
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in model.parameters())


def test_packing_is_looked_at_under_adapters_too(folders: dict[str, Path]) -> None:
    check_packing(loaded(folders["llama"], LoraSettings())[1])


def test_targets_that_are_not_there_are_told(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="lora.targets"):
        loaded(folders["qwen2"], LoraSettings(targets="no_such"))


def test_an_int8_base_needs_cuda_and_its_package(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSettings(name=str(folders["qwen2"]))
    config = AutoConfig.from_pretrained(folders["qwen2"])
    with pytest.raises(MachineError, match="the device is cpu"):
        load_int8(model, config, "cpu")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="bitsandbytes is not installed"):
        load_int8(model, config, "cuda")


def test_the_memory_of_an_int8_base_is_unknown(folders: dict[str, Path]) -> None:
    lora = LoraSettings(base=BaseFormat.INT8)
    settings = TrialSettings(
        model=ModelSettings(name=str(folders["qwen2"])), train=TrainSettings(precision=Precision.BF16), lora=lora
    )
    subject = PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=lora)
    with pytest.raises(TraceError, match="int8"):
        step_parts(subject, checkpointing=False, reentrant=False)


def test_an_int8_base_is_read_by_transformers(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of transformers, and that nothing it complains of is passed over: no such device is here."""
    model = ModelSettings(name=str(folders["qwen2"]))
    config = AutoConfig.from_pretrained(folders["qwen2"])
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    asked: dict[str, Any] = {}
    told: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}

    def from_pretrained(*_args: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return plain, told

    monkeypatch.setattr(module, "find_spec", lambda name: True)
    monkeypatch.setattr(module, "BitsAndBytesConfig", lambda **kwargs: kwargs)
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    assert load_int8(model, config, "cuda") is plain
    assert asked["quantization_config"] == {"load_in_8bit": True}
    assert asked["device_map"] == {"": "cuda"}
    told["missing_keys"] = {"model.norm.weight"}
    with pytest.raises(LoadError, match="missing_keys: model.norm.weight"):
        load_int8(model, config, "cuda")
