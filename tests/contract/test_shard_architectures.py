"""Every architecture, planned from its trace and proved: outputs, gradients and parameters after some steps."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from dryfit.core.errors import ConfigError
from dryfit.core.sharding import ShardPlan
from dryfit.meta import build
from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import prove
from loading import config_of

KV = {"num_key_value_heads": 2}
AUTO: dict[str, Any] = {
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
}
# Task, settings, and what of a layer is cut, without digits.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("masked-lm", {}, 10),
    "roberta": ("masked-lm", {}, 10),
    "electra": ("masked-lm", {"embedding_size": 16}, 10),
    "distilbert": ("masked-lm", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, 10),
    "deberta-v2": (
        "masked-lm",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        14,
    ),
    "modernbert": ("masked-lm", {"cls_token_id": 1, "sep_token_id": 2}, 4),
    "gpt2": ("causal-lm", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, 6),
    "llama": ("causal-lm", {**KV, "tie_word_embeddings": True}, 7),
    "mistral": ("causal-lm", KV, 7),
    "qwen2": ("causal-lm", {**KV, "tie_word_embeddings": True}, 10),
    "gemma2": ("causal-lm", {**KV, "head_dim": 8}, 7),
    "mixtral": ("causal-lm", {**KV, "num_local_experts": 4, "num_experts_per_tok": 2}, 6),
    "t5": ("seq2seq-lm", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, 17),
}


def model_of(name: str, **changes: Any) -> nn.Module:
    task, settings, _ = ARCHITECTURES[name]
    return build(
        lambda: AUTO[task].from_config(config_of(name, **{**settings, **changes}), attn_implementation="eager")
    )


def batch_of(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 64, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if ARCHITECTURES[name][0] == "seq2seq-lm":
        given["decoder_input_ids"] = torch.randint(5, 64, (3, 6), generator=generator)
    return given if ARCHITECTURES[name][0] == "masked-lm" else {**given, "use_cache": False}


def cut_in_layers(plan: ShardPlan) -> set[str]:
    return {name for name, shard in plan.parameters.items() if shard.dim is not None and re.search(r"\.\d+\.", name)}


def proved(module: nn.Module, plan: ShardPlan, name: str) -> None:
    if name == "mixtral":  # grouped products have no fp64 kernel
        module.config._experts_implementation = "eager"  # pyright: ignore
    prove(module, plan, batch_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("words", [False, True], ids=["layers", "words too"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_planned_and_proved_on_two_ranks(name, words):
    module = model_of(name)
    plan = plan_shards(module, 2, tokens=1 if words else 10**6)
    assert len(cut_in_layers(plan)) == 2 * ARCHITECTURES[name][2]
    assert any(row.vocabulary for row in plan.modules.values()) is words
    assert ShardPlan.model_validate_json(plan.model_dump_json()) == plan
    proved(module, plan, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert", "gpt2", "llama", "mixtral", "t5"])
def test_four_ranks_need_four_heads_of_keys(name):
    module = model_of(name)
    if KV.keys() <= ARCHITECTURES[name][1].keys():
        with pytest.raises(ConfigError, match="4 does not divide 2"):
            plan_shards(module, 4, tokens=10**6)
        module = model_of(name, num_key_value_heads=4)
    plan = plan_shards(module, 4, tokens=10**6)
    assert len(cut_in_layers(plan)) == 2 * ARCHITECTURES[name][2]
    proved(module, plan, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_layers_are_cut_as_transformers_own_plan_does(name):
    module = model_of(name)
    theirs: dict[str, str] = module.config.base_model_tp_plan  # pyright: ignore
    plan = plan_shards(module, 2, tokens=10**6)
    dims = {"colwise": 0, "rowwise": 1}
    seen = set()
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and path.startswith("model.layers."):
            style = theirs[re.sub(r"\d+", "*", path.removeprefix("model."))]
            seen.add(style)
            assert plan.parameters[f"{path}.weight"].dim == dims[style], path
    assert seen == set(dims)
