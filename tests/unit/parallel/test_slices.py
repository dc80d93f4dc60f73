"""A rank's weights from a checkpoint, as trials load them: the right numbers, no byte too many, the same refusals."""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import reads
import shard_plans as made
from dryfit.gpu.slots import slots
from dryfit.meta import build, leaks, materialise
from dryfit.meta.checkpoint_files import open_checkpoint
from dryfit.meta.filling import fill
from dryfit.meta.keys import StoredSlice
from dryfit.meta.matching import LoadOptions
from dryfit.meta.pretrained import Kind
from dryfit.parallel.apply import apply, connect, shard, shards_of, slice_tensor
from dryfit.parallel.collectives import AbsentRanks, SimulatedRanks, simulate
from dryfit.parallel.layout import ModelRecipe, empty_model, filled_slices
from dryfit.settings.check_messages import TensorOrigin
from dryfit.settings.errors import LoadError, ShardError
from dryfit.settings.sharding import Boundary, ModuleShard, ParameterShard, ShardPlan
from dryfit.settings.tables import HeadSettings, ModelSettings, RegularizationSettings
from dryfit.tasks.base import MakeBase, TaskModel
from dryfit.tasks.heads import EncoderWithHead, HeadSpec
from rank_loading import LoadedRank
from reads import Reads

PLANS: dict[str, Callable[..., ShardPlan]] = {
    "bert": made.bert_plan,
    "llama": made.llama_plan,
    "gpt2": made.gpt2_plan,
}


def saved(folder: Path, kind: str, *, shard_bytes: int | None = None, **changes: Any) -> Path:
    make = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = make.from_config(made.config(kind, **changes))
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    return folder


def whole(kind: str, folder: Path, **changes: Any) -> nn.Module:
    module = made.on_meta(kind, **changes)
    materialise(module, folder)
    return module


def assert_slices(module: nn.Module, expected: nn.Module, plan: ShardPlan, rank: int) -> None:
    shards = shards_of(expected, plan)
    held = {slot.name: slot.tensor for slot in slots(module)}
    assert leaks(module) == ()
    for slot in slots(expected):
        local = slot.tensor.detach()
        if slot.name in shards:
            local = slice_tensor(local, shards[slot.name], rank, plan.degree)
        assert torch.equal(held[slot.name], local), slot.name
        assert held[slot.name].requires_grad == slot.tensor.requires_grad


