"""The prover: right plans pass far within the tolerances, each kind of wrong one is refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shard_plans as made
from dryfit.meta import build, leaks
from dryfit.parallel.prove import prove
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import Boundary, ModuleShard, ShardPlan
from shard_mutants import MUTANTS, changed_module, changed_parameter

PLANS: dict[str, Callable[..., ShardPlan]] = {
    "bert": made.bert_plan,
    "llama": made.llama_plan,
    "gpt2": made.gpt2_plan,
    "mixtral": made.mixtral_plan,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", PLANS)
def test_right_plans_are_proved(kind: str, degree: int):
    module = made.on_meta(kind)
    empty, text = leaks(module), repr(module)

    proof = prove(module, PLANS[kind](module, degree), made.batch())

    assert max(proof.output_error, proof.gradient_error) < 1e-12
    assert proof.parameter_error < 1e-10
    assert proof.parameters == len(list(module.parameters()))
    assert (proof.degree, proof.steps, proof.left_out) == (degree, 3, ())
    assert (leaks(module), repr(module)) == (empty, text)  # the model that was given is as it was


def test_vocabularies_are_sharded_tied_or_not():
    for tied in (False, True):
        module = made.on_meta("llama", tie_word_embeddings=tied)
        assert prove(module, made.llama_plan(module, 2, vocabulary=True), made.batch()).output_error < 1e-12
    bert = made.on_meta("bert")  # whose padding row gets no gradient
    assert prove(bert, made.bert_plan(bert, 4, vocabulary=True), made.batch()).gradient_error < 1e-12


def test_of_many_layers_of_a_kind_two_are_proved():
    module = made.on_meta("llama", num_hidden_layers=5)
    plan = made.llama_plan(module, 2)

    proof = prove(module, plan, made.batch())

    assert proof.left_out == ("model.layers.2", "model.layers.3", "model.layers.4")
    assert prove(module, plan, made.batch(), whole=True).left_out == ()


def test_a_layer_that_is_sharded_otherwise_is_not_left_out():
    module = made.on_meta("llama", num_hidden_layers=5)
    plan = changed_module(made.llama_plan(module, 2), "model.layers.3.mlp.down_proj", outputs={})

    with pytest.raises(ShardError, match=r"model\.layers\.3\.mlp\.down_proj's output is off"):
        prove(module, plan, made.batch())


def test_a_model_that_counts_on_all_its_layers_is_proved_whole():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(4):
                x = self.layers[index](x).tanh()
            return x

    module = build(Counting)
    rows = made.PlanBuilder(module, 2)
    for index in range(4):
        rows.column(f"layers.{index}")
        rows.modules[f"layers.{index}"] = ModuleShard(inputs={"input": Boundary.COPY}, outputs={"0": Boundary.GATHER})

    assert prove(module, rows.plan(), {"x": torch.randn(3, 4)}).left_out == ()


# --- wrong plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_plan_is_refused_by_name(mutant: str):
    change, named = MUTANTS[mutant]
    module = made.on_meta("llama")
    plan = change(made.llama_plan(module, 2, vocabulary=True))

    with pytest.raises(ShardError, match=named) as caught:
        prove(module, plan, made.batch())

    assert caught.value.doing == "proving a plan that shards a LlamaForCausalLM over 2 ranks"


BERT_MUTANTS: dict[str, tuple[Callable[[ShardPlan], ShardPlan], str]] = {
    "a bias on each rank": (
        lambda plan: changed_module(plan, "bert.encoder.layer.0.output.dense", bias_after=False),
        r"bert\.encoder\.layer\.0\.output\.dense's output is off",
    ),
    "a bias that is not sharded": (
        lambda plan: changed_parameter(plan, "bert.encoder.layer.0.attention.self.query.bias", dim=None, blocks=()),
        r"bert\.encoder\.layer\.0\.attention\.self\.query fails",
    ),
}


@pytest.mark.parametrize("mutant", BERT_MUTANTS)
def test_a_wrong_plan_of_a_model_with_biases_is_refused_by_name(mutant: str):
    change, named = BERT_MUTANTS[mutant]
    module = made.on_meta("bert")

    with pytest.raises(ShardError, match=named):
        prove(module, change(made.bert_plan(module, 2)), made.batch())


def test_a_fused_weight_sharded_in_one_block_is_refused():
    module = made.on_meta("gpt2")
    plan = made.gpt2_plan(module, 2)
    for name in ("weight", "bias"):
        plan = changed_parameter(plan, f"transformer.h.0.attn.c_attn.{name}", blocks=(96,))

    with pytest.raises(ShardError, match=r"transformer\.h\.0\.attn\.c_proj's output is off"):
        prove(module, plan, made.batch())


def test_weights_of_experts_need_their_gradients_summed_too():
    module = made.on_meta("mixtral")
    path = next(path for path, part in module.named_modules() if type(part).__name__ == "MixtralExperts")
    plan = changed_module(made.mixtral_plan(module, 2), path, inputs={"hidden_states": Boundary.COPY})

    with pytest.raises(ShardError, match=rf"the gradient of {path.removesuffix('experts')}gate\.weight is off"):
        prove(module, plan, made.batch())


class PerHeadNorm(nn.Module):
    """A weight that all heads share, on what each rank has other heads of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).unflatten(-1, (-1, 4))
        return self.down((heads.tanh() * self.scale).flatten(-2))


