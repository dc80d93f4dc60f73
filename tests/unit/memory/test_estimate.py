from dataclasses import replace

import pytest

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.caching_allocator import replay
from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, estimate, layer_of, run_of, with_fragmentation
from dryfit.plans.tracer import Variant
from dryfit.settings.memory_terms import Confidence, DeviceKind, DeviceSpec, MemoryCategory, OptimizerImpl, StepPhase
from planning import MIB, ToyTracer

KIB = 1024
WORKSPACE = 8519680
CUDA = Device(
    DeviceSpec(name="24GiB", capacity_bytes=24 * 2**30),
    DeviceConstants(500 * MIB, WORKSPACE, Confidence.UNCALIBRATED),
    AllocatorSettings(expandable_segments=True),
    torch="2.13.0",
)
CPU = Device(
    DeviceSpec(name="cpu", kind=DeviceKind.CPU, capacity_bytes=8 * 2**30),
    DeviceConstants(521 * MIB, 0, Confidence.UNCALIBRATED),
    AllocatorSettings(),
    torch="2.13.0",
)
WORK = Work(Variant(), effective_batch=8, micro_batch=4, evaluation_rows=16, lengths=Lengths(64))


def planned(work=WORK, device=CUDA, tracer=None):
    return estimate(SegmentSource(tracer or ToyTracer()), work, device)


def test_the_numbers_by_hand():
    found = planned()
    inputs = 8 * 8 * 64  # of the effective batch
    activations, scores = 2 * 256 * KIB, 64 * KIB
    assert found.by_category == {
        MemoryCategory.WEIGHTS: 8 * MIB,
        MemoryCategory.GRADIENTS: 12 * MIB,
        MemoryCategory.OPTIMIZER: 16 * MIB,
        MemoryCategory.ACTIVATIONS: activations,
        MemoryCategory.TEMPORARIES: scores,
        MemoryCategory.INPUTS: inputs,
        MemoryCategory.WORKSPACES: 2 * WORKSPACE,
    }
    assert found.peak_allocated_bytes == sum(found.by_category.values())
    assert found.peak_allocated_bytes <= found.min_cap_bytes <= found.peak_reserved_bytes
    assert (found.overhead_bytes, found.margin_bytes) == (500 * MIB, 300 * MIB)
    assert found.required_bytes == found.min_cap_bytes + 800 * MIB
    assert (found.peak_at.phase, found.peak_at.module, found.peak_at.op) == (
        StepPhase.BACKWARD,
        "layer.1.linear",
        "aten.empty.default",
    )
    assert (found.worst_batch.rows, found.worst_batch.length, found.worst_batch.from_data) == (4, 64, False)
    assert max(found.by_phase.values()) == found.peak_allocated_bytes
    assert found.host_bytes == 0


def test_the_smallest_capacity_is_that_of_the_whole_run():
    found = planned()
    run = run_of(SegmentSource(ToyTracer()), WORK, (64, 64, 64), CUDA)
    blocks, deltas = run.blocks.tolist(), run.deltas.tolist()
    survives = replay(blocks, deltas, CUDA.allocator, capacity_bytes=found.min_cap_bytes)
    assert survives.oom_event is None
    assert replay(blocks, deltas, CUDA.allocator, capacity_bytes=found.peak_allocated_bytes - 1).oom_event is not None


def test_a_large_validation_batch_is_the_peak():
    found = planned(replace(WORK, evaluation_rows=1024))
    assert found.peak_at.phase is StepPhase.EVALUATE
    scores = 4 * 1024 * 64 * 64
    assert found.peak_allocated_bytes == (8 + 16 + 16) * MIB - 16 * MIB + scores + 8 * 1024 * 64 + 2 * WORKSPACE


def test_answers_that_are_generated_may_be_the_peak():
    few, many = (planned(replace(WORK, measured_rows=rows)) for rows in (1, 100))
    assert few.peak_allocated_bytes == planned().peak_allocated_bytes
    assert (many.peak_at.phase, many.peak_at.module) == (StepPhase.EVALUATE, "cache")
    assert many.by_category[MemoryCategory.TEMPORARIES] == 100 * MIB


def test_a_loop_over_tensors_at_once_is_the_peak():
    found = planned(replace(WORK, micro_batch=8, variant=Variant(optimizer_impl=OptimizerImpl.FOREACH)))
    assert found.peak_at.phase is StepPhase.OPTIMIZER
    assert found.by_category[MemoryCategory.TEMPORARIES] == 8 * MIB


