"""The ways in which models load without a word and are wrong: C10 to C12, C16 to C19 and C23, one test for each.

Each test shows that dryfit is exact or raises, and what the plain libraries do today, so that a repair is seen.
"""

import json
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)

import dryfit
from dryfit.meta import build, leaks, materialise
from dryfit.meta.checkpoint_files import open_checkpoint
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, dirty, fresh, llama_config, output, perturb, tokens, written

WEIGHTS = "model.safetensors"
PT = {"format": "pt"}


@pytest.fixture
def bert(tmp_path):
    """A folder with a BERT, and the same model."""
    reference = fresh(BertModel, bert_config())
    return written(tmp_path / "bert", reference), reference


def rewrite(folder, change):
    """Save the weights of a folder under other keys or with other values."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata=PT)


def test_c10a_an_absent_head(bert):
    folder, _ = bert
    plain = [BertForSequenceClassification.from_pretrained(folder, num_labels=3).eval() for _ in range(2)]
    assert not torch.equal(output(plain[0]), output(plain[1]))
    with pytest.raises(LoadError, match="2 missing \\(classifier.weight, classifier.bias\\)"):
        dryfit.load(folder, task="sequence-classification")
    state = torch.random.get_rng_state()
    ours = [dryfit.load(folder, task="sequence-classification", missing=["classifier.*"]) for _ in range(2)]
    assert_same(*ours)
    assert torch.equal(output(ours[0]), output(ours[1]))
    assert torch.equal(torch.random.get_rng_state(), state)


PREFIXES = [
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "base_model.model.",
    "base_model.",
    "bert.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_c10b_prefixed_keys(bert, prefix):
    folder, reference = bert
    rewrite(folder, lambda state: {prefix + key: value for key, value in state.items()})
    if prefix in ("module.", "_orig_mod."):
        plain = BertModel.from_pretrained(folder, dtype=torch.float32)
        assert not any(map(torch.equal, plain.state_dict().values(), reference.state_dict().values()))
    model = dryfit.meta.build(lambda: BertModel(bert_config())).eval()
    report = materialise(model, folder)
    assert_same(model, reference)
    assert sum(report.renamed.values()) == 39
    assert report.from_file["pooler.dense.bias"] == f"{prefix}pooler.dense.bias"


def test_c10b_prefixed_keys_of_a_tied_model_and_half_of_the_file(tmp_path):
    reference = fresh(LlamaForCausalLM, llama_config(tie_word_embeddings=True))
    written(tmp_path, reference)
    rewrite(tmp_path, lambda state: {"module." + key: value for key, value in state.items()})
    assert_same(dryfit.load(tmp_path, task="causal-lm"), reference)
    rewrite(tmp_path, lambda state: {k.removeprefix("module.") if "layers.1" in k else k: v for k, v in state.items()})
    assert_same(dryfit.load(tmp_path, task="causal-lm"), reference)
    both = load_file(tmp_path / WEIGHTS)
    both["model.norm.weight"] = both["module.model.norm.weight"] + 1
    save_file(both, tmp_path / WEIGHTS, metadata=PT)
    with pytest.raises(LoadError) as caught:
        dryfit.load(tmp_path, task="causal-lm")
    assert "module.model.norm.weight" in caught.value.found and "both name" in caught.value.found


def test_c10c_the_file_of_another_architecture(bert, tmp_path):
    folder, reference = bert
    written(tmp_path / "llama", fresh(LlamaModel, llama_config()))
    (folder / WEIGHTS).write_bytes((tmp_path / "llama" / WEIGHTS).read_bytes())
    plain = BertModel.from_pretrained(folder)
    assert not torch.equal(plain.pooler.dense.weight, reference.pooler.dense.weight)
    with pytest.raises(LoadError, match="missing \\(embeddings.word_embeddings.weight"):
        dryfit.load(folder)
    model = build(lambda: BertModel(bert_config()))
    with pytest.raises(LoadError, match="39 missing"):
        materialise(model, folder)


@pytest.mark.parametrize("layers, found", [(4, "32 missing (encoder.layer.2."), (1, "16 without a place")])
def test_c10c_another_number_of_layers(bert, layers, found):
    folder, _ = bert
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    BertModel.from_pretrained(folder)  # no error
    with pytest.raises(LoadError) as caught:
        dryfit.load(folder)
    assert found in str(caught.value) and "encoder.layer." in str(caught.value)


class OwnConfig(PreTrainedConfig):
    model_type = "dryfit-own"


class Own(PreTrainedModel):
    """A user's model whose tables transformers does not know how to restore."""

    config_class = OwnConfig

    def __init__(self, config, *, plain=False, bare=False):
        super().__init__(config)
        self.line = nn.Linear(4, 4)
        self.register_buffer("two", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        if plain:
            self.scale = torch.tensor([1.0, 2.0, 4.0, 8.0])
            self.more = {"x": [torch.ones(4) * 3]}
        if bare:
            self.gain = nn.Parameter(torch.ones(4))
            self.shift = nn.Parameter(torch.zeros(4))
            self.never = nn.Parameter(torch.empty(4))
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        y = self.line(x) * self.two + self.steps
        return y * self.scale * self.more["x"][0] if hasattr(self, "scale") else y


def test_c11a_tables_of_a_users_model(tmp_path):
    reference = fresh(Own, OwnConfig())
    written(tmp_path, reference)
    dirty()
    plain = [Own.from_pretrained(tmp_path) for _ in range(6)]
    assert any(not torch.equal(model.two, reference.two) for model in plain)
    model = build(lambda: Own(OwnConfig())).eval()
    report = materialise(model, tmp_path)
    assert_same(model, reference)
    assert {"two", "steps"} == set(report.constructed)
    assert torch.equal(output(model, x=torch.ones(1, 4)), output(reference, x=torch.ones(1, 4)))


def test_c11b_plain_tensor_attributes(tmp_path):
    reference = fresh(partial(Own, plain=True), OwnConfig())
    written(tmp_path, reference)
    plain = Own.from_pretrained(tmp_path, plain=True)
    assert plain.scale.is_meta
    assert {"scale", "more['x'][0]"} <= set(leaks(plain))
    model = build(lambda: Own(OwnConfig(), plain=True)).eval()
    assert not model.scale.is_meta
    report = materialise(model, tmp_path)
    assert_same(model, reference)
    assert {"scale", "more['x'][0]"} <= set(report.constructed)
    assert torch.equal(output(model, x=torch.ones(1, 4)), output(reference, x=torch.ones(1, 4)))


def test_c11c_bare_parameters_the_file_lacks(tmp_path):
    written(tmp_path, fresh(Own, OwnConfig()))
    model = build(lambda: Own(OwnConfig(), bare=True)).eval()
    with pytest.raises(LoadError, match="3 missing \\(gain, shift, never\\)"):
        materialise(model, tmp_path)
    with pytest.raises(LoadError, match="1 missing \\(never\\)"):
        materialise(model, tmp_path, missing=["gain", "shift"])
    before = leaks(model)
    # Allowed to be missing, and still nobody has ever said what it is.
    with pytest.raises(LoadError, match="never: .*never wrote"):
        materialise(model, tmp_path, missing="init")
    assert leaks(model) == before
    state = load_file(tmp_path / WEIGHTS)
    save_file({**state, "never": torch.full((4,), 5.0)}, tmp_path / WEIGHTS, metadata=PT)
    report = materialise(model, tmp_path, missing=["gain", "shift"])
    assert torch.equal(model.gain, torch.ones(4)) and torch.equal(model.shift, torch.zeros(4))
    assert torch.equal(model.never, torch.full((4,), 5.0))
    assert {"gain", "shift"} <= set(report.constructed) and not report.random


class Reading(PreTrainedModel):
    """A model whose constructor does what a constructor on meta cannot."""

    config_class = OwnConfig

    def __init__(self, config, what=None, folder=None):
        super().__init__(config)
        rates = torch.arange(3) / 4  # not linspace, which transformers sends to the CPU
        match what:
            case "item":
                self.rates = [rate.item() for rate in rates]
            case "numpy":
                self.rates = rates.numpy().tolist()
            case "branch":
                self.rates = [1.0] if rates.sum() > 0.5 else [0.0]
            case "to":
                self.register_buffer("rates", rates.to("cpu"), persistent=False)
            case "weight":
                self.rates = float(nn.Linear(2, 2).weight.detach().sum() * 0)
            case "load":
                self.rates = torch.load(folder, weights_only=True)["rates"]
        self.line = nn.Linear(4, 4)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        return self.line(x)


@pytest.mark.parametrize("what", ["item", "numpy", "branch", "to", "weight", "load"])
def test_c12_constructors_that_read_values(what, tmp_path):
    torch.save({"rates": torch.tensor([1.0, 2.0])}, tmp_path / "rates.pt")
    reference = fresh(partial(Reading, what=what, folder=tmp_path / "rates.pt"), OwnConfig())
    written(tmp_path, reference)
    model = build(lambda: Reading(OwnConfig(), what, tmp_path / "rates.pt")).eval()
    materialise(model, tmp_path)
    assert_same(model, reference)
    assert torch.equal(torch.as_tensor(model.rates), torch.as_tensor(reference.rates))
    if what in ("item", "numpy", "branch", "weight"):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError), match="meta"):
            Reading.from_pretrained(tmp_path, what=what)


