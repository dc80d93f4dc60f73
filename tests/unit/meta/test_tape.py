"""Programs of constructors, written down and repeated, against the same programs run plainly."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from dryfit.meta import build, construction, leaks, materialise, on_meta
from dryfit.meta import construction as recorder
from dryfit.meta.construction import ConstructionRecorder
from dryfit.meta.tape import Tape, is_deferred, tape_of
from dryfit.settings.errors import LoadError
from loading import dirty
from thinning import examples

SHAPES = ((3, 4), (4, 3), (2, 2, 2), (5,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def empty_then_filled(shape, dtype, how, value):
    """Memory that is allocated first and written afterwards, in one of the ways people do it."""
    tensor = torch.empty(shape, dtype=dtype) if how % 2 else torch.ones(1, dtype=dtype).new_empty(shape)
    match how % 6:
        case 0:
            tensor.fill_(value)
        case 1:
            nn.init.constant_(tensor, value)
        case 2:
            for row in range(shape[0]):
                tensor[row] = row + value
        case 3:
            tensor.copy_(torch.arange(tensor.numel(), dtype=dtype).view(shape))
        case 4:
            flat = tensor.view(-1)
            flat[0::2] = value
            flat[1::2] = -value
        case 5:
            tensor.zero_().add_(value)
    return tensor


def step(pool, op, one, two, number):
    """One statement of a constructor: changes the pool of tensors, or one of them."""
    tensor = pool[one % len(pool)]
    same = [other for other in pool if other.shape == tensor.shape and other.dtype == tensor.dtype]
    other = same[two % len(same)]
    shape, dtype = SHAPES[two % len(SHAPES)], DTYPES[number % len(DTYPES)]
    value = (number - 8) / 4
    match op:
        case "full":
            return torch.full(shape, value, dtype=dtype)
        case "arange":
            return torch.arange(number + 1, dtype=dtype)
        case "empty":
            return empty_then_filled(shape, dtype, number, value)
        case "empty_like":
            return torch.empty_like(tensor).copy_(other)
        case "clone":
            return tensor.clone() if number % 2 else copy.deepcopy(tensor)
        case "parameter":
            return nn.Parameter(tensor.detach(), requires_grad=False)
        case "cast":
            return tensor.to(dtype)
        case "flat":
            return tensor.reshape(-1)
        case "transpose":
            return tensor.transpose(0, -1)
        case "slice":
            return tensor[: max(1, tensor.shape[0] - number % 3)]
        case "narrow":
            return tensor.narrow(-1, number % tensor.shape[-1], 1)
        case "detach":
            return tensor.detach().data
        case "add":
            return tensor + other * value
        case "where":
            return torch.where(tensor > other, tensor, value)
        case "cat":
            return torch.cat([tensor, other])
        case "stack":
            return torch.stack([tensor.sin(), other]).sum(0)
        case "cumsum":
            return tensor.float().cumsum(0)
        case "read":
            return torch.full(shape, float(tensor.sum().item()) % 7, dtype=dtype)
        case "numpy":
            return torch.tensor(tensor.float().numpy().copy())
        case "branch":
            return tensor + 1 if bool((tensor > 0).any()) else tensor - 1
        case "list":
            return torch.tensor(tensor.flatten()[:3].tolist(), dtype=dtype)
        case "scale":
            tensor.mul_(0.5).add_(value)
        case "sum":
            tensor.add_(other.clone())
        case "copy":
            tensor.copy_(other.clone())
        case "fill":
            tensor.fill_(value)
        case "item":
            tensor[number % tensor.shape[0]] = value
        case "masked":
            tensor.masked_fill_(tensor > value, value)
        case "data":
            tensor.data = other.detach() + 1
        case "out":
            torch.add(other.clone(), value, out=tensor)
        case "clamp":
            nn.init.eye_(tensor) if tensor.ndim == 2 and tensor.is_contiguous() else tensor.clamp_(-1, value)
    return None


OPS = (
    "full arange empty empty empty empty_like clone parameter cast flat transpose slice narrow detach add where cat "
    "stack cumsum read numpy branch list copy fill item masked data out clamp scale sum"
).split()
NUMBERS = st.integers(0, 16)
PROGRAMS = st.lists(st.tuples(st.sampled_from(OPS), NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=14)


class Program(nn.Module):
    """A constructor that does what a program says, and keeps every tensor it met."""

    def __init__(self, program):
        super().__init__()
        pool = [empty_then_filled((3, 4), torch.float32, 2, 1.0), torch.arange(12.0).view(3, 4)]
        with torch.no_grad():
            for op, one, two, number in program:
                made = step(pool, op, one, two, number)
                if made is not None:
                    pool.append(made)
        for index, tensor in enumerate(pool):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"p{index}", tensor)
            elif index % 3:
                self.register_buffer(f"b{index}", tensor, persistent=bool(index % 2))
        self.pool = pool


def same(module, plain):
    for index, (ours, theirs) in enumerate(zip(module.pool, plain.pool, strict=True)):
        assert (ours.dtype, ours.shape, type(ours)) == (theirs.dtype, theirs.shape, type(theirs)), index
        assert torch.equal(ours, theirs), index


@settings(max_examples=examples(400))
@given(PROGRAMS)
def test_programs(program):
    plain = Program(program)
    module = build(partial(Program, program))
    materialise(module, missing="init")
    assert not leaks(module)
    same(module, plain)


@settings(max_examples=examples(300))
@given(PROGRAMS)
def test_programs_whose_every_tensor_counts_as_large(program):
    plain = Program(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "DEFERRED_ABOVE_BYTES", 1)
        patch.setattr(construction, "DEFERRED_ABOVE_BYTES", 1)
        module = build(partial(Program, program))
        # Parameters, buffers and attributes alike: only what was read for its value is real.
        materialise(module, missing="init")
    same(module, plain)


@settings(max_examples=examples(100))
@example([*[("full", 0, 0, 0)] * 3, ("slice", 0, 0, 8), ("narrow", 5, 0, 0), ("transpose", 6, 0, 0)], 0)
@given(PROGRAMS, st.integers(0, 3))
def test_programs_that_draw(program, seed):
    """Random values are those of the seed, whatever else happens; and the process's generator stays as it is."""

    def make():
        module = Program(program)
        module.drawn = nn.Parameter(torch.empty(3).normal_())
        module.real = torch.randn(2)
        return module

    before = torch.random.get_rng_state()
    first, second = (build(make, seed=seed) for _ in range(2))
    materialise(first, missing="init"), materialise(second, missing="init")
    assert torch.equal(first.drawn, second.drawn) and torch.equal(first.real, second.real)
    other = build(make, seed=seed + 1)
    materialise(other, missing="init")
    assert not torch.equal(first.drawn, other.drawn) and not torch.equal(first.real, other.real)
    assert torch.equal(torch.random.get_rng_state(), before)


