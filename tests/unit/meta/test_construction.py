"""Constructors that run without memory for weights: what they compute, read, draw and change."""

import copy
import math
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoConfig, AutoModel, BertForSequenceClassification, BertModel

import dryfit
from dryfit.meta import build, leaks, materialise, meta_init, on_meta
from dryfit.settings.check_messages import TensorOrigin
from dryfit.settings.errors import LoadError
from loading import From, assert_same, bert_config, dirty, fresh, made, perturb, several, written

MIB = 1 << 20


def assert_as_plain(make):
    """A constructor without randomness gives the same module both ways."""
    dirty()
    plain = From(make)
    assert_same(made(make), plain)
    return plain


def buffers(self):
    self.register_buffer("arange", torch.arange(7))
    self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
    self.register_buffer("filled", torch.full((3,), 2.5, dtype=torch.float64), persistent=False)
    self.register_buffer("none", None)
    self.register_buffer("complex", torch.polar(torch.ones(3), torch.arange(3.0)))
    self.register_buffer("scalar", torch.tensor(3.0))
    self.register_buffer("nothing", torch.empty(0))


def attributes(self):
    self.scale = torch.linspace(0, 1, 5)
    self.tables = [torch.zeros(2), {"x": (torch.ones(3), 4)}]
    self.number = torch.tensor([3.5]).item()
    self.listed = torch.arange(3).tolist()
    self.array = torch.arange(4).numpy()
    self.asarray = np.asarray(torch.ones(2))
    self.size = float(torch.nn.Linear(3, 2).bias.detach().abs().max() < 1)
    self.line = nn.Linear(3, 3 if torch.ones(2).sum() > 1 else 5)
    nn.init.constant_(self.line.weight, 0.25)
    nn.init.eye_(self.line.weight)
    nn.init.zeros_(self.line.bias)


def bare(self):
    self.ones = nn.Parameter(torch.ones(3))
    self.small = nn.Parameter(torch.zeros(3, dtype=torch.float16), requires_grad=False)
    self.list = nn.ParameterList([nn.Parameter(torch.full((2,), float(index))) for index in range(3)])


def devices(self):
    self.processor = nn.Parameter(torch.empty(3, device="cpu").fill_(2.0))
    self.meta = nn.Parameter(torch.empty(3, device="meta").fill_(2.0))
    self.register_buffer("zeros", torch.zeros(3, device="meta"))
    self.line = nn.Linear(2, 2, device="cpu")
    self.named = torch.arange(3, device=torch.device("cpu"))
    with torch.device("meta"):
        self.inside = torch.arange(4.0) * 2
        self.other = nn.Linear(2, 2, bias=False)
    self.moved = torch.ones(2).to("cpu").to("meta")
    self.cpued = torch.empty(3).fill_(1.0).cpu()
    for parameter in (self.line.weight, self.line.bias, self.other.weight):
        nn.init.ones_(parameter)


def in_place(self):
    self.weight = nn.Parameter(torch.empty(4, 6))
    with torch.no_grad():
        self.weight.zero_()
        self.weight[1] = 3.0
        self.weight[:, 2:4].add_(1).mul_(2)
        self.weight.view(-1)[5] = -1
        self.weight.t()[0, 0] = 9
        self.weight.data[3, 3:] = torch.arange(3.0)
        self.weight.masked_fill_(self.weight == 3.0, 0.5)
        self.weight[2].copy_(self.weight[1] * 2)
    table = torch.empty(5, 4)
    for row in range(5):
        for column in range(4):
            table[row, column] = math.sin(row / 10000 ** (column / 4))
    self.register_buffer("table", table, persistent=False)
    table[:, 0::2] = torch.cos(table[:, 0::2])
    out = torch.empty(3)
    torch.add(torch.ones(3), 2, out=out)
    self.register_buffer("out", out)
    self.register_buffer("stacked", torch.stack([torch.empty(2).fill_(1.0), torch.ones(2)]))
    self.register_buffer("catted", torch.cat([out, self.weight.detach()[0]]))


