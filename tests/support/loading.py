"""Tiny models on disk with weights that no initialiser makes, and an exact comparison of two modules."""

import copy
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.bert import BertConfig
from transformers.models.llama import LlamaConfig

from dryfit.gpu.slots import slots
from dryfit.meta import build, leaks, materialise

VOCAB = 64
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {**_SIZES, **_HEADS, **_TOKENS}


def bert_config(**changes: Any) -> BertConfig:
    return BertConfig(**{**SMALL, "num_labels": 3, **changes})


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **changes})


def config_of(model_type: str, **changes: Any) -> Any:
    wanted = {**SMALL, **changes}
    return AutoConfig.for_model(model_type, **{key: value for key, value in wanted.items() if value is not None})


def perturb(model: nn.Module, *, seed: int = 7) -> nn.Module:
    """Add noise to every weight and persistent table: ones, zeros and usual initial values cannot hide an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model.eval()


def written(folder: Path, model: PreTrainedModel, **saving: Any) -> Path:
    """Perturb a model and save it."""
    perturb(model).save_pretrained(folder, **saving)
    return folder


def fresh(cls: Any, config: Any, *, seed: int = 1) -> Any:
    """A model built plainly, of a random state of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls(config)


def dirty() -> None:
    """Leave memory full of large numbers behind, so that memory nobody wrote is not zero by chance."""
    for size in (8, 64, 256, 1024, 4096, 32768):
        held = [torch.full((size,), 1e30 + index) for index in range(64)]
        held += [torch.full((size,), 2**61, dtype=torch.int64) for _ in range(16)]
        del held


def tokens(*, rows: int = 2, length: int = 9, seed: int = 3) -> torch.Tensor:
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def output(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """The first output of a model for fixed tokens.

    Of a copy: matrix products of a CPU differ in the last digit with where in memory a weight begins, and that of
    a mapped file begins anywhere.
    """
    inputs = inputs or {"input_ids": tokens()}
    with torch.no_grad():
        made = copy.deepcopy(model)(**inputs)
    return made if isinstance(made, torch.Tensor) else made[0]


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Which names are one parameter."""
    groups: defaultdict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def assert_same(model: nn.Module, reference: nn.Module, *, skip: Iterable[str] = ()) -> None:
    """Every parameter, buffer and plain tensor: value, type, shape, flags and ties."""
    assert type(model) is type(reference)
    ours = {slot.name: slot for slot in slots(model)}
    theirs = {slot.name: slot for slot in slots(reference)}
    assert list(ours) == list(theirs)
    for name in ours.keys() - set(skip):
        one, other = ours[name], theirs[name]
        assert (one.kind, one.persistent) == (other.kind, other.persistent), name
        assert type(one.tensor) is type(other.tensor), name
        assert (one.tensor.dtype, one.tensor.shape) == (other.tensor.dtype, other.tensor.shape), name
        assert one.tensor.device.type == "cpu", name
        assert one.tensor.requires_grad == other.tensor.requires_grad, name
        assert torch.equal(one.tensor, other.tensor), name
    assert ties(model) == ties(reference)
    assert model.training == reference.training


class From(nn.Module):
    """A module whose constructor is a function."""

    def __init__(self, make):
        super().__init__()
        make(self)


def made(make, **options):
    """Built without memory and filled with what its constructor would have given it."""
    module = build(partial(From, make))
    materialise(module, missing="init", **options)
    assert not leaks(module)
    return module


def several(self: nn.Module, count: int = 4) -> None:
    """A constructor that draws in every way; for ``From``."""
    self.first = nn.Linear(8, 8)
    self.bare = nn.Parameter(torch.randn(8))
    self.register_buffer("noise", torch.rand(8))
    self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
    nn.init.trunc_normal_(self.layers[0].weight)
