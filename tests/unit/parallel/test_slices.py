"""A rank's weights from a checkpoint: the right numbers, no byte too many, and the refusals of whole loading."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import reads
import shard_plans as made
from dryfit.core.errors import LoadError, ShardError
from dryfit.core.jobs.load_report import TensorOrigin
from dryfit.core.sharding.shard_plan import ParameterShard, ShardPlan
from dryfit.meta import build, leaks, materialise
from dryfit.meta.construction.walk import slots
from dryfit.parallel.ranks.apply import slice_tensor
from dryfit.parallel.ranks.check import shards_of
from dryfit.parallel.ranks.slices import load
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

    for rank in range(4):
        module = made.on_meta(kind)
        plan = PLANS[kind](module, 4)
        report = load(module, plan, rank, folder)
        assert_slices(module, expected, plan, rank)
    assert set(report.origins()) == {slot.name for slot in slots(expected)}


def test_tied_vocabularies_are_read_once_and_stay_tied(tmp_path: Path):
    folder = saved(tmp_path, "llama", tie_word_embeddings=True)
    expected = whole("llama", folder, tie_word_embeddings=True)
    module = made.on_meta("llama", tie_word_embeddings=True)
    plan = made.llama_plan(module, 2, vocabulary=True)

    report = load(module, plan, 1, folder)

    assert_slices(module, expected, plan, 1)
    assert module.lm_head.weight is module.model.embed_tokens.weight  # pyright: ignore
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_pickled_weights_are_cut_as_well(tmp_path: Path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(made.config("bert"))
    state = model.state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    state[name] = state[name].t().contiguous().t()  # not in row-major order
    torch.save(state, tmp_path / "pytorch_model.bin")
    module = made.on_meta("bert")
    plan = made.bert_plan(module, 2)

    load(module, plan, 1, tmp_path / "pytorch_model.bin")

    assert_slices(module, model.train(), plan, 1)


def test_a_new_head_is_drawn_once_for_all_ranks(tmp_path: Path):
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    drawn = []
    for rank in range(2):
        module = made.on_meta("llama")
        plan = made.llama_plan(module, 2, vocabulary=True)
        report = load(module, plan, rank, None, missing="init")
        assert report.origins()["lm_head.weight"] is TensorOrigin.RANDOM
        drawn.append(module.lm_head.weight.detach())  # pyright: ignore
    expected = made.on_meta("llama")
    materialise(expected, missing="init")

    assert torch.equal(torch.cat(drawn), expected.lm_head.weight)  # pyright: ignore


def test_casts_are_made_after_reading(tmp_path: Path):
    folder = saved(tmp_path, "llama")
    module = made.on_meta("llama")

    report = load(module, made.llama_plan(module, 2), 0, folder, dtype=torch.bfloat16)

    assert report.casts == {"float32 to bfloat16": 21}
    assert module.get_parameter("model.layers.0.mlp.down_proj.weight").dtype is torch.bfloat16


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

    load(module, plan, 2, folder)

    assert planned <= read.all_bytes() <= 1.01 * planned
    assert planned < 0.6 * whole_bytes


@pytest.mark.parametrize("by_expert", [False, True], ids=["features of each expert", "whole experts"])
def test_experts_are_put_together_from_slices(tmp_path: Path, by_expert: bool, read: Reads):
    torch.manual_seed(0)
    saved(tmp_path, "mixtral")
    expected = whole("mixtral", tmp_path)
    module = made.on_meta("mixtral")
    plan = made.mixtral_plan(module, 2)
    if by_expert:
        rows = made.PlanBuilder(module, 2)
        for name in [name for name, row in plan.parameters.items() if row.dim is not None]:
            rows.cut(name, 0)
        plan = rows.plan()
    assert sum(row.dim is not None for row in plan.parameters.values()) == 4
    read.clear()

    report = load(module, plan, 1, tmp_path)

    assert_slices(module, expected, plan, 1)
    assert report.notes == ()
    planned = sum(4 * parameter.numel() for parameter in module.parameters())
    assert read.all_bytes() - (tmp_path / "model.safetensors").stat().st_size + 4 * sum(
        parameter.numel() for parameter in expected.parameters()
    ) == pytest.approx(planned, abs=8)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_missing_weights_are_named_before_anything_is_read(tmp_path: Path, read: Reads):
    folder = saved(tmp_path, "llama", num_hidden_layers=1)
    module = made.on_meta("llama")
    empty = leaks(module)
    header_bytes = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    read.clear()

    with pytest.raises(LoadError, match=r"9 missing \(model\.layers\.1\.") as caught:
        load(module, made.llama_plan(module, 2), 0, folder)

    assert "config.json and the weights belong together" in caught.value.hint
    assert read.all_bytes() == header_bytes
    assert leaks(module) == empty


def test_weights_of_another_size_are_judged_whole(tmp_path: Path):
    folder = saved(tmp_path, "llama", intermediate_size=24)  # as long as a slice would be
    module = made.on_meta("llama")

    with pytest.raises(LoadError, match=r"\[24, 32\] in the file, not \[48, 32\]"):
        load(module, made.llama_plan(module, 2), 0, folder)


def test_a_lost_shard_is_named(tmp_path: Path):
    folder = saved(tmp_path, "llama", shard_bytes=20_000)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    module = made.on_meta("llama")

    with pytest.raises(LoadError, match=f"shards are missing: {last.name}"):
        load(module, made.llama_plan(module, 2), 0, folder)


def test_a_file_cut_short_is_refused(tmp_path: Path):
    folder = saved(tmp_path, "llama")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)
    module = made.on_meta("llama")

    with pytest.raises(LoadError, match="it is cut short"):
        load(module, made.llama_plan(module, 2), 0, folder)


def test_tied_weights_that_differ_in_the_file_are_refused_by_the_rank_that_sees_it(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "llama", tie_word_embeddings=True)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, 0] += 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def attempt(rank: int) -> None:
        module = made.on_meta("llama", tie_word_embeddings=True)
        load(module, made.llama_plan(module, 2, vocabulary=True), rank, folder)

    attempt(0)
    with pytest.raises(LoadError, match="are one weight in the model and differ in the file"):
        attempt(1)


def test_a_view_of_what_is_cut_is_refused(tmp_path: Path):
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4))
            self.first = self.weight[:2].detach()

    torch.save({"weight": torch.ones(8, 4)}, tmp_path / "w.pt")
    module = build(Viewed)
    rows = {"weight": ParameterShard(shape=(8, 4), dim=0, blocks=(8,))}

    with pytest.raises(LoadError, match="1 tensors are views of weights that are not wanted whole: first of weight"):
        load(module, ShardPlan(degree=2, parameters=rows, modules={}), 0, tmp_path / "w.pt")


def test_a_model_is_cut_once(tmp_path: Path):
    folder = saved(tmp_path, "bert")
    module = made.on_meta("bert")
    plan = made.bert_plan(module, 2)
    load(module, plan, 0, folder)

    with pytest.raises(ShardError, match="it is cut already"):
        load(module, plan, 0, folder)
