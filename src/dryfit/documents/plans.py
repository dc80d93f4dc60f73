"""Memory plans of a trial, a search space or a study, and measured memory: lines, tables, JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from dryfit.documents.document import Block, Document, Line, View, document_of, duration_text, json_of, value_text
from dryfit.documents.memory_tables import EFFECTS, VERDICT_STYLES, memory_table, requirement_table
from dryfit.documents.rehearsals import cost_text, hours_text
from dryfit.ledger.events import FailureFacts, Observed
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import PlanState, TrialState
from dryfit.settings.errors import FailureKind
from dryfit.settings.execution import ExecutionChoice, Fallback, MemoryPlan
from dryfit.settings.memory_terms import Effect, OptimizerImpl, VerdictKind
from dryfit.settings.plan_messages import CalibrateResult, CaseComparison, PlanAnswer
from dryfit.settings.rehearsal_messages import Interval, RunCost, times
from dryfit.settings.sharding import Sent, ShardRow, ShardSummary
from dryfit.settings.text import Table, few, gib
from dryfit.settings.trial import Scalar
from dryfit.study.planning import PlannedCell, SpacePlan
from dryfit.study.trial_plans import least_bytes


class Plans(View):
    """Counts of a study's memory plans.

    Attributes:
        planned: Trials whose plan fits.
        refused: Trials whose plan does not fit.
        unknown: Trials whose memory could not be planned.
        out_of_memory: Attempts that ran out of device memory although their plan fits.
        observed_over_planned: The largest ratio of the peaks of allocated memory; None if none was observed.
    """

    planned: int
    refused: int
    unknown: int
    out_of_memory: int
    observed_over_planned: float | None


def plan_totals(state: StudyState) -> Plans | None:
    """Count the plans of a study; None if nothing was planned."""
    plans = [trial.plan for trial in state.present if trial.plan is not None]
    if not plans:
        return None
    verdicts = [plan.answer.verdict for plan in plans]
    ratios = [ratio for trial in state.present if (ratio := observed_over_planned(trial)) is not None]
    return Plans(
        planned=sum(verdict.fits for verdict in verdicts),
        refused=verdicts.count(VerdictKind.REFUSED),
        unknown=verdicts.count(VerdictKind.UNKNOWN),
        out_of_memory=sum(plan.misses for plan in plans if plan.answer.verdict is not VerdictKind.UNKNOWN),
        observed_over_planned=round(max(ratios), 4) if ratios else None,
    )


def totals_text(totals: Plans) -> str:
    """Return the counts of a study's plans in one line."""
    parts = [f"{totals.planned} planned", f"{totals.refused} refused", f"{totals.unknown} unknown"]
    if totals.out_of_memory:
        parts.append(f"{totals.out_of_memory} out of memory all the same")
    if totals.observed_over_planned is not None:
        parts.append(f"largest observed / planned {totals.observed_over_planned:.3f}")
    return ", ".join(parts)


def observed_over_planned(trial: TrialState) -> float | None:
    """Return the ratio of observed to planned peak allocated memory; None unless both belong to the same execution."""
    plan, observed = trial.plan, trial.observed
    if plan is None or observed is None or observed.allocated_bytes is None or plan.runs_otherwise:
        return None
    memory = plan.answer.memory
    return observed.allocated_bytes / memory.peak_allocated_bytes if memory and memory.peak_allocated_bytes else None


def choice_text(choice: ExecutionChoice) -> str:
    """Describe an execution choice in a few words."""
    words = [f"tensor parallelism over {choice.tp} ranks"] if choice.tp is not None else []
    words += [f"micro-batch {choice.micro_batch} x {choice.accumulation}"]
    words += [f"validation batch {choice.eval_batch}"] if choice.eval_batch is not None else []
    words += ["checkpointing"] if choice.checkpointing else []
    words += ["loss in chunks"] if choice.chunked_loss else []
    words += ["inputs of layers on the host"] if choice.offload_activations else []
    words += [f"{choice.optimizer_impl} optimizer"] if choice.optimizer_impl is not OptimizerImpl.AUTO else []
    words += ["optimizer state on the host"] if choice.offload_optimizer else []
    return ", ".join(words)


