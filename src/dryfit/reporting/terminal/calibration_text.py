"""The result of ``dryfit calibrate`` as a table, as lines and as JSON."""

from collections.abc import Sequence

from dryfit.core.jobs.calibration import Calibration, CaseComparison
from dryfit.core.jobs.plan import CalibrateResult
from dryfit.core.text.units import gib
from dryfit.reporting.data.json_view import Answer
from dryfit.reporting.terminal.tables import Table


class CalibrationView(Answer):
    """What ``dryfit calibrate --json`` prints."""

    calibration: Calibration | None
    comparisons: tuple[CaseComparison, ...]


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