def test_repeated_micro_batches_are_looked_at_twice_and_the_short_last_one_once():
    tracer = ToyTracer()
    planned(replace(WORK, effective_batch=50, micro_batch=4), tracer=tracer)
    rows = {(kind, shape.rows) for kind, _, shape in tracer.traced if shape}
    assert rows == {
        (SegmentKind.BATCH, 50),
        (SegmentKind.MICRO_FIRST, 4),
        (SegmentKind.MICRO_NEXT, 4),
        (SegmentKind.MICRO_NEXT, 2),
        (SegmentKind.EVALUATE, 16),
    }
    one = run_of(SegmentSource(ToyTracer()), replace(WORK, effective_batch=12), (64,), CUDA)
    many = run_of(SegmentSource(ToyTracer()), replace(WORK, effective_batch=400), (64,), CUDA)
    assert len(one) == len(many)


def test_a_batch_smaller_than_a_micro_batch_is_one():
    found = planned(replace(WORK, effective_batch=2, micro_batch=4))
    assert found.worst_batch.rows == 2


def test_on_the_cpu_nothing_is_rounded_or_cached():
    found = planned(replace(WORK, lengths=Lengths(63)), CPU)
    activations, scores = 2 * 1024 * 4 * 63, 4 * 4 * 63 * 63
    assert found.peak_allocated_bytes == (8 + 16 + 12) * MIB + activations + scores + 8 * 8 * 63
    assert found.peak_reserved_bytes == found.min_cap_bytes == found.peak_allocated_bytes
    assert MemoryCategory.WORKSPACES not in found.by_category
    assert found.margin_bytes == 64 * MIB


def test_state_in_host_memory_is_counted_there():
    there, here = planned(replace(WORK, variant=Variant(offload_optimizer=True))), planned()
    # Two states, a copy of each weight and one of each gradient.
    assert there.host_bytes == 16 * MIB + 2 * 8 * MIB
    assert there.peak_allocated_bytes == here.peak_allocated_bytes - 16 * MIB


def test_state_that_is_paged_counts_as_host_memory():
    there, here = planned(replace(WORK, has_pages=True)), planned()
    assert there.host_bytes == 16 * MIB and here.host_bytes == 0


def test_the_longest_batch_of_the_data_counts_where_lengths_are_known():
    lengths = Lengths.of(512, [30, 100, 61])
    assert (lengths.longest, lengths.candidates) == (100, (100,))
    assert planned(replace(WORK, lengths=lengths)).worst_batch.from_data
    assert Lengths.of(512, None) == Lengths(512)
    assert Lengths.of(64, [30, 100]).longest == 64
    assert Lengths.of(64, []) == Lengths(64)


def test_a_padded_mask_may_make_a_shorter_batch_the_worst():
    lengths = Lengths.of(512, [512, 511, 509, 505, 100])
    assert lengths.candidates == (512, 511)
    assert Lengths.of(512, [512, 504, 500]).candidates == (512,)
    tracer = ToyTracer(bump=lambda shape: MIB * (shape.length % 8 > 0))
    found = planned(replace(WORK, lengths=lengths), tracer=tracer)
    assert found.worst_batch.length == 511


def test_a_few_lengths_stand_for_all():
    spread = Lengths.of(512, range(20, 520)).spread
    assert spread == (72, 272, 472, 512)
    assert Lengths(512).spread == (512,)
    assert Lengths.of(512, [64]).spread == (64,)


@pytest.mark.parametrize("expandable", [True, False])
def test_batches_of_varying_lengths_only_ever_add(expandable):
    device = replace(CUDA, allocator=AllocatorSettings(expandable_segments=expandable))
    work = replace(WORK, lengths=Lengths.of(512, range(24, 520, 8)))
    tracer = ToyTracer(weight=MIB // 4, activation=9000)
    source = SegmentSource(tracer)
    plain = estimate(source, work, device)
    found = with_fragmentation(plain, source, work, device, seed=0)
    assert found.fragmented_bytes >= plain.fragmented_bytes
    assert found.fragmented_bytes > plain.fragmented_bytes or not expandable
    assert found.min_cap_bytes >= plain.min_cap_bytes
    assert found.required_bytes == found.min_cap_bytes + found.overhead_bytes + found.margin_bytes
    assert with_fragmentation(plain, source, work, device, seed=0) == found
    again = {shape for kind, _, shape in tracer.traced if kind is SegmentKind.MICRO_FIRST}
    assert again == {Shape(4, length) for length in work.lengths.spread}


def test_without_lengths_there_is_no_fragmentation_to_tell():
    source = SegmentSource(ToyTracer())
    plain = estimate(source, WORK, CUDA)
    assert with_fragmentation(plain, source, WORK, CUDA, seed=0) is plain


@pytest.mark.parametrize(
    "module, layer",
    [
        ("encoder.encoder.layer.23.attention.self.query", "encoder.encoder.layer.23.attention"),
        ("encoder.layer.23", "encoder.layer.23"),
        ("model.layers.7.mlp", "model.layers.7.mlp"),
        ("head.layers.0.1.weight", "head.layers.0.1"),
        ("pooler.dense", "pooler.dense"),
        ("conv1d.x1", "conv1d.x1"),
        ("", ""),
    ],
)
def test_a_layer_is_named_by_its_part(module, layer):
    assert layer_of(module) == layer