def plan_text(plan: PlanState) -> str:
    """Return a plan in one line: verdict, memory needed and available, confidence."""
    answer = plan.answer
    parts = [str(answer.verdict)]
    if answer.memory is not None:
        each = f" on each of {answer.devices} devices" if answer.devices > 1 else ""
        parts.append(f"needs {gib(answer.memory.required_bytes)} of {gib(answer.device.capacity_bytes)}{each}")
    if answer.verdict is VerdictKind.UNKNOWN:
        parts += answer.reasons
    else:
        parts.append(str(answer.confidence))
    return ", ".join(parts)


def memory_cell(trial: TrialState) -> str:
    """Return the observed and planned peak of a trial for a table, a dash where unknown.

    On a GPU both are allocated memory, on the CPU that of the whole process.
    """
    return f"{_size(trial.observed_bytes)} / {_size(trial.plan.peak_bytes if trial.plan is not None else None)}"


def execution_cell(trial: TrialState) -> str:
    """Return a trial's execution choice for a table, a dash without a plan."""
    choice = trial.plan.execution if trial.plan is not None else None
    return choice_text(choice) if choice is not None else "-"


def plan_lines(trial: TrialState) -> list[str]:
    """Return lines on a trial's planned and observed memory; none if it has neither."""
    lines: list[str] = []
    plan = trial.plan
    if plan is not None:
        lines.append(f"  plan: {plan_text(plan)} (planned in {plan.answer.planner_s:.1f} s)")
        if plan.execution is not None:
            taken = [f"the {plan.fallbacks_taken}. fallback of its plan"] if plan.fallbacks_taken else []
            taken += [f"the {plan.eval_batches_taken}. smaller validation batch"] if plan.eval_batches_taken else []
            lines.append(f"    run with {', '.join([choice_text(plan.execution), *taken])}")
        if plan.answer.hours is not None:
            lines.append(f"    alone on {plan.answer.device.name} it trains {hours_text(plan.answer.hours)}")
        lines += _ladder_lines(plan)
        misses = [attempt.number for attempt in trial.attempts if _ran_out(attempt.failure)]
        lines += [f"    attempt {number} ran out of memory all the same" for number in misses]
    if trial.observed is not None:
        lines += _observed_lines(trial.observed, plan)
    return lines


def _ran_out(failure: FailureFacts | None) -> bool:
    return failure is not None and failure.kind is FailureKind.OOM_DEVICE


def _ladder_lines(plan: PlanState) -> list[str]:
    if plan.answer.verdict is not VerdictKind.REFUSED:
        return []
    return [
        f"    {fallback.change}: {gib(fallback.required_bytes)}, {'fits' if fallback.fits else 'does not fit'}"
        + (", changes the experiment" if fallback.effect is Effect.SEMANTICS else "")
        + (f", {fallback.note}" if fallback.devices > 1 else "")
        for fallback in plan.answer.ladder
    ]


def _observed_lines(observed: Observed, plan: PlanState | None) -> list[str]:
    memory = None if plan is None or plan.runs_otherwise else plan.answer.memory
    host_bytes = plan.peak_bytes if plan is not None and memory is not None and plan.on_cpu else None
    rows = (
        ("allocated", observed.allocated_bytes, memory.peak_allocated_bytes if memory is not None else None),
        ("reserved", observed.reserved_bytes, memory.peak_reserved_bytes if memory is not None else None),
        ("host memory", observed.rss_bytes, host_bytes),
    )
    return [f"  {name}: {_compared(seen, planned)}" for name, seen, planned in rows if seen is not None]


def _compared(observed_bytes: int, planned_bytes: int | None) -> str:
    if not planned_bytes:
        return f"{gib(observed_bytes)} observed"
    return f"{gib(observed_bytes)} observed, {gib(planned_bytes)} planned ({observed_bytes / planned_bytes:.3f})"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else gib(size_bytes)


