from dataclasses import replace

import pytest

from dryfit.gpu.allocator_settings import AllocatorSettings
from dryfit.gpu.constants import DeviceConstants
from dryfit.plans.estimate import Device, Lengths, SegmentSource
from dryfit.plans.ladder import PlannedTrial, SettingChange, execution_asked, fallback_stages, plan_by_ladder
from dryfit.settings.errors import ConfigError
from dryfit.settings.execution import ExecutionChoice, ExecutionSettings
from dryfit.settings.ladder import Change, describe, halvings, time_factor
from dryfit.settings.memory_terms import Confidence, DeviceSpec, Effect, OptimizerImpl, StepPhase, VerdictKind
from planning import MIB, ToyTracer

TRIAL = PlannedTrial(
    effective_batch=16,
    lengths=Lengths(512),
    optimizer_impls=(OptimizerImpl.FUSED,),
    cannot_offload="the device is too slow",
)
# 512 tokens: a row keeps 50 MiB in each of four layers, and needs 4 MiB for scores.
MODEL = {"layers": 4, "weight": 20 * MIB, "activation": 100 * 1024, "scores": 16}


def device(capacity_mib):
    return Device(
        DeviceSpec(name="made-up", capacity_bytes=capacity_mib * MIB),
        DeviceConstants(500 * MIB, 8519680, Confidence.UNCALIBRATED),
        AllocatorSettings(expandable_segments=True),
        torch="2.13.0",
    )


def planned(capacity_mib, trial=TRIAL, execution=None, tracer=None, **more):
    source = SegmentSource(tracer or ToyTracer(**MODEL))
    more.setdefault("resubject", lambda change: None)
    return plan_by_ladder(trial, execution or ExecutionSettings(), source, device(capacity_mib), **more)


