import dataclasses
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dryfit.gpu.slots import SlotKind, leaks, slots
from dryfit.meta import moves as move_module
from dryfit.meta.moves import move
from dryfit.settings.errors import LoadError, MachineError
from thinning import examples

PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64)
BUFFER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


class Special(nn.Parameter):
    """A parameter of a class of its own."""


@dataclasses.dataclass(frozen=True)
class Box:
    inside: torch.Tensor


class Node(nn.Module):
    """Computes something of everything it holds, in double precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        for slot in slots(self):
            if slot.owner is self:
                x = torch.tanh(x + exact(slot.tensor.detach()).real.double().mean())
        return x


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()  # one-byte floats cannot be compared


def filled(dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.linspace(-2.3, 3.7, 12, dtype=torch.float64).roll(seed).reshape(4, 3)
    return values.to(dtype)


def tree(ops: list[tuple[int, int, int, int]]) -> Node:
    """A module grown step by step: each operation adds one thing, at places given by small numbers."""
    nodes = [Node()]
    parameters: list[nn.Parameter] = []
    buffers: list[torch.Tensor] = []
    for number, (what, a, b, c) in enumerate(ops):
        node, name = nodes[a % len(nodes)], f"n{number}"
        if what == 0:
            nodes.append(Node())
            node.add_module(name, nodes[-1])
        elif what in (1, 2, 3):
            data = filled(PARAMETER_DTYPES[b % (3 if what == 1 else len(PARAMETER_DTYPES))], number)
            data = data.T if c == 3 else data
            trains = data.dtype.is_floating_point and data.itemsize > 1 and c % 2 == 0
            parameters.append((Special if what == 2 else nn.Parameter)(data, requires_grad=trains))
            if c > 1:
                parameters[-1].note = {"row": number}
            node.register_parameter(name, parameters[-1])
        elif what in (4, 5):
            data = filled(torch.float32, number) if what == 5 else filled(BUFFER_DTYPES[b % 5], number)
            buffers.append(data[:1].expand(4, 3) if what == 5 else data)
            node.register_buffer(name, buffers[-1], persistent=c % 2 == 0)
        elif what in (6, 7):
            one, two = filled(BUFFER_DTYPES[b % 5], number), filled(torch.float32, number + 1)
            inside = [one, [one, two[:, 1:]], {"k": (two,)}, Box(one)]
            setattr(node, name, inside[c % 4])
        elif what == 8 and parameters:
            node.register_parameter(name, parameters[b % len(parameters)])
        elif what == 9 and buffers:
            node.register_buffer(name, buffers[b % len(buffers)])
        elif what == 10 and a % len(nodes) < b % len(nodes):  # never upwards: no cycles
            node.add_module(name, nodes[b % len(nodes)])
        elif what == 11 and parameters:
            whole = parameters[b % len(parameters)].data
            part = (whole[1:], whole[:, :2], whole.detach(), whole[2])[c % 4] if whole.numel() == 12 else whole[:1]
            parameters.append(nn.Parameter(part, requires_grad=False))
            node.register_parameter(name, parameters[-1])
        elif what == 12 and parameters:
            held = parameters[b % len(parameters)]
            if held.requires_grad:
                held.grad = torch.full_like(held, 0.3)
        elif what == 13 and parameters:
            node.__dict__[name] = parameters[b % len(parameters)] if c % 2 else [parameters[b % len(parameters)].data]
        elif what == 14:
            node.register_buffer(name, None)
    return nodes[0]


def add_meta(root: Node, where: int, what: int) -> None:
    nodes = list(root.modules())
    node, empty = nodes[where % len(nodes)], torch.empty(3, device="meta")
    if what == 0:
        node.lost = nn.Parameter(empty)
    elif what == 1:
        node.register_buffer("lost", empty, persistent=False)
    else:
        node.lost = [{"x": empty}] if what == 2 else empty


STEP = st.tuples(st.integers(0, 14), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3))
TREES = st.one_of(st.lists(STEP, max_size=6), st.lists(STEP, min_size=8, max_size=24)).map(tree)


@dataclasses.dataclass
class Seen:
    tensors: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    facts: dict[str, tuple[Any, ...]]
    same: set[tuple[str, str]]
    memory: dict[tuple[str, str], int]


def elements(tensor: torch.Tensor) -> set[int]:
    indices = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    return set(indices.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist())


def look(root: nn.Module) -> Seen:
    found = slots(root)
    seen = Seen({}, {}, {}, {}, set(), {})
    for slot in found:
        tensor = slot.tensor
        seen.tensors[slot.name] = tensor
        seen.values[slot.name] = tensor.detach().clone()
        seen.grads[slot.name] = None if tensor.grad is None else tensor.grad.clone()
        facts = (slot.kind, slot.persistent, slot.aliases, type(tensor), tensor.requires_grad, dict(vars(tensor)))
        seen.facts[slot.name] = (*facts, tensor.shape)
    for one, two in combinations(found, 2):
        if one.tensor is two.tensor:
            seen.same.add((one.name, two.name))
        if one.tensor.untyped_storage()._cdata == two.tensor.untyped_storage()._cdata:
            if elements(one.tensor) & elements(two.tensor):
                distance = one.tensor.storage_offset() - two.tensor.storage_offset()
                seen.memory[one.name, two.name] = distance
    return seen


def converted(seen: Seen) -> set[str]:
    """What a change of type reaches: floating parameters and all that overlaps them in memory."""
    names = {
        name
        for name, tensor in seen.tensors.items()
        if seen.facts[name][0] is SlotKind.PARAMETER and tensor.is_floating_point() and tensor.itemsize > 1
    }
    while True:
        more = {name for pair in seen.memory for name in pair if names & set(pair)} - names
        if not more:
            return names
        names |= more


def assert_moved(root: nn.Module, before: Seen, keys: list[str], dtype: torch.dtype | None) -> None:
    after = look(root)
    assert list(root.state_dict()) == keys
    assert after.facts == before.facts
    assert after.same == before.same
    assert after.memory == before.memory
    changed = converted(before) if dtype else set()
    for name, value in before.values.items():
        want = value.to(dtype) if name in changed else value
        assert after.tensors[name].dtype == want.dtype, name
        assert torch.equal(exact(after.values[name]), exact(want)), name
        gradient = before.grads[name]
        if gradient is not None:
            kept = after.grads[name]
            assert kept is not None
            assert torch.equal(kept, gradient.to(dtype) if name in changed else gradient)
        if isinstance(before.tensors[name], nn.Parameter):
            assert after.tensors[name] is before.tensors[name], f"{name}: an optimizer would lose it"
            assert after.tensors[name].grad is before.tensors[name].grad


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is copied, as on the way to another device."""
    monkeypatch.setattr(move_module, "_stays", lambda group, target: False)


