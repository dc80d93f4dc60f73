"""Plans: which parameters are sharded how, what happens at the edges, and what is refused, with the reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dryfit.parallel.planner import plan_shards
from dryfit.parallel.prove import prove
from dryfit.settings.errors import ConfigError, TraceError
from dryfit.settings.sharding import Boundary, ShardPlan
from shard_plans import batch, on_meta

COPY, REDUCE, GATHER = Boundary.COPY, Boundary.REDUCE, Boundary.GATHER
FEATURES = 16


def features(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.empty(rows, length, FEATURES, device="meta")}


def planned(module: nn.Module, degree: int = 2) -> ShardPlan:
    return plan_shards(module, degree, inputs=features)


def proved(module: nn.Module, plan: ShardPlan) -> None:
    x = torch.randn(3, 5, FEATURES, generator=torch.Generator().manual_seed(2))
    prove(module, plan, {"x": x})


class Mlp(nn.Module):
    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, inner)
        self.down = nn.Linear(inner, FEATURES)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x)))) + x


class Attention(nn.Module):
    """With a norm of each head, of which there are ``heads`` of width 4."""

    def __init__(self, heads: int = 4, *, say: str = "heads") -> None:
        super().__init__()
        self.heads = heads
        self.say = say
        self.norm = nn.LayerNorm(FEATURES)
        self.qkv = nn.Linear(FEATURES, 3 * heads * 4)
        self.of_head = nn.LayerNorm(4)
        self.out = nn.Linear(heads * 4, FEATURES, bias=False)

    def forward(self, x):
        count = {"heads": self.heads, "constant": 4, "product": self.heads * 4 // 4, "width": -1}[self.say]
        qkv = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(*x.shape[:2], count, 4 if count < 0 else -1).transpose(1, 2) for part in qkv)
        scores = self.of_head(q) @ self.of_head(k).transpose(-1, -2)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(mixed) + x


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_of_two_products():
    module = Mlp()
    plan = planned(module)
    assert (plan.parameters["up.weight"].dim, plan.parameters["up.bias"].dim) == (0, 0)
    assert (plan.parameters["down.weight"].dim, plan.parameters["down.bias"].dim) == (1, None)
    assert plan.modules["up"].inputs == {"input": COPY}
    assert plan.modules["down"].outputs == {"0": REDUCE} and plan.modules["down"].bias_after
    assert not plan.parameters["norm.weight"].sum_gradient
    proved(module, plan)


@pytest.mark.slow
@pytest.mark.parametrize("say", ["heads", "product", "width"])
def test_heads_of_a_fused_projection(say):
    module = Stack(Attention(say=say))
    plan = planned(module)
    fused = plan.parameters["layers.0.qkv.weight"]
    assert (fused.dim, fused.blocks, fused.unit) == (0, (16, 16, 16), 4)
    numbers = {path: row.attributes for path, row in plan.modules.items() if row.attributes}
    assert numbers == ({} if say == "width" else {"layers.0": {"heads": 2}})
    assert plan.parameters["layers.0.of_head.weight"].sum_gradient
    assert plan.parameters["layers.0.of_head.bias"].sum_gradient
    proved(module, plan)


@pytest.mark.slow
def test_heads_that_stand_in_the_code_are_refused_and_the_rest_is_sharded():
    plan = planned(Stack(Attention(say="constant"), Mlp()))
    assert plan.parameters["layers.0.qkv.weight"].dim is None
    assert "a rank's part of layers.0" in plan.whole["layers.0.qkv.weight"]
    assert plan.parameters["layers.1.up.weight"].dim == 0


def test_nothing_but_heads_that_stand_in_the_code():
    with pytest.raises(ConfigError, match="nothing of it can be sharded") as caught:
        planned(Attention(say="constant"))
    assert "qkv.weight: a rank's part of of_head does not run" in str(caught.value)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 24)
        self.down = nn.Linear(24, FEATURES)

    def forward(self, x):
        return self.down(torch.fft.rfft(self.up(x), dim=1).real[:, : x.shape[1] // 2])


@pytest.mark.slow
def test_an_operator_without_a_rule_is_named_with_its_module():
    plan = planned(Stack(Mlp(), Unusual()))
    assert plan.parameters["layers.0.up.weight"].dim == 0
    assert plan.parameters["layers.1.up.weight"].dim is None
    assert "fft" in plan.whole["layers.1.up.weight"] and "layers.1" in plan.whole["layers.1.up.weight"]


def test_a_degree_that_divides_nothing_names_those_that_do():
    with pytest.raises(ConfigError, match="3 does not divide 4, the heads") as caught:
        planned(Stack(Attention(), Mlp(20)), degree=3)
    assert "2, 4" in caught.value.allowed


@pytest.mark.parametrize("degree", [1, 0])
def test_one_rank_shards_nothing(degree):
    with pytest.raises(ConfigError, match=f"{degree} ranks"):
        planned(Mlp(), degree=degree)


class OnlyNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.square = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.norm(x + self.square(x))


def test_a_residual_stream_is_whole():
    with pytest.raises(ConfigError, match="nothing of it can be sharded") as caught:
        planned(OnlyNorms())
    assert "layer_norm in norm needs all of a dimension" in str(caught.value)


class Twice(nn.Module):
    """One projection for two inputs, of which one is whole and one sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 24)
        self.down = nn.Linear(24, FEATURES)
        self.gate = nn.Linear(FEATURES, 24)

    def forward(self, x):
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden) + self.down(F.silu(self.gate(x + 1)) * self.up(x + 1))


