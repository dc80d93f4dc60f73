"""A calibration for people and for programs: what ``dryfit calibrate`` prints."""

from collections.abc import Sequence

from dryfit.core.jobs import CalibrateResult
from dryfit.core.jobs.calibration import Calibration, CaseComparison
from dryfit.core.text.units import gib
from dryfit.reporting.data.json_view import Answer
from dryfit.reporting.terminal.tables import Table


class CalibrationView(Answer):
    """What ``calibrate --json`` prints."""

    calibration: Calibration | None
    comparisons: tuple[CaseComparison, ...]


def calibration_view(found: CalibrateResult) -> CalibrationView:
    """The constants that are kept, and every comparison they were made from."""
    return CalibrationView(calibration=found.calibration, comparisons=found.comparisons)


def calibration_table(comparisons: Sequence[CaseComparison]) -> Table:
    """Planned beside observed, a row a case."""
    heads = ("case", "allocated", "planned", "error", "reserved", "planned", "error", "replayed", "first deviation")
    return Table(heads, tuple(_row(one) for one in comparisons))


def calibration_lines(found: CalibrateResult) -> list[str]:
    """What is kept, in sentences."""
    kept = found.calibration
    if kept is None:
        return ["nothing was kept"]
    worst_reserved = max(abs(one.reserved_error) for one in found.comparisons)
    constants = f"context {gib(kept.context_bytes)}, cuBLAS workspace {gib(kept.workspace_bytes)} a thread"
    errors = f"median error {kept.error_median:.2%}, p95 {kept.error_p95:.2%} of {kept.runs} runs"
    return [
        f"{kept.device_name}, torch {kept.torch}: {constants}",
        f"peak allocated: {errors}; peak reserved: worst {worst_reserved:.2%}",
    ]


def _row(one: CaseComparison) -> tuple[str, ...]:
    replayed = "-"
    if one.replay_difference_bytes is not None:
        off = one.replay_difference_bytes
        replayed = f"{one.replayed_events} events, " + (f"off by {gib(off)}" if off else "exact")
    return (
        one.name,
        gib(one.observed_allocated_bytes),
        gib(one.planned_allocated_bytes),
        f"{one.allocated_error:+.2%}",
        gib(one.observed_reserved_bytes),
        gib(one.planned_reserved_bytes),
        f"{one.reserved_error:+.2%}",
        replayed,
        _deviation(one),
    )


def _deviation(one: CaseComparison) -> str:
    found = one.first_deviation
    if found is None:
        return "none" if one.phases else "-"
    planned = gib(found.planned_bytes) if found.planned_bytes is not None else "nothing"
    observed = gib(found.observed_bytes) if found.observed_bytes is not None else "nothing"
    return f"{found.phase} #{found.index}: {planned} planned ({found.planned_by or '-'}), {observed} taken"
