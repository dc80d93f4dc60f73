"""Values that constructors draw, and the layers of torch: of the seed alone, and of the right distribution."""

import random
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import BertModel

from dryfit.meta import build, leaks, materialise
from dryfit.settings.check_messages import TensorOrigin
from loading import From, assert_same, bert_config, dirty, fresh, made, perturb, several


class Net(nn.Module):
    """A bit of everything with weights that torch initialises."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(10, width, padding_idx=0)
        self.line = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.batch = nn.BatchNorm1d(width)
        self.conv = nn.Conv1d(width, width, 3)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 32, batch_first=True), 2)
        self.weighted = parametrizations.weight_norm(nn.Linear(width, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, ids):
        x = self.norm(self.line(self.embed(ids)))
        x = self.body(self.lstm(x)[0][..., : x.shape[-1]])
        x = self.attention(x, x, x)[0]
        return self.weighted(self.batch(self.conv(x.transpose(1, 2))).transpose(1, 2)) * self.gain


def test_layers_of_torch(tmp_path):
    plain = perturb(fresh(lambda _: Net(), None))
    save_file(plain.state_dict(), tmp_path / "net.safetensors")
    dirty()
    module = build(Net).eval()
    assert {name for name, _ in module.named_parameters()} - set(leaks(module)) == {"gain"}
    materialise(module, tmp_path / "net.safetensors")
    assert type(module.weighted) is not nn.Linear
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    ids = torch.arange(8).view(2, 4)
    assert torch.equal(module(ids), plain(ids))


def test_layers_of_torch_drawn_anew():
    width = 96
    module = build(partial(Net, width))
    report = materialise(module, missing="init")
    plain = fresh(lambda _: Net(width), None)
    assert not module.embed.weight[0].any()
    for (name, ours), (_, theirs) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        ours, theirs = ours.detach(), theirs.detach()
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if theirs.std() > 0:
            assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.4), name
            assert not torch.equal(ours, theirs)
        else:
            assert torch.equal(ours, theirs), name
        if ours.std() > 0 and "original" not in name and name != "gain":
            assert report.origins()[name] is TensorOrigin.RANDOM, name
    # Copies of a layer begin alike, as they do plainly.
    first, second = module.body.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight)
    assert first.linear1.weight is not second.linear1.weight


def test_weight_norm_agrees_with_itself():
    """Magnitude and direction are computed from one drawn weight: both must be of the same draw."""
    plain_like = build(lambda: parametrizations.weight_norm(nn.Linear(6, 4)))
    materialise(plain_like, missing="init")
    magnitude = plain_like.parametrizations.weight.original0
    direction = plain_like.parametrizations.weight.original1
    assert torch.allclose(magnitude, torch.linalg.vector_norm(direction, dim=1, keepdim=True))


INITIALISERS = {
    "trunc_normal_": (partial(nn.init.trunc_normal_, std=0.02, a=-0.04, b=0.04), 0.0176),
    "normal_": (partial(nn.init.normal_, std=0.3), 0.3),
    "uniform_": (partial(nn.init.uniform_, a=-1, b=1), 1 / 3**0.5),
    "kaiming_normal_": (nn.init.kaiming_normal_, (2 / 64) ** 0.5),
    "kaiming_uniform_": (nn.init.kaiming_uniform_, (2 / 64) ** 0.5),
    "xavier_normal_": (nn.init.xavier_normal_, (2 / 128) ** 0.5),
    "xavier_uniform_": (nn.init.xavier_uniform_, (2 / 128) ** 0.5),
    "orthogonal_": (nn.init.orthogonal_, 1 / 8),
    "sparse_": (partial(nn.init.sparse_, sparsity=0.5, std=0.1), 0.1 * 0.5**0.5),
    "dirac_": (nn.init.dirac_, None),
    "eye_": (nn.init.eye_, None),
}


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("generator", [False, True])
def test_initialisers(name, generator):
    initialise, std = INITIALISERS[name]
    shape = (64, 64, 1) if name == "dirac_" else (64, 64)
    takes = name not in ("dirac_", "eye_")
    if generator and name == "sparse_":
        pytest.skip("it draws a part from the process's own generator even so")

    def make(self):
        self.weight = nn.Parameter(torch.empty(shape))
        own = {"generator": torch.Generator().manual_seed(5)} if generator and takes else {}
        initialise(self.weight, **own)
        if own:
            self.second = nn.Parameter(torch.empty(shape))
            initialise(self.second, **own)

    dirty()
    module = made(make)
    weight = module.weight.detach()
    plain = From(make)
    if generator or not takes:
        assert torch.equal(weight, plain.weight)
        if takes:
            assert torch.equal(module.second, plain.second)
        return
    assert not torch.equal(weight, plain.weight)
    assert float(weight.std()) == pytest.approx(std, rel=0.1)
    assert torch.equal(weight, made(make).weight)
    match name:
        case "orthogonal_":
            assert torch.allclose(weight @ weight.t(), torch.eye(64), atol=1e-5)
        case "sparse_":
            assert torch.equal((weight == 0).sum(0), torch.full((64,), 32))
        case "trunc_normal_":
            assert weight.abs().max() <= 0.04


def test_random_values_are_of_the_seed_alone(tmp_path):
    whole = made(several)
    torch.manual_seed(99)
    assert_same(whole, made(several))
    other = build(partial(From, several), seed=1)
    materialise(other, missing="init")
    for (name, one), (_, another) in zip(whole.named_parameters(), other.named_parameters(), strict=True):
        assert not torch.equal(one, another), name
    assert not torch.equal(whole.layers[1].weight, whole.layers[2].weight)
    # Whichever of them the file holds, the others are the same; also when they are made one by one.
    names = [name for name, _ in whole.named_parameters()]
    for seed in range(5):
        held = random.Random(seed).sample([*names, "noise"], 5)
        save_file({name: torch.full_like(whole.state_dict()[name], 7.0) for name in held}, tmp_path / "x.safetensors")
        part = build(partial(From, several))
        materialise(part, tmp_path / "x.safetensors", missing="init")
        for name, value in part.state_dict().items():
            expected = torch.full_like(value, 7.0) if name in held else whole.state_dict()[name]
            assert torch.equal(value, expected), name
    single = build(partial(From, several))
    materialise(single.layers[2], missing="init")
    assert torch.equal(single.layers[2].weight, whole.layers[2].weight)
    materialise(single, missing="init")
    assert_same(single, whole)


def test_the_process_generator_is_left_alone():
    torch.manual_seed(3), random.seed(3)
    before = torch.random.get_rng_state(), random.getstate()
    module = build(partial(From, several))
    materialise(module, missing="init")
    build(lambda: BertModel(bert_config()))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
