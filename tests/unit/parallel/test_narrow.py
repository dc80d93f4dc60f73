"""Plans of wide models, proved on narrow ones: right ones pass, wrong ones and other models are refused by name."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

import shard_plans as made
from dryfit.meta import build
from dryfit.parallel import narrow as narrow_module
from dryfit.parallel.capture import Inputs, follow
from dryfit.parallel.graph import Graph
from dryfit.parallel.narrow import Narrowing, WideModel, carried_over, narrow_config, prove_narrowed, prove_on
from dryfit.parallel.prove import proof_bytes, prove
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import ModuleShard, ShardPlan, ShardProof
from shard_mutants import MUTANTS, changed_module

WIDE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 640,
}


Followed = dict[tuple[nn.Module, int, tuple[int, int]], Graph]


@pytest.fixture(scope="module", autouse=True)
def _whole_models_are_followed_once() -> Iterator[None]:
    """What a whole model runs is the same under every plan; a rank's part is followed for each."""
    known: Followed = {}

    def follow_once(module: nn.Module, inputs: Inputs | None, size: tuple[int, int], **of_rank: Any) -> Graph:
        if of_rank:
            return follow(module, inputs, size, **of_rank)
        assert inputs is None
        key = (module, len(list(module.modules())), size)  # layers that repeat are left out meanwhile
        if key not in known:
            known[key] = follow(module, inputs, size)
        return known[key]

    with mock.patch.object(narrow_module, "follow", follow_once):
        yield


@cache
def the_wide_llama() -> nn.Module:
    """One for all plans."""
    return made.on_meta("llama", **WIDE)


def wide_llama(**changes: Any) -> nn.Module:
    return made.on_meta("llama", **{**WIDE, **changes}) if changes else the_wide_llama()


@cache
def the_narrow_one(module: nn.Module) -> nn.Module:
    """One for all plans of a model."""
    return narrower(module)


def narrower(module: nn.Module, step: Narrowing = Narrowing.HEADS, degree: int = 2, **changes: Any) -> nn.Module:
    config: Any = narrow_config(module.config, degree, step)  # pyright: ignore
    for key, value in changes.items():
        setattr(config, key, value)
    make = AutoModelForSequenceClassification if config.model_type == "bert" else AutoModelForCausalLM
    return build(lambda: make.from_config(config))


def proved(module: nn.Module, plan: ShardPlan, narrow: nn.Module | None = None) -> ShardProof:
    return prove_on(WideModel(module, plan), narrow or the_narrow_one(module), made.batch())


@pytest.mark.slow
def test_a_right_plan_is_proved_on_a_narrow_model():
    module = wide_llama(num_hidden_layers=5)
    before = repr(module), module.config.to_dict()  # pyright: ignore

    proof = proved(module, made.llama_plan(module, 2, vocabulary=True))

    assert proof.narrowed == {
        "hidden_size": (256, 128),
        "intermediate_size": (640, 128),
        "num_attention_heads": (16, 4),
        "num_key_value_heads": (16, 4),
        "vocab_size": (2048, 512),
    }
    assert proof.left_out == ("model.layers.2", "model.layers.3", "model.layers.4")
    assert proof.gradient_error < 1e-12
    assert (repr(module), module.config.to_dict()) == before  # pyright: ignore
    assert ShardProof.model_validate_json(proof.model_dump_json()) == proof


@pytest.mark.slow
def test_the_first_step_that_fits_is_taken():
    module = wide_llama()
    plan = made.llama_plan(module, 2)
    wide = WideModel(module, plan)

    def sample(narrow: nn.Module) -> dict[str, torch.Tensor]:
        return made.batch()

    def needed(step: Narrowing) -> int:
        narrow = narrower(module, step)
        return proof_bytes(narrow, carried_over(wide, narrow))

    assert needed(Narrowing.VOCABULARY) > needed(Narrowing.FEATURES) > needed(Narrowing.HEADS)
    with pytest.raises(ShardError, match="to prove"):
        prove(module, plan, made.batch(), most_bytes=needed(Narrowing.VOCABULARY))
    proof = prove_narrowed(wide, lambda step: narrower(module, step), sample, most_bytes=needed(Narrowing.VOCABULARY))
    assert proof.narrowed == {"vocab_size": (2048, 512)}
    with pytest.raises(ShardError, match=r"the narrowest model of its class .* takes about 0\.0 GiB") as caught:
        prove_narrowed(wide, lambda step: narrower(module, step), sample, most_bytes=1 << 20)
    assert "execution.tp" in caught.value.hint


# --- wrong plans -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_plan_of_a_wide_model_is_refused_by_name(mutant: str):
    change, named = MUTANTS[mutant]
    module = wide_llama()
    plan = change(made.llama_plan(module, 2, vocabulary=True))

    # Where a size betrays the plan, that is seen while the wide model is followed.
    with pytest.raises(
        ShardError, match=rf"({named}|(model\.layers\.1|model\.embed_tokens|lm_head|lm head))"
    ) as caught:
        proved(module, plan)

    assert "shards a LlamaForCausalLM" in caught.value.doing or "LlamaForCausalLM is sharded" in caught.value.doing


