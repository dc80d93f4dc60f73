"""Whatever the trial, the execution settings and the device: what a plan may never do."""

from hypothesis import given
from hypothesis import strategies as st

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.gpu.events import SegmentKind, Shape
from dryfit.plans.estimate import Device, Lengths, SegmentSource, Work, run_of
from dryfit.plans.ladder import (
    PlannedTrial,
    execution_asked,
    fallback_stages,
    plan_by_ladder,
    smaller_validations,
)
from dryfit.plans.trace_store import fit, in_canonical_order, plan_fits
from dryfit.plans.tracer import Variant
from dryfit.settings.execution import ExecutionSettings
from dryfit.settings.memory_terms import Confidence, DeviceKind, DeviceSpec, Effect, OptimizerImpl, VerdictKind
from planning import MIB, ToyTracer

IMPLS = (OptimizerImpl.FOREACH, OptimizerImpl.PLAIN)

trials = st.builds(
    PlannedTrial,
    effective_batch=st.integers(1, 40),
    lengths=st.one_of(
        st.integers(8, 256).map(Lengths),
        st.lists(st.integers(8, 256), min_size=1, max_size=20).map(lambda rows: Lengths.of(200, rows)),
    ),
    optimizer_impls=st.sampled_from([IMPLS, IMPLS[:1]]),
    cannot_checkpoint=st.sampled_from([None, "it cannot"]),
    cannot_offload=st.sampled_from([None, "it cannot"]),
    cannot_offload_activations=st.sampled_from([None, "it cannot"]),
    lora_rank=st.sampled_from([None, 8]),
)
executions = st.builds(
    ExecutionSettings,
    micro_batch=st.none() | st.integers(1, 50),
    eval_batch=st.none() | st.integers(1, 100),
    checkpointing=st.sampled_from([None, False]),
    offload_activations=st.sampled_from([None, False]),
    offload_optimizer=st.sampled_from([None, False]),
    allow=st.sampled_from(["exact", "numerics"]),
    memory_limit=st.sampled_from([None, "900MiB"]),
)
tracers = st.builds(
    dict,
    layers=st.integers(1, 3),
    weight=st.integers(1, 30 * MIB),
    activation=st.integers(1, 20_000),
    states=st.integers(0, 2),
    scored=st.integers(0, 40_000),
)


def device(capacity_mib, kind=DeviceKind.CUDA):
    return Device(
        DeviceSpec(name="made-up", kind=kind, capacity_bytes=capacity_mib * MIB),
        DeviceConstants(400 * MIB, 8519680, Confidence.UNCALIBRATED),
        AllocatorSettings(expandable_segments=True),
        torch="2.13.0",
    )


def planned(trial, wish, made, where, every_fallback=False):
    source = SegmentSource(ToyTracer(**made))
    smaller = SegmentSource(ToyTracer(**made | {"states": 0}, key="smaller"))
    return plan_by_ladder(trial, wish, source, where, resubject=lambda change: smaller, every_fallback=every_fallback)


