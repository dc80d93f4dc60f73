"""Recomputing activations changes no gradient, whatever is frozen; an encoder returns nothing that is not read."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

import encoders
import tiny
from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.pretrained import Kind, load_pretrained
from dryfit.settings.errors import ConfigError
from dryfit.settings.tables import HeadSettings
from dryfit.tasks.heads import AttentionPooling, EncoderWithHead, HeadSpec, freeze
from dryfit.training.model import enable_checkpointing

WITHOUT = ("albert", "xlnet")
SHARES = ("deberta-v2", "deberta-v3")
WITH = [name for name in encoders.CONFIGS if name not in WITHOUT]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: encoders.model(tmp_path_factory.mktemp(name), name) for name in encoders.CONFIGS}


def gradients(folder: Path, *, reentrant: bool | None, frozen: int, dropout: float) -> dict[str, torch.Tensor]:
    encoder = encoders.with_dropouts(folder, torch.float64, dropout=dropout)
    if reentrant is not None:
        enable_checkpointing(encoder, reentrant=reentrant)
    torch.manual_seed(0)
    head = HeadSpec(HeadSettings(layers=1, dropout=dropout), num_outputs=3)
    model = EncoderWithHead(encoder, head).double().train()
    freeze(model, frozen)
    ids = torch.randint(5, 30, (5, 12))
    mask = torch.ones_like(ids)
    mask[2, 7:] = 0
    torch.manual_seed(1)
    model(ids, mask).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.each_pair
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", WITH)
def test_checkpointing_changes_no_gradient(folders: dict[str, Path], name: str, frozen: int, dropout: float) -> None:
    want = gradients(folders[name], reentrant=None, frozen=frozen, dropout=dropout)
    assert want
    for reentrant in (False, True)[: 1 if name in SHARES else 2]:
        have = gradients(folders[name], reentrant=reentrant, frozen=frozen, dropout=dropout)
        assert have.keys() == want.keys()
        for key, gradient in want.items():
            assert float((have[key] - gradient).norm()) <= 1e-12 * max(float(gradient.norm()), 1e-3), (key, reentrant)


def kept_bytes(folder: Path, *, reentrant: bool | None, frozen: int) -> int:
    """What autograd keeps for the backward pass outside of checkpointed regions, model weights left out."""
    encoder, _ = load_pretrained(FolderSource(str(folder)), Kind.ENCODER)
    if reentrant is not None:
        enable_checkpointing(encoder, reentrant=reentrant)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), num_outputs=2)).train()
    freeze(model, frozen)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(5, 30, (8, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(ids, torch.ones_like(ids))
    assert outputs.requires_grad
    return sum(kept.values())


def test_checkpointing_keeps_less_and_frozen_layers_nothing(folders: dict[str, Path]) -> None:
    plain = kept_bytes(folders["bert"], reentrant=None, frozen=0)
    for reentrant in (False, True):
        assert kept_bytes(folders["bert"], reentrant=reentrant, frozen=0) < plain / 2
    # One of two layers frozen: without the switch that transformers turns on, nothing below it is in the graph.
    frozen = kept_bytes(folders["bert"], reentrant=False, frozen=1)
    assert frozen < kept_bytes(folders["bert"], reentrant=False, frozen=0) - 8 * 64 * 32 * 4


@pytest.mark.parametrize(
    ("name", "reentrant", "found"),
    [
        *[(name, reentrant, "has no activation checkpointing") for name in WITHOUT for reentrant in (False, True)],
        *[(name, True, "shares tensors between its layers") for name in SHARES],
    ],
)
def test_a_model_that_cannot_checkpoint_is_refused(
    folders: dict[str, Path], name: str, reentrant: bool, found: str
) -> None:
    encoder, _ = load_pretrained(FolderSource(str(folders[name])), Kind.ENCODER)
    with pytest.raises(ConfigError, match=f"{encoders.CONFIGS[name][0]} {found}"):
        enable_checkpointing(encoder, reentrant=reentrant)


def test_normalised_relative_embeddings_go_through_reentrant_autograd_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why DeBERTa is refused; once this fails, the refusal can go."""
    folder = tiny.model(tmp_path, "deberta-v2", norm_rel_ebd="layer_norm")
    monkeypatch.setattr("dryfit.training.model.class_cannot_checkpoint", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(folder, reentrant=True, frozen=0, dropout=0.0)


@pytest.mark.parametrize("architecture", ["bert", "llama", "qwen2", "deberta-v2"])
def test_only_the_last_hidden_states_are_returned(architecture: str) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        architecture, **sizes, output_hidden_states=True, output_attentions=True, attn_implementation="eager"
    )
    config.use_cache = True
    encoder = AutoModel.from_config(config)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(), num_outputs=2))
    returned = []
    encoder.register_forward_hook(lambda _module, _inputs, output: returned.append(output))
    ids = torch.randint(5, 30, (2, 7))
    model(ids, torch.ones_like(ids))
    held = {name: value for name, value in returned[0].items() if value is not None}
    assert held.keys() <= {"last_hidden_state", "pooler_output"}
    assert config.use_cache, "the config is saved with the model"


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "attention"])
def test_pooling_sees_no_padding(folders: dict[str, Path], pooling: str) -> None:
    encoder, _ = load_pretrained(FolderSource(str(folders["bert"])), Kind.ENCODER, dtype=torch.float64)
    torch.manual_seed(0)
    model = EncoderWithHead(encoder, HeadSpec(HeadSettings(pooling=pooling), num_outputs=3)).double().eval()
    ids = torch.randint(5, 30, (4, 12))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    padded = torch.nn.functional.pad(ids, (0, 6), value=7), torch.nn.functional.pad(mask, (0, 6))
    with torch.no_grad():
        assert torch.allclose(model(ids, mask), model(*padded), rtol=1e-12, atol=1e-12)
        alone = model(ids[1:2, :5], mask[1:2, :5])
        assert torch.allclose(model(ids, mask)[1:2], alone, rtol=1e-12, atol=1e-12)


def test_attention_pooling_is_its_formula() -> None:
    torch.manual_seed(0)
    pooling = AttentionPooling(5).double()
    hidden, mask = torch.randn(3, 7, 5, dtype=torch.float64), torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    have = pooling((hidden, mask))
    weight, bias, query = pooling.project.weight, pooling.project.bias, pooling.query.weight[0]
    for row, length in enumerate((7, 4, 7)):
        tokens_TD = hidden[row, :length]
        weights_T = torch.stack([(query @ (weight @ token_D + bias).tanh()).exp() for token_D in tokens_TD])
        want = (weights_T.unsqueeze(1) * tokens_TD).sum(0) / weights_T.sum()
        assert torch.allclose(have[row], want, rtol=1e-12, atol=1e-15)
    have.sum().backward()
    for parameter in pooling.parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().sum()) > 0