_MEMORY: Final = tuple(name for name in MemoryPlan.model_fields)


@json_of.register
def plan_json(answer: PlanAnswer) -> dict[str, object]:
    """Return a plan as ``plan --json`` prints it: the memory beside the rest; unknown values are null."""
    rest = answer.model_dump(exclude={"v", "memory"}, by_alias=True)
    memory = {name: getattr(answer.memory, name, None) for name in _MEMORY}
    return {"schema": 1, **rest, **memory, "capacity_bytes": answer.device.capacity_bytes}


@json_of.register
def _(plan: SpacePlan) -> dict[str, object]:
    cells = [
        {"params": dict(cell.params), "checkpointing": cell.checkpointing, "plan": plan_json(cell.answer)}
        for cell in plan.cells
    ]
    return {
        "schema": 1,
        "device": plan.device,
        "varied": plan.varied,
        "kept": dict(plan.kept),
        "cells": cells,
        "planner_s": plan.planner_s,
        "trials": plan.trials,
        "hours": plan.hours,
        "cost": plan.cost,
    }


def shard_table(summary: ShardSummary) -> Table:
    """Return one row for each kind of parameter, the same parameters of all layers together."""
    rows = [(row.name, str(row.count), _shapes(row), row.how) for row in summary.rows]
    return Table(("parameter", "count", "whole -> of a rank", "sharded by"), tuple(rows))


def shard_lines(summary: ShardSummary) -> list[str]:
    """Return lines on what a rank holds and sends, the errors in the proof, and why parameters are not sharded."""
    share = summary.weight_bytes / summary.whole_weight_bytes
    weights = f"{gib(summary.weight_bytes)} of {gib(summary.whole_weight_bytes)}"
    lines = [
        f"sharded over {summary.degree} ranks, each on a device of its own: all memory is that of one rank",
        f"weights of a rank: {weights} ({share:.1%}), {summary.cut} parameters sharded, {summary.whole} whole",
        _sent_text(summary.sent),
        f"proved: outputs differ by {summary.output_error:.0e}, gradients by {summary.gradient_error:.0e}",
    ]
    return lines + [f"whole: {few(kept.names)}: {kept.reason}" for kept in summary.kept_whole]


def _sent_text(sent: Sent | None) -> str:
    if sent is None:
        return "sent by a rank in an optimizer step: unknown"
    total = gib(sent.forward_bytes + sent.backward_bytes)
    parts = f"{gib(sent.forward_bytes)} forward, {gib(sent.backward_bytes)} backward"
    return f"sent by a rank in an optimizer step: {total} ({parts})"


def _shapes(row: ShardRow) -> str:
    if row.shape == row.local_shape:
        return _shape(row.shape)
    return f"{_shape(row.shape)} -> {_shape(row.local_shape)}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def space_shard_lines(summaries: Iterable[tuple[str, ShardSummary | None]]) -> list[str]:
    """Return a line for each sharded model of a search space.

    Args:
        summaries: For each combination, the model's name (empty if not searched) and how it is sharded.
    """
    most: dict[tuple[str, int], tuple[ShardSummary, int]] = {}
    for name, summary in summaries:
        if summary is not None:
            key, sent = (name, summary.weight_bytes), summary.sent or Sent()
            sent_bytes = max(sent.forward_bytes + sent.backward_bytes, most[key][1] if key in most else 0)
            most[key] = (summary, sent_bytes)
    lines: list[str] = []
    for (name, _), (summary, sent_bytes) in most.items():
        model = f"{name}: " if name else ""
        weights = f"{gib(summary.weight_bytes)} of {gib(summary.whole_weight_bytes)} of weights"
        lines.append(
            f"{model}sharded over {summary.degree} ranks, a device each: a rank holds {weights} and sends up to "
            f"{gib(sent_bytes)} in an optimizer step; a plan of one model, without a study, shows how"
        )
    return lines