@given(trials, executions, tracers, st.integers(600, 2000), st.sampled_from(DeviceKind), st.booleans())
def test_a_plan_keeps_its_promises(trial, wish, made, capacity_mib, kind, every_fallback):
    where = device(capacity_mib, kind)
    found = planned(trial, wish, made, where, every_fallback)
    most_bytes = wish.limited(where.spec).capacity_bytes
    executions = [fallback.execution for fallback in found.ladder if fallback.execution]
    for execution in [*executions, *found.fallbacks, *([found.execution] if found.execution else [])]:
        # The effective batch is what was asked for, whatever it is cut into.
        assert execution.accumulation == -(-trial.effective_batch // execution.micro_batch)
        assert 1 <= execution.micro_batch <= trial.effective_batch
        assert wish.micro_batch is None or execution.micro_batch == min(wish.micro_batch, trial.effective_batch)
        assert wish.eval_batch is None or execution.eval_batch == wish.eval_batch
        assert wish.checkpointing is None or execution.checkpointing == wish.checkpointing
        assert wish.offload_optimizer is None or execution.offload_optimizer == wish.offload_optimizer
        assert wish.offload_activations is None or execution.offload_activations == wish.offload_activations
        assert execution.checkpointing or not execution.offload_activations
        assert not (trial.cannot_offload_activations and execution.offload_activations)
        assert not (trial.cannot_checkpoint and execution.checkpointing)
        assert not (trial.cannot_offload and execution.offload_optimizer)
    assert all(fallback.execution is None for fallback in found.ladder if fallback.effect is Effect.SEMANTICS)
    if found.execution:
        assert all(choice.eval_rows <= found.execution.eval_rows for choice in found.fallbacks)
        halves = wish.eval_batch is None and wish.allow == "numerics"
        assert (found.eval_batches[-1:] == (1,)) == (halves and found.execution.eval_rows > 1)
    if wish.allow == "exact":
        asked = execution_asked(trial, wish)
        assert {execution.micro_batch for execution in executions} <= {asked.micro_batch}
        assert Effect.NUMERICS not in {fallback.effect for fallback in found.ladder}
    match found.verdict:
        case VerdictKind.FITS | VerdictKind.FITS_WITH:
            assert found.memory.required_bytes <= most_bytes
            assert (found.verdict is VerdictKind.FITS) == (found.execution == execution_asked(trial, wish))
            assert (found.verdict is VerdictKind.FITS) == (found.shortfall_bytes == 0)
        case VerdictKind.REFUSED:
            assert found.execution is None
            assert found.memory.required_bytes == most_bytes + found.shortfall_bytes > most_bytes
            assert not any(fallback.fits for fallback in found.ladder if fallback.execution)
    assert all(fallback.fits == (fallback.required_bytes <= most_bytes) for fallback in found.ladder)


@given(trials, executions, tracers, st.integers(600, 2000), st.integers(0, 1000))
def test_more_memory_is_never_worse(trial, wish, made, capacity_mib, more_mib):
    def place(found):
        asked = execution_asked(trial, wish)
        bases = [asked, *(choice for stage in fallback_stages(trial, wish, asked) for choice in stage.choices)]
        order = [choice for base in bases for choice in (base, *smaller_validations(base, wish))]
        return [*order, None].index(found.execution)

    less = planned(trial, wish, made, device(capacity_mib))
    more = planned(trial, wish, made, device(capacity_mib + more_mib))
    assert place(more) <= place(less)
    assert more.shortfall_bytes <= less.shortfall_bytes


@given(trials, executions, tracers, st.integers(600, 2000))
def test_telling_every_fallback_changes_no_choice(trial, wish, made, capacity_mib):
    brief, full = (planned(trial, wish, made, device(capacity_mib), every_fallback) for every_fallback in (False, True))
    assert (brief.verdict, brief.execution, brief.memory) == (full.verdict, full.execution, full.memory)
    assert {fallback.execution for fallback in brief.ladder} <= {fallback.execution for fallback in full.ladder}


@given(trials, tracers, st.integers(1, 40), st.booleans())
def test_a_run_takes_each_block_once_and_frees_it_whole(trial, made, micro_batch, checkpointing):
    work = Work(Variant(checkpointing, OptimizerImpl.FOREACH), trial.effective_batch, micro_batch, 8, trial.lengths)
    run = run_of(SegmentSource(ToyTracer(**made)), work, work.lengths.spread, device(1000))
    live = {}
    for block, delta in zip(run.blocks.tolist(), run.deltas.tolist(), strict=True):
        if delta > 0:
            assert block not in live
            live[block] = delta
        else:
            assert live.pop(block) == -delta
    # Weights, optimizer state and both workspaces stay.
    assert len(live) == made["layers"] * (1 + made["states"]) + 2
    assert sum(run.by_category(len(run) - 1, rounded=False).values()) == sum(live.values())
    peak = run.peak()
    assert sum(run.by_category(peak.index).values()) == peak.bytes_ == max(run.by_phase().values())


@given(tracers, st.sets(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=30))
def test_a_fit_gives_what_a_trace_gives(made, places):
    shapes = [Shape(rows, 8 * eights) for rows, eights in places]
    tracer = ToyTracer(**made)

    def trace(shape):
        return tracer.trace(SegmentKind.MICRO_NEXT, Variant(), shape)

    for shape in shapes:
        for found in plan_fits(shape, shapes):
            fitted = fit(found, {node: trace(node) for node in (*found.nodes, *found.checks)})
            assert fitted.at(shape) == in_canonical_order(trace(shape))


@given(trials, executions)
def test_no_choice_is_tried_twice(trial, wish):
    asked = execution_asked(trial, wish)
    tried = [choice for stage in fallback_stages(trial, wish, asked) for choice in stage.choices]
    assert len(tried) == len({*tried, asked}) - 1