@given(root=TREES)
@settings(max_examples=examples(800))
def test_random_trees_to_another_device(root: Node) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_module, "_stays", lambda group, target: False)
        before, keys = look(root), list(root.state_dict())
        pointers = {name: tensor.data_ptr() for name, tensor in before.tensors.items()}
        x = torch.ones(2, dtype=torch.complex128)
        result = root(x)
        assert move(root, "cpu") is root
        assert_moved(root, before, keys, None)
        assert torch.equal(root(x), result)
        assert not [slot.name for slot in slots(root) if slot.tensor.data_ptr() == pointers[slot.name]]


@given(root=TREES, dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float32]))
@settings(max_examples=examples(600))
def test_random_trees_to_another_type(root: Node, dtype: torch.dtype) -> None:
    before, keys = look(root), list(root.state_dict())
    x = torch.ones(2, dtype=torch.complex128)
    result = root(x)
    move(root, "cpu", dtype)
    assert_moved(root, before, keys, dtype)
    if dtype is torch.float64:
        assert torch.allclose(root(x), result, rtol=1e-14)


@given(root=TREES, where=st.integers(0, 5), what=st.integers(-1, 3), dtype=st.sampled_from([None, torch.bfloat16]))
@settings(max_examples=examples(600))
def test_refused_if_and_only_if_something_has_no_data(root: Node, where: int, what: int, dtype: Any) -> None:
    if what >= 0:
        add_meta(root, where, what)
    lost = leaks(root)
    before, keys = look(root), list(root.state_dict())
    if not lost:
        move(root, "cpu", dtype)
        assert_moved(root, before, keys, dtype)
        return
    with pytest.raises(LoadError) as caught:
        move(root, "cpu", dtype)
    assert lost[0] in caught.value.found
    assert f"{len(lost)} of {len(before.tensors)} tensors have no data" in caught.value.found
    after = look(root)
    assert after.facts == before.facts
    assert all(after.tensors[name] is tensor for name, tensor in before.tensors.items())
    assert all(after.tensors[name].dtype == value.dtype for name, value in before.values.items())


