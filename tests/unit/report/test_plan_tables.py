"""Plans as lines and tables."""

import json
from collections.abc import Sequence
from datetime import date

from dryfit.documents.document import json_text
from dryfit.documents.memory_tables import memory_table, requirement_table
from dryfit.documents.plans import (
    choice_text,
    headline,
    hours_lines,
    ladder_table,
    peak_text,
    plan_json,
    refusal_lines,
    shard_lines,
    shard_table,
    space_lines,
    space_table,
    trust_text,
)
from dryfit.settings.execution import ExecutionChoice, Fallback, MemoryPlan, WorstBatch
from dryfit.settings.memory_terms import (
    DeviceSpec,
    Effect,
    MemoryCategory,
    OptimizerImpl,
    PeakAt,
    StepPhase,
    VerdictKind,
)
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.rehearsal_messages import Interval
from dryfit.settings.run_costs import given_price
from dryfit.settings.sharding import KeptWhole, Sent, ShardRow, ShardSummary
from dryfit.settings.trial import Scalar
from dryfit.study.planning import PlannedCell, SpacePlan
from dryfit.study.trial_plans import refusal_text
from golden import Golden

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


def test_a_refusal_tells_the_peak_and_the_ways_out(golden: Golden) -> None:
    refused = answer(VerdictKind.REFUSED, plan=memory(), ladder=LADDER)
    golden("plan", headline(refused), refusal_lines(refused))


def test_a_refusal_without_a_way_out_names_the_nearest(golden: Golden) -> None:
    ladder = (fallback("a", 28, Effect.EXACT, fits=False), fallback("b", 26, Effect.SEMANTICS, fits=False))
    golden("plan", refusal_lines(answer(VerdictKind.REFUSED, ladder=ladder, reasons=("the margin does not fit",))))
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


def test_a_cut_model_is_a_table_and_lines(golden: Golden) -> None:
    fits = answer(VerdictKind.FITS, plan=memory(20)).model_copy(update={"sharding": CUT})
    refused = answer(VerdictKind.REFUSED, plan=memory()).model_copy(update={"sharding": CUT})
    unknown = shard_lines(CUT.model_copy(update={"sent": None}))
    said = [headline(fits), headline(refused), refusal_text(refused)]
    golden("plan", shard_table(CUT), shard_lines(CUT), unknown, said)
    assert plan_json(fits)["cut"] == CUT.model_dump()


def test_fallbacks_of_several_devices_say_how_many_and_nothing_of_time(golden: Golden) -> None:
    two = fallback("execution.tp = 2", 17.0, Effect.NUMERICS, note="on each of 2 devices").model_copy(
        update={"execution": None, "devices": 2}
    )
    refused = answer(VerdictKind.REFUSED, plan=memory(), ladder=(two,))
    golden("plan", ladder_table((two,)), refusal_lines(refused), refusal_text(refused))


def test_other_headlines(golden: Golden) -> None:
    whole = ExecutionChoice(micro_batch=4, accumulation=1)
    chosen = ExecutionChoice(
        micro_batch=4, accumulation=4, checkpointing=True, optimizer_impl=OptimizerImpl.PLAIN, offload_optimizer=True
    )
    moved = whole.model_copy(update={"checkpointing": True, "offload_activations": True})
    choices = [chosen, whole, whole.model_copy(update={"eval_batch": 2}), moved]
    answers = [
        answer(VerdictKind.FITS_WITH, plan=memory(20), execution=chosen),
        answer(VerdictKind.UNKNOWN, reasons=("custom kernel flash::fwd", "model.py:7")),
        answer(VerdictKind.UNKNOWN),
    ]
    golden("plan", [choice_text(one) for one in choices], [headline(one) for one in answers], trust_text(answers[2]))


def test_tables_of_one_plan(golden: Golden) -> None:
    host = memory().model_copy(update={"host_bytes": GIB})
    noted = ladder_table([fallback("a", 30, Effect.EXACT, fits=False, note="slow")])
    peak = peak_text(memory(from_data=False))
    golden("plan", memory_table(memory()), requirement_table(DEVICE, host), ladder_table(LADDER), noted, peak)


def cell(length: Scalar, batch: Scalar, found: PlanAnswer, *, checkpointing: bool = False) -> PlannedCell:
    return PlannedCell({"train.max_length": length, "train.batch_size": batch}, checkpointing, found)