class Around(nn.Module):
    """A model that loads its pretrained part itself."""

    def __init__(self, folder):
        super().__init__()
        self.body = AutoModel.from_pretrained(folder)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids):
        return self.head(self.body(input_ids).last_hidden_state[:, 0])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_c12_a_constructor_that_loads_its_part(kind, tmp_path):
    cls, config = (BertModel, bert_config()) if kind == "bert" else (LlamaModel, llama_config())
    pretrained = fresh(cls, config)
    written(tmp_path / "part", pretrained)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device context"):
        Around(tmp_path / "part")
    trained = perturb(fresh(Around, tmp_path / "part"), seed=8)
    save_file(trained.state_dict(), tmp_path / "whole.safetensors")
    dirty()
    model = build(lambda: Around(tmp_path / "part")).eval()
    materialise(model, tmp_path / "whole.safetensors")
    assert_same(model, trained)
    assert torch.equal(output(model), output(trained))
    # Without a file of its own: the part is what it loaded, the head is drawn.
    new = build(lambda: Around(tmp_path / "part")).eval()
    with pytest.raises(LoadError, match="2 missing \\(head.weight, head.bias\\)"):
        materialise(new)
    report = materialise(new, missing=["head.*"])
    assert_same(new.body, pretrained)
    assert set(report.random) == {"head.weight", "head.bias"}
    overwrite(tmp_path / "part" / WEIGHTS, None)  # C17: what transformers loads is the file itself
    assert_same(new.body, pretrained)


