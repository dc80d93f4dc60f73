"""A trial's model planned and proved for its ranks; too wide a one on a narrower model that its task makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dryfit.parallel.prove import proof_bytes
from dryfit.parallel.proved_plans import PLANS_FOLDER, proved_plan
from dryfit.settings.choices import BuiltInTask, Precision
from dryfit.settings.errors import ShardError
from dryfit.settings.execution import PlanSubject
from dryfit.settings.tables import LoraSettings, ModelSettings, TrainSettings, TrialSettings
from dryfit.training.step_tracer import StepParts, step_parts

MOST_BYTES = 48 << 20
HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8}
STREAM: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 3, "vocab_size": 4096, "intermediate_size": 1280}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 16,
    "type_vocab_size": 0,
}
GPT2: dict[str, Any] = {"n_embd": 512, "n_layer": 3, "n_head": 16, "bos_token_id": 1, "eos_token_id": 4095}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}

# Task, rank of adapters, settings beside STREAM.
MODELS: dict[str, tuple[BuiltInTask, int, dict[str, Any]]] = {
    "bert": (BuiltInTask.CRITERIA, 0, {"num_attention_heads": 16}),
    "qwen2": (BuiltInTask.CAUSAL_LM, 4, {**HEADS, "max_window_layers": 3}),
    "llama": (BuiltInTask.CAUSAL_LM, 0, HEADS),
    "gpt2": (BuiltInTask.CAUSAL_LM, 0, GPT2),
    "mixtral": (BuiltInTask.CAUSAL_LM, 0, {**HEADS, **MIXTRAL}),
    "deberta-v2": (BuiltInTask.EVIDENCE, 0, {**DEBERTA, "num_attention_heads": 16, "pooler_hidden_size": 512}),
}


def trial_of(folder: Path, name: str, precision: Precision = Precision.FP32) -> StepParts:
    task, rank, own = MODELS[name]
    sizes = {key: value for key, value in STREAM.items() if name != "gpt2" or key == "vocab_size"}
    AutoConfig.for_model(name, **{**sizes, **own}).save_pretrained(folder)
    settings = TrialSettings(model=ModelSettings(name=str(folder)), train=TrainSettings(precision=precision))
    lora = LoraSettings(r=rank) if rank else None
    return step_parts(PlanSubject(task=task, settings=settings, lora=lora), checkpointing=False, reentrant=False)


@pytest.mark.slow
@pytest.mark.every(6)
@pytest.mark.parametrize("name", MODELS)
def test_too_wide_a_model_is_proved_on_a_narrower_one(name: str, tmp_path: Path):
    parts = trial_of(tmp_path / "model", name)
    folder = tmp_path / PLANS_FOLDER

    made = proved_plan(parts.model, parts.task, 2, folder, most_bytes=MOST_BYTES)

    assert proof_bytes(parts.model, made.plan) > MOST_BYTES
    assert made.plan.parameters.keys() == dict(parts.model.named_parameters(remove_duplicate=False)).keys()
    assert made.proof.narrowed["vocab_size"] == (4096, 512)
    assert len(made.proof.narrowed) > 1
    assert made.proof.gradient_error < 1e-11
    assert len(made.proof.left_out) == (0 if name == "mixtral" else 1)
    assert proved_plan(parts.model, parts.task, 2, folder, most_bytes=MOST_BYTES) == made  # as it was kept


@pytest.mark.slow
@pytest.mark.nightly
def test_a_base_in_half_precision_is_proved_on_a_narrower_one_with_the_same_casts(tmp_path: Path):
    parts = trial_of(tmp_path / "model", "qwen2", Precision.BF16)
    assert parts.model.pretrained()[""].dtype is torch.bfloat16
    made = proved_plan(parts.model, parts.task, 2, tmp_path / PLANS_FOLDER, most_bytes=MOST_BYTES)
    assert made.proof.narrowed["vocab_size"] == (4096, 512)
    assert made.proof.gradient_error < 1e-11


@pytest.mark.slow
def test_what_fits_is_proved_at_its_own_width(tmp_path: Path):
    parts = trial_of(tmp_path / "model", "bert")

    made = proved_plan(parts.model, parts.task, 2, tmp_path / PLANS_FOLDER)

    assert made.proof.narrowed == {}


@pytest.mark.slow
def test_memory_that_is_not_enough_for_any_model_of_the_class(tmp_path: Path):
    parts = trial_of(tmp_path / "model", "bert")

    with pytest.raises(ShardError, match="the narrowest model of its class") as caught:
        proved_plan(parts.model, parts.task, 2, tmp_path / PLANS_FOLDER, most_bytes=1 << 20)

    assert not (tmp_path / PLANS_FOLDER).exists()
    assert caught.value.allowed == "0.0 GiB"
