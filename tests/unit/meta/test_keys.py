"""Which key of a file belongs to which place of a module, whatever wrapped the model that was saved."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import dryfit
from dryfit.meta import build, leaks, materialise
from dryfit.meta.keys import map_keys
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, config_of, fresh, llama_config, output, perturb, written
from thinning import examples

WEIGHTS = "model.safetensors"
WRAPPERS = ["module.", "_orig_mod.", "base_model.model.", "base_model."]


BERT = build(lambda: BertForSequenceClassification(bert_config()))


def names_of(module):
    return list(module.state_dict())


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(WRAPPERS), max_size=4), st.booleans(), st.booleans())
def test_every_stack_of_wrappers_is_undone(wrappers, inner, based):
    names = names_of(BERT)
    keys = [name.removeprefix("bert.") if based and "classifier" not in name else name for name in names]
    keys = [key.replace("layer.1.", "layer.1._orig_mod.") if inner else key for key in keys]
    keys = ["".join(wrappers) + key for key in keys]
    found = map_keys(BERT, keys, names, {})
    assert set(found.direct) == set(names) and set(found.direct.values()) == set(keys)
    assert not (found.stray or found.unexpected or found.ignored)
    for name, key in found.direct.items():
        assert key.endswith(name.rpartition(".")[2]) and ("layer.1." in name) == ("layer.1." in key)


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(WRAPPERS), max_size=3), st.data())
def test_half_wrapped_files_and_two_keys_for_one_place(wrappers, data):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names, prefix = names_of(module), "".join(wrappers)
    wrapped = data.draw(st.sets(st.sampled_from(names)))
    keys = [prefix + name if name in wrapped else name for name in names]
    assert map_keys(module, keys, names, {}).direct == dict(zip(names, keys, strict=True))
    if prefix and wrapped:
        twice = data.draw(st.sampled_from(sorted(wrapped)))
        with pytest.raises(LoadError) as caught:
            map_keys(module, [*keys, twice], names, {})
        assert prefix + twice in caught.value.found and f"name {twice}" in caught.value.found


class Wrapped(nn.Module):
    """A module with parts called as the wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.base_model = nn.ModuleDict({"model": nn.Linear(2, 4), "base_layer": nn.Linear(2, 5)})
        self.scale = nn.Parameter(torch.ones(6))


def test_a_module_with_parts_of_those_names(tmp_path):
    reference = perturb(fresh(lambda _: Wrapped(), None))
    save_file(reference.state_dict(), tmp_path / "x.safetensors")
    module = build(Wrapped).eval()
    report = materialise(module, tmp_path / "x.safetensors")
    assert_same(module, reference)
    assert not report.renamed and all(key == name for name, key in report.from_file.items())
    save_file({f"module.{k}": v for k, v in reference.state_dict().items()}, tmp_path / "x.safetensors")
    module = build(Wrapped).eval()
    materialise(module, tmp_path / "x.safetensors")
    assert_same(module, reference)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_wrapped_files_that_are_converted(prefix, tmp_path):
    """Experts in the file's own layout, behind a wrapper's prefix."""
    config = config_of("mixtral", num_key_value_heads=2, num_local_experts=3)
    reference = fresh(AutoModelForCausalLM.from_config, config)
    written(tmp_path, reference)
    state = load_file(tmp_path / WEIGHTS)
    assert any("experts.2.w1" in key for key in state)
    save_file({prefix + key: value for key, value in state.items()}, tmp_path / WEIGHTS)
    assert_same(dryfit.load(tmp_path, task="causal-lm"), reference)
    lost = {key: value for key, value in state.items() if "layers.1.block_sparse_moe.experts.2.w1" not in key}
    save_file(lost, tmp_path / WEIGHTS)
    with pytest.raises(LoadError, match="layers.1.mlp.experts.gate_up_proj"):
        dryfit.load(tmp_path, task="causal-lm")
    key = next(key for key in state if "layers.1.block_sparse_moe.experts.2.w1" in key)
    save_file({**state, key: state[key][:-8].contiguous()}, tmp_path / WEIGHTS)
    with pytest.raises(LoadError, match="layers.1.mlp.experts.gate_up_proj"):
        dryfit.load(tmp_path, task="causal-lm")
    more = {**state, key.replace("experts.2", "experts.3"): state[key].clone()}
    save_file(more, tmp_path / WEIGHTS)
    with pytest.raises(LoadError, match="layers.1.mlp.experts.gate_up_proj"):
        dryfit.load(tmp_path, task="causal-lm")


