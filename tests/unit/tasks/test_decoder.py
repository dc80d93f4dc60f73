"""Decoders with adapters: where weights come from, in which format, and that each adapter learns."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import tiny_lms
from dryfit.meta.pretrained import DTYPES
from dryfit.settings.choices import BaseFormat, Precision
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import base_format
from dryfit.settings.tables import LoraSettings, TrainSettings
from dryfit.tasks.causal_lm import check_packing
from dryfit.training.model import enable_checkpointing
from dryfit.training.step import backward_batch
from quantised import batch, by_transformers, loaded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes", "ignore::DeprecationWarning:bitsandbytes")


INTEGERS = {BaseFormat.INT8: [torch.int8], BaseFormat.NF4: [torch.uint8]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decoders")
    return {name: tiny_lms.causal_lm(root / name, name) for name in ("qwen2", "llama")}


@pytest.mark.parametrize("base", list(BaseFormat))
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_adapters_are_in_fp32_beside_a_base_of_any_format(
    folders: dict[str, Path], architecture: str, base: BaseFormat
) -> None:
    folder = folders[architecture]
    _, model, report = loaded(folder, LoraSettings(r=4, base=base, dropout=0.0))
    formats = {name: weight.dtype for name, weight in model.named_parameters()}
    format_ = base_format(LoraSettings(base=base), TrainSettings(precision=Precision.BF16))
    wanted = DTYPES[format_.compute]
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {formats[name] for name in learned} == {torch.float32}
    frozen = {dtype for name, dtype in formats.items() if name not in learned}
    assert frozen == {wanted, *INTEGERS.get(base, ())}
    assert learned == {name for name in formats if "lora_" in name}
    assert set(report.random) == {name for name in formats if "lora_A" in name}
    # B is zero: the model begins as its base, which is the file's.
    plain = by_transformers(folder, format_)
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
