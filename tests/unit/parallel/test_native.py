"""Plans in transformers' words, what it makes of them, and those it has none for."""

from collections.abc import Callable

import pytest
from torch import nn

import shard_plans as made
from dryfit.core.sharding.shard_plan import Boundary, ModuleShard, ShardPlan
from dryfit.parallel.proof.prove import prove
from dryfit.parallel.ranks.native import as_run_natively, native_plan

ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
LAYERS = {f"{ATTENTION}.{name}_proj": "colwise" for name in "qkv"} | {
    f"{ATTENTION}.o_proj": "rowwise",
    f"{MLP}.gate_proj": "colwise",
    f"{MLP}.up_proj": "colwise",
    f"{MLP}.down_proj": "rowwise",
}


@pytest.mark.parametrize("vocabulary", [False, True])
def test_llama_is_said_as_it_ships_and_what_is_run_is_proved(vocabulary: bool):
    module = made.on_meta("llama")
    plan = made.llama_plan(module, 2, vocabulary=vocabulary)

    said = native_plan(plan)
    run = as_run_natively(plan)

    ends = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"} if vocabulary else {}
    assert said == LAYERS | ends
    assert run is not None
    assert run.modules["model.layers.0.mlp.up_proj"].inputs == {"input": Boundary.COPY}
    assert "model.layers.0.mlp" not in run.modules
    assert prove(module, run, made.batch()).gradient_error < 1e-12


def test_a_model_that_ships_no_plan_gets_one():
    module = made.on_meta("bert")
    plan = made.bert_plan(module, 4)

    said = native_plan(plan)

    assert said == {
        f"bert.encoder.layer.*.{name}": style
        for name, style in {
            "attention.self.query": "colwise",
            "attention.self.key": "colwise",
            "attention.self.value": "colwise",
            "attention.output.dense": "rowwise",
            "intermediate.dense": "colwise",
            "output.dense": "rowwise",
        }.items()
    }
    run = as_run_natively(plan)
    assert run is not None
    assert prove(module, run, made.batch()).gradient_error < 1e-12


def test_what_the_class_would_cut_and_the_plan_does_not_is_said_to_be_whole():
    plan = made.llama_plan(made.on_meta("llama"), 2)

    said = native_plan(plan, ["lm_head", f"{MLP}.up_proj"])

    assert said == LAYERS | {"lm_head": "replicate"}


def other_layer(plan: ShardPlan) -> ShardPlan:
    whole = plan.parameters["model.layers.1.mlp.up_proj.weight"].model_copy(update={"dim": None, "blocks": ()})
    return plan.model_copy(update={"parameters": {**plan.parameters, "model.layers.1.mlp.up_proj.weight": whole}})


def row(path: str, **changes: object) -> Callable[[ShardPlan], ShardPlan]:
    def change(plan: ShardPlan) -> ShardPlan:
        changed = plan.modules.get(path, ModuleShard()).model_copy(update=changes)
        return plan.model_copy(update={"modules": {**plan.modules, path: changed}})

    return change


def parameter(name: str, **changes: object) -> Callable[[ShardPlan], ShardPlan]:
    def change(plan: ShardPlan) -> ShardPlan:
        changed = plan.parameters[name].model_copy(update=changes)
        return plan.model_copy(update={"parameters": {**plan.parameters, name: changed}})

    return change


NO_WORDS: dict[str, Callable[[ShardPlan], ShardPlan]] = {
    "another layer": other_layer,
    "numbers": row("model.layers.0.self_attn", attributes={"head_dim": 8}),
    "a sum around a module": row("model.layers.0.mlp", outputs={"0": Boundary.REDUCE}),
    "a split before a column": row("model.layers.0.mlp.up_proj", inputs={"input": Boundary.SPLIT}),
    "rows that are put together": row("model.layers.0.mlp.down_proj", outputs={"0": Boundary.GATHER}),
    "another dimension": row("lm_head", dim=-2),
    "summed gradients": parameter("model.norm.weight", sum_gradient=True),
    "three blocks": parameter("model.layers.0.mlp.up_proj.weight", blocks=(16, 16, 16)),
    "blocks of rows": parameter("model.layers.0.mlp.down_proj.weight", blocks=(24, 24)),
    "a tie": parameter("lm_head.weight", tied_to="model.embed_tokens.weight"),
}


@pytest.mark.parametrize("what", NO_WORDS)
def test_what_transformers_has_no_words_for(what: str):
    plan = NO_WORDS[what](made.llama_plan(made.on_meta("llama"), 2, vocabulary=True))

    assert native_plan(plan) is None
    assert as_run_natively(plan) is None


def test_transposed_weights_have_no_words():
    module: nn.Module = made.on_meta("gpt2")

    assert native_plan(made.gpt2_plan(module, 2)) is None