_BATCH = "train.batch_size"
_LIST_WIDTH = 13
_SHOWN_BYTES = 2**30 // 20
"""Smaller sizes would read 0.0 GiB."""


def headline(answer: PlanAnswer) -> str:
    """Return the verdict of a plan in one line, with its numbers."""
    each = f" on each of {answer.devices} devices" if answer.devices > 1 else ""
    device = f"device has {gib(answer.device.capacity_bytes)} ({answer.device.name})"
    memory = answer.memory
    match answer.verdict:
        case VerdictKind.UNKNOWN:
            return f"plan unknown: {'; '.join(answer.reasons) or 'no reason was given'}    [PLAN-UNKNOWN]"
        case VerdictKind.REFUSED:
            needs = f"trial needs {gib(memory.required_bytes)}{each}, " if memory is not None else ""
            return f"plan refused: {needs}{device}    [PLAN-NOFIT]"
        case VerdictKind.FITS | VerdictKind.FITS_WITH:
            needs = f"needs {gib(memory.required_bytes)}{each}, " if memory is not None else ""
            how = f" with {choice_text(answer.execution)}" if answer.execution is not None else ""
            return f"plan fits{how}: {needs}{device}"


def peak_text(memory: MemoryPlan) -> str:
    """Return where the peak is: ``backward, encoder.layer.23.attention  (4 x 512, worst batch of the data)``."""
    at, batch = memory.peak_at, memory.worst_batch
    place = ", ".join(part for part in (str(at.phase), at.module, at.op) if part)
    known = "worst batch of the data" if batch.from_data else "rows of train.max_length, for the data is not known"
    return f"{place}  ({batch.rows} x {batch.length}, {known})"


def refusal_lines(answer: PlanAnswer) -> list[str]:
    """Return the lines of a refusal below its headline: the peak, its parts, and what would fit."""
    lines = [f"  {'reason':<{_LIST_WIDTH}}{reason}" for reason in answer.reasons]
    memory = answer.memory
    if memory is not None:
        parts = {str(name): size for name, size in memory.by_category.items()} | {"overhead": memory.overhead_bytes}
        sizes = "  ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items() if size >= _SHOWN_BYTES)
        lines += [f"  {'peak at':<{_LIST_WIDTH}}{peak_text(memory)}", f"  {sizes}   GiB"]
    fitting = [fallback for fallback in answer.ladder if fallback.fits]
    lines += _named("would fit", [fallback for fallback in fitting if fallback.effect is not Effect.SEMANTICS])
    lines += _named("changes", [fallback for fallback in fitting if fallback.effect is Effect.SEMANTICS])
    if not fitting and answer.ladder:
        lines += _named("nearest", [min(answer.ladder, key=lambda fallback: fallback.required_bytes)])
    return lines


def ladder_table(ladder: Sequence[Fallback]) -> Table:
    """Return one row for each change that lowers memory, with what it saves."""
    noted = any(fallback.note for fallback in ladder)
    rows = [
        (
            fallback.change,
            gib(fallback.required_bytes),
            gib(fallback.saves_bytes),
            EFFECTS[fallback.effect],
            f"{fallback.time_factor:.2g}x" if fallback.devices == 1 else "-",  # not measured for several ranks
            "yes" if fallback.fits else "no",
            *((fallback.note,) if noted else ()),
        )
        for fallback in ladder
    ]
    return Table(("change", "needs", "saves", "effect", "time", "fits", *(("note",) if noted else ())), tuple(rows))


def trust_text(answer: PlanAnswer) -> str:
    """Return the confidence of a plan, the version of torch and the planning time."""
    return f"{answer.confidence}, torch {answer.torch}, planned in {duration_text(answer.planner_s)}"