@pytest.mark.parametrize("make", [buffers, attributes, bare, devices, in_place])
def test_constructors_without_randomness(make):
    plain = From(make)
    filled = made(make)
    dirty()
    if make is devices:  # plainly these would be on meta: what is asked for is the value
        for name in ("meta", "zeros", "inside", "moved"):
            assert getattr(plain, name).is_meta
        assert filled.meta.tolist() == [2, 2, 2] and filled.inside.tolist() == [0, 2, 4, 6]
        assert filled.zeros.tolist() == [0, 0, 0] and filled.moved.tolist() == [1, 1]
        assert filled.named.tolist() == [0, 1, 2] and filled.cpued.tolist() == [1, 1, 1]
        assert filled.line.weight.eq(1).all() and filled.other.weight.eq(1).all()
        return
    assert_same(filled, plain)
    for name in ("number", "listed", "size"):
        assert getattr(filled, name, None) == getattr(plain, name, None)
    for name in ("array", "asarray"):
        assert np.array_equal(getattr(filled, name, 0), getattr(plain, name, 0))


def test_what_is_computed_is_real_before_anything_is_filled():
    module = build(partial(From, in_place))
    assert leaks(module) == ("weight",)
    assert torch.equal(module.table, From(in_place).table)
    assert build(partial(From, buffers)).arange.tolist() == list(range(7))
    assert not leaks(build(partial(From, bare)))


def test_a_parameter_that_nobody_wrote(tmp_path):
    def make(self):
        self.weight = nn.Parameter(torch.empty(3))
        self.partly = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            self.partly[:2] = 1

    module = build(partial(From, make))
    for name in ("weight", "partly"):
        with pytest.raises(LoadError, match=f"{name}: .*never wrote"):
            other = next(iter({"weight", "partly"} - {name}))
            save_file({other: torch.ones(3)}, tmp_path / "x.safetensors")
            materialise(module, tmp_path / "x.safetensors", missing=[name])
    assert leaks(module) == ("weight", "partly")
    save_file({"weight": torch.ones(3), "partly": torch.zeros(3)}, tmp_path / "x.safetensors")
    assert set(materialise(module, tmp_path / "x.safetensors").from_file) == {"weight", "partly"}


def test_a_buffer_that_nobody_wrote_is_named():
    def make(self):
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.attribute = torch.empty(3)

    with pytest.raises(LoadError, match="never wrote"):
        materialise(build(partial(From, make)), missing="init")


def large(self):
    rows = 17 * MIB // 4  # 68 MiB each as four-byte numbers in four columns
    self.register_buffer("zeros", torch.zeros(rows, 4))
    self.register_buffer("steps", torch.arange(rows * 4, dtype=torch.float32).view(rows, 4) * 0.5 + 1, persistent=False)
    self.weight = nn.Parameter(torch.ones(rows, 4) * 3)
    self.noise = nn.Parameter(torch.randn(rows, 4, generator=torch.Generator().manual_seed(2)))
    self.seen = int(self.steps[-1, -1].item())
    self.register_buffer("small", self.steps[:3].clone())


@pytest.mark.slow
def test_large_tensors_are_computed_when_they_are_needed():
    module = build(partial(From, large))
    assert leaks(module) == ("weight", "noise", "zeros", "steps")
    assert not module.small.is_meta
    assert_as_plain(large)
    assert module.seen == From(large).seen


def test_inside_device_contexts_and_other_builds():
    plain = fresh(partial(From), buffers)
    with torch.device("meta"):
        inside = build(partial(From, buffers))
        materialise(inside, missing="init")
    assert_same(inside.train(), plain)

    def nested(self):
        self.inner = build(lambda: nn.Linear(3, 3), seed=5)
        self.outer = nn.Linear(3, 3)
        with on_meta(seed=6):
            self.third = nn.Linear(3, 3)
        materialised = build(lambda: nn.Linear(2, 2, bias=False))
        materialise(materialised, missing="init")
        self.ready = materialised

    module = build(partial(From, nested))
    assert {"inner.weight", "outer.weight", "third.weight"} <= set(leaks(module))
    assert not module.ready.weight.is_meta
    materialise(module, missing="init")
    alone = build(lambda: nn.Linear(3, 3), seed=5)
    materialise(alone, missing="init")
    assert torch.equal(module.inner.weight, alone.weight)