GPT2: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 16, "n_inner": 512}


@pytest.mark.slow
def test_numbers_of_modules_are_carried_over():
    module = made.on_meta("gpt2", **GPT2)
    plan = made.gpt2_plan(module, 2)

    proof = proved(module, plan)

    assert proof.narrowed["n_embd"] == (256, 64)
    moved = carried_over(WideModel(module, plan), narrower(module))
    assert moved.modules["transformer.h.0.attn"].attributes == {"split_size": 32}
    with pytest.raises(ShardError, match=r"transformer\.h\.0\.attn\.split_size is 64 of 256 on a rank"):
        proved(module, changed_module(plan, "transformer.h.0.attn", attributes={"split_size": 64}))
    with pytest.raises(ShardError, match=r"transformer\.h\.0\.attn"):
        proved(module, changed_module(plan, "transformer.h.0.attn", attributes={"split_size": 256}))


@pytest.mark.slow
def test_heads_that_the_degree_does_not_divide_are_not_hidden():
    module = wide_llama(num_key_value_heads=8, num_attention_heads=16)
    three = wide_llama(hidden_size=384, num_attention_heads=24, num_key_value_heads=3)  # of 16 features each
    rows = made.PlanBuilder(three, 2)
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        rows.modules[path] = ModuleShard(inputs={"hidden_states": made.COPY})
        for name in "qkv":
            rows.column(f"{path}.{name}_proj")
        rows.row(f"{path}.o_proj")

    assert narrower(three).config.num_key_value_heads == 3  # pyright: ignore
    with pytest.raises(ShardError, match="self_attn"):
        proved(three, rows.plan())
    assert proved(module, made.llama_plan(module, 2)).narrowed["num_attention_heads"] == (16, 8)


# --- other models ----------------------------------------------------------------------------------------------------


def with_module(module: nn.Module, path: str, put: nn.Module) -> nn.Module:
    changed = copy.deepcopy(module)
    changed.set_submodule(path, put)
    return changed


OTHERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "the same": (lambda module: build(lambda: AutoModelForCausalLM.from_config(module.config)), "not narrower"),  # pyright: ignore
    "a layer less": (lambda module: narrower(module, num_hidden_layers=1), r"where the wide one has model\.layers\.1"),
    "tied": (
        lambda module: narrower(module, tie_word_embeddings=True),
        r"lm_head\.weight is tied to model\.embed_tokens",
    ),
    "biases": (lambda module: narrower(module, mlp_bias=True), r"has model\.layers\.0\.mlp\.gate_proj\.bias where"),
    "another class": (
        lambda module: with_module(narrower(module), "model.layers.0.mlp.act_fn", nn.GELU()),
        r"model\.layers\.0\.mlp\.act_fn is a GELU, in the wide model a SiLU",
    ),
    "another norm": (
        lambda module: narrower(module, hidden_act="relu"),
        r"model\.layers\.0\.mlp\.act_fn is a ReLU, in the wide model a SiLU",
    ),
    "wider": (
        lambda module: narrower(module, intermediate_size=1024),
        r"mlp\.gate_proj\.weight is \[1024, 128\], in the",
    ),
    "heads that share keys": (lambda module: narrower(module, num_key_value_heads=2), "should run"),
}


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("other", OTHERS)
def test_a_model_that_differs_in_more_than_its_sizes_proves_nothing(other: str):
    change, named = OTHERS[other]
    module = wide_llama()

    with pytest.raises(ShardError, match=named):
        proved(module, made.llama_plan(module, 2), change(module))


class ByWidth(LlamaForCausalLM):
    """Does something else where its stream is wide."""

    def forward(self, **given: Any) -> Any:
        out: Any = super().forward(**given)
        return out.logits.tanh() if self.config.hidden_size > 200 else out.logits.sigmoid()


@pytest.mark.slow
def test_code_that_goes_by_the_width_is_refused():
    config: Any = made.config("llama", **WIDE)
    narrow_one: Any = narrow_config(config, 2, Narrowing.HEADS)
    module, narrow = build(lambda: ByWidth(config)), build(lambda: ByWidth(narrow_one))

    with pytest.raises(ShardError, match="the narrow model runs sigmoid in the model itself where tanh"):
        proved(module, made.llama_plan(module, 2), narrow)


def test_a_plan_of_another_model_is_refused_first():
    module = wide_llama()
    plan = changed_module(made.llama_plan(module, 2), "model.nothing", vocabulary=True)

    with pytest.raises(ShardError, match=r"model\.nothing is no module of it"):
        proved(module, plan)