@pytest.mark.parametrize("shard_bytes", [None, 20_000], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", PLANS)
def test_each_rank_gets_its_slices(tmp_path: Path, kind: str, shard_bytes: int | None):
    folder = saved(tmp_path, kind, shard_bytes=shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_bytes is not None)
    expected = whole(kind, folder)

    plan = PLANS[kind](expected, 4)
    for rank in range(4):
        part = LoadedRank(lambda: made.on_meta(kind), plan, folder, rank)
        assert_slices(part.module, expected, plan, rank)
    assert set(part.report.origins()) == {f"inner.{slot.name}" for slot in slots(expected)}


def test_tied_vocabularies_are_read_once_and_stay_tied(tmp_path: Path):
    folder = saved(tmp_path, "llama", tie_word_embeddings=True)
    expected = whole("llama", folder, tie_word_embeddings=True)
    plan = made.llama_plan(expected, 2, vocabulary=True)

    part = LoadedRank(lambda: made.on_meta("llama", tie_word_embeddings=True), plan, folder, 1)

    assert_slices(part.module, expected, plan, 1)
    assert part.module.lm_head.weight is part.module.model.embed_tokens.weight
    assert part.report.tied == {"inner.lm_head.weight": "inner.model.embed_tokens.weight"}


def test_pickled_weights_are_sharded_as_well(tmp_path: Path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(made.config("bert"))
    state = model.state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    state[name] = state[name].t().contiguous().t()  # not in row-major order
    torch.save(state, tmp_path / "pytorch_model.bin")
    plan = made.bert_plan(model, 2)

    part = LoadedRank(lambda: made.on_meta("bert"), plan, tmp_path, 1)

    assert_slices(part.module, model.train(), plan, 1)


def test_a_new_head_is_drawn_once_for_all_ranks(tmp_path: Path):
    AutoModel.from_config(made.config("bert")).save_pretrained(tmp_path)
    source = ModelSettings(name=str(tmp_path))

    def make(base: MakeBase) -> TaskModel:
        encoder = base(source, Kind.ENCODER)
        return build(lambda: EncoderWithHead(encoder, HeadSpec(HeadSettings(), 8)), seed=5)

    recipe = ModelRecipe(make, RegularizationSettings(), "cpu")
    whole = empty_model(recipe)
    name = next(name for name, one in whole.head.named_parameters() if one.ndim == 2)  # pyright: ignore
    drawn = []
    for rank in range(2):
        parts = {f"head.{name}": StoredSlice(0, ((4 * rank, 4 * rank + 4),))}
        model, report = filled_slices(recipe, whole, parts)
        assert report.origins()[f"head.{name}"] is TensorOrigin.RANDOM
        drawn.append(model.get_parameter(f"head.{name}").detach())
    expected, _ = filled_slices(recipe, whole, {})

    assert torch.equal(torch.cat(drawn), expected.get_parameter(f"head.{name}"))


def test_casts_are_made_after_reading(tmp_path: Path):
    folder = saved(tmp_path, "llama")
    plan = made.llama_plan(made.on_meta("llama"), 2)

    part = LoadedRank(lambda: made.on_meta("llama"), plan, folder, 0, dtype=torch.bfloat16)

    assert part.module.get_parameter("model.layers.0.mlp.down_proj.weight").dtype is torch.bfloat16


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def read() -> Iterator[Reads]:
    with reads.counted() as found:
        yield found


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}


@pytest.mark.parametrize("shard_bytes", [None, 1_000_000], ids=["one file", "several files"])
@pytest.mark.parametrize("kind", PLANS)
def test_a_rank_reads_its_slices_and_hardly_more(tmp_path: Path, kind: str, shard_bytes: int | None, read: Reads):
    folder = saved(tmp_path, kind, shard_bytes=shard_bytes, **WIDE)
    module = made.on_meta(kind, **WIDE)
    plan = PLANS[kind](module, 4)
    planned = sum(4 * torch.Size(plan.parameters[name].local_shape(4)).numel() for name, _ in module.named_parameters())
    whole_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    read.clear()

    LoadedRank(lambda: made.on_meta(kind, **WIDE), plan, folder, 2)

    assert planned <= read.all_bytes() <= 1.01 * planned
    assert planned < 0.6 * whole_bytes


@pytest.mark.parametrize("by_expert", [False, True], ids=["features of each expert", "whole experts"])
def test_experts_are_put_together_from_slices(tmp_path: Path, by_expert: bool, read: Reads):
    torch.manual_seed(0)
    saved(tmp_path, "mixtral")
    expected = whole("mixtral", tmp_path)
    plan = made.mixtral_plan(expected, 2)
    if by_expert:
        rows = made.PlanBuilder(expected, 2)
        for name in [name for name, row in plan.parameters.items() if row.dim is not None]:
            rows.shard(name, 0)
        plan = rows.plan()
    assert sum(row.dim is not None for row in plan.parameters.values()) == 4
    read.clear()

    part = LoadedRank(lambda: made.on_meta("mixtral"), plan, tmp_path, 1)

    assert_slices(part.module, expected, plan, 1)
    assert part.report.notes == ()
    planned = sum(4 * parameter.numel() for parameter in part.module.parameters())
    assert read.all_bytes() - (tmp_path / "model.safetensors").stat().st_size + 4 * sum(
        parameter.numel() for parameter in expected.parameters()
    ) == pytest.approx(planned, abs=8)


# --- refusals --------------------------------------------------------------------------------------------------------


def llama_on_rank(folder: Path, rank: int, *, vocabulary: bool = False, **changes: Any) -> LoadedRank:
    plan = made.llama_plan(made.on_meta("llama", **changes), 2, vocabulary=vocabulary)
    return LoadedRank(lambda: made.on_meta("llama", **changes), plan, folder, rank)


def test_missing_weights_are_named_before_anything_is_read(tmp_path: Path, read: Reads):
    folder = saved(tmp_path, "llama", num_hidden_layers=1)
    header_bytes = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    read.clear()

    with pytest.raises(LoadError, match=r"9 missing \(model\.layers\.1\.") as caught:
        llama_on_rank(folder, 0)

    assert "config.json and the weights belong together" in caught.value.hint
    assert read.all_bytes() == header_bytes


def test_weights_of_another_size_are_judged_whole(tmp_path: Path):
    folder = saved(tmp_path, "llama", intermediate_size=24)  # as long as a slice would be

    with pytest.raises(LoadError, match=r"\[24, 32\] in the file, not \[48, 32\]"):
        llama_on_rank(folder, 0)


def test_a_lost_shard_is_named(tmp_path: Path):
    folder = saved(tmp_path, "llama", shard_bytes=20_000)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()

    with pytest.raises(LoadError, match=f"shards are missing: {last.name}"):
        llama_on_rank(folder, 0)


def test_a_file_cut_short_is_refused(tmp_path: Path):
    folder = saved(tmp_path, "llama")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)

    with pytest.raises(LoadError, match="it is cut short"):
        llama_on_rank(folder, 0)


def test_tied_weights_that_differ_in_the_file_are_refused_by_the_rank_that_sees_it(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "llama", tie_word_embeddings=True)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, 0] += 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    llama_on_rank(folder, 0, vocabulary=True, tie_word_embeddings=True)
    with pytest.raises(LoadError, match="are one weight in the model and differ in the file"):
        llama_on_rank(folder, 1, vocabulary=True, tie_word_embeddings=True)


def test_a_view_of_what_is_sharded_is_refused(tmp_path: Path):
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4))
            self.first = self.weight[:2].detach()

    torch.save({"weight": torch.ones(8, 4)}, tmp_path / "w.pt")
    module = build(Viewed)
    options = LoadOptions(torch.device("cpu"), parts={"weight": StoredSlice(0, ((0, 4),))})

    with pytest.raises(LoadError, match="1 tensors are views of weights that are not wanted whole: first of weight"):
        fill(module, open_checkpoint(tmp_path / "w.pt"), options)


# ---- a rank's module: what it holds, what it says of itself, and that it trains as the whole does

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