def test_modules_built_apart_are_put_together():
    first, second = (build(lambda: nn.Linear(4, 4), seed=seed) for seed in (1, 2))
    expected = [build(lambda: nn.Linear(4, 4), seed=seed) for seed in (1, 2)]
    for part in expected:
        materialise(part, missing="init")

    def joined(self):
        self.first, self.second = first, second
        self.merged = nn.Parameter(torch.empty(8, 4))
        with torch.no_grad():
            self.merged.copy_(torch.cat([first.weight, second.weight]) * 2)
            second.weight[0] = 0

    module = build(partial(From, joined))
    materialise(module, missing="init")
    one, two = (part.weight.detach().clone() for part in expected)
    assert torch.equal(module.first.weight, one)
    assert torch.equal(module.merged, torch.cat([one, two]) * 2)
    two[0] = 0
    assert torch.equal(module.second.weight, two)


def test_copies_of_layers():
    def make(self):
        layer = nn.Linear(6, 6)
        nn.init.constant_(layer.weight, 0.5)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.tied = layer
        self.tied.weight = self.layers[0].weight
        with torch.no_grad():
            self.layers[1].weight[0] = 1

    module = made(make)
    assert module.tied.weight is module.layers[0].weight
    assert module.layers[2].weight.eq(0.5).all() and module.layers[1].weight[0].eq(1).all()
    assert module.layers[1].weight[1:].eq(0.5).all()
    assert torch.equal(module.layers[0].bias, module.layers[2].bias)


def test_a_copy_of_a_model_without_weights(tmp_path):
    """It is filled from a file like any other; how its constructor would have drawn its weights is not known."""
    empty = build(partial(From, several))
    twin = copy.deepcopy(empty)
    materialise(empty, missing="init")
    with pytest.raises(LoadError, match="first.weight is on meta"):
        materialise(twin, missing="init")
    save_file(empty.state_dict(), tmp_path / "x.safetensors")
    materialise(twin, tmp_path / "x.safetensors")
    assert_same(twin, empty)


class Loads(nn.Module):
    """A constructor that reads files and builds a pretrained part in one of several ways."""

    def __init__(self, folder, way):
        super().__init__()
        match way:
            case "from_pretrained":
                self.part = AutoModel.from_pretrained(folder)
            case "from_config":
                self.part = AutoModel.from_config(AutoConfig.from_pretrained(folder))
            case "bfloat16":
                self.part = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
            case "new head":
                self.part = BertForSequenceClassification.from_pretrained(folder, num_labels=3)
            case "torch.load":
                self.register_buffer("table", torch.load(folder / "table.pt", weights_only=True))
                self.part = nn.Linear(3, 3)
                self.part.load_state_dict(torch.load(folder / "part.pt", weights_only=True))
            case "safetensors":
                self.part = BertModel(bert_config())
                self.part.load_state_dict(load_file(folder / "model.safetensors"))
        self.head = nn.Linear(3, 2)
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)


WAYS = ["from_pretrained", "bfloat16", "torch.load", "safetensors", "from_config", "new head"]


@pytest.mark.parametrize("way", WAYS)
def test_constructors_that_load(way, tmp_path):
    written(tmp_path, fresh(BertModel, bert_config()))
    torch.save(torch.arange(5.0), tmp_path / "table.pt")
    torch.save({"weight": torch.full((3, 3), 2.0), "bias": torch.ones(3)}, tmp_path / "part.pt")
    dirty()
    plain = fresh(lambda _: Loads(tmp_path, way), None)
    module = build(lambda: Loads(tmp_path, way))
    assert torch.get_default_dtype() == torch.float32
    materialise(module, missing="init")
    names = {name for name, _ in plain.named_parameters()}
    drawn = names if way == "from_config" else {"part.classifier.weight"} if way == "new head" else set()
    assert_same(module, plain, skip=drawn)
    if way == "new head":
        assert module.load_report.random == ("part.classifier.weight",)
    trained = perturb(plain.train(), seed=3).train()
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    module = build(lambda: Loads(tmp_path, way)).eval()
    materialise(module, tmp_path / "trained.safetensors")
    assert_same(module, trained.eval())