def recorded(make):
    with on_meta():
        return make()


def value_of(tensor):
    assert is_deferred(tensor)
    known = tape_of(tensor)
    return known.realise(tensor)


def test_a_value_and_whether_it_was_drawn():
    value, drawn = value_of(recorded(lambda: torch.empty(3).fill_(2)))
    assert value.tolist() == [2, 2, 2] and not drawn
    value, drawn = value_of(recorded(lambda: torch.empty(1000).normal_(5, 2)))
    assert drawn and float(value.mean()) == pytest.approx(5, abs=0.3)
    value, drawn = value_of(recorded(lambda: torch.empty(3).normal_().zero_()))
    assert value.tolist() == [0, 0, 0] and not drawn  # what was drawn is gone
    _, drawn = value_of(recorded(lambda: torch.empty(3).normal_().mul_(0.5)))
    assert drawn

    def partly():
        tensor = torch.empty(2, 3).normal_()
        tensor[0].zero_()
        return tensor

    value, drawn = value_of(recorded(partly))
    assert drawn and not value[0].any() and value[1].all()


def test_steps_after_a_read_change_nothing_of_it():
    def make():
        first = torch.empty(3).fill_(1)
        second = torch.empty(3).copy_(first)
        third = first * 2
        first.fill_(5)
        second.add_(first)
        return first, second, third

    first, second, third = recorded(make)
    assert value_of(second)[0].tolist() == [6, 6, 6]
    assert value_of(third)[0].tolist() == [2, 2, 2]
    assert value_of(first)[0].tolist() == [5, 5, 5]


