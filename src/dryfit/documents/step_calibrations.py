"""What a measured step says of a device, for the terminal and as JSON."""

from dataclasses import asdict
from typing import Final

from dryfit.documents.document import Document, Line
from dryfit.study.step_calibrations import StepCalibrated

_QUANTITIES: Final = {
    "tensor": "of its peak on tensor cores",
    "simt": "of its peak in fp32",
    "bandwidth": "of its memory bandwidth",
}


def step_calibrated_json(found: StepCalibrated) -> dict[str, object]:
    """Return it as ``calibrate --time --json`` prints it."""
    return {"schema": 2, **asdict(found.kept), "before": found.before, "estimated_s": found.estimated_s}


def step_calibrated_document(found: StepCalibrated) -> Document:
    """Return what is used from now on, and what was until now."""
    kept = found.kept
    reached = f"{kept.device} reaches {kept.value:.0%} {_QUANTITIES[kept.quantity]}"
    was = "nothing was known before" if found.before is None else f"{found.before:.0%} before"
    lines = [Line(f"{reached} ({was})", "green")]
    if found.estimated_s is not None:
        error = found.estimated_s / kept.measured_s - 1
        lines.append(
            Line(f"a step took {kept.measured_s:.3g} s; the estimate was {found.estimated_s:.3g} s, {error:+.0%}")
        )
    lines.append(Line("rehearsals on this device use it from now on"))
    return Document(tuple(lines))