@given(root=TREES, dtype=st.sampled_from([None, torch.bfloat16]))
@settings(max_examples=examples(300))
def test_random_trees_to_meta(root: Node, dtype: torch.dtype | None) -> None:
    before, keys = look(root), list(root.state_dict())
    move(root, "meta", dtype)
    after = look(root)
    assert list(root.state_dict()) == keys
    assert len(leaks(root)) == len(after.tensors)
    assert (after.facts, after.same, after.memory) == (before.facts, before.same, before.memory)
    changed = converted(before) if dtype else set()
    for name, value in before.values.items():
        assert after.tensors[name].dtype == (dtype if name in changed else value.dtype)
        if before.grads[name] is not None:
            assert after.grads[name].is_meta


def test_a_move_that_fails_half_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2))
    install, calls = move_module._install, []

    def failing(*args: Any) -> None:
        calls.append(1)
        if len(calls) in (1, 3):
            raise torch.OutOfMemoryError("no memory")
        install(*args)

    monkeypatch.setattr(move_module, "_install", failing)
    with pytest.raises(torch.OutOfMemoryError) as at_once:
        move(root, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in root.parameters()} == {torch.float32}
    assert not hasattr(at_once.value, "__notes__")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        move(root, "cpu", torch.bfloat16)
    assert "failed half-way" in caught.value.__notes__[0]


def test_modules_without_parameters_or_anything() -> None:
    empty, buffers = nn.Sequential(nn.ReLU()), nn.Module()
    buffers.register_buffer("table", torch.arange(3.0))
    assert move(empty, "cpu", torch.bfloat16) is empty
    assert move(buffers, "cpu", torch.bfloat16).table.dtype is torch.float32
    assert move(buffers, "meta").table.is_meta
    with pytest.raises(LoadError, match="table"):
        move(buffers, "cpu")


def test_results_of_computations_move_without_their_graph(elsewhere: None) -> None:
    module = nn.Linear(2, 2)
    module.product = module.weight * 2
    module.leaf = torch.ones(2, requires_grad=True)
    move(module, "cpu")
    assert module.product.grad_fn is None
    assert not module.product.requires_grad
    assert module.leaf.requires_grad
    assert torch.equal(module.product, module.weight * 2)


def test_a_recurrent_module_still_runs_after_meta_and_back() -> None:
    module = nn.LSTM(2, 3)
    want = module(torch.ones(1, 2))[0]
    move(module, "cpu", torch.float64)
    got = module(torch.ones(1, 2, dtype=torch.float64))[0]
    assert torch.allclose(want.double(), got, atol=1e-6)
    move(module, "meta")
    assert module(torch.empty(1, 2, dtype=torch.float64, device="meta"))[0].is_meta


def test_sparse_and_conjugated_tensors(elsewhere: None) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()
    module.register_buffer("few", torch.eye(3).to_sparse())
    module.register_buffer("conj", torch.tensor([1 + 2j]).conj())
    move(module, "cpu", torch.float64)
    assert torch.equal(module.few.to_dense(), torch.eye(3))
    assert module.conj.tolist() == [1 - 2j]
    assert module.weight.grad.is_sparse
    assert module.weight.grad.dtype is torch.float64


