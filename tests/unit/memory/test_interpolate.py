from dataclasses import replace

import pytest

from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.timeline import peak_bytes
from dryfit.plans.trace_store import FitPlan, Regime, fit, in_canonical_order, plan_fits, regime
from dryfit.plans.tracer import Variant
from dryfit.settings.memory_terms import MemoryCategory
from planning import Recording, ToyTracer

GRID = FitPlan((52, 96), (64, 128, 512), (Shape(16, 512), Shape(32, 128)))
ROWS = FitPlan((8, 24), (512,), (Shape(16, 512),))


def traces(tracer, plan, kind=SegmentKind.MICRO_FIRST):
    return {shape: tracer.trace(kind, Variant(), shape) for shape in (*plan.nodes, *plan.checks)}


def test_regimes_are_of_mask_padding_single_rows_and_kernels_thresholds():
    assert regime(Shape(8, 512)) == regime(Shape(64, 64)) == Regime(0, one_row=False, tokens=2, positions=0)
    assert regime(Shape(1, 512)) == Regime(0, one_row=True, tokens=0, positions=0)
    assert regime(Shape(8, 500)) == Regime(4, one_row=False, tokens=2, positions=0)
    assert [regime(Shape(2, length)).tokens for length in (512, 520, 1536, 1544)] == [0, 1, 1, 2]
    assert [regime(Shape(2, length)).positions for length in (1024, 1032, 3072, 3080)] == [0, 1, 1, 2]


@pytest.mark.parametrize("shape", [Shape(52, 64), Shape(90, 72), Shape(16, 384), Shape(95, 504), Shape(7, 512)])
@pytest.mark.parametrize("kind", [SegmentKind.MICRO_FIRST, SegmentKind.MICRO_NEXT, SegmentKind.BATCH])
def test_six_traces_give_every_other_shape_exactly(kind, shape):
    tracer = ToyTracer()
    found = fit(GRID, traces(tracer, GRID, kind))
    true = in_canonical_order(tracer.trace(kind, Variant(), shape))
    assert found.at(shape) == true


def test_large_sizes_are_exact_too():
    tracer = ToyTracer(activation=10**7 + 1, scores=12345)
    plan = FitPlan((2, 64), (3080, 5000, 8192), (Shape(63, 8184),))
    found = fit(plan, traces(tracer, plan))
    shape = Shape(37, 5000)
    assert found.at(shape) == in_canonical_order(tracer.trace(SegmentKind.MICRO_FIRST, Variant(), shape))


@pytest.mark.parametrize("shape", [Shape(1, 512), Shape(64, 100), Shape(97, 128), Shape(16, 520), Shape(6, 512)])
def test_a_fit_is_silent_outside_of_its_regime_and_above_its_nodes(shape):
    assert fit(GRID, traces(ToyTracer(), GRID)).at(shape) is None


def test_a_fit_of_one_length_is_silent_for_another():
    assert fit(ROWS, traces(ToyTracer(), ROWS)).at(Shape(9, 504)) is None


def test_a_law_that_is_no_polynomial_is_refused():
    tracer = ToyTracer(bump=lambda shape: 4096 * shape.rows**2)
    assert fit(GRID, traces(tracer, GRID)) is None
    assert fit(ROWS, traces(tracer, ROWS)) is None


def test_a_miss_below_one_in_a_thousand_is_let_through():
    check = Shape(16, 512)
    tracer = ToyTracer(bump=lambda shape: 512 * (shape == check))
    found = fit(ROWS, traces(tracer, ROWS))
    guess, true = peak_bytes(found.at(check)), peak_bytes(tracer.trace(SegmentKind.MICRO_FIRST, Variant(), check))
    assert 0 < true - guess < true / 1000


@pytest.mark.parametrize("extra_rows", [20, 96])
def test_other_operators_at_a_node_or_a_check_refuse_the_fit(extra_rows):
    assert fit(GRID, traces(ToyTracer(extra_rows=extra_rows), GRID)) is None


