"""Plans as lines and tables."""

from collections.abc import Sequence

from dryfit.core.jobs.memory import (
    Effect,
    ExecutionChoice,
    Fallback,
    MemoryCategory,
    MemoryPlan,
    PeakAt,
    StepPhase,
    VerdictKind,
    WorstBatch,
)
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.settings.execution import DeviceSpec, OptimizerImpl
from dryfit.core.settings.trial import Scalar
from dryfit.core.sharding.shard_summary import KeptWhole, Sent, ShardRow, ShardSummary
from dryfit.reporting.data.observed_memory import choice_text
from dryfit.reporting.data.plan_view import plan_view, space_view
from dryfit.reporting.terminal.plan_tables import (
    headline,
    ladder_table,
    memory_table,
    peak_text,
    refusal_lines,
    requirement_table,
    space_lines,
    space_table,
    trust_text,
)
from dryfit.reporting.terminal.shard_tables import shard_lines, shard_table
from dryfit.study.planning.plan_requests import PlannedCell, SpacePlan
from dryfit.study.planning.refusals import refusal_text

GIB = 2**30
DEVICE = DeviceSpec(name="rtx4090", capacity_bytes=236 * GIB // 10)


def memory(required: float = 31.4, *, from_data: bool = True) -> MemoryPlan:
    return MemoryPlan(
        peak_allocated_bytes=int(29 * GIB),
        peak_reserved_bytes=int(30 * GIB),
        min_cap_bytes=int(29.5 * GIB),
        overhead_bytes=int(1.7 * GIB),
        margin_bytes=int(0.2 * GIB),
        required_bytes=int(required * GIB),
        by_category={
            MemoryCategory.WEIGHTS: int(1.4 * GIB),
            MemoryCategory.ADAPTERS: 0,
            MemoryCategory.ACTIVATIONS: int(24.1 * GIB),
            MemoryCategory.INPUTS: 4096,
        },
        by_phase={StepPhase.LOAD: 0, StepPhase.BACKWARD: int(29 * GIB)},
        peak_at=PeakAt(phase=StepPhase.BACKWARD, module="encoder.layer.23.attention", op=""),
        worst_batch=WorstBatch(rows=32, length=512, from_data=from_data),
    )


def fallback(change: str, needs: float, effect: Effect, *, fits: bool = True, note: str = "") -> Fallback:
    own = effect is not Effect.SEMANTICS
    return Fallback(
        change=change,
        execution=ExecutionChoice(micro_batch=16, accumulation=2) if own else None,
        required_bytes=int(needs * GIB),
        saves_bytes=int((31.4 - needs) * GIB),
        time_factor=1.3,
        effect=effect,
        fits=fits,
        note=note,
    )


LADDER = (
    fallback("activation checkpointing", 12.3, Effect.EXACT),
    fallback("micro-batch 32 -> 16, accumulate 2", 19.4, Effect.NUMERICS),
    fallback("max length 512 -> 320", 22.4, Effect.SEMANTICS),
)


def answer(
    verdict: VerdictKind,
    *,
    plan: MemoryPlan | None = None,
    execution: ExecutionChoice | None = None,
    ladder: Sequence[Fallback] = (),
    reasons: tuple[str, ...] = (),
) -> PlanAnswer:
    return PlanAnswer(
        verdict=verdict,
        device=DEVICE,
        memory=plan,
        execution=execution,
        ladder=tuple(ladder),
        reasons=reasons,
        torch="2.13.0",
        planner_s=1.25,
    )


def test_a_refusal_reads_as_the_design_says() -> None:
    refused = answer(VerdictKind.REFUSED, plan=memory(), ladder=LADDER)
    assert headline(refused) == ("plan refused: trial needs 31.4 GiB, device has 23.6 GiB (rtx4090)    [PLAN-NOFIT]")
    assert refusal_lines(refused) == [
        "  peak at      backward, encoder.layer.23.attention  (32 x 512, worst batch of the data)",
        "  weights 1.4  activations 24.1  overhead 1.7   GiB",
        "  would fit    activation checkpointing             12.3 GiB   exact, about 1.3x time",
        "               micro-batch 32 -> 16, accumulate 2   19.4 GiB   equal up to rounding, about 1.3x time",
        "  changes      max length 512 -> 320   22.4 GiB   changes the experiment; never automatic",
    ]


def test_a_refusal_without_a_way_out_names_the_nearest() -> None:
    ladder = (fallback("a", 28, Effect.EXACT, fits=False), fallback("b", 26, Effect.SEMANTICS, fits=False))
    lines = refusal_lines(answer(VerdictKind.REFUSED, ladder=ladder, reasons=("the margin does not fit",)))
    assert lines[0] == "  reason       the margin does not fit"
    assert lines[1].startswith("  nearest      b")
    assert len(lines) == 2
    assert refusal_lines(answer(VerdictKind.REFUSED)) == []


CUT = ShardSummary(
    degree=2,
    weight_bytes=3 * GIB,
    whole_weight_bytes=5 * GIB,
    cut=3,
    whole=2,
    sent=Sent(forward_bytes=2 * GIB, backward_bytes=GIB),
    output_error=2.2e-15,
    gradient_error=0.0,
    rows=(
        ShardRow(name="layer.*.query.weight", count=3, shape=(384, 384), local_shape=(192, 384), how="column"),
        ShardRow(name="norm.weight", count=2, shape=(384,), local_shape=(384,), how="whole"),
    ),
    kept_whole=(KeptWhole(reason="too many words", names=("table", "head")),),
)


def test_a_cut_model_is_a_table_and_lines() -> None:
    assert shard_table(CUT).rows == (
        ("layer.*.query.weight", "3", "[384, 384] -> [192, 384]", "column"),
        ("norm.weight", "2", "[384]", "whole"),
    )
    assert shard_lines(CUT) == [
        "sharded over 2 ranks, each on a device of its own: all memory is that of one rank",
        "weights of a rank: 3.0 GiB of 5.0 GiB (60.0%), 3 parameters sharded, 2 whole",
        "sent by a rank in an optimizer step: 3.0 GiB (2.0 GiB forward, 1.0 GiB backward)",
        "proved: outputs differ by 2e-15, gradients by 0e+00",
        "whole: table, head: too many words",
    ]
    assert "sent by a rank in an optimizer step: unknown" in shard_lines(CUT.model_copy(update={"sent": None}))
    fits = answer(VerdictKind.FITS, plan=memory(20)).model_copy(update={"sharding": CUT})
    assert headline(fits) == "plan fits: needs 20.0 GiB on each of 2 devices, device has 23.6 GiB (rtx4090)"
    refused = answer(VerdictKind.REFUSED, plan=memory()).model_copy(update={"sharding": CUT})
    assert headline(refused).startswith("plan refused: trial needs 31.4 GiB on each of 2 devices, device has")
    assert refusal_text(refused).startswith("needs 31.4 GiB on each of 2 devices, rtx4090 has 23.6 GiB")
    assert plan_view(fits).cut == CUT


def test_fallbacks_of_several_devices_say_how_many_and_nothing_of_time() -> None:
    two = fallback("execution.tp = 2", 17.0, Effect.NUMERICS, note="on each of 2 devices").model_copy(
        update={"execution": None, "devices": 2}
    )
    (row,) = ladder_table((two,)).rows
    assert row[3:] == ("equal up to rounding", "-", "yes", "on each of 2 devices")
    refused = answer(VerdictKind.REFUSED, plan=memory(), ladder=(two,))
    assert refusal_lines(refused)[-1] == (
        "  would fit    execution.tp = 2   17.0 GiB   equal up to rounding, on each of 2 devices"
    )
    assert refusal_text(refused).endswith("; would fit: execution.tp = 2 (17.0 GiB, on each of 2 devices)")


def test_other_headlines() -> None:
    chosen = ExecutionChoice(
        micro_batch=4,
        accumulation=4,
        checkpointing=True,
        optimizer_impl=OptimizerImpl.PLAIN,
        offload_optimizer=True,
    )
    assert choice_text(chosen) == "micro-batch 4 x 4, checkpointing, plain optimizer, optimizer state on the host"
    assert choice_text(ExecutionChoice(micro_batch=4, accumulation=1)) == "micro-batch 4 x 1"
    fewer = ExecutionChoice(micro_batch=4, accumulation=1, eval_batch=2)
    moved = ExecutionChoice(micro_batch=4, accumulation=1, checkpointing=True, offload_activations=True)
    assert choice_text(moved) == "micro-batch 4 x 1, checkpointing, inputs of layers on the host"
    assert choice_text(fewer) == "micro-batch 4 x 1, validation batch 2"
    fits = headline(answer(VerdictKind.FITS_WITH, plan=memory(20), execution=chosen))
    assert fits.startswith("plan fits with micro-batch 4 x 4, ")
    assert fits.endswith(": needs 20.0 GiB, device has 23.6 GiB (rtx4090)")
    unknown = headline(answer(VerdictKind.UNKNOWN, reasons=("custom kernel flash::fwd", "model.py:7")))
    assert unknown == "plan unknown: custom kernel flash::fwd; model.py:7    [PLAN-UNKNOWN]"
    assert "no reason was given" in headline(answer(VerdictKind.UNKNOWN))
    assert trust_text(answer(VerdictKind.UNKNOWN)) == "uncalibrated, torch 2.13.0, planned in 1.2 s"


def test_tables_of_one_plan() -> None:
    assert memory_table(memory()).rows == (
        ("at the peak", "activations", "24.1 GiB"),
        ("at the peak", "weights", "1.4 GiB"),
        ("at the peak", "inputs", "0 MiB"),
        ("peak of phase", "backward", "29.0 GiB"),
    )
    rows = requirement_table(answer(VerdictKind.FITS).device, memory()).rows
    assert rows[-2:] == (
        ("required", "31.4 GiB", "smallest cap + overhead + margin"),
        ("device", "23.6 GiB", "rtx4090"),
    )
    host = memory().model_copy(update={"host_bytes": GIB})
    assert requirement_table(answer(VerdictKind.FITS).device, host).rows[-1][:2] == ("host", "1.0 GiB")
    table = ladder_table(LADDER)
    assert table.heads == ("change", "needs", "saves", "effect", "time", "fits")
    assert table.rows[0] == ("activation checkpointing", "12.3 GiB", "19.1 GiB", "exact", "1.3x", "yes")
    noted = ladder_table([fallback("a", 30, Effect.EXACT, fits=False, note="slow")])
    assert (noted.heads[-1], noted.rows[0][-2:]) == ("note", ("no", "slow"))
    assert "the data is not known" in peak_text(memory(from_data=False))


def cell(length: Scalar, batch: Scalar, found: PlanAnswer, *, checkpointing: bool = False) -> PlannedCell:
    return PlannedCell({"train.max_length": length, "train.batch_size": batch}, checkpointing, found)


def space(*cells: PlannedCell, varied: tuple[str, ...] = ("train.max_length", "train.batch_size")) -> SpacePlan:
    return SpacePlan(device=DEVICE, varied=varied, kept={"optim.name": "adamw"}, cells=cells, planner_s=2.0)


WHOLE = ExecutionChoice(micro_batch=16, accumulation=1)


def test_a_cell_shows_the_mildest_way_to_fit() -> None:
    fits = answer(VerdictKind.FITS, plan=memory(20), execution=WHOLE)
    saved = answer(VerdictKind.FITS, plan=memory(9), execution=WHOLE.model_copy(update={"checkpointing": True}))
    halves = answer(VerdictKind.FITS_WITH, plan=memory(20), execution=ExecutionChoice(micro_batch=8, accumulation=2))
    refused = answer(VerdictKind.REFUSED, plan=memory(), ladder=LADDER)
    unknown = answer(VerdictKind.UNKNOWN, reasons=("no trace",))
    plan = space(
        cell(128, 8, fits),
        cell(128, 8, saved, checkpointing=True),
        cell(128, 16, halves),
        cell(128, 16, saved, checkpointing=True),
        cell(256, 8, halves),
        cell(256, 8, refused, checkpointing=True),
        cell(256, 16, refused),
        cell(256, 16, unknown, checkpointing=True),
        cell(512, 8, unknown),
    )
    table = space_table(plan)
    assert table.heads == ("max_length", "batch 8", "batch 16")
    assert table.rows == (
        ("128", "fits", "ckpt"),
        ("256", "8 x 2", "needs 12.3 GiB"),
        ("512", "unknown", "-"),
    )
    assert space_lines(plan) == [
        "3 of 5 combinations fit rtx4090 (23.6 GiB), 2.0 s",
        "planned at optim.name = adamw; these are searched too: --set another value to see it",
        "unknown: no trace",
    ]
    assert plan.fits
    assert not space(cell(512, 8, unknown)).fits


def test_a_space_without_batches_has_one_column() -> None:
    found = answer(VerdictKind.FITS, plan=memory(from_data=False), execution=WHOLE)
    plan = space(PlannedCell({"model.name": "m"}, False, found), varied=("model.name",))
    assert space_table(plan).heads == ("name", "fits")
    assert space_table(plan).rows == (("m", "fits"),)
    assert "lengths of the data are not known" in space_lines(plan)[2]


def test_a_space_says_once_how_each_model_is_cut() -> None:
    whole = answer(VerdictKind.FITS, plan=memory(20))
    less, most = (whole.model_copy(update={"sharding": cut}) for cut in (CUT.model_copy(update={"sent": None}), CUT))
    lines = space_lines(space(cell(64, 8, less), cell(64, 16, most), cell(128, 8, less)))
    (line,) = (line for line in lines if "ranks" in line)
    assert line.startswith("sharded over 2 ranks, a device each: a rank holds 3.0 GiB of 5.0 GiB of weights")
    assert "sends up to 3.0 GiB in an optimizer step" in line
    named = [PlannedCell({"model.name": name}, False, most) for name in ("a", "b")]
    assert [line[:3] for line in space_lines(space(*named, varied=("model.name",))) if "ranks" in line] == [
        "a: ",
        "b: ",
    ]
    assert not any("ranks" in line for line in space_lines(space(cell(64, 8, whole))))


def test_the_json_is_null_where_nothing_is_known() -> None:
    known = plan_view(answer(VerdictKind.FITS, plan=memory(), execution=WHOLE))
    assert known.required_bytes == memory().required_bytes
    unknown = plan_view(answer(VerdictKind.UNKNOWN)).model_dump(mode="json", by_alias=True)
    nulls = {key for key, value in unknown.items() if value is None}
    assert nulls == {
        "cut",
        *("peak_allocated_bytes", "peak_reserved_bytes", "min_cap_bytes", "overhead_bytes", "margin_bytes"),
        *("required_bytes", "fragmented_bytes", "host_bytes", "by_category", "by_phase", "peak_at", "worst_batch"),
        "execution",
    }
    assert unknown["schema"] == 1
    view = space_view(space(cell(128, 8, answer(VerdictKind.UNKNOWN))))
    assert view.cells[0].params == {"train.max_length": 128, "train.batch_size": 8}