def space(
    *cells: PlannedCell, varied: tuple[str, ...] = ("train.max_length", "train.batch_size"), price: str = ""
) -> SpacePlan:
    prices = given_price(price, date(2026, 11, 1)) if price else None
    kept = {"optim.name": "adamw"}
    return SpacePlan(device=DEVICE, varied=varied, kept=kept, cells=cells, planner_s=2.0, trials=20, prices=prices)


WHOLE = ExecutionChoice(micro_batch=16, accumulation=1)


def test_hours_are_those_of_the_mildest_way_to_fit_of_each_combination() -> None:
    def timed(verdict: VerdictKind, hours: float | None, choice: ExecutionChoice = WHOLE) -> PlanAnswer:
        found = answer(verdict, plan=memory(20), execution=choice)
        around = None if hours is None else Interval(estimate=hours, low=hours / 2, high=2 * hours)
        return found.model_copy(update={"hours": around})

    slower = timed(VerdictKind.FITS, 9.0, WHOLE.model_copy(update={"checkpointing": True}))
    short, long = timed(VerdictKind.FITS, 1.0), timed(VerdictKind.FITS, 3.0)
    cells = (cell(128, 8, short), cell(128, 8, slower, checkpointing=True), cell(256, 8, long))
    plan = space(*cells, cell(512, 8, answer(VerdictKind.REFUSED, plan=memory())), price="0.50USD")
    assert plan.hours == Interval(estimate=2.0, low=0.5, high=6.0)
    assert (plan.cost.estimate, plan.cost.low, plan.cost.high) == (20.0, 5.0, 60.0)
    assert any("20 trials one after the other" in line and "5.00 to 60.00 USD" in line for line in space_lines(plan))
    unknown = space(cell(128, 8, short), cell(256, 8, timed(VerdictKind.FITS, None)), price="0.50USD")
    assert (unknown.hours, unknown.cost) == (None, None)
    assert not any("a training takes" in line for line in space_lines(unknown))
    assert "no cost: the hours of a training are not known" in space_lines(unknown)
    alone = hours_lines(plan.hours, 1, plan.cost)
    assert len(alone) == 1 and "trials" not in alone[0] and alone[0].endswith("5.00 to 60.00 USD")


def test_a_cell_shows_the_mildest_way_to_fit(golden: Golden) -> None:
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
    golden("plan", space_table(plan), space_lines(plan))
    assert plan.fits
    assert not space(cell(512, 8, unknown)).fits


def test_a_space_without_batches_has_one_column(golden: Golden) -> None:
    found = answer(VerdictKind.FITS, plan=memory(from_data=False), execution=WHOLE)
    plan = space(PlannedCell({"model.name": "m"}, False, found), varied=("model.name",))
    golden("plan", space_table(plan), space_lines(plan))


def test_a_space_says_once_how_each_model_is_cut(golden: Golden) -> None:
    whole = answer(VerdictKind.FITS, plan=memory(20))
    less, most = (whole.model_copy(update={"sharding": cut}) for cut in (CUT.model_copy(update={"sent": None}), CUT))
    named = [PlannedCell({"model.name": name}, False, most) for name in ("a", "b")]
    one = space(cell(64, 8, less), cell(64, 16, most), cell(128, 8, less))
    spaces = [one, space(*named, varied=("model.name",)), space(cell(64, 8, whole))]
    golden("plan", *(space_lines(one) for one in spaces))


def test_the_json_is_null_where_nothing_is_known() -> None:
    known = json.loads(json_text(answer(VerdictKind.FITS, plan=memory(), execution=WHOLE)))
    unknown = json.loads(json_text(answer(VerdictKind.UNKNOWN)))
    assert known["required_bytes"] == memory().required_bytes and known.keys() == unknown.keys()
    nulls = {key for key, value in unknown.items() if value is None}
    assert nulls == {
        "cut",
        *("peak_allocated_bytes", "peak_reserved_bytes", "min_cap_bytes", "overhead_bytes", "margin_bytes"),
        *("required_bytes", "fragmented_bytes", "host_bytes", "by_category", "by_phase", "peak_at", "worst_batch"),
        *("execution", "hours", "cost"),
    }
    assert unknown["schema"] == 1
    view = json.loads(json_text(space(cell(128, 8, answer(VerdictKind.UNKNOWN)))))
    assert view["cells"][0]["params"] == {"train.max_length": 128, "train.batch_size": 8}
    assert view["cells"][0]["plan"] == unknown
