"""Filling modules: every place accounted for exactly once, nothing changed on an error, refills in place."""

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
from dryfit.gpu.slots import slots
from dryfit.meta import build, leaks, materialise
from dryfit.meta.keys import map_keys
from dryfit.meta.reading import ReadMode
from dryfit.settings.check_messages import LoadReport, TensorOrigin
from dryfit.settings.errors import LoadError, MachineError
from loading import assert_same, bert_config, config_of, fresh, llama_config, output, perturb, written
from thinning import examples

SIZES = (1, 2, 3)


class Tree(nn.Module):
    """A module that a plan describes: kinds of tensors, ties, and further modules."""

    def __init__(self, plan):
        super().__init__()
        own, below = plan
        earlier = []
        for index, kind in enumerate(own):
            name, size = f"t{index}", SIZES[index % len(SIZES)]
            match kind:
                case "drawn":
                    setattr(self, name, nn.Parameter(torch.empty(size, 2).normal_()))
                case "constant":
                    setattr(self, name, nn.Parameter(torch.empty(size, 2).fill_(index)))
                case "real":
                    setattr(self, name, nn.Parameter(torch.full((size,), float(index))))
                case "tied":
                    setattr(self, name, earlier[0] if earlier else nn.Parameter(torch.empty(2).zero_()))
                case "buffer":
                    self.register_buffer(name, torch.arange(size + 1.0))
                case "hidden":
                    self.register_buffer(name, torch.arange(size) * index, persistent=False)
                case "looped":
                    table = torch.empty(size)
                    table[:] = index
                    self.register_buffer(name, table, persistent=False)
                case "attribute":
                    setattr(self, name, {"x": [torch.ones(size) * index]})
                case "layer":
                    setattr(self, name, nn.Linear(size, 2))
            if isinstance(getattr(self, name), nn.Parameter):
                earlier.append(getattr(self, name))
        for index, plan in enumerate(below):
            self.add_module(f"m{index}", Tree(plan))


KINDS = st.sampled_from("drawn constant real tied buffer hidden looped attribute layer".split())
LEAVES = st.tuples(st.lists(KINDS, max_size=5), st.just([]))
PLANS = st.recursive(
    LEAVES, lambda inner: st.tuples(st.lists(KINDS, max_size=4), st.lists(inner, max_size=2)), max_leaves=5
)


def saved(folder, module, keep=lambda name: True):
    state = {name: value.clone() for name, value in module.state_dict().items() if keep(name)}
    save_file(state or {"nothing": torch.empty(0)}, folder)
    return state


def assert_covers(report, module):
    named = [*report.from_file, *report.tied, *report.constructed, *report.random]
    assert len(named) == len(set(named))
    assert set(named) == {name for slot in slots(module) for name in slot.names}
    assert set(report.origins()) == set(named)
    assert LoadReport.model_validate_json(report.model_dump_json()) == report
    assert report.summary()


def identities(module):
    """Which tensors a module holds; by number, for whoever holds a weight on meta may be an optimizer."""
    return [(slot.name, id(slot.tensor)) for slot in slots(module)]


def refusal(module, file):
    """The message of an error that changes nothing."""
    before = identities(module)
    with pytest.raises(LoadError) as caught:
        materialise(module, file)
    assert identities(module) == before
    return str(caught.value)


@settings(max_examples=examples(40))
@given(plan=PLANS, lost=st.integers(0, 40))
def test_the_guarantee(plan, lost, tmp_path_factory):
    """Whatever the module: from file, tied, constructed or drawn, each place once; or an error that changes nothing."""
    file = tmp_path_factory.mktemp("x") / "x.safetensors"
    plain = perturb(fresh(lambda _: Tree(plan), None))
    names = list(plain.state_dict())
    gone = names[lost % len(names)] if names and lost < 30 else None
    pointers = {name: value.data_ptr() for name, value in plain.state_dict().items()}
    tied_to = {name for name in names if gone and pointers[name] == pointers[gone]}
    state = saved(file, plain, lambda name: name not in tied_to)
    module = build(partial(Tree, plan)).eval()
    if gone and state:
        message = refusal(module, file)
        assert any(name in message for name in tied_to) and str(file) in message
    if not state:
        report = materialise(module, missing="init")
    else:
        report = materialise(module, file, missing=list(tied_to) if gone else "error")
        assert_same(module, plain, skip=tied_to)
    assert_covers(report, module)
    assert not leaks(module)
    if gone and state:
        allowed = {name for name, origin in report.origins().items() if origin is TensorOrigin.RANDOM}
        assert allowed <= tied_to


