"""The recorder: which storages are counted, when, for whom; on real tensors of the CPU."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.events import Segment
from dryfit.gpu.recorder import StorageRecorder
from dryfit.gpu.script_recorder import LiveAllocations, Places, ScriptRecorder
from dryfit.settings.memory_terms import MemoryCategory, StepPhase


def live_bytes(segment: Segment) -> list[int]:
    """What is allocated after each event."""
    total, out = 0, []
    for delta in segment.deltas:
        total += delta
        out.append(total)
    return out


@contextmanager
def removed_later(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep torch's hooks inside the block only."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_views_and_in_place_operators_take_nothing() -> None:
    recorder = StorageRecorder("cpu", kernels=False)
    with recorder, recorder.segment() as record:
        tensor = torch.empty(1000)
        tensor.view(10, 100).t()[3:].add_(1)
        other = tensor + 1
        del tensor
        other.mul_(2)
        del other
    assert record.result.deltas == (4000, 4000, -4000, -4000)
    assert record.result.blocks == (0, 1, 0, 1)


def test_a_view_of_what_was_made_before_takes_nothing() -> None:
    weight, empty = torch.zeros(8, 8), torch.empty(0)
    recorder = StorageRecorder("cpu", kernels=False)
    with recorder, recorder.segment() as record:
        torch.mm(torch.ones(2, 8), weight.t())
        weight.detach().mul_(2)
        empty.resize_(16)
    assert sorted(delta for delta in record.result.deltas if delta > 0) == [4 * 16, 4 * 16, 4 * 16]


def test_a_storage_lives_as_long_as_its_last_view() -> None:
    recorder = StorageRecorder("cpu", kernels=False)
    with recorder, recorder.segment() as record:
        view = torch.empty(1000)[:1]
        torch.empty(10)
        del view
    assert live_bytes(record.result) == [4000, 4040, 4000, 0]


def test_what_has_no_name_ends_with_its_segment_and_what_has_one_lives_on() -> None:
    recorder = StorageRecorder("cpu", kernels=False)
    with recorder:
        with recorder.segment() as first:
            kept, left = torch.empty(100), torch.empty(7)
            recorder.name(kept, "weight:w", MemoryCategory.WEIGHTS)
        with recorder.segment() as second:
            del left  # ended with the first segment already
            del kept
    assert live_bytes(first.result) == [400, 428, 400]
    assert first.result.names == {0: "weight:w"}
    assert second.result.deltas == (-400,)
    assert second.result.names == {0: "weight:w"}


def test_forward_temporaries_and_activations_are_told_apart_and_gradients_named() -> None:
    recorder = ScriptRecorder(LiveAllocations(AllocatorSettings, None, 0), Places(), "cpu")
    recorder.record_segments()
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.Tanh())
    recorder.know(model)
    with recorder, removed_later(recorder.follow()):
        data = torch.randn(32, 64)
        recorder.adopt(data, "input:x", MemoryCategory.INPUTS)
        for parameter in layer.parameters():
            recorder.adopt(parameter, "weight:w", MemoryCategory.WEIGHTS)
        with recorder.segment() as record:
            recorder.phase = StepPhase.FORWARD
            loss = (model(data) * 2).sum()
            recorder.phase = StepPhase.BACKWARD
            loss.backward()
            for name, parameter in layer.named_parameters():
                assert parameter.grad is not None
                recorder.name(parameter.grad, f"gradient:{name}", MemoryCategory.GRADIENTS)
    segment = record.result
    taken = [
        (segment.label_table[label], delta)
        for delta, label in zip(segment.deltas, segment.labels, strict=True)
        if delta > 4
    ]
    where = {(label.op, label.module): label.category for label, _ in taken}
    assert where["aten.tanh.default", "1"] is MemoryCategory.ACTIVATIONS  # kept for backward
    assert where["aten.addmm.default", "0"] is MemoryCategory.TEMPORARIES  # tanh keeps its output only
    assert where["aten.tanh_backward.default", "1"] is MemoryCategory.TEMPORARIES
    assert where["aten.mm.default", "0"] is MemoryCategory.GRADIENTS
    assert set(segment.names.values()) == {"gradient:weight", "gradient:bias"}
    assert live_bytes(segment)[-1] == (64 * 64 + 64) * 4


def test_sums_of_gradients_are_made_in_place_where_autograd_would_do_it() -> None:
    recorder = StorageRecorder("cpu", kernels=False)
    leaf = torch.randn(1000, requires_grad=True)
    with recorder, recorder.segment() as record:
        recorder.phase = StepPhase.FORWARD
        twice = leaf * 2
        loss = twice.relu().exp().sum() + twice.sin().exp().sum()
        recorder.phase = StepPhase.BACKWARD
        loss.backward()
    sums = [
        delta
        for delta, label in zip(record.result.deltas, record.result.labels, strict=True)
        if record.result.label_table[label].op == "aten.add.Tensor" and delta > 4
    ]
    assert sums == []  # a mode sees add make a new tensor; without one autograd adds in place


def test_tensors_of_other_devices_do_not_count() -> None:
    recorder = StorageRecorder("cuda", kernels=True)
    with recorder, recorder.segment() as record:
        torch.empty(1000)
    assert record.result.deltas == ()
