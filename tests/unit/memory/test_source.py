from dataclasses import replace

import pytest

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, compact, estimate, relevant, with_fragmentation
from dryfit.plans.timeline import end_bytes
from dryfit.plans.trace_store import TraceStore, in_canonical_order
from dryfit.plans.tracer import Variant
from dryfit.settings.errors import TraceError
from dryfit.settings.memory_terms import Confidence, DeviceSpec, OptimizerImpl
from planning import MIB, ToyTracer

FIRST = SegmentKind.MICRO_FIRST
LADDER = [Shape(rows, 512) for rows in (128, 64, 32, 16, 8, 4, 1)]


def true(shape, variant=None):
    return in_canonical_order(ToyTracer().trace(FIRST, variant or Variant(), shape))


def test_one_shape_is_one_trace():
    tracer = ToyTracer()
    source = SegmentSource(tracer)
    for _ in range(2):
        assert in_canonical_order(source.segment(FIRST, Variant(), Shape(4, 64))) == true(Shape(4, 64))
    assert len(tracer.traced) == source.traced == 1


def test_a_prepared_ladder_is_interpolated():
    source = SegmentSource(ToyTracer())
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced == 5  # two nodes, a check, and two where other kernels run


def test_a_prepared_grid_is_interpolated():
    source = SegmentSource(ToyTracer())
    shapes = [Shape(rows, length) for rows in (8, 16, 32, 64, 128) for length in range(64, 513, 64)]
    source.prepare(FIRST, shapes)
    for shape in shapes:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced < len(shapes) // 2


def test_where_no_fit_holds_everything_is_traced():
    def bump(shape):
        return 512 * shape.rows**2

    source = SegmentSource(ToyTracer(bump=bump, activation=1))
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        found = in_canonical_order(source.segment(FIRST, Variant(), shape))
        assert found == in_canonical_order(ToyTracer(bump=bump, activation=1).trace(FIRST, Variant(), shape))
    assert source.traced == len(LADDER)


def test_where_operators_change_with_rows_everything_is_traced():
    source = SegmentSource(ToyTracer(extra_rows=32))
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        expected = in_canonical_order(ToyTracer(extra_rows=32).trace(FIRST, Variant(), shape))
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == expected


@pytest.mark.parametrize(
    "shapes", [LADDER, [Shape(rows, length) for rows in (4, 8, 16) for length in (64, 128, 256, 512)]]
)
def test_a_later_process_traces_nothing(tmp_path, shapes):
    for traced in (True, False):
        source = SegmentSource(ToyTracer(), TraceStore(tmp_path))
        source.prepare(FIRST, shapes)
        for shape in shapes:
            assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
        assert (source.traced > 0) is traced


def test_another_subject_has_traces_of_its_own(tmp_path):
    store = TraceStore(tmp_path)
    SegmentSource(ToyTracer(), store).segment(FIRST, Variant(), Shape(4, 64))
    other = SegmentSource(ToyTracer(key="other"), store)
    other.segment(FIRST, Variant(), Shape(4, 64))
    assert other.traced == 1


def test_a_loss_in_chunks_has_segments_of_its_own():
    whole, chunked = Variant(), Variant(chunked_loss=True, optimizer_impl=OptimizerImpl.PLAIN)
    own = {kind for kind in SegmentKind if relevant(kind, chunked).chunked_loss}
    assert own == {FIRST, SegmentKind.MICRO_NEXT, SegmentKind.MICRO_HOST, SegmentKind.EVALUATE}
    assert relevant(SegmentKind.MEASURE, chunked) == relevant(SegmentKind.MEASURE, whole)
    assert relevant(SegmentKind.UPDATE, chunked) == Variant(optimizer_impl=OptimizerImpl.PLAIN)


def test_what_a_kind_does_not_depend_on_is_not_traced_twice():
    source = SegmentSource(ToyTracer())
    plain, other = Variant(), Variant(checkpointing=True, offload_optimizer=True)
    for variant in (plain, other):
        for kind in SegmentKind:
            source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    # Checkpointing doubles the three kinds of micro-batches, the state's place the three of updates.
    assert source.traced == len(SegmentKind) + 6
    for kind in SegmentKind:
        source.segment(kind, Variant(optimizer_impl=OptimizerImpl.PLAIN), Shape(4, 64) if kind.has_shape else None)
    assert source.traced == len(SegmentKind) + 9


def test_another_optimizer_only_traces_updates():
    twin = SegmentSource(ToyTracer())
    source = SegmentSource(ToyTracer(states=1, key="one state"), twin=twin)
    for kind in SegmentKind:
        source.segment(kind, Variant(), Shape(4, 64) if kind.has_shape else None)
    assert (source.traced, twin.traced) == (3, len(SegmentKind) - 3)
    first = source.segment(SegmentKind.UPDATE_FIRST, Variant())
    assert end_bytes(first, "optimizer:") == 8 * MIB


def test_segments_are_kept_small():
    tables = {}
    segments = [ToyTracer().trace(FIRST, Variant(), Shape(rows, 64)) for rows in (2, 4)]
    small = [compact(segment, tables) for segment in segments]
    assert small[0].label_table is small[1].label_table
    assert [in_canonical_order(one) for one in small] == [in_canonical_order(one) for one in segments]
    assert small[0].deltas.itemsize == 8


def test_the_model_at_hand_is_traced():
    tracer = ToyTracer()
    source, variant = SegmentSource(tracer), Variant(checkpointing=True, offload_optimizer=True)
    for kind in SegmentKind:
        source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    assert {asked for _, asked, _ in tracer.traced} == {variant}


def test_a_plan_is_made_once(tmp_path):
    work = Work(Variant(), 8, 4, 16, Lengths.of(256, range(24, 200)))
    device = Device(
        DeviceSpec(name="x", capacity_bytes=2**34),
        DeviceConstants(0, 0, Confidence.UNCALIBRATED),
        AllocatorSettings(),
        torch="2.13.0",
    )

    def planned(key, device=device):
        source = SegmentSource(ToyTracer(key=key), TraceStore(tmp_path))
        return with_fragmentation(estimate(source, work, device), source, work, device, seed=0), source.traced

    first, traced = planned("toy")
    assert traced > 0
    files = len(list(tmp_path.iterdir()))
    assert planned("toy") == (first, 0)
    assert len(list(tmp_path.iterdir())) == files
    planned("toy", replace(device, spec=DeviceSpec(name="y", capacity_bytes=2**35)))
    assert len(list(tmp_path.iterdir())) == files  # the device's size decides nothing here
    planned("toy", replace(device, allocator=AllocatorSettings(expandable_segments=True)))
    assert len(list(tmp_path.iterdir())) == files + 2


def test_what_cannot_be_traced_is_an_error_each_time():
    source = SegmentSource(ToyTracer(untraceable=lambda kind, variant: variant.checkpointing))
    for _ in range(2):
        with pytest.raises(TraceError, match="toy.py:7"):
            source.segment(FIRST, Variant(checkpointing=True), Shape(4, 64))
    assert source.segment(FIRST, Variant(), Shape(4, 64))