def test_a_constructor_that_loads_with_dryfit(tmp_path):
    reference = fresh(BertModel, bert_config())
    written(tmp_path, reference)

    def make(self):
        self.body = dryfit.load(tmp_path, missing="init")
        self.inner = build(lambda: BertModel(bert_config()))
        materialise(self.inner, tmp_path)
        self.head = nn.Linear(32, 2)

    module = build(partial(From, make))
    assert leaks(module) == ("head.weight", "head.bias")
    assert_same(module.inner.eval(), reference)
    assert torch.equal(
        module.body.state_dict()["embeddings.word_embeddings.weight"], reference.get_input_embeddings().weight
    )
    report = materialise(module, missing=["head.*"])
    assert report.from_file["inner.pooler.dense.bias"] == "pooler.dense.bias"
    assert set(report.random) == {"head.weight", "head.bias"}


def changed_afterwards(self):
    self.line = nn.Linear(4, 4)
    nn.init.eye_(self.line.weight), nn.init.ones_(self.line.bias)
    self.line.to(torch.bfloat16).to("cpu")
    self.line.weight.requires_grad_(False)
    self.doubled = nn.Linear(2, 2).double()
    for parameter in self.doubled.parameters():
        parameter.data = torch.full_like(parameter.data, 0.1)
    self.halved = nn.Linear(2, 2, dtype=torch.float16)
    self.halved.weight.data.fill_(3), self.halved.bias.data.zero_()
    self.halved.weight.note = "kept"
    self.swapped = nn.Linear(2, 3)
    self.swapped.weight, self.swapped.bias = nn.Parameter(torch.ones(3, 2)), None
    self.frozen = nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2))
    self.same = self.frozen.weight
    self.row = self.line.weight[1]
    self.pruned = nn.Linear(3, 3)
    nn.init.constant_(self.pruned.weight, 2.0), nn.init.zeros_(self.pruned.bias)
    self.pruned.register_buffer("mask", torch.ones(3, 3).triu())
    self.pruned.weight = nn.Parameter(self.pruned.weight * self.pruned.mask)


def test_layers_changed_after_they_were_made():
    plain = From(changed_afterwards)
    module = made(changed_afterwards)
    assert_same(module, plain)
    assert module.halved.weight.note == "kept"
    assert module.same is module.frozen.weight


def test_the_modes_end_with_their_context():
    def broken(self):
        self.line = nn.Linear(2, 2)
        raise ValueError("no")

    before = (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack()))
    with pytest.raises(ValueError, match="no"):
        build(partial(From, broken))
    with pytest.raises(KeyError), on_meta():
        raise KeyError
    assert (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())) == before
    assert not torch.empty(3).is_meta and not nn.Linear(2, 2).weight.is_meta
    # And the next one in line is not kept waiting.
    thread = threading.Thread(target=lambda: build(partial(From, bare)), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_other_threads_build_as_ever():
    seen = []
    with on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        thread = threading.Thread(target=lambda: seen.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
    assert seen == [False]


def test_meta_init_and_on_meta():
    made_by_class = meta_init(nn.Linear, seed=4)(3, 2)
    assert leaks(made_by_class) == ("weight", "bias")
    materialise(made_by_class, missing="init")
    with on_meta(seed=4):
        built = nn.Linear(3, 2)
    materialise(built, missing="init")
    assert_same(built, made_by_class)


def test_what_nobody_recorded_is_refused():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(LoadError, match="weight is on meta, and how its constructor filled it is not known"):
        materialise(module, missing="init")
    built = build(lambda: nn.Sequential(module, nn.Linear(2, 2)))
    with pytest.raises(LoadError, match="0.weight"):
        materialise(built, missing="init")


# ---- Values that constructors draw, and the layers of torch: of the seed alone, and of the right distribution


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
