import pytest

from dryfit.gpu.events import WORKSPACE_OP, SegmentKind, Shape
from dryfit.plans.timeline import compose, end_bytes, peak_bytes
from dryfit.plans.tracer import Variant
from dryfit.settings.errors import InternalError
from dryfit.settings.memory_terms import MemoryCategory, StepPhase
from planning import MIB, Recording, ToyTracer

SHAPE = Shape(rows=4, length=64)
KIB = 1024


def segments(*kinds, variant=None):
    tracer = ToyTracer()
    return [tracer.trace(kind, variant or Variant(), SHAPE if kind.has_shape else None) for kind in kinds]


def step(update):
    return segments(SegmentKind.BATCH, SegmentKind.MICRO_FIRST, SegmentKind.MICRO_NEXT, update)


def whole_run(workspace_bytes=0):
    parts = [
        segments(SegmentKind.LOAD),
        step(SegmentKind.UPDATE_FIRST),
        step(SegmentKind.UPDATE),
        segments(SegmentKind.EVALUATE),
        segments(SegmentKind.SAVE),
    ]
    return compose(parts, workspace_bytes=workspace_bytes)


def test_phases_have_peaks_of_their_own():
    phases = whole_run().by_phase()
    assert phases[StepPhase.LOAD] == 8 * MIB
    # The largest forward pass is that of the second micro-batch of the second step.
    assert phases[StepPhase.FORWARD] == (8 + 16 + 8) * MIB + 2 * 256 * KIB + 64 * KIB + 2048
    assert phases[StepPhase.EVALUATE] == (8 + 16) * MIB + 64 * KIB + 2048
    assert phases[StepPhase.SAVE] == (8 + 16) * MIB + 512
    assert StepPhase.CLIP not in phases


def test_each_thread_takes_one_workspace_and_keeps_it():
    run = whole_run(workspace_bytes=1000)
    table = run.label_table
    taken = [at for at, label in enumerate(run.labels) if table[label].op == WORKSPACE_OP]
    assert [table[run.labels[at]].phase for at in taken] == [StepPhase.FORWARD, StepPhase.BACKWARD]
    assert run.deltas[taken].tolist() == [1000, 1000]
    assert set(run.rounded[taken].tolist()) == {1024}
    # Before the first activation, and before the first event of the backward pass.
    assert table[run.labels[taken[0] + 1]].category is MemoryCategory.ACTIVATIONS
    assert table[run.labels[taken[1] - 1]].phase is StepPhase.FORWARD


def test_a_batch_is_freed_at_the_end_of_its_step():
    run = compose([segments(SegmentKind.BATCH), segments(SegmentKind.BATCH)])
    assert run.deltas.tolist() == [2048, -2048, 2048, -2048]
    assert run.blocks.tolist() == [0, 0, 1, 1]


def test_what_code_still_holds_at_the_end_of_a_part_is_freed_there():
    made = Recording()
    made.take(100, MemoryCategory.TEMPORARIES)
    made.take(200, MemoryCategory.TEMPORARIES)
    run = compose([[made.segment()]])
    assert run.deltas.tolist() == [100, 200, -200, -100]
    assert run.blocks.tolist() == [0, 1, 1, 0]


def test_a_gradient_may_be_replaced_by_a_new_storage():
    first, second = Recording(), Recording()
    first.take(512, MemoryCategory.GRADIENTS, name="gradient:w")
    second.take(512, MemoryCategory.GRADIENTS, name="gradient:w")
    second.free_named("gradient:w", 512)
    last = Recording()
    last.free_named("gradient:w", 512)
    run = compose([[first.segment(), second.segment(), last.segment()]])
    assert run.blocks.tolist() == [0, 1, 0, 1]
    assert run.deltas.tolist() == [512, 512, -512, -512]


def test_a_free_takes_the_size_the_block_was_taken_with():
    first, second = Recording(), Recording()
    first.take(512, MemoryCategory.GRADIENTS, name="gradient:w")
    second.free_named("gradient:w", 999)
    assert compose([[first.segment(), second.segment()]]).deltas.tolist() == [512, -512]


def test_segments_stay_as_they_were():
    made = segments(SegmentKind.MICRO_FIRST, SegmentKind.UPDATE)
    before = [(list(segment.blocks), list(segment.deltas)) for segment in made]
    compose([made])
    assert before == [(segment.blocks, segment.deltas) for segment in made]


def test_freeing_what_no_segment_left_is_our_bug():
    with pytest.raises(InternalError, match="gradient:layer.0"):
        compose([segments(SegmentKind.UPDATE)])


def test_an_empty_run_has_no_memory():
    run = compose([])
    assert len(run) == 0
    assert run.by_phase() == {}


def test_what_a_segment_holds_by_itself():
    made = segments(SegmentKind.UPDATE_FIRST, SegmentKind.EVALUATE)
    assert end_bytes(made[0], "optimizer:") == 16 * MIB
    assert end_bytes(made[0], "gradient:") == 0
    assert peak_bytes(made[1]) == 64 * KIB + 2048
