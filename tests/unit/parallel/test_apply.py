"""One rank's module: what it holds, what it says of itself, and that it trains as the whole does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shard_plans as made
from dryfit.meta import materialise
from dryfit.parallel.apply import apply, connect, shard
from dryfit.parallel.collectives import AbsentRanks, SimulatedRanks, simulate
from dryfit.settings.errors import ShardError
from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan

GOOD = {"shape": (32, 32), "dim": 0, "blocks": (32,)}


def real(kind: str, **changes: Any) -> Any:
    module = made.on_meta(kind, **changes)
    materialise(module, missing="init")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double()


def test_a_rank_holds_its_slices_and_says_so():
    module = real("bert")
    plan = made.bert_plan(module, 2)
    whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    parts = [apply(copy.deepcopy(module), plan, AbsentRanks(rank, 2)) for rank in range(2)]

    dims = {name: row.dim for name, row in plan.parameters.items()}
    for name, expected in whole.items():
        held = [part.get_parameter(name) for part in parts]
        joined = held[0] if dims[name] is None else torch.cat(held, dims[name])
        assert torch.equal(joined, expected), name
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in held)  # none keeps the whole alive
    linear = parts[0].get_submodule("bert.encoder.layer.0.output.dense")
    assert (linear.in_features, linear.out_features) == (24, 32)
    assert isinstance(linear, nn.Linear)


def test_flags_attributes_and_ties_stay():
    module = real("llama", tie_word_embeddings=True)
    module.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    module.model.embed_tokens.weight.note = "kept"

    plan = made.llama_plan(module, 4, vocabulary=True)
    part = apply(module, plan, AbsentRanks(1, 4))

    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert part.model.embed_tokens.weight.note == "kept"
    assert not part.model.layers[0].mlp.up_proj.weight.requires_grad
    assert part.model.embed_tokens.num_embeddings == 16


def test_fused_weights_are_sharded_in_each_block_and_numbers_are_told():
    module = real("gpt2")
    whole = module.transformer.h[0].attn.c_attn.weight.detach().clone()

    part = apply(module, made.gpt2_plan(module, 2), AbsentRanks(1, 2)).transformer.h[0].attn

    expected = torch.cat([whole[:, begin + 16 : begin + 32] for begin in (0, 32, 64)], 1)
    assert torch.equal(part.c_attn.weight, expected)
    assert (part.c_attn.nf, part.split_size) == (48, 16)


def test_a_rank_alone_shows_shapes():
    module = real("llama")
    part = apply(module, made.llama_plan(module, 2, vocabulary=True), AbsentRanks(0, 2))

    assert tuple(part(**made.batch()).logits.shape) == (3, 7, 64)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_training_with_checkpointing_and_accumulation_equals_the_whole(kind: str, reentrant: bool | None):
    module = real(kind)
    plan = getattr(made, f"{kind}_plan")(module, 2)
    batches = [made.batch(seed=seed) for seed in range(2)]
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.train()
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for batch in batches:
            model(**batch).logits.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    copies = [copy.deepcopy(module) for _ in range(2)]
    expected = gradients(module)
    found = simulate(2, lambda ranks: gradients(apply(copies[ranks.rank], plan, ranks)))

    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, whole in expected.items():
        dim = plan.parameters[name].dim
        joined = [rank[name] for rank in found] if dim is None else [torch.cat([rank[name] for rank in found], dim)]
        for one in joined:
            assert torch.allclose(one, whole, rtol=0, atol=1e-7 * largest), name  # norms round to fp32 inside


def test_gradients_of_whole_parameters_are_summed_once_for_each_backward_pass():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    plan = ShardPlan(degree=2, parameters={"scale": ParameterShard(shape=(3,), sum_gradient=True)}, modules={})
    data = torch.randn(2, 2, 3, dtype=torch.float64)  # rank, pass

    def work(ranks: SimulatedRanks) -> torch.Tensor:
        module = apply(Scaled(), plan, ranks)
        for one in data[ranks.rank]:
            module(one).sum().backward()
        assert module.scale.grad is not None
        return module.scale.grad

    assert all(torch.allclose(found, data.sum((0, 1)), rtol=0, atol=1e-14) for found in simulate(2, work))


@pytest.mark.parametrize("named", ["hidden_states", "0"])
def test_inputs_are_found_however_they_are_passed(named: str):
    class Inner(nn.Module):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            return args[0] if args else kwargs["hidden_states"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if named == "0" else self.inner(hidden_states=x)

    plan = ShardPlan(degree=2, parameters={}, modules={"inner": ModuleShard(inputs={named: Boundary.COPY})})

    def gradient(ranks: SimulatedRanks) -> torch.Tensor | None:
        x = torch.arange(4.0, requires_grad=True)
        apply(Outer(), plan, ranks)(x).sum().backward()
        return x.grad

    assert [one.tolist() for one in simulate(2, gradient) if one is not None] == [[2.0] * 4] * 2


def linear(**rows: Any) -> ShardPlan:
    weight = ParameterShard(**{**GOOD, **rows.pop("weight", {})})
    parameters = {"0.weight": weight, "0.bias": ParameterShard(shape=(32,)), **rows.pop("more", {})}
    for name in rows.pop("without", ()):
        del parameters[name]
    return ShardPlan(degree=2, parameters=parameters, modules={"0": ModuleShard(), **rows.pop("modules", {})})


WRONG: dict[str, tuple[Callable[[], ShardPlan], str]] = {
    "a parameter without a row": (lambda: linear(without=("0.bias",)), "0.bias has no row"),
    "a row too many": (
        lambda: linear(more={"1.weight": ParameterShard(shape=(2,))}),
        "1.weight is no parameter of it",
    ),
    "another shape": (lambda: linear(weight={"shape": (32, 8)}), r"0.weight is \[32, 32\], its row says \[32, 8\]"),
    "sharded and summed": (
        lambda: linear(weight={"sum_gradient": True}),
        "0.weight is sharded: its gradients are slices",
    ),
    "no such module": (lambda: linear(modules={"1": ModuleShard()}), "1 is no module of it"),
    "no such number": (
        lambda: linear(modules={"0": ModuleShard(attributes={"heads": 2})}),
        "0: it has no number called heads",
    ),
    "no vocabulary": (lambda: linear(modules={"0": ModuleShard(vocabulary=True)}), "a Linear has no vocabulary"),
    "a bias after no sum": (
        lambda: linear(modules={"0": ModuleShard(bias_after=True)}),
        "a bias after the sum needs its output summed",
    ),
    "no bias to add": (
        lambda: linear(modules={"": ModuleShard(bias_after=True, outputs={"0": Boundary.REDUCE})}),
        "a Sequential cannot leave its bias for later",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_of_another_module_is_refused_before_anything_changes(wrong: str):
    make, named = WRONG[wrong]
    module = nn.Sequential(nn.Linear(32, 32))

    with pytest.raises(ShardError, match=named):
        apply(module, make(), AbsentRanks(0, 2))

    assert tuple(module[0].weight.shape) == (32, 32)


def test_tied_parameters_are_sharded_alike_or_not_at_all():
    module = made.on_meta("llama", tie_word_embeddings=True)
    plan = made.llama_plan(module, 2, vocabulary=True)
    rows = {**plan.parameters, "lm_head.weight": ParameterShard(shape=(64, 32), dim=1, blocks=(32,))}

    with pytest.raises(ShardError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight and sharded"):
        apply(module, plan.model_copy(update={"parameters": rows}), AbsentRanks(0, 2))


def test_an_unknown_input_is_named_with_those_there_are():
    plan = linear(modules={"0": ModuleShard(inputs={"hidden": Boundary.COPY})})

    with pytest.raises(ShardError, match=r"connecting 0: 'hidden' is none of its inputs") as caught:
        apply(nn.Sequential(nn.Linear(32, 32)), plan, AbsentRanks(0, 2))

    assert caught.value.allowed == "input"


def test_what_is_no_activation_cannot_cross():
    bias = ParameterShard(shape=(32,), dim=0, blocks=(32,))
    plan = linear(modules={"0": ModuleShard(outputs={"1": Boundary.REDUCE})}, more={"0.bias": bias})
    part = apply(nn.Sequential(nn.Linear(32, 32)), plan, AbsentRanks(0, 2))

    with pytest.raises(ShardError, match="running 0 on rank 0: it has no output 1: Tensor"):
        part(torch.ones(1, 32))


def test_a_module_is_sharded_once_and_connected_to_its_own_ranks():
    module = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ShardError, match="the module is not sharded, the plan is for 2 ranks"):
        connect(module, linear(), AbsentRanks(0, 2))

    shard(module, linear(), 0)

    with pytest.raises(ShardError, match="it is sharded already"):
        shard(module, linear(), 0)
    with pytest.raises(ShardError, match="connecting rank 1 of 2: the module is sharded as rank 0 of 2"):
        connect(module, linear(), AbsentRanks(1, 2))
    module[0].weight.data = torch.ones(32, 32)
    with pytest.raises(ShardError, match=r"0\.weight is \[32, 32\], a slice is \[16, 32\]"):
        connect(module, linear(), AbsentRanks(0, 2))


def test_tables_that_need_every_row_are_refused():
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    rows = {"0.weight": ParameterShard(shape=(8, 4), dim=0, blocks=(8,))}
    plan = ShardPlan(degree=2, parameters=rows, modules={"0": ModuleShard(vocabulary=True)})

    with pytest.raises(ShardError, match="max_norm, scale_grad_by_freq and sparse need the whole table"):
        apply(module, plan, AbsentRanks(0, 2))
