"""The ways in which models on meta go wrong, those aside that tests/unit/meta has: C01 to C16, building and filling.

Each test shows that dryfit is exact or raises, and what the plain libraries do today, so that a repair is seen.
"""

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from transformers import (
    AutoModel,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)

import dryfit
from dryfit.meta import build, leaks, materialise, move
from dryfit.settings.errors import LoadError
from loading import assert_same, bert_config, dirty, fresh, llama_config, output, perturb, tokens, written

NO_DATA = "Cannot copy out of meta tensor"


class WithHead(nn.Module):
    """A user's own module around a model of transformers."""

    def __init__(self, config):
        super().__init__()
        self.body = AutoModel.from_config(config)
        self.head = nn.Linear(config.hidden_size, 3)

    def forward(self, input_ids):
        return self.head(self.body(input_ids).last_hidden_state[:, 0])


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


def test_c02a_a_plain_module_around_a_model(tmp_path):
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


WEIGHTS = "model.safetensors"
PT = {"format": "pt"}


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


class OwnConfig(PreTrainedConfig):
    model_type = "dryfit-own"


class Own(PreTrainedModel):
    """A user's model whose tables transformers does not know how to restore."""

    config_class = OwnConfig

    def __init__(self, config, *, bare=False):
        super().__init__(config)
        self.line = nn.Linear(4, 4)
        self.register_buffer("two", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)
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
        return self.line(x) * self.two + self.steps


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