def test_views_of_one_large_buffer_are_moved_one_by_one(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    copied = move_module._copied

    def watched(*args: Any) -> list[torch.Tensor]:
        out = copied(*args)
        sizes.extend(tensor.untyped_storage().nbytes() for tensor in out)
        return out

    monkeypatch.setattr(move_module, "_copied", watched)
    whole = torch.arange(1000.0)
    module = nn.Module()
    for index in range(10):
        module.register_parameter(f"p{index}", nn.Parameter(whole[index * 100 : (index + 1) * 100]))
    move(module, "cpu")
    assert max(sizes) <= 400 + 16
    assert torch.equal(torch.cat(list(module.parameters())), whole)


def test_views_of_several_types_move_together_but_are_not_converted(elsewhere: None) -> None:
    module = nn.Module()
    module.whole = nn.Parameter(torch.arange(4.0))
    module.register_buffer("bits", module.whole.detach().view(torch.int32)[1:])
    with pytest.raises(LoadError, match="share memory as different types"):
        move(module, "cpu", torch.float64)
    move(module, "cpu")
    with torch.no_grad():
        module.whole[1] = 0
    assert module.bits.tolist()[0] == 0


def test_wide_elements_stay_aligned_beside_narrow_ones(elsewhere: None) -> None:
    bytes_ = torch.arange(32, dtype=torch.uint8)
    module = nn.Module()
    module.register_buffer("narrow", bytes_.view(torch.int16)[3:12])  # from byte 6 on
    module.register_buffer("wide", bytes_.view(torch.int64)[1:3])
    want = module.wide.tolist()
    move(module, "cpu")
    assert module.wide.tolist() == want
    module.narrow[1] = -1
    assert module.wide.tolist() != want


def test_wrong_arguments() -> None:
    with pytest.raises(LoadError, match="(?s)moving Linear to cpu as torch.int8.*is not a floating-point type"):
        move(nn.Linear(1, 1), "cpu", torch.int8)
    with pytest.raises(LoadError, match="have no shape yet"):
        move(nn.LazyLinear(3), "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="moving Linear to cuda"):
            move(nn.Linear(1, 1), "cuda")


def test_what_is_there_already_is_not_copied() -> None:
    module = nn.Linear(2, 2)
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    assert [parameter.data_ptr() for parameter in move(module, "cpu", torch.float32).parameters()] == pointers


def test_what_has_gaps_changes_its_type_and_loses_them() -> None:
    module = nn.Module()
    module.register_parameter("gaps", nn.Parameter(torch.arange(6.0)[::2]))
    found: Any = move(module, "cpu", torch.float64)
    assert found.gaps.dtype is torch.float64 and found.gaps.tolist() == [0, 2, 4]
    assert found.gaps.untyped_storage().nbytes() == 3 * 8


def test_memory_is_freed_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    for index in range(8):
        module.register_parameter(f"p{index}", nn.Parameter(torch.ones(1000)))
        module.register_buffer(f"b{index}", torch.ones(1000))
    alive: dict[int, Any] = {}
    install, most = move_module._install, [0]

    def watched(group: Any, moved: Any, gradients: Any) -> None:
        alive[len(alive)] = None
        install(group, moved, gradients)
        held = {s.tensor.untyped_storage()._cdata for s in slots(module)}
        most[0] = max(most[0], len(held))

    monkeypatch.setattr(move_module, "_stays", lambda group, target: False)
    monkeypatch.setattr(move_module, "_install", watched)
    move(module, "cpu", torch.float64)
    assert most[0] == 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@given(root=TREES, dtype=st.sampled_from([None, torch.bfloat16, torch.float64]))
@settings(max_examples=examples(100))
def test_random_trees_to_a_gpu_and_back(root: Node, dtype: torch.dtype | None) -> None:
    before, keys = look(root), list(root.state_dict())
    move(root, "cuda", dtype)
    assert {slot.tensor.device.type for slot in slots(root)} <= {"cuda"}
    move(root, "cpu")
    assert_moved(root, before, keys, dtype)