def space_table(plan: SpacePlan) -> Table:
    """Return one row for each combination of the other keys, and one column for each batch size.

    A cell says ``fits``, or how it fits (``4 x 4`` is a micro-batch of 4 with 4 accumulation steps, ``ckpt`` activation
    checkpointing), or the least memory it needs.
    """
    keys = tuple(name for name in plan.varied if name != _BATCH)
    batches = _distinct(plan.cells, (_BATCH,)) if _BATCH in plan.varied else [()]
    heads = tuple(f"batch {batch[0]}" if batch else "fits" for batch in batches)
    rows: list[tuple[str, ...]] = []
    for row in _distinct(plan.cells, keys):
        cells = [cell for cell in plan.cells if _values(cell, keys) == row]
        texts = [_cells_text([cell for cell in cells if _values(cell, (_BATCH,) * len(b)) == b]) for b in batches]
        rows.append((*("-" if value is None else value_text(value) for value in row), *texts))
    return Table((*(name.partition(".")[2] for name in keys), *heads), tuple(rows))


def space_lines(plan: SpacePlan) -> list[str]:
    """Return the lines below the table of a search space: counts, assumptions and unknowns."""
    size = gib(plan.device.capacity_bytes)
    groups = [
        [cell for cell in plan.cells if _values(cell, plan.varied) == point]
        for point in _distinct(plan.cells, plan.varied)
    ]
    fitting = sum(any(cell.answer.verdict.fits for cell in cells) for cells in groups)
    lines = [f"{fitting} of {len(groups)} combinations fit {plan.device.name} ({size}), {plan.planner_s:.1f} s"]
    if plan.kept:
        kept = ", ".join(f"{name} = {value_text(value)}" for name, value in plan.kept.items())
        lines.append(f"planned at {kept}; these are searched too: --set another value to see it")
    if any(cell.answer.memory is not None and not cell.answer.memory.worst_batch.from_data for cell in plan.cells):
        lines.append("the lengths of the data are not known here: rows of train.max_length were taken")
    lines += hours_lines(plan.hours, plan.trials, plan.cost)
    if plan.prices is not None and plan.cost is None:
        why = (
            "the hours of a training are not known"
            if plan.hours is None
            else f"there is no price of {plan.device.name}"
        )
        lines.append(f"no cost: {why}")
    lines += space_shard_lines((str(cell.params.get("model.name", "")), cell.answer.sharding) for cell in plan.cells)
    reasons = dict.fromkeys(reason for cell in plan.cells if _unknown(cell) for reason in cell.answer.reasons)
    return lines + [f"unknown: {reason}" for reason in reasons]


def hours_lines(hours: Interval | None, trials: int, cost: RunCost | None) -> list[str]:
    """Return how long a training and all trials of a study take, and what they cost; nothing where it is not known."""
    if hours is None:
        return []
    text = f"a training takes {hours_text(hours)}, without its evaluations"
    if trials > 1:
        text += f"; {trials} trials one after the other {hours_text(times(hours, trials))}"
    return [f"{text}, {cost_text(cost)}" if cost is not None else text]


@document_of.register
def _(answer: PlanAnswer) -> Document:
    """Return the verdict of a plan, its memory, and the changes that would lower it."""
    refused, memory = answer.verdict is VerdictKind.REFUSED, answer.memory
    blocks: list[Block] = [Line(headline(answer), VERDICT_STYLES[answer.verdict])]
    blocks += refusal_lines(answer) if refused else []
    if memory is not None:
        blocks += [] if refused else [f"peak at {peak_text(memory)}"]
        blocks += ["", requirement_table(answer.device, memory), "", memory_table(memory)]
    blocks += hours_lines(answer.hours, 1, answer.cost)
    if answer.sharding is not None:
        blocks += ["", shard_table(answer.sharding), *shard_lines(answer.sharding)]
    blocks += ["", ladder_table(answer.ladder)] if answer.ladder else []
    blocks += [f"no fallback to several devices: {answer.cannot_shard}"] if answer.cannot_shard else []
    return Document((*blocks, Line(trust_text(answer), "dim")))


@document_of.register
def _(plan: SpacePlan) -> Document:
    return Document((space_table(plan), *space_lines(plan)))


