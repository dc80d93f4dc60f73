"""What each place of a module will be, decided from headers alone."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dryfit.meta import build, leaks, materialise
from dryfit.meta.matching import allowed_by, memory_of, targets
from dryfit.settings.errors import LoadError
from loading import assert_same, fresh


class Parts(nn.Module):
    """Each kind of place once."""

    def __init__(self, size=3):
        super().__init__()
        self.line = nn.Linear(size, size)
        self.other = nn.Linear(size, size, bias=False)
        self.other.weight = self.line.weight
        self.register_buffer("kept", torch.arange(size).float())
        self.register_buffer("hidden", torch.arange(size).float() * 2, persistent=False)
        self.register_buffer("mask", torch.ones(size, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(4))
        self.plain = torch.zeros(size)


@pytest.fixture
def parts(tmp_path):
    """A file with the state of a module, the state, and what writes it again."""
    reference = fresh(lambda _: Parts(), None)
    state = {name: value.clone() for name, value in reference.state_dict().items() if name != "other.weight"}
    state["kept"] += 5
    file = tmp_path / "x.safetensors"

    def write(**changes):
        content = {**state, **{name.replace("__", "."): value for name, value in changes.items()}}
        save_file({name: value for name, value in content.items() if value is not None}, file)
        return file

    return state, write


def fails(file, *found, **options):
    module = build(Parts)
    before = leaks(module)
    with pytest.raises(LoadError) as caught:
        materialise(module, file, **options)
    for words in (*found, str(file)):
        assert words in str(caught.value)
    assert leaks(module) == before
    return caught.value


def test_places():
    module = build(Parts)
    found = {target.name: target for target in targets(module)}
    assert set(found) == {"line.weight", "line.bias", "kept", "hidden", "mask", "count", "plain"}
    assert found["line.weight"].names == ("line.weight", "other.weight") and found["line.weight"].is_parameter
    kept = {name for name, target in found.items() if target.persistent}
    assert kept == {"line.weight", "line.bias", "kept", "mask", "count"}
    assert memory_of(module.line.weight) == memory_of(module.other.weight) != memory_of(module.line.bias)


def test_a_file_that_fits(parts):
    state, write = parts
    module = build(Parts)
    report = materialise(module, write())
    for name, value in state.items():
        assert torch.equal(module.state_dict()[name], value)
    assert set(report.from_file) == set(state)
    assert set(report.constructed) == {"hidden", "plain"} and report.tied == {"other.weight": "line.weight"}


def test_missing(parts):
    _, write = parts
    fails(write(line__bias=None), "1 missing (line.bias)")
    fails(write(kept=None, mask=None), "2 missing (kept, mask)")
    fails(write(line__weight=None, line__bias=None), "2 missing (line.weight, line.bias)", missing=["other.bias"])
    module = build(Parts)
    report = materialise(module, write(line__weight=None, kept=None), missing=["*weight", "kept"])
    assert report.random == ("line.weight",) and "kept" in report.constructed
    assert module.other.weight is module.line.weight and module.kept.tolist() == [0, 1, 2]
    # A tied weight is allowed under either of its names.
    assert materialise(build(Parts), write(line__weight=None), missing=["other.*"]).random == ("line.weight",)


def test_patterns():
    assert allowed_by(["a.b"], "init") and not allowed_by(["a.b"], "error")
    assert allowed_by(["a.b", "c"], ["c"]) and allowed_by(["a.b"], ["a.*"]) and allowed_by(["a.b"], ["*"])
    assert not allowed_by(["a.b"], []) and not allowed_by(["a.b"], ["a"])


def test_shapes(parts):
    _, write = parts
    fails(write(line__bias=torch.zeros(4)), "line.bias: [4] in the file, not [3]")
    fails(write(count=torch.zeros(1, dtype=torch.int64)), "count: [1] in the file, not []")
    fails(write(line__bias=torch.zeros(4)), "of another shape", missing="init")
    # A new head in the place of an old one is allowed by its name.
    module = build(Parts)
    report = materialise(module, write(line__bias=torch.zeros(4)), missing=["line.bias"])
    assert report.random == ("line.bias",) and report.unexpected == ("line.bias",)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_types_are_converted(parts, kind):
    state, write = parts
    module = build(Parts)
    report = materialise(module, write(line__bias=state["line.bias"].to(kind)))
    assert (
        torch.equal(module.line.bias, state["line.bias"].to(kind).float()) and module.line.bias.dtype == torch.float32
    )
    assert report.casts == {f"{str(kind)[6:]} to float32": 1}


OTHERS = [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_numbers_are_refused(parts, kind):
    _, write = parts
    found = fails(write(line__bias=torch.zeros(3).to(kind)), "1 of another kind of number (line.bias", missing="init")
    assert "quantised" in found.hint
    if kind is not torch.int64:
        fails(write(count=torch.zeros(()).to(kind)), "count")
    if kind is not torch.bool:
        fails(write(mask=torch.zeros(3).to(kind)), "mask")


def test_strays(parts):
    _, write = parts
    fails(write(line__scale=torch.ones(3)), "1 without a place", "line.scale")
    fails(write(extra=torch.ones(3)), "extra")
    report = materialise(build(Parts), write(line__scale=torch.ones(3)), unexpected=["line.scale"])
    assert report.unexpected == ("line.scale",)
    report = materialise(build(Parts), write(head__weight=torch.ones(3)))
    assert report.unexpected == ("head.weight",)


def test_tables_that_the_file_holds_too(parts):
    _, write = parts
    report = materialise(build(Parts), write(hidden=torch.tensor([0.0, 2.0, 4.0])))
    assert report.ignored == ("hidden",) and "hidden" in report.constructed
    fails(write(hidden=torch.tensor([0.0, 2.0, 5.0])), "hidden", "not what the constructor computes")
    fails(write(hidden=torch.tensor([0.0, 2.0])), "hidden")


def test_tied_weights_that_the_file_holds_twice(parts):
    state, write = parts
    twin = state["line.weight"].clone()
    module = build(Parts)
    report = materialise(module, write(other__weight=twin))
    assert module.other.weight is module.line.weight and report.tied == {"other.weight": "line.weight"}
    changed = twin.clone()
    changed[1, 1] += 1
    fails(write(other__weight=changed), "line.weight", "other.weight", "differ")
    fails(write(other__weight=torch.zeros(2, 2)), "[2, 2] in the file")
    module = build(Parts)
    materialise(module, write(other__weight=twin, line__weight=None))
    assert torch.equal(module.line.weight, twin) and module.other.weight is module.line.weight


def test_tied_weights_in_two_types(parts):
    state, write = parts
    half = state["line.weight"].to(torch.bfloat16)
    module = build(Parts)
    materialise(module, write(line__weight=half.float(), other__weight=half))
    assert torch.equal(module.line.weight, half.float())
    fails(write(other__weight=half), "differ")


def test_nan_in_tied_weights_is_no_difference(parts):
    """Bit for bit the same, though a NaN does not equal itself."""
    state, write = parts
    weight = state["line.weight"].clone()
    weight[0, 0] = float("nan")
    module = build(Parts)
    materialise(module, write(line__weight=weight, other__weight=weight.clone()))
    assert module.line.weight[0, 0].isnan()


def test_a_module_without_tensors(tmp_path):
    report = materialise(build(nn.ReLU))
    assert report.origins() == {} and report.summary() == "no tensor"
    save_file({"weight": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="weight"):
        materialise(build(nn.ReLU), tmp_path / "x.safetensors")


def test_a_module_at_two_paths(tmp_path):
    def make():
        layer = nn.Linear(2, 2)
        return nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.ReLU())})

    reference = fresh(lambda _: make(), None)
    torch.save(reference.state_dict(), tmp_path / "x.bin")
    module = build(make)
    report = materialise(module, tmp_path / "x.bin")
    assert_same(module, reference)
    assert module["b"][0] is module["a"]
    assert report.tied == {"b.0.weight": "a.weight", "b.0.bias": "a.bias"}
