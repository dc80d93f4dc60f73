"""The ways in which models on meta go wrong, one test for each known case: C01 to C09, building and filling.

Each test shows that dryfit is exact or raises, and what the plain libraries do today, so that a repair is seen.
"""

import copy

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from transformers import AutoModel, BertForSequenceClassification, BertModel, LlamaForCausalLM, LlamaModel

import dryfit
from dryfit.meta import build, leaks, materialise, move
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, dirty, fresh, llama_config, output, perturb, ties, tokens, written

NO_DATA = "Cannot copy out of meta tensor"


class WithHead(nn.Module):
    """A user's own module around a model of transformers."""

    def __init__(self, config):
        super().__init__()
        self.body = AutoModel.from_config(config)
        self.head = nn.Linear(config.hidden_size, 3)

    def forward(self, input_ids):
        return self.head(self.body(input_ids).last_hidden_state[:, 0])


class TiedPair(nn.Module):
    """A plain embedding and the layer that shares its weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, input_ids):
        return self.out(self.embed(input_ids))


@pytest.fixture
def bert(tmp_path):
    """A folder with a BERT, and the same model."""
    reference = fresh(BertModel, bert_config())
    return written(tmp_path / "bert", reference), reference


@pytest.fixture
def llama(tmp_path):
    """A folder with a tied Llama, and the same model."""
    reference = fresh(LlamaForCausalLM, llama_config(tie_word_embeddings=True))
    return written(tmp_path / "llama", reference), reference


def on_plain_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("kind", ["default", "context"])
def test_c01_loading_inside_a_meta_device_context(bert, llama, kind):
    folder, _ = bert
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device context manager"):
        AutoModel.from_pretrained(folder)
    reference = dryfit.load(folder)
    if kind == "context":
        with torch.device("meta"):
            model, tied = dryfit.load(folder), dryfit.load(llama[0], task="causal-lm")
            headed = dryfit.load(folder, task="token-classification", missing=["classifier.*"])
    else:
        torch.set_default_device("meta")
        try:
            model, tied = dryfit.load(folder), dryfit.load(llama[0], task="causal-lm")
            headed = dryfit.load(folder, task="token-classification", missing=["classifier.*"])
        finally:
            torch.set_default_device(None)
    assert_same(model, reference)
    (folder / "model.safetensors").rename(folder / "away")
    torch.save(reference.state_dict(), folder / "pytorch_model.bin")
    with torch.device("meta"):
        assert_same(dryfit.load(folder), reference)
    (folder / "away").rename(folder / "model.safetensors")
    assert_same(tied, llama[1])
    assert_same(headed, dryfit.load(folder, task="token-classification", missing=["classifier.*"]))


def test_c02a_a_plain_module_around_a_model(bert, tmp_path):
    with pytest.raises(NotImplementedError, match=NO_DATA):
        on_plain_meta(lambda: WithHead(bert_config())).to("cpu")
    reference = perturb(fresh(WithHead, bert_config()))
    save_file(reference.state_dict(), tmp_path / "whole.safetensors")
    dirty()
    model = build(lambda: WithHead(bert_config())).eval()
    with pytest.raises(LoadError, match="body.embeddings.word_embeddings.weight"):
        move(model, "cpu")
    report = materialise(model, tmp_path / "whole.safetensors")
    assert_same(model, reference)
    assert not report.random and torch.equal(output(model), output(reference))
    # The pretrained part from its own folder, then the head that is to be trained.
    parts = build(lambda: WithHead(bert_config())).eval()
    materialise(parts.body, bert[0])
    assert_same(parts.body, bert[1])
    with pytest.raises(LoadError, match="2 missing \\(head.weight, head.bias\\)"):
        materialise(parts)
    merged = materialise(parts, missing=["head.*"])
    assert_same(parts.body, bert[1])
    assert set(merged.random) == {"head.weight", "head.bias"}
    assert merged.from_file["body.pooler.dense.weight"] == "pooler.dense.weight"


def test_c02b_real_inputs_into_a_model_without_weights(tmp_path):
    plain = on_plain_meta(lambda: WithHead(bert_config()))
    assert plain(tokens()).is_meta  # an answer of the right shape, and no error
    reference = perturb(fresh(WithHead, bert_config()))
    save_file(reference.state_dict(), tmp_path / "whole.safetensors")
    model = build(lambda: WithHead(bert_config())).eval()
    for call in (model, model.body):
        with pytest.raises(LoadError, match="real tensor of shape \\(2, 9\\).*on meta"):
            call(tokens())
    with pytest.raises(LoadError, match="real tensor"):
        model.head(torch.ones(1, 32))
    assert model(tokens().to("meta")).is_meta
    materialise(model, tmp_path / "whole.safetensors")
    assert torch.equal(output(model), output(reference))
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


def test_c03a_non_persistent_tables_of_bert(bert):
    folder, reference = bert
    dirty()
    plain = on_plain_meta(lambda: BertModel(bert_config())).to_empty(device="cpu")
    for table in (plain.embeddings.position_ids, plain.embeddings.token_type_ids):
        table.fill_(2**61)  # what memory that nobody wrote may hold
    assert str(plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)) == (
        "<All keys matched successfully>"
    )
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        plain(tokens())
    model = build(lambda: BertModel(bert_config())).eval()
    report = materialise(model, folder)
    assert_same(model, reference)
    assert {"embeddings.position_ids", "embeddings.token_type_ids"} <= set(report.constructed)
    assert torch.equal(output(model), output(reference))


def test_c03b_rotary_frequencies_of_llama(llama):
    folder, reference = llama
    dirty()
    model = build(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True))).eval()
    frequencies = model.model.rotary_emb.inv_freq
    assert not frequencies.is_meta and torch.equal(frequencies, reference.model.rotary_emb.inv_freq)
    report = materialise(model, folder)
    assert_same(model, reference)
    assert "model.rotary_emb.inv_freq" in report.constructed
    assert torch.equal(output(model), output(reference))


def test_c04_initial_values_without_reset_parameters():
    config = llama_config(tie_word_embeddings=False)
    plain = on_plain_meta(lambda: LlamaModel(config))
    lacking = [module for module in plain.modules() if module._parameters and not hasattr(module, "reset_parameters")]
    assert lacking  # RMSNorm: to_empty and reset_parameters leave it as it is
    dirty()
    model = build(lambda: LlamaForCausalLM(config), seed=4).eval()
    report = materialise(model, missing="init")
    assert not leaks(model) and not report.from_file
    reference = fresh(LlamaForCausalLM, config)
    for name, value in reference.named_parameters():
        ours = model.get_parameter(name).detach()
        if "norm" in name:
            assert torch.equal(ours, torch.ones_like(ours)), name
        else:
            assert float(ours.std()) == pytest.approx(0.02, rel=0.1), name
            assert float(ours.mean()) == pytest.approx(0.0, abs=0.002), name
            assert name in report.random
        assert ours.shape == value.shape
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert output(model).isfinite().all()


def test_c05_ties_survive(llama, tmp_path):
    folder, reference = llama
    plain = on_plain_meta(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True)))
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    plain.to_empty(device="cpu")
    assert plain.lm_head.weight is not plain.model.embed_tokens.weight
    dirty()
    model = build(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True))).eval()
    materialise(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, reference)
    pair = perturb(fresh(lambda _: TiedPair(), None))
    save_file({"embed.weight": pair.embed.weight.detach()}, tmp_path / "pair.safetensors")
    ours = build(TiedPair).eval()
    report = materialise(ours, tmp_path / "pair.safetensors")
    assert ours.out.weight is ours.embed.weight
    assert_same(ours, pair)
    assert report.tied == {"out.weight": "embed.weight"} and report.from_file == {"embed.weight": "embed.weight"}
    # Under its other name only.
    save_file({"out.weight": pair.embed.weight.detach()}, tmp_path / "other.safetensors")
    other = build(TiedPair).eval()
    materialise(other, tmp_path / "other.safetensors")
    assert_same(other, pair)


def test_c06a_the_file_lacks_the_tied_head(llama):
    folder, reference = llama
    state = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in state
    plain = on_plain_meta(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True)))
    plain.load_state_dict(state, assign=True, strict=False)
    assert {"lm_head.weight", "model.rotary_emb.inv_freq"} <= set(leaks(plain))
    with pytest.raises(NotImplementedError, match=NO_DATA):
        plain.to("cpu")
    model = build(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True))).eval()
    materialise(model, folder)
    assert not leaks(model)
    assert_same(model, reference)
    # A model of plain meta that was half filled in this way is not finished by guessing.
    with pytest.raises(LoadError, match="1 missing \\(lm_head.weight\\)"):
        materialise(plain, folder)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    before = leaks(plain)
    with pytest.raises(LoadError, match="model.rotary_emb.inv_freq is on meta"):
        materialise(plain, folder)
    assert leaks(plain) == before


def test_c06b_the_file_holds_tied_weights_twice(llama, tmp_path):
    folder, reference = llama
    state = load_file(folder / "model.safetensors")
    twice = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    plain = on_plain_meta(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True)))
    plain.load_state_dict(twice, assign=True, strict=True)
    assert plain.lm_head.weight is not plain.model.embed_tokens.weight
    save_file(twice, tmp_path / "twice.safetensors", metadata={"format": "pt"})
    model = build(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True))).eval()
    materialise(model, tmp_path / "twice.safetensors")
    assert_same(model, reference)
    assert ties(model) == {frozenset({"model.embed_tokens.weight", "lm_head.weight"})}
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameter.numel() for parameter in reference.parameters())
    twice["lm_head.weight"][3, 2] += 1
    save_file(twice, tmp_path / "differ.safetensors", metadata={"format": "pt"})
    refused = build(lambda: LlamaForCausalLM(llama_config(tie_word_embeddings=True)))
    before = leaks(refused)
    with pytest.raises(LoadError) as caught:
        materialise(refused, tmp_path / "differ.safetensors")
    assert "lm_head.weight" in str(caught.value) and "model.embed_tokens.weight" in str(caught.value)
    assert leaks(refused) == before


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter.*")
def test_c07_a_state_dict_copied_into_meta(bert):
    folder, reference = bert
    for load in (
        lambda model: model.load_state_dict(load_file(folder / "model.safetensors"), strict=True),
        lambda model: load_model(model, str(folder / "model.safetensors")),
    ):
        plain = on_plain_meta(lambda: BertModel(bert_config()))
        load(plain)
        names = [name for name, _ in plain.named_parameters()]
        assert set(names) <= set(leaks(plain))  # nothing was loaded, and nobody said so
        model = build(lambda: BertModel(bert_config())).eval()
        load(model)
        assert set(leaks(model)) == set(names)
        with pytest.raises(LoadError, match="39 missing"):
            materialise(model)
        materialise(model, folder)
        assert_same(model, reference)


@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device.*")
def test_c08a_no_process_group_is_needed(bert):
    folder, reference = bert
    with init_empty_weights():
        plain = BertModel(bert_config())
    with pytest.raises(ValueError, match="Default process group"):
        load_checkpoint_and_dispatch(plain, str(folder))
    model = build(lambda: BertModel(bert_config())).eval()
    materialise(model, folder)
    assert_same(model, reference)


def test_c08b_buffers_of_a_complete_file(bert, llama):
    for (folder, reference), cls in ((bert, BertModel), (llama, LlamaForCausalLM)):
        config = reference.config
        with init_empty_weights(include_buffers=True):
            plain = cls(config)
        with pytest.raises(NotImplementedError, match=NO_DATA):
            load_checkpoint_and_dispatch(plain, str(folder), device_map={"": "cpu"})
        model = build(lambda cls=cls, config=config: cls(config)).eval()
        materialise(model, folder)
        assert_same(model, reference)
        with init_empty_weights(include_buffers=True):  # even here: what goes to meta stays what it was
            model = build(lambda cls=cls, config=config: cls(config)).eval()
        materialise(model, folder)
        assert_same(model, reference)


def test_c09_a_file_without_the_head(bert):
    folder, _ = bert
    with init_empty_weights():
        plain = BertForSequenceClassification(bert_config())
    with pytest.raises((NotImplementedError, ValueError)) as anonymous:
        load_checkpoint_and_dispatch(plain, str(folder), device_map={"": "cpu"})
    assert "classifier" not in str(anonymous.value)
    model = build(lambda: BertForSequenceClassification(bert_config()))
    before = leaks(model)
    with pytest.raises(LoadError) as caught:
        materialise(model, folder)
    message = str(caught.value)
    assert "2 missing (classifier.weight, classifier.bias)" in message
    assert str(folder) in message and "missing=" in caught.value.hint
    assert leaks(model) == before
    # The other way round: a whole model's weights from a base without one of its layers.
    state = load_file(folder / "model.safetensors")
    lacking = copy.copy(state)
    del lacking["encoder.layer.1.output.dense.bias"]
    save_file(lacking, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="1 missing \\(encoder.layer.1.output.dense.bias\\)"):
        dryfit.load(folder)
