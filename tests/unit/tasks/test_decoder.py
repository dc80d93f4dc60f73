"""Decoders with adapters: where weights come from, in which format, and that each adapter learns."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import tiny_lms
from dryfit.core.errors import ConfigError, LoadError, MachineError, TraceError
from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.settings.choices import BaseFormat, BuiltInTask, Precision
from dryfit.core.settings.execution import PlanSubject
from dryfit.core.settings.tables import (
    DataSettings,
    LoraSettings,
    ModelSettings,
    RegularizationSettings,
    TrainSettings,
    TrialSettings,
)
from dryfit.core.settings.weight_formats import WEIGHT_FORMATS, WeightFormat
from dryfit.meta.loading import frozen_weights
from dryfit.meta.loading.filling import materialise
from dryfit.meta.loading.frozen_weights import DTYPES, fill_frozen, load_frozen
from dryfit.meta.loading.matching import LoadOptions
from dryfit.meta.loading.pretrained import Kind, empty_stack
from dryfit.tasks.base import TaskContext
from dryfit.tasks.lm.causal_lm import CausalLm, CausalLmTask
from dryfit.tasks.lm.packing_check import check_packing
from dryfit.tasks.tokens.token_set import TokenFacts
from dryfit.train.model import enable_checkpointing
from dryfit.train.optim.step import backward_batch
from dryfit.train.rehearsal.subjects import step_parts
from parts import need_package

ON_CPU = {name: replace(row, cuda_only=False) for name, row in WEIGHT_FORMATS.items()}
"""The formats, as if each were allowed on a CPU: bitsandbytes computes there too."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes", "ignore::DeprecationWarning:bitsandbytes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decoders")
    return {name: tiny_lms.causal_lm(root / name, name) for name in ("qwen2", "llama")}


def loaded(folder: Path, lora: LoraSettings, *, seed: int = 1) -> tuple[CausalLmTask, CausalLm, LoadReport]:
    settings = TrialSettings(
        model=ModelSettings(name=str(folder)), train=TrainSettings(precision=Precision.BF16), lora=lora
    )
    task = CausalLmTask(TaskContext(settings, DataSettings(), TokenFacts(pad_id=1)))

    def make(source: Any, kind: Kind, *, part: str = "", frozen: WeightFormat | None = None) -> Any:
        model = empty_stack(source, kind, RegularizationSettings())
        fill_frozen(model, source, kind, frozen and ON_CPU[frozen.name], LoadOptions(torch.device("cpu")))
        return model

    model = task.model(make, seed=seed)
    return task, model, materialise(model, missing=model.drawn)


def by_transformers(folder: Path, base: WeightFormat) -> Any:
    """The base as transformers loads it, which quantises by itself."""
    how = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)} if base.name is BaseFormat.INT8 else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[base.compute], device_map="cpu", **how).eval()


def batch(*, rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 300, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("base", list(BaseFormat))
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_adapters_are_in_fp32_beside_a_base_of_any_format(
    folders: dict[str, Path], architecture: str, base: BaseFormat
) -> None:
    folder = folders[architecture]
    _, model, report = loaded(folder, LoraSettings(r=4, base=base))
    formats = {name: weight.dtype for name, weight in model.named_parameters()}
    wanted = DTYPES[WEIGHT_FORMATS[base].compute]
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {formats[name] for name in learned} == {torch.float32}
    frozen = {dtype for name, dtype in formats.items() if name not in learned}
    assert frozen == {wanted, *([torch.int8] if base is BaseFormat.INT8 else [])}
    assert learned == {name for name in formats if "lora_" in name}
    assert set(report.random) == {name for name in formats if "lora_A" in name}
    # B is zero: the model begins as its base, which is the file's.
    plain = by_transformers(folder, WEIGHT_FORMATS[base])
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
@pytest.mark.parametrize("base", list(BaseFormat))
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
    source, int8 = ModelSettings(name=str(folders["qwen2"])), WEIGHT_FORMATS[BaseFormat.INT8]
    with pytest.raises(MachineError, match="the device is cpu"):
        load_frozen(source, Kind.CAUSAL_LM, int8, device="cpu")
    monkeypatch.setattr(frozen_weights, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="bitsandbytes is not installed"):
        load_frozen(source, Kind.CAUSAL_LM, int8, device="cuda")


def test_the_memory_of_an_int8_base_is_unknown(folders: dict[str, Path]) -> None:
    lora = LoraSettings(base=BaseFormat.INT8)
    settings = TrialSettings(
        model=ModelSettings(name=str(folders["qwen2"])), train=TrainSettings(precision=Precision.BF16), lora=lora
    )
    subject = PlanSubject(task=BuiltInTask.CAUSAL_LM, settings=settings, lora=lora)
    with pytest.raises(TraceError, match="int8"):
        step_parts(subject, checkpointing=False, reentrant=False)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "mistral", "qwen2"])
def test_an_int8_base_has_the_numbers_that_transformers_gives_it(tmp_path: Path, architecture: str) -> None:
    need_package("bitsandbytes")
    folder = tiny_lms.causal_lm(tmp_path, architecture)
    int8 = ON_CPU[BaseFormat.INT8]
    ours: Any = load_frozen(ModelSettings(name=str(folder)), Kind.CAUSAL_LM, int8, device="cpu")
    plain = by_transformers(folder, int8)
    wanted, found = plain.state_dict(), ours.state_dict()
    assert any(name.endswith(".SCB") for name in wanted)
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    ids = batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_every_weight_of_an_int8_base_is_accounted_for(tmp_path: Path) -> None:
    need_package("bitsandbytes")
    folder = tiny_lms.causal_lm(tmp_path / "model")
    int8, source = ON_CPU[BaseFormat.INT8], ModelSettings(name=str(folder))
    model: Any = load_frozen(source, Kind.CAUSAL_LM, int8, device="cpu")
    report: LoadReport = model.load_report
    assert set(report.from_file) == {name for name, _ in model.named_parameters()}
    assert not report.random
    assert set(report.casts) == {"float32 to float16", "float32 to int8"}
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"missing \(model.layers.1.mlp.up_proj.weight\)"):
        load_frozen(source, Kind.CAUSAL_LM, int8, device="cpu")
