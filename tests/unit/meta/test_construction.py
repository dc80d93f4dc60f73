"""Constructors that run without memory for weights: what they compute, read, draw and change."""

import copy
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoConfig, AutoModel, BertForSequenceClassification, BertModel

import dryfit
from dryfit.meta import build, leaks, materialise, meta_init, on_meta
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