def choice(micro_batch, checkpointing=False, **more):
    return ExecutionChoice(
        micro_batch=micro_batch,
        accumulation=-(-16 // micro_batch),
        checkpointing=checkpointing,
        optimizer_impl=more.pop("optimizer_impl", OptimizerImpl.FUSED),
        **more,
    )


def test_what_fits_as_asked_is_run_as_asked():
    found = planned(8192)
    assert (found.verdict, found.execution, found.shortfall_bytes) == (VerdictKind.FITS, choice(16), 0)
    assert found.memory.required_bytes <= 8192 * MIB
    assert found.ladder == ()
    assert (found.confidence, found.torch) == (Confidence.UNCALIBRATED, "2.13.0")


def test_checkpointing_comes_first():
    as_asked = planned(8192).memory
    found = planned(3500)
    assert (found.verdict, found.execution) == (VerdictKind.FITS_WITH, choice(16, True))
    (fallback,) = found.ladder
    assert fallback.change == "activation checkpointing"
    assert (fallback.effect, fallback.fits, fallback.time_factor) == (Effect.EXACT, True, 1.3)
    assert fallback.saves_bytes == as_asked.required_bytes - found.memory.required_bytes
    assert found.shortfall_bytes == as_asked.required_bytes - 3500 * MIB


SCORES = MODEL | {"scored": 120 * 1024}
"""With 60 MiB more for each row that is validated: 64 rows take more than a step of 16."""


HALVED = [{}, {"eval_batch": 32}, {"eval_batch": 16}]


def tried(found):
    return [fallback.execution for fallback in found.ladder]


def test_a_validation_that_does_not_fit_takes_fewer_rows_before_training_changes():
    as_asked = planned(8192, tracer=ToyTracer(**SCORES))
    assert as_asked.memory.peak_at.phase is StepPhase.EVALUATE
    assert (as_asked.memory.worst_batch.rows, as_asked.execution.eval_rows) == (64, 64)
    assert as_asked.eval_batches == (32, 16, 8, 4, 2, 1)
    training = planned(8192).memory
    found = planned(training.required_bytes // MIB + 1, tracer=ToyTracer(**SCORES))
    assert (found.verdict, found.execution) == (VerdictKind.FITS_WITH, choice(16, eval_batch=32))
    assert (found.memory.required_bytes, found.memory.worst_batch.rows) == (training.required_bytes, 16)
    (fallback,) = found.ladder
    assert fallback.change == "validation batch 64 -> 32"
    assert (fallback.effect, fallback.time_factor) == (Effect.NUMERICS, 1.0)
    assert fallback.saves_bytes == as_asked.memory.required_bytes - training.required_bytes
    assert found.eval_batches == (16, 8, 4, 2, 1)


def test_a_smaller_validation_batch_is_tried_with_each_change_of_training_and_only_where_it_is_the_peak():
    recomputed = planned(8192, execution=ExecutionSettings(checkpointing=True)).memory.required_bytes
    found = planned(recomputed // MIB + 1, tracer=ToyTracer(**SCORES))
    assert found.execution == choice(16, True, eval_batch=16)
    # As asked down to where training is the peak; with checkpointing until it fits.
    assert tried(found) == [choice(16, eval_batch=32), *(choice(16, True, **rows) for rows in HALVED)]
    assert found.memory.required_bytes == recomputed


def test_what_is_left_after_a_smaller_validation_batch_validates_no_more_rows():
    found = planned(2800, tracer=ToyTracer(**SCORES))
    assert found.execution == choice(16, True, eval_batch=16)
    assert found.fallbacks == (choice(8, True, eval_batch=16), choice(4, True), choice(2, True), choice(1, True))
    assert found.eval_batches == (8, 4, 2, 1)


def test_a_refusal_names_the_least_with_fewer_validated_rows():
    found = planned(1000, tracer=ToyTracer(**MODEL | {"scored": 1024 * 1024}))
    assert found.verdict is VerdictKind.REFUSED
    least = min(found.ladder, key=lambda fallback: fallback.required_bytes)
    assert least.execution == choice(1, True, eval_batch=1) == found.ladder[-1].execution
    assert "micro-batch 16 -> 1, accumulate 16 + validation batch 64 -> 1 + activation" in found.reasons[1]
    assert "64 rows of 512 tokens" in found.reasons[0] and "peak in evaluate" in found.reasons[0]


@pytest.mark.parametrize("execution", [ExecutionSettings(eval_batch=64), ExecutionSettings(allow="exact")])
def test_a_validation_batch_that_was_set_or_must_stay_exact_is_kept(execution):
    found = planned(2400, execution=execution, tracer=ToyTracer(**SCORES))
    assert found.verdict is VerdictKind.REFUSED
    assert {other.eval_rows for other in tried(found)} <= {64}
    assert planned(8192, execution=execution).eval_batches == ()


def test_fewer_validated_rows_as_asked_are_no_change():
    found = planned(8192, execution=ExecutionSettings(eval_batch=3), tracer=ToyTracer(**SCORES))
    assert (found.verdict, found.execution) == (VerdictKind.FITS, choice(16, eval_batch=3))
    assert found.memory.required_bytes == planned(8192).memory.required_bytes


def test_answers_are_generated_for_no_more_rows_than_are_validated():
    trial = replace(TRIAL, measured_rows=lambda rows: min(8, rows))
    kept = ToyTracer(**MODEL, answered=500 * MIB)
    as_asked = planned(8192, trial, tracer=kept).memory
    assert as_asked.peak_at.phase is StepPhase.EVALUATE
    found = planned(as_asked.required_bytes // MIB - 300, trial, tracer=kept)
    assert found.execution == choice(16, eval_batch=4), "64, 32, 16 and 8 rows are answered 8 at once"


def test_then_smaller_micro_batches_the_faster_choice_first():
    wanted = [
        choice(16, True),
        *(choice(8), choice(4), choice(2), choice(8, True), choice(1)),
        *(choice(4, True), choice(2, True), choice(1, True)),
    ]
    (stage,) = fallback_stages(TRIAL, ExecutionSettings(), choice(16))
    assert list(stage.choices) == wanted
    found = planned(2200)
    assert (found.verdict, found.execution) == (VerdictKind.FITS_WITH, choice(4))
    assert [fallback.execution for fallback in found.ladder] == wanted[:3]
    assert [fallback.fits for fallback in found.ladder] == [False, False, True]
    assert found.ladder[2].change == "micro-batch 16 -> 4, accumulate 4"
    assert {fallback.effect for fallback in found.ladder[1:]} == {Effect.NUMERICS}


def test_what_fits_with_nothing_is_refused_with_numbers():
    found = planned(1000)
    assert (found.verdict, found.execution, found.fallbacks) == (VerdictKind.REFUSED, None, ())
    assert found.shortfall_bytes == found.memory.required_bytes - 1000 * MIB > 0
    assert len(found.ladder) == 9 and not any(fallback.fits for fallback in found.ladder)
    needs, least = found.reasons
    assert "made-up has 1000 MiB" in needs and "16 rows of 512 tokens" in needs and "layer." in needs
    assert "micro-batch 16 -> 1, accumulate 16 + activation checkpointing" in least


@pytest.mark.parametrize(
    "execution, tried",
    [
        (ExecutionSettings(checkpointing=False), {(8, False), (4, False), (2, False), (1, False)}),
        (ExecutionSettings(checkpointing=True), {(8, True), (4, True), (2, True), (1, True)}),
        (ExecutionSettings(micro_batch=4), {(4, True)}),
        (ExecutionSettings(allow="exact"), {(16, True)}),
        (ExecutionSettings(micro_batch=4, checkpointing=False), set()),
    ],
)
def test_what_is_set_is_kept(execution, tried):
    found = planned(1000, execution=execution)
    assert found.verdict is VerdictKind.REFUSED
    assert {(fallback.execution.micro_batch, fallback.execution.checkpointing) for fallback in found.ladder} == tried


def test_a_memory_limit_binds():
    limited = planned(8192, execution=ExecutionSettings(memory_limit="2200MiB"))
    assert limited.execution == planned(2200).execution
    assert planned(8192, execution=ExecutionSettings(memory_limit="1TiB")).verdict is VerdictKind.FITS


def test_another_implementation_of_the_optimizer_is_tried():
    trial = replace(TRIAL, optimizer_impls=(OptimizerImpl.FOREACH, OptimizerImpl.PLAIN))
    execution = ExecutionSettings(micro_batch=1, checkpointing=True)

    def small(execution, capacity_mib=8192):
        return planned(capacity_mib, trial, execution, ToyTracer(layers=4, weight=20 * MIB))

    tight = small(execution).memory.required_bytes // MIB - 20
    found = small(execution, tight)
    assert found.verdict is VerdictKind.FITS_WITH
    assert found.execution == choice(1, True, optimizer_impl=OptimizerImpl.PLAIN)
    assert found.ladder[-1].change == "plain optimizer"
    assert found.ladder[-1].effect is Effect.NUMERICS
    kept = {"micro_batch": 1, "checkpointing": True}
    for wish in ({"allow": "exact"}, {"optimizer_impl": OptimizerImpl.FOREACH}):
        assert small(ExecutionSettings(**kept, **wish), tight).verdict is VerdictKind.REFUSED


def test_state_in_host_memory_is_the_last_resort():
    trial = replace(TRIAL, cannot_offload=None)
    smallest = planned(1000).ladder[-1].required_bytes // MIB
    found = planned(smallest - 10, trial)
    assert found.verdict is VerdictKind.FITS_WITH
    assert found.execution.offload_optimizer
    assert found.memory.host_bytes == (2 + 1 + 1) * 80 * MIB
    assert "optimizer state in host memory" in found.ladder[-1].change
    assert planned(smallest - 10, trial, ExecutionSettings(offload_optimizer=False)).verdict is VerdictKind.REFUSED
    assert planned(8192, trial, ExecutionSettings(offload_optimizer=True)).execution == choice(
        16, offload_optimizer=True
    )


def test_inputs_of_layers_come_to_the_host_after_smaller_micro_batches_and_change_no_number():
    trial = replace(TRIAL, cannot_offload_activations=None)
    recomputed = planned(8192, trial, ExecutionSettings(checkpointing=True, allow="exact")).memory
    found = planned(recomputed.required_bytes // MIB - 100, trial, ExecutionSettings(allow="exact"))
    assert found.execution == choice(16, True, offload_activations=True)
    fallback = found.ladder[-1]
    assert (fallback.change, fallback.effect) == (
        "activation checkpointing + inputs of layers in host memory",
        Effect.EXACT,
    )
    assert fallback.time_factor == pytest.approx(1.3 * 1.15, abs=1e-3)
    # 200 MiB for each of four layers; torch gives page-locked memory in powers of two.
    assert found.memory.host_bytes == 4 * 256 * MIB
    smallest = planned(1000, trial).ladder[-1]
    assert smallest.execution == choice(1, True, offload_activations=True)
    kept = ExecutionSettings(allow="exact", offload_activations=False)
    assert planned(recomputed.required_bytes // MIB - 100, trial, kept).verdict is VerdictKind.REFUSED


def test_inputs_of_layers_are_moved_only_where_layers_are_recomputed():
    trial = replace(TRIAL, cannot_offload_activations=None)
    wish = ExecutionSettings(offload_activations=True)
    assert planned(8192, trial, wish).execution == choice(16, True, offload_activations=True)
    assert all(fallback.execution.offload_activations for fallback in planned(1000, trial, wish).ladder)
    with pytest.raises(ConfigError, match="has no layers"):
        planned(8192, replace(trial, cannot_checkpoint="it has no layers"), wish)
    with pytest.raises(ConfigError, match="host memory already"):
        planned(8192, TRIAL, wish)
    with pytest.raises(ValueError, match="offload_activations is true and checkpointing false"):
        ExecutionSettings(offload_activations=True, checkpointing=False)


def test_lengths_of_other_powers_of_two_have_pinned_memory_of_their_own():
    trial = replace(TRIAL, cannot_offload_activations=None, lengths=Lengths.of(512, [128] * 50 + [512]))
    wish = ExecutionSettings(offload_activations=True)
    found = planned(8192, trial, wish).memory
    shorter = {64: 4, 128: 4}[64] * 64 * MIB  # 50 MiB a layer at 128 tokens
    assert found.host_bytes == 4 * 256 * MIB + shorter


def test_fallbacks_only_take_memory_away():
    found = planned(2200)
    assert found.execution == choice(4)
    assert found.fallbacks == (choice(2), choice(1), choice(4, True), choice(2, True), choice(1, True))
    assert planned(3500).fallbacks == (choice(8, True), choice(4, True), choice(2, True), choice(1, True))


def test_every_fallback_is_told_where_that_is_asked():
    trial = replace(TRIAL, cannot_offload=None)
    found = planned(8192, trial, every_fallback=True)
    assert (found.verdict, found.execution) == (VerdictKind.FITS, choice(16))
    automatic = [fallback for fallback in found.ladder if fallback.execution]
    assert len(automatic) == 10 and automatic[-1].change == "optimizer state in host memory"
    assert automatic[-1].saves_bytes > 100 * MIB
    # Fallbacks with every number, and still the same choice as without them.
    tight = planned(2200, trial, every_fallback=True)
    assert tight.execution == planned(2200, trial).execution == choice(4)
    assert len([fallback for fallback in tight.ladder if fallback.execution]) == 10


def test_suggestions_change_the_experiment_and_are_computed():
    adapters = replace(TRIAL, lora_rank=128)
    asked_for: list[SettingChange] = []

    def resubject(change):
        asked_for.append(change)
        states = 1 if change.kind is Change.SMALL_OPTIMIZER else 2
        return SegmentSource(ToyTracer(**MODEL | {"states": states, "weight": 20 * MIB // (3 - states)}))

    found = planned(8192, adapters, every_fallback=True, resubject=resubject)
    suggested = {fallback.change: fallback for fallback in found.ladder if fallback.effect is Effect.SEMANTICS}
    assert list(suggested) == [
        "8-bit optimizer state",
        "lora.r 128 -> 64",
        "train.max_length 512 -> 256",
        "train.batch_size 16 -> 8",
    ]
    assert {fallback.execution for fallback in suggested.values()} == {None}
    assert [change.kind for change in asked_for] == [Change.SMALL_OPTIMIZER, Change.SMALLER_RANK]
    shorter = planned(8192, replace(TRIAL, lengths=Lengths(256)))
    assert suggested["train.max_length 512 -> 256"].required_bytes == shorter.memory.required_bytes
    smaller = planned(8192, replace(TRIAL, effective_batch=8))
    assert suggested["train.batch_size 16 -> 8"].required_bytes == smaller.memory.required_bytes
    assert all(
        fallback.saves_bytes == found.memory.required_bytes - fallback.required_bytes for fallback in suggested.values()
    )


def test_where_nothing_fits_suggestions_build_on_the_smallest():
    smallest = planned(1000).ladder[-1].required_bytes // MIB
    found = planned(smallest - 10, every_fallback=True)
    assert found.verdict is VerdictKind.REFUSED
    shorter = next(fallback for fallback in found.ladder if fallback.change.startswith("train.max_length"))
    assert shorter.note == "with micro-batch 16 -> 1, accumulate 16 + activation checkpointing"
    assert shorter.fits and shorter.execution is None


def test_what_cannot_be_traced_is_unknown():
    found = planned(8192, tracer=ToyTracer(untraceable=lambda kind, variant: True))
    assert (found.verdict, found.memory, found.execution) == (VerdictKind.UNKNOWN, None, None)
    assert "toy.py:7" in found.reasons[0]


def test_a_divided_trial_is_unknown_and_not_planned_as_one_process():
    found = planned(4000, execution=ExecutionSettings(dp=2))
    assert (found.verdict, found.memory, found.execution) == (VerdictKind.UNKNOWN, None, None)
    assert "execution.dp is 2" in found.reasons[0]


def test_a_fallback_that_cannot_be_traced_is_left_out():
    def tracer():
        return ToyTracer(**MODEL, untraceable=lambda kind, variant: variant.checkpointing)

    found = planned(3500, tracer=tracer())
    assert (found.verdict, found.execution) == (VerdictKind.FITS_WITH, choice(8))
    refused = planned(1000, tracer=tracer())
    assert not any(fallback.execution.checkpointing for fallback in refused.ladder)
    assert any("toy.py:7" in reason for reason in refused.reasons)


def test_a_loss_in_chunks_is_a_fallback_where_it_takes_time():
    trial = replace(TRIAL, cannot_chunk=None)
    stages = fallback_stages(trial, ExecutionSettings(), asked := execution_asked(trial, ExecutionSettings()))
    assert asked.chunked_loss is False
    first, second = stages[0].choices[:2]  # what leaves every number as it is, then what changes its rounding
    assert (first.checkpointing, first.chunked_loss) == (True, False)
    assert (second.micro_batch, second.checkpointing, second.chunked_loss) == (16, False, True)
    found = planned(1000, trial, every_fallback=True)
    named = {fallback.change: fallback for fallback in found.ladder}
    assert named["loss in chunks"].effect is Effect.NUMERICS and named["loss in chunks"].time_factor == 1.03
    assert "activation checkpointing + loss in chunks" in named
    exact = ExecutionSettings(allow="exact")
    assert not any(one.chunked_loss for stage in fallback_stages(trial, exact, asked) for one in stage.choices)


def test_a_loss_in_chunks_is_as_asked_where_it_takes_none():
    trial = replace(TRIAL, cannot_chunk=None, chunks_for_free=True)
    asked = execution_asked(trial, ExecutionSettings())
    assert asked.chunked_loss is True
    assert all(
        one.chunked_loss for stage in fallback_stages(trial, ExecutionSettings(), asked) for one in stage.choices
    )
    kept = ExecutionSettings(chunked_loss=False)
    assert execution_asked(trial, kept).chunked_loss is False
    stages = fallback_stages(trial, kept, execution_asked(trial, kept))
    assert not any(one.chunked_loss for stage in stages for one in stage.choices)
    assert execution_asked(TRIAL, ExecutionSettings()).chunked_loss is None


@pytest.mark.parametrize(
    "execution, word",
    [
        (ExecutionSettings(chunked_loss=True), "not over the words"),
        (ExecutionSettings(offload_optimizer=True), "too slow"),
        (ExecutionSettings(checkpointing=True), "no layers"),
        (ExecutionSettings(optimizer_impl=OptimizerImpl.FOREACH), "fused"),
    ],
)
def test_a_wish_that_cannot_be_met_is_an_error(execution, word):
    with pytest.raises(ConfigError, match=word):
        planned(8192, replace(TRIAL, cannot_checkpoint="it has no layers"), execution)


def test_halvings_end_with_one_row():
    assert list(halvings(10)) == [10, 5, 3, 2, 1]
    assert list(halvings(1)) == [1]


def test_words_and_times():
    asked = execution_asked(TRIAL, ExecutionSettings())
    assert asked == choice(16)
    assert execution_asked(TRIAL, ExecutionSettings(micro_batch=64)) == choice(16)
    other = choice(8, True, offload_optimizer=True)
    words = "micro-batch 16 -> 8, accumulate 2 + activation checkpointing + optimizer state in host memory"
    assert describe(other, asked) == words
    assert time_factor(asked, asked, TRIAL.lengths.longest) == 1.0
    assert time_factor(choice(8), asked, TRIAL.lengths.longest) == 1.05
    assert time_factor(choice(4), asked, TRIAL.lengths.longest) == pytest.approx(1.05 * 1.1, abs=1e-3)
