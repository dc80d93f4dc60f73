"""A rank's weights from a checkpoint, as trials load them: the right numbers, no byte too many, the same refusals."""

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
from dryfit.parallel.apply import shards_of, slice_tensor
from dryfit.parallel.layout import ModelRecipe, empty_model, filled_slices
from dryfit.settings.check_messages import TensorOrigin
from dryfit.settings.errors import LoadError
from dryfit.settings.sharding import ShardPlan
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