def test_names_of_old_versions(tmp_path):
    reference = fresh(BertForMaskedLM, bert_config())
    written(tmp_path, reference)
    state = load_file(tmp_path / WEIGHTS)
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in state.items()
    }
    assert old.keys() != state.keys()
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, tmp_path / WEIGHTS)
    plain = BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = dryfit.load(tmp_path, task="masked-lm")
    assert_same(model, plain)
    assert_same(model, reference)
    report = model.load_report
    assert report.from_file["bert.embeddings.LayerNorm.weight"] == "bert.embeddings.LayerNorm.gamma"
    assert "bert.embeddings.position_ids" in report.ignored
    assert sum(report.renamed.values()) == len(old.keys() - state.keys() - {"bert.embeddings.position_ids"})


def test_old_rotary_tables(tmp_path):
    reference = fresh(LlamaForCausalLM, llama_config())
    written(tmp_path, reference)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file({**load_file(tmp_path / WEIGHTS), **tables}, tmp_path / WEIGHTS)
    model = dryfit.load(tmp_path, task="causal-lm")
    assert_same(model, reference)
    assert set(tables) == set(model.load_report.ignored)


@pytest.mark.parametrize(
    "module, saved",
    [
        (BertModel, BertForMaskedLM),
        (BertModel, BertForSequenceClassification),
        (BertForSequenceClassification, BertForMaskedLM),
        (LlamaModel, LlamaForCausalLM),
        (LlamaForCausalLM, LlamaModel),
    ],
)
def test_bases_and_heads(module, saved, tmp_path):
    config = bert_config() if "Bert" in module.__name__ else llama_config()
    whole = fresh(saved, config)
    written(tmp_path, whole)
    model = build(lambda: module(config)).eval()
    missing = ["*pooler*", "classifier.*", "lm_head.*"]
    report = materialise(model, tmp_path, missing=missing)
    plain = module.from_pretrained(tmp_path, dtype=torch.float32)
    new = [name for name in names_of(model) if any(part in name for part in ("pooler", "classifier", "lm_head"))]
    absent = [name for name in new if name not in report.from_file]
    assert_same(model, plain, skip=absent)
    assert set(report.random) == {name for name in absent if name.endswith("weight")}
    assert all(key.startswith(("cls.", "classifier.", "lm_head.")) for key in report.unexpected)


def test_an_encoder_in_the_file_of_an_encoder_and_decoder(tmp_path):
    config = config_of("t5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    whole = fresh(T5ForConditionalGeneration, config)
    written(tmp_path, whole)
    model = build(lambda: T5EncoderModel(config)).eval()
    report = materialise(model, tmp_path)
    assert_same(model, T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float32))
    left = (*report.unexpected, *report.ignored)
    assert left and all(key.startswith(("decoder.", "lm_head.")) for key in left)
    assert torch.equal(output(model), output(whole.get_encoder()))


@pytest.mark.parametrize("task", ["causal-lm"])
def test_a_plain_module_cannot_convert(task, tmp_path):
    """Only a model of transformers knows its file's older layout; around it, the keys have no place: that is said."""
    config = config_of("mixtral", num_key_value_heads=2, num_local_experts=2)
    written(tmp_path, fresh(AutoModelForCausalLM.from_config, config))
    make = partial(AutoModelForCausalLM.from_config, config)
    around = build(lambda: nn.ModuleDict({"body": make()}))
    before = leaks(around)
    with pytest.raises(LoadError, match="missing \\(body.model"):
        materialise(around, tmp_path)
    assert leaks(around) == before
    materialise(around["body"], tmp_path)
    assert_same(around["body"].eval(), dryfit.load(tmp_path, task=task))