@settings(max_examples=examples(100))
@given(plan=PLANS)
def test_refilling_a_real_module_keeps_its_parameters(plan, tmp_path_factory):
    file = tmp_path_factory.mktemp("x") / "x.safetensors"
    trained = perturb(fresh(lambda _: Tree(plan), None))
    if not saved(file, trained):
        return
    module = fresh(lambda _: Tree(plan), None, seed=2).eval()
    held = [(slot.tensor, slot.tensor.data_ptr()) for slot in slots(module)]
    report = materialise(module, file)
    assert_same(module, trained)
    assert_covers(report, module)
    assert [(slot.tensor.data_ptr(), True) for slot in slots(module)] == [
        (pointer, slot.tensor is tensor) for slot, (tensor, pointer) in zip(slots(module), held, strict=True)
    ]


def bert_at(folder, **changes):
    reference = fresh(BertModel, bert_config(**changes))
    return written(folder, reference), reference


def unchanged(module, folder, match, **options):
    before = identities(module)
    with pytest.raises(LoadError, match=match):
        materialise(module, folder, **options)
    assert identities(module) == before
    assert not hasattr(module, "load_report")


def test_errors_change_nothing(tmp_path):
    folder, _ = bert_at(tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    empty, real = build(lambda: BertModel(bert_config())), fresh(BertModel, bert_config())
    values = {name: value.clone() for name, value in real.state_dict().items()}
    key = "encoder.layer.1.output.dense.weight"
    spoilt = {
        "1 missing": {name: value for name, value in state.items() if name != key},
        "of another shape": {**state, key: torch.zeros(3, 4)},
        "of another kind of number": {**state, key: torch.zeros(32, 48, dtype=torch.int64)},
        "without a place": {**state, "encoder.layer.1.output.dense.wait": torch.zeros(3)},
        "both name": {**state, f"module.{key}": state[key].clone()},
    }
    for match, content in spoilt.items():
        save_file(content, file)
        for module in (empty, real):
            unchanged(module, folder, match)
    assert all(torch.equal(value, values[name]) for name, value in real.state_dict().items())
    unchanged(empty, tmp_path / "nowhere", "no such file")
    unchanged(empty, file, "holds no data", device="meta")
    # All that is wrong, at once.
    save_file({**spoilt["of another shape"], "encoder.layer.1.x": torch.ones(1)}, file)
    with pytest.raises(LoadError) as caught:
        materialise(empty, folder)
    assert "1 of another shape" in caught.value.found and "1 without a place" in caught.value.found


def test_parts_first_and_the_whole_later(tmp_path):
    """Reports of parts are merged into that of the whole."""
    folder, reference = bert_at(tmp_path / "bert")
    model = build(lambda: BertForSequenceClassification(bert_config())).eval()
    materialise(model.bert, folder)
    parameter = model.bert.pooler.dense.weight
    report = materialise(model, missing=["classifier.*"])
    assert model.bert.pooler.dense.weight is parameter
    assert_covers(report, model)
    assert report.from_file["bert.pooler.dense.weight"] == "pooler.dense.weight"
    assert report.random == ("classifier.weight",)
    assert_same(model.bert, reference)
    again = materialise(model)
    assert again.origins() == report.origins()
    # Filled with its own file, everything is from there.
    written(tmp_path / "whole", model)
    last = materialise(model, tmp_path / "whole")
    assert not last.random and set(last.from_file) == {name for name, _ in model.named_parameters()}


def test_types(tmp_path):
    folder, reference = bert_at(tmp_path)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = build(lambda: BertModel(bert_config()))
        report = materialise(model, folder, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert {table.dtype for table in model.buffers()} == {torch.int64}
        assert report.casts == {f"float32 to {str(dtype)[6:]}": 39}
        assert all(
            torch.equal(model.state_dict()[name], value.to(dtype)) for name, value in reference.state_dict().items()
        )
    # A real module takes another type in place; its parameters stay the same objects.
    held = list(model.parameters())
    materialise(model, folder, dtype=torch.float32)
    assert all(one is two for one, two in zip(held, model.parameters(), strict=True))
    assert_same(model.eval(), reference)
    mixed = build(partial(Tree, (["buffer", "hidden", "real", "drawn"], [])))
    materialise(mixed, missing="init", dtype=torch.bfloat16)
    kinds = {slot.name: slot.tensor.dtype for slot in slots(mixed)}
    assert kinds == {"t0": torch.float32, "t1": torch.int64, "t2": torch.bfloat16, "t3": torch.bfloat16}


def test_modules_that_want_fp32_keep_it(tmp_path):
    """transformers' own list of weights that lose too much in half precision."""

    class Careful(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ["norm"]  # noqa: RUF012

    reference = fresh(Careful, llama_config())
    written(tmp_path, reference)
    half = Careful.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = build(lambda: Careful(llama_config())).eval()
    materialise(model, tmp_path, dtype=torch.bfloat16)
    assert_same(model, half)
    assert model.model.norm.weight.dtype == torch.float32 and model.lm_head.weight.dtype == torch.bfloat16


def test_flags_and_attributes_of_parameters_stay(tmp_path):
    def make():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[0].weight.requires_grad_(False)
        module[1].weight.note = {"lr": 2}
        return module

    module = build(make)
    save_file(fresh(lambda _: make(), None).state_dict(), tmp_path / "x.safetensors")
    materialise(module, tmp_path / "x.safetensors")
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True]
    assert module[1].weight.note == {"lr": 2} and isinstance(module[1].weight, nn.Parameter)
    assert all(parameter.is_leaf for parameter in module.parameters())


class Looking(nn.Module):
    """A layer with further names for its weight and for parts of it."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Linear(4, 6)
        self.rows = [self.whole.weight, self.whole.weight.data[2:4]]
        self.register_buffer("column", self.whole.weight.data[:, 1], persistent=False)
        self.turned = self.whole.weight.data.t()
        self.register_buffer("bias", self.whole.bias.data, persistent=False)


@pytest.mark.parametrize("source", ["file", "constructor"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_views_go_on_looking_at_their_weight(source, dtype, tmp_path):
    plain = perturb(fresh(lambda _: Looking(), None))
    saved(tmp_path / "x.safetensors", plain)
    module = build(Looking)
    if source == "file":
        report = materialise(module, tmp_path / "x.safetensors", dtype=dtype)
        assert torch.equal(module.whole.weight, plain.whole.weight.to(dtype or torch.float32))
    else:
        report = materialise(module, missing="init", dtype=dtype)
    assert_covers(report, module)
    assert report.tied["turned"] == "whole.weight" and report.tied["rows[1]"] == "whole.weight"
    assert module.rows[0] is module.whole.weight
    with torch.no_grad():
        module.whole.weight.copy_(torch.arange(24.0).view(6, 4))
        module.whole.bias.fill_(7)
    assert module.rows[1].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert module.column.tolist() == [1, 5, 9, 13, 17, 21]
    assert torch.equal(module.turned, module.whole.weight.t()) and module.bias.eq(7).all()


def test_mapped_weights_are_the_file_until_they_are_written_to(tmp_path):
    folder, reference = bert_at(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model = build(lambda: BertModel(bert_config())).eval()
    materialise(model, folder, mode=ReadMode.MAPPED)
    assert_same(model, reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before
    # Private copies in their place, the objects the same.
    held = list(model.parameters())
    materialise(model, folder)
    assert all(one is two for one, two in zip(held, model.parameters(), strict=True))
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())
    assert_same(model, reference)
    # And into those copies once more: what has memory of its own keeps it.
    places = [parameter.data_ptr() for parameter in model.parameters()]
    perturb(model)
    materialise(model, folder)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_same(model, reference)


def test_other_tensors_than_plain_ones_are_refused():
    with pytest.raises(LoadError, match="2 parameters are no plain tensors: 0.weight \\(UninitializedParameter\\)"):
        materialise(build(lambda: nn.Sequential(nn.LazyLinear(3))), missing="init")


def test_a_device_that_is_not_there(tmp_path):
    module = build(lambda: torch.nn.Linear(2, 2))
    with pytest.raises(MachineError, match="filling a Linear"):
        materialise(module, missing="init", device="cuda:77")
    with pytest.raises(LoadError, match="device is meta"):
        materialise(module, missing="init", device="meta")
    assert leaks(module) == ("weight", "bias")


# ---- Which key of a file belongs to which place of a module, whatever wrapped the model that was saved


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