@pytest.mark.slow
def test_modules_that_run_twice():
    module = Stack(Mlp(), Twice())
    plan = planned(module)
    assert plan.parameters["layers.1.down.weight"].dim == 1
    proved(module, plan)


@pytest.mark.slow
def test_layers_that_repeat_are_planned_once_and_all_of_them_are_in_the_plan():
    module = Stack(*(layer for _ in range(5) for layer in (Attention(), Mlp())), Mlp(48))
    before = dict(module.named_parameters())
    plan = planned(module)
    assert set(plan.parameters) == set(before)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
    for at in (0, 4, 8):
        assert plan.modules[f"layers.{at}.out"] == plan.modules["layers.0.out"]
        assert plan.parameters[f"layers.{at}.of_head.bias"].sum_gradient
    assert plan.parameters["layers.10.up.weight"].blocks == (48,)
    sums = [path for path, what in plan.modules.items() if REDUCE in what.outputs.values()]
    assert sorted(sums) == sorted(f"layers.{at}.{'out' if at % 2 == 0 and at < 10 else 'down'}" for at in range(11))
    assert sum(row.sum_gradient for row in plan.parameters.values()) == 10
    proved(module, plan)


class Steps(nn.Module):
    """Does something else in long rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x if x.shape[1] < 10 else x.relu())


@pytest.mark.slow
def test_a_model_that_does_something_else_in_long_rows():
    with pytest.raises(ConfigError, match="with more rows it runs relu"):
        planned(Steps())


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x) * float(x.sum().item() > 0 and x.tolist()[0][0][0])


@pytest.mark.slow
def test_code_that_needs_values_is_named():
    with pytest.raises(TraceError, match="torch.export gave up in the model itself"):
        planned(Reads())


@pytest.mark.slow
def test_bert_with_a_table_of_words_that_pays():
    module = on_meta("bert", num_hidden_layers=1)
    plan = plan_shards(module, 4, tokens=1)
    words = plan.modules["bert.embeddings.word_embeddings"]
    assert words.vocabulary and words.outputs == {"0": REDUCE}
    assert plan.parameters["bert.embeddings.word_embeddings.weight"].local_shape(4) == (16, 32)
    assert plan.modules["bert.encoder.layer.0.attention.self"].inputs == {"hidden_states": COPY}
    assert plan.parameters["bert.encoder.layer.0.attention.self.query.weight"].unit == 8
    many = plan_shards(module, 4, tokens=10**6)
    assert many.parameters["bert.embeddings.word_embeddings.weight"].dim is None
    assert "send more" in many.whole["bert.embeddings.word_embeddings.weight"]
    assert ShardPlan.model_validate_json(plan.model_dump_json()) == plan
    prove(module, plan, batch())


@pytest.mark.slow
def test_heads_that_share_keys_and_a_tied_head():
    module = on_meta("llama", num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
    plan = plan_shards(module, 2, tokens=1)
    assert plan.parameters["model.layers.0.self_attn.q_proj.weight"].unit == 16
    assert plan.parameters["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert plan.modules["lm_head"].outputs == {"0": GATHER}
    with pytest.raises(ConfigError, match="4 does not divide 2") as caught:
        plan_shards(module, 4)
    assert caught.value.allowed == "execution.tp of 2" and "key and value heads" in caught.value.hint


def test_what_is_sent():
    plan = planned(Mlp())
    crossing = {path: (list(what.inputs.values()), what.outputs) for path, what in plan.modules.items()}
    assert crossing == {"down": ([], {"0": REDUCE}), "up": ([COPY], {})}
