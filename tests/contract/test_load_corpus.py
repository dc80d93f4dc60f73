"""The ways in which models on meta go wrong, those aside that tests/unit/meta has: C01 to C08, building and filling.

Each test shows that dryfit is exact or raises, and what the plain libraries do today, so that a repair is seen.
"""

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file, load_model
from transformers import (
    AutoModel,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
)

import dryfit
from dryfit.meta import build, leaks, materialise
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, dirty, fresh, llama_config, output, tokens, written

NO_DATA = "Cannot copy out of meta tensor"


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


def test_c02b_real_inputs_into_a_model_without_weights(bert):
    folder, reference = bert
    assert on_plain_meta(lambda: BertModel(bert_config()))(tokens()).pooler_output.is_meta  # an answer, and no error
    model = build(lambda: BertModel(bert_config())).eval()
    for call in (model, model.embeddings):
        with pytest.raises(LoadError, match="real tensor of shape \\(2, 9\\).*on meta"):
            call(tokens())
    materialise(model, folder)
    assert torch.equal(output(model), output(reference))
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


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