def per_head_plan(module: nn.Module, *, summed: bool) -> ShardPlan:
    rows = made.PlanBuilder(module, 2)
    rows.column("up", unit=4)
    rows.modules["up"] = ModuleShard(inputs={"input": Boundary.COPY})
    rows.row("down", unit=4)
    return changed_parameter(rows.plan(), "scale", sum_gradient=summed)


def test_a_whole_parameter_inside_a_region_needs_its_gradient_summed():
    module = build(PerHeadNorm)
    inputs = {"x": torch.randn(5, 8)}

    assert prove(module, per_head_plan(module, summed=True), inputs).gradient_error < 1e-12
    with pytest.raises(ShardError, match="the gradient of scale is off"):
        prove(module, per_head_plan(module, summed=False), inputs)


# --- what cannot be proved --------------------------------------------------------------------------------------------


def test_a_proof_that_takes_too_much_memory_is_refused_with_numbers():
    module = made.on_meta("bert")

    with pytest.raises(ShardError, match=r"parameters take about 0\.0 GiB to prove") as caught:
        prove(module, made.bert_plan(module, 2), made.batch(), most_bytes=1 << 20)

    assert "narrower model" in caught.value.hint


def test_inputs_that_the_whole_model_cannot_take_are_named():
    module = made.on_meta("bert")

    with pytest.raises(ShardError, match=r"the whole model fails \(index out of range"):
        prove(module, made.bert_plan(module, 2), {"input_ids": torch.full((2, 3), 10_000)})


def test_a_model_without_gradients_proves_nothing():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.detach() * x

    module = build(Table)
    plan = made.PlanBuilder(module, 2).plan()

    with pytest.raises(ShardError, match="no parameter gets a gradient|fails"):
        prove(module, plan, {"x": torch.ones(4)})


class _WithAnOutputOfItsOwn(nn.Module):
    """A parameter is one of its outputs, as learned weights of losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features, and the scales for each row."""
        return self.second(torch.relu(self.first(x))), self.scales.expand(len(x), 2)


def test_an_output_that_is_a_parameter_is_compared_as_it_was():
    module = build(_WithAnOutputOfItsOwn)
    plan = made.PlanBuilder(module, 2)
    plan.column("first")
    plan.row("second")
    proof = prove(module, plan.plan(), {"x": torch.randn(3, 8)})
    assert max(proof.output_error, proof.gradient_error, proof.parameter_error) < 1e-10
