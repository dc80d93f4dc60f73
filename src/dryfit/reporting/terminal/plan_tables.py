"""The tables and lines that ``dryfit plan`` prints.

A study says why a trial is refused in ``study.planning.refusals``, its report in ``reporting.data.observed_memory``.
"""

from collections.abc import Iterator, Sequence

from dryfit.core.jobs.memory import Effect, Fallback, MemoryPlan, VerdictKind
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.jobs.rehearsal import RehearsalMemory
from dryfit.core.settings.execution import DeviceKind, DeviceSpec
from dryfit.core.settings.trial import Scalar
from dryfit.core.text.units import gib
from dryfit.reporting.data.observed_memory import choice_text
from dryfit.reporting.terminal.shard_tables import space_shard_lines
from dryfit.reporting.terminal.tables import Table, duration_text, value_text
from dryfit.study.planning.plan_requests import PlannedCell, SpacePlan
from dryfit.study.planning.refusals import least_bytes

_BATCH = "train.batch_size"
EFFECTS = {
    Effect.EXACT: "exact",
    Effect.NUMERICS: "equal up to rounding",
    Effect.SEMANTICS: "changes the experiment; never automatic",
}
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


def memory_table(memory: MemoryPlan | RehearsalMemory) -> Table:
    """Return the memory by category at the peak, and the peak of each phase."""
    largest_first = sorted(memory.by_category.items(), key=lambda item: -item[1])
    rows = [("at the peak", str(name), gib(size)) for name, size in largest_first if size]
    rows += [("peak of phase", str(name), gib(size)) for name, size in memory.by_phase.items() if size]
    return Table(("what", "of", "memory"), tuple(rows))


def requirement_table(device: DeviceSpec, memory: MemoryPlan | RehearsalMemory) -> Table:
    """Return the steps from the memory of tensors to the memory required of the device."""
    rows = [("peak allocated", memory.peak_allocated_bytes, "tensors")]
    if device.kind is DeviceKind.CUDA:
        outside, total = "CUDA context and libraries", "smallest cap + overhead + margin"
        rows += [
            ("peak reserved", memory.peak_reserved_bytes, "by the caching allocator where memory is plenty"),
            ("fragmented", memory.fragmented_bytes, "reserved but not allocated, at worst"),
            ("smallest cap", memory.min_cap_bytes, "the least the caching allocator gets through with"),
        ]
    else:
        outside, total = "Python, torch and transformers", "peak allocated + overhead + margin"
    rows += [
        ("overhead", memory.overhead_bytes, outside),
        ("margin", memory.margin_bytes, "kept free"),
        ("required", memory.required_bytes, total),
        ("device", device.capacity_bytes, device.name),
    ]
    if isinstance(memory, MemoryPlan) and memory.host_bytes:
        rows.append(("host", memory.host_bytes, "tensors kept off the device"))
    return Table(("what", "memory", "meaning"), tuple((name, gib(size), meaning) for name, size, meaning in rows))


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
    lines += space_shard_lines((str(cell.params.get("model.name", "")), cell.answer.sharding) for cell in plan.cells)
    reasons = dict.fromkeys(reason for cell in plan.cells if _unknown(cell) for reason in cell.answer.reasons)
    return lines + [f"unknown: {reason}" for reason in reasons]


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
        return _choice_text(min(fitting, key=_mildness))
    known = [cell.answer for cell in cells if cell.answer.memory is not None and not _unknown(cell)]
    return f"needs {gib(min(map(least_bytes, known)))}" if known else "unknown"


def _mildness(cell: PlannedCell) -> tuple[bool, int, bool, int]:
    """Sort key of cells that fit: no change, then checkpointing, smaller micro-batches, and more devices last."""
    choice = cell.answer.execution
    return (
        cell.answer.verdict is not VerdictKind.FITS,
        cell.answer.devices,
        choice is not None and choice.offloads,
        (choice.accumulation if choice is not None else 1) * 2 + cell.checkpointing,
    )


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