def test_c16_a_pickle_of_meta_tensors(bert):
    folder, _ = bert
    with torch.device("meta"):
        empty = BertModel(bert_config())
    (folder / WEIGHTS).unlink()
    torch.save(empty.state_dict(), folder / "pytorch_model.bin")
    assert torch.load(folder / "pytorch_model.bin", weights_only=True)["pooler.dense.bias"].is_meta
    with pytest.raises(LoadError, match="meta") as caught:
        dryfit.load(folder)
    assert "pytorch_model.bin" in str(caught.value)
    assert "embeddings.word_embeddings.weight" in str(caught.value)


def overwrite(path, change):
    """Write other values into a safetensors file in place, as `cp` does."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(len(data) - start) if change is None else change(data[start:])
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path)


def test_c17_a_file_overwritten_after_loading(bert):
    folder, reference = bert
    plain = BertModel.from_pretrained(folder)
    model = dryfit.meta.build(lambda: BertModel(bert_config())).eval()
    materialise(model, folder)
    mapped = dryfit.load(folder, mapped=True)
    guard = open_checkpoint(folder).guard
    guard.check()
    overwrite(folder / WEIGHTS, None)
    assert not plain.pooler.dense.weight.any()  # the loaded model became the new file
    assert_same(model, reference)
    assert torch.equal(output(model), output(reference))
    assert not mapped.encoder.layer[0].output.dense.weight.any()
    with pytest.raises(LoadError, match="changed since"):
        mapped(tokens())
    with pytest.raises(LoadError, match="changed since"):  # which is what the guard is for
        guard.check()


def test_c18_a_file_cut_short_after_loading(bert):
    folder, reference = bert
    model = dryfit.meta.build(lambda: BertModel(bert_config())).eval()
    materialise(model, folder)
    guard = open_checkpoint(folder).guard
    os.truncate(folder / WEIGHTS, 4000)
    assert_same(model, reference)
    assert torch.equal(output(model), output(reference))
    with pytest.raises(LoadError, match="size changed"):
        guard.check()
    with pytest.raises(LoadError, match=WEIGHTS):
        dryfit.load(folder)


def test_c19_tables_stay_in_fp32(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    reference = fresh(LlamaForCausalLM, config)
    written(tmp_path, reference)
    with torch.device("meta"):
        plain = LlamaForCausalLM(config).to(torch.bfloat16)
    assert plain.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    half = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = dryfit.load(tmp_path, task="causal-lm", dtype=torch.bfloat16)
    assert_same(model, half)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    half.save_pretrained(tmp_path / "half")
    assert load_file(tmp_path / "half" / WEIGHTS)["model.norm.weight"].dtype == torch.bfloat16
    with torch.device("meta"):
        assigned = LlamaForCausalLM(config)
    assigned.load_state_dict(load_file(tmp_path / "half" / WEIGHTS), strict=False, assign=True)
    assert assigned.model.norm.weight.dtype == torch.bfloat16  # an fp32 model no longer
    whole = dryfit.load(tmp_path / "half", task="causal-lm")
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    for name, value in half.state_dict().items():
        assert torch.equal(whole.state_dict()[name], value.float()), name
    assert set(whole.load_report.casts) == {"bfloat16 to float32"}


def sharded(folder):
    reference = fresh(BertModel, bert_config())
    written(folder, reference, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    return reference, index, json.loads(index.read_text())


def test_c23a_an_index_without_the_keys_of_a_shard(tmp_path):
    _, index, content = sharded(tmp_path)
    lost = sorted(set(content["weight_map"].values()))[1]
    keys = [key for key, shard in content["weight_map"].items() if shard == lost]
    content["weight_map"] = {key: shard for key, shard in content["weight_map"].items() if shard != lost}
    index.write_text(json.dumps(content))
    BertModel.from_pretrained(tmp_path)  # no error
    with pytest.raises(LoadError) as caught:
        dryfit.load(tmp_path)
    assert "missing" in caught.value.found and sum(key in str(caught.value) for key in keys) >= min(3, len(keys) - 2)


def test_c23a_a_shard_without_a_key_of_the_index(tmp_path):
    _, index, content = sharded(tmp_path)
    key, shard = next(item for item in content["weight_map"].items() if item[0].endswith("layer.0.output.dense.bias"))
    state = load_file(tmp_path / shard)
    del state[key]
    save_file(state, tmp_path / shard, metadata=PT)
    BertModel.from_pretrained(tmp_path)  # no error
    with pytest.raises(LoadError) as caught:
        dryfit.load(tmp_path)
    assert key in str(caught.value) and shard in str(caught.value) and index.name in str(caught.value)
    os.remove(tmp_path / shard)
    with pytest.raises(LoadError, match=shard):
        dryfit.load(tmp_path)


def test_c23b_a_stale_file_beside_an_index(tmp_path):
    reference, _, _ = sharded(tmp_path)
    stale = fresh(BertModel, bert_config(), seed=9)
    save_file(stale.state_dict(), tmp_path / WEIGHTS, metadata=PT)
    plain = BertModel.from_pretrained(tmp_path)
    assert torch.equal(plain.pooler.dense.weight, stale.pooler.dense.weight)
    with pytest.raises(LoadError, match="both model.safetensors and model.safetensors.index.json"):
        dryfit.load(tmp_path)
    os.remove(tmp_path / WEIGHTS)
    model = build(lambda: BertModel(bert_config())).eval()
    materialise(model, tmp_path)
    assert_same(model, reference)
    assert output(model, input_ids=tokens()).shape == (2, 9, 32)