def test_real_tensors_are_taken_as_they_were():
    def make():
        real = torch.ones(3)
        copied = torch.empty(3).copy_(real)
        real.fill_(9)
        return copied

    assert value_of(recorded(make))[0].tolist() == [1, 1, 1]


def test_memory_that_nobody_wrote():
    dirty()
    for make in (
        lambda: torch.empty(3),
        lambda: torch.empty(3) + 1,
        lambda: torch.empty(4, 2).index_fill_(0, torch.tensor([0, 2]), 1.0),
        lambda: torch.empty(3, dtype=torch.bool),
        lambda: torch.empty(3, dtype=torch.int64),
        lambda: torch.empty(3, dtype=torch.complex64),
    ):
        with pytest.raises(LoadError, match="never wrote"):
            value_of(recorded(make))
    value, _ = value_of(recorded(lambda: torch.empty(3).fill_(float("nan"))))
    assert value.isnan().all()  # not a number, and the constructor's own


def test_reading_what_nobody_wrote_is_refused_at_once():
    with pytest.raises(LoadError, match="never wrote"):
        recorded(lambda: torch.empty(3).sum().item())
    with pytest.raises(LoadError, match="never wrote"):
        recorded(lambda: torch.empty(3).tolist())


def test_operations_that_meta_does_not_know():
    def make():
        weight = torch.empty(4, 4)
        nn.init.eye_(weight)
        q, r = torch.linalg.qr(weight * 2)
        return weight, q @ r, weight[weight > 0], torch.unique(weight), weight.nonzero()

    weight, product, picked, unique, places = recorded(make)
    assert torch.allclose(value_of(product)[0], torch.eye(4) * 2)
    assert torch.equal(value_of(weight)[0], torch.eye(4))
    assert picked.tolist() == [1, 1, 1, 1] and unique.tolist() == [0, 1] and len(places) == 4


def test_strides_are_kept():
    def make():
        return torch.empty_permuted((2, 3, 4), (2, 0, 1)).fill_(3), torch.empty_strided((2, 3), (1, 2)).fill_(1)

    permuted, strided = recorded(make)
    for tensor, stride in ((permuted, permuted.stride()), (strided, (1, 2))):
        value = value_of(tensor)[0]
        assert (value.shape == tensor.shape and value.stride() == stride) or torch.equal(value, torch.ones(2, 3))


def test_a_tape_lives_as_long_as_its_tensors():
    tensor = recorded(lambda: torch.empty(3).fill_(1))
    known = weakref.ref(tape_of(tensor))
    gc.collect()
    assert known() is not None
    del tensor
    gc.collect()
    assert known() is None


def test_filling_lets_go_of_the_tape():
    module = build(lambda: nn.Linear(3, 3))
    known = weakref.ref(tape_of(module.weight))
    materialise(module, missing="init")
    gc.collect()
    assert known() is None


def test_tensors_of_plain_meta_have_no_history():
    assert tape_of(torch.empty(3, device="meta")) is None
    own = Tape(0)
    with ConstructionRecorder(own):
        tensor = torch.empty(3, device="cpu")
    assert is_deferred(tensor) and tape_of(tensor) is own
    with pytest.raises(LoadError, match="before the constructor ran"):
        own.realise(torch.empty(3, device="meta"))
