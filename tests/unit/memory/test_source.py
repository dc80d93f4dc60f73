import pytest

from dryfit.core.errors import TraceError
from dryfit.core.plan import OptimizerImpl
from dryfit.memory.events import SegmentKind, Shape
from dryfit.memory.interpolate import in_canonical_order
from dryfit.memory.source import SegmentSource
from dryfit.memory.store import TraceStore
from dryfit.memory.tracer import Variant
from planning import ToyTracer

FIRST = SegmentKind.MICRO_FIRST
LADDER = [Shape(rows, 512) for rows in (32, 16, 8, 4, 2, 1)]


def true(shape, variant=None):
    return in_canonical_order(ToyTracer().trace(FIRST, variant or Variant(), shape))


def test_one_shape_is_one_trace():
    tracer = ToyTracer()
    source = SegmentSource(tracer)
    for _ in range(2):
        assert source.segment(FIRST, Variant(), Shape(4, 64)) == ToyTracer().trace(FIRST, Variant(), Shape(4, 64))
    assert len(tracer.traced) == source.traced == 1


def test_a_prepared_ladder_is_interpolated():
    source = SegmentSource(ToyTracer())
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced == 4  # two nodes, a check, and the single row


def test_a_prepared_grid_is_interpolated():
    source = SegmentSource(ToyTracer())
    shapes = [Shape(rows, length) for rows in (4, 8, 16, 32, 64) for length in range(64, 513, 64)]
    source.prepare(FIRST, shapes)
    for shape in shapes:
        assert in_canonical_order(source.segment(FIRST, Variant(), shape)) == true(shape)
    assert source.traced == 8  # instead of 40


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
    source = SegmentSource(ToyTracer(extra_rows=16))
    source.prepare(FIRST, LADDER)
    for shape in LADDER:
        expected = in_canonical_order(ToyTracer(extra_rows=16).trace(FIRST, Variant(), shape))
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


def test_what_a_kind_does_not_depend_on_is_not_traced_twice():
    source = SegmentSource(ToyTracer())
    plain, other = Variant(), Variant(checkpointing=True, offload_optimizer=True)
    for variant in (plain, other):
        for kind in SegmentKind:
            source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    # Checkpointing doubles the two micro-batches, the state's place the two updates.
    assert source.traced == len(SegmentKind) + 4
    source.segment(SegmentKind.UPDATE, Variant(optimizer_impl=OptimizerImpl.PLAIN))
    assert source.traced == len(SegmentKind) + 5


def test_the_model_at_hand_is_traced():
    tracer = ToyTracer()
    source, variant = SegmentSource(tracer), Variant(checkpointing=True, offload_optimizer=True)
    for kind in SegmentKind:
        source.segment(kind, variant, Shape(4, 64) if kind.has_shape else None)
    assert {asked for _, asked, _ in tracer.traced} == {variant}


def test_what_cannot_be_traced_is_an_error_each_time():
    source = SegmentSource(ToyTracer(untraceable=lambda kind, variant: variant.checkpointing))
    for _ in range(2):
        with pytest.raises(TraceError, match="toy.py:7"):
            source.segment(FIRST, Variant(checkpointing=True), Shape(4, 64))
    assert source.segment(FIRST, Variant(), Shape(4, 64))