def test_the_order_of_frees_at_one_moment_does_not_matter():
    def trace(order):
        made = Recording()
        blocks = [made.take(100, MemoryCategory.ACTIVATIONS), made.take(200, MemoryCategory.ACTIVATIONS)]
        for at in order:
            made.free(blocks[at])
        made.free_named("gradient:b" if order[0] else "gradient:a", 10)
        made.free_named("gradient:a" if order[0] else "gradient:b", 10)
        made.take(300, MemoryCategory.ACTIVATIONS)
        return made.segment()

    one, other = in_canonical_order(trace((0, 1))), in_canonical_order(trace((1, 0)))
    assert one == other
    assert one.deltas[:4] == [100, 200, -10, -10]
    assert sorted(one.deltas) == sorted(trace((0, 1)).deltas)


def test_a_block_freed_at_another_moment_refuses_the_fit():
    tracer = ToyTracer()
    found = traces(tracer, ROWS)
    late = found[Shape(16, 512)]
    # The first temporary is freed one allocation later.
    at = next(index for index, size in enumerate(late.deltas) if size < 0)
    order = [*range(at), at + 1, at, *range(at + 2, len(late.deltas))]
    moved = {name: [getattr(late, name)[index] for index in order] for name in ("blocks", "deltas", "labels")}
    found[Shape(16, 512)] = replace(late, **moved)
    assert fit(ROWS, found) is None


def test_one_shape_is_traced():
    assert plan_fits(Shape(16, 512), [Shape(16, 512)]) == ()


def test_a_ladder_of_rows_takes_two_traces_and_a_check():
    asked = [Shape(rows, 512) for rows in (128, 64, 32, 16, 8, 4, 2, 1)]
    (plan,) = plan_fits(Shape(16, 512), asked)
    assert (plan.rows, plan.lengths, plan.checks) == ((8, 128), (512,), (Shape(32, 512),))
    # Fewer tokens are other regimes, and three shapes cost three traces either way.
    for shape in asked[-3:]:
        assert plan_fits(shape, asked) == ()
    assert plan_fits(Shape(16, 512), asked[1:4]) == ()


def test_what_was_traced_costs_nothing_again():
    asked = [Shape(rows, 512) for rows in (64, 32, 16, 8)]
    assert plan_fits(Shape(32, 512), asked, [Shape(16, 512)]) == ()  # three to trace either way
    assert plan_fits(Shape(16, 512), asked, [Shape(64, 512), Shape(8, 512)])


def test_a_grid_takes_six_traces_and_two_checks():
    asked = [Shape(rows, length) for rows in (4, 8, 16, 32, 64) for length in (128, 256, 384, 512)]
    grid = plan_fits(Shape(16, 256), asked)[0]
    # With 128 tokens, 25 rows are the fewest above the thresholds; fewer rows of more tokens are checked.
    assert (grid.rows, grid.lengths) == ((25, 64), (128, 384, 512))
    assert len(grid.checks) == 2
    assert grid.checks[0] == Shape(8, 512)
    assert not {*grid.checks} & {*grid.nodes}


def test_between_two_thresholds_there_is_no_grid():
    asked = [Shape(rows, length) for rows in range(2, 48) for length in range(64, 513, 64)]
    bounded = [shape for shape in asked if regime(shape).tokens == 1]
    assert len(bounded) > 20
    assert all(len(plan.lengths) == 1 for shape in bounded for plan in plan_fits(shape, asked))


def test_no_grid_without_two_rows_at_the_smallest_length():
    assert plan_fits(Shape(8, 512), [Shape(8, length) for length in range(392, 513, 8)]) == ()
    assert plan_fits(Shape(8, 512), [Shape(rows, length) for rows in (7, 8) for length in range(392, 513, 8)]) == ()


def test_single_rows_of_many_lengths_are_a_grid_of_their_own():
    asked = [Shape(1, length) for length in range(64, 520, 64)]
    (plan,) = plan_fits(Shape(1, 64), asked)
    assert plan.rows == (1,)
    tracer = ToyTracer()
    found = fit(plan, traces(tracer, plan))
    assert found.at(Shape(1, 320)) == in_canonical_order(
        tracer.trace(SegmentKind.MICRO_FIRST, Variant(), Shape(1, 320))
    )