def _named(name: str, fallbacks: Sequence[Fallback]) -> Iterator[str]:
    width = max((len(fallback.change) for fallback in fallbacks), default=0)
    for index, fallback in enumerate(fallbacks):
        head = name if index == 0 else ""
        effect = EFFECTS[fallback.effect]
        time = f", about {fallback.time_factor:.2g}x time" if fallback.effect is not Effect.SEMANTICS else ""
        time = f", {fallback.note}" if fallback.devices > 1 else time
        yield f"  {head:<{_LIST_WIDTH}}{fallback.change:<{width}}  {gib(fallback.required_bytes):>9}   {effect}{time}"


def _values(cell: PlannedCell, keys: Sequence[str]) -> tuple[Scalar, ...]:
    return tuple(cell.params.get(key) for key in keys)


def _distinct(cells: Sequence[PlannedCell], keys: Sequence[str]) -> list[tuple[Scalar, ...]]:
    return list(dict.fromkeys(_values(cell, keys) for cell in cells))


def _unknown(cell: PlannedCell) -> bool:
    return cell.answer.verdict is VerdictKind.UNKNOWN


def _cells_text(cells: Sequence[PlannedCell]) -> str:
    """Return how the cells of a combination, without and with checkpointing, fit with the least change."""
    if not cells:
        return "-"  # the combination cannot be sampled
    fitting = [cell for cell in cells if cell.answer.verdict.fits]
    if fitting:
        return _choice_text(min(fitting, key=lambda cell: cell.mildness))
    known = [cell.answer for cell in cells if cell.answer.memory is not None and not _unknown(cell)]
    return f"needs {gib(min(map(least_bytes, known)))}" if known else "unknown"


def _choice_text(cell: PlannedCell) -> str:
    choice = cell.answer.execution
    if choice is None:
        return "fits"
    parts = [f"tp {choice.tp}"] if choice.tp is not None else []
    parts += [f"{choice.micro_batch} x {choice.accumulation}"] if choice.accumulation > 1 else []
    parts += [f"val {choice.eval_batch}"] if choice.eval_batch is not None else []
    parts += ["ckpt"] if choice.checkpointing else []
    parts += ["chunked"] if choice.chunked_loss and cell.answer.verdict is not VerdictKind.FITS else []
    parts += ["act offload"] if choice.offload_activations else []
    parts += ["offload"] if choice.offload_optimizer else []
    return ", ".join(parts) or "fits"


def calibration_table(comparisons: Sequence[CaseComparison]) -> Table:
    """Return one row for each case: planned beside observed memory."""
    heads = ("case", "allocated", "planned", "error", "reserved", "planned", "error")
    return Table(heads, tuple(map(_row, comparisons)))


def calibration_lines(result: CalibrateResult) -> list[str]:
    """Return lines on the constants that are kept and their errors."""
    kept = result.calibration
    if kept is None:
        return ["nothing was kept"]
    worst_reserved = max(abs(case.reserved_error) for case in result.comparisons)
    constants = f"context {gib(kept.context_bytes)}, cuBLAS workspace {gib(kept.workspace_bytes)} a thread"
    errors = f"median error {kept.error_median:.2%}, p95 {kept.error_p95:.2%} of {kept.runs} runs"
    return [
        f"{kept.device_name}, torch {kept.torch}: {constants}",
        f"peak allocated: {errors}; peak reserved: worst {worst_reserved:.2%}",
    ]


@document_of.register
def _(result: CalibrateResult) -> Document:
    """Return planned beside measured memory, then the constants that are kept."""
    return Document((calibration_table(result.comparisons), *calibration_lines(result)))


@json_of.register
def _(result: CalibrateResult) -> dict[str, object]:
    return {"schema": 1, "calibration": result.calibration, "comparisons": result.comparisons}


def _row(case: CaseComparison) -> tuple[str, ...]:
    return (
        case.name,
        gib(case.observed_allocated_bytes),
        gib(case.planned_allocated_bytes),
        f"{case.allocated_error:+.2%}",
        gib(case.observed_reserved_bytes),
        gib(case.planned_reserved_bytes),
        f"{case.reserved_error:+.2%}",
    )
