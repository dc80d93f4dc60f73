"""How estimated step times compare with published speeds: errors, intervals, and one row of a card given.

Pure. Measured are ``step_us`` (microseconds of an optimizer step) or ``sample_ns`` (nanoseconds of a sample). Steps of
MetaMathQA are compared beside the anchor's: which rows are long is unknown, but all methods see the same ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from published_list import ANCHOR, FAMILIES, Row
from published_score import percentile

GIVEN: Final = "timm mixer_l16_224 nchw 224"
"""The row by which the others on its card are calibrated: one of matrix products, named before any was compared."""

_PRODUCTS: Final = ("matmul", "convolution", "attention")
_UNITS: Final = {"step_us": 1e6, "sample_ns": 1e9}


@dataclass(frozen=True, slots=True)
class StepError:
    """The time of one row's step, or of a sample: seconds."""

    row: Row
    estimate_s: float
    low_s: float
    high_s: float
    measured_s: float
    level: str
    products: float = 0.0

    @property
    def percent(self) -> float:
        """By how much the estimate is too long, in per cent of what was measured."""
        return 100 * (self.estimate_s / self.measured_s - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the interval of 80 % holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s

    def scaled(self, factor: float) -> "StepError":
        """Return it with an estimate and an interval some times as long."""
        times = (self.estimate_s * factor, self.low_s * factor, self.high_s * factor)
        return replace(self, estimate_s=times[0], low_s=times[1], high_s=times[2])


def step_errors(
    rows: Sequence[Row], records: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Mapping[str, int]]
) -> list[StepError]:
    """Return the rows that have both, in their order; those of MetaMathQA by the anchor, which has none."""
    found: list[StepError] = []
    for row in rows:
        record, known = records.get(row.name, {}), measured.get(row.name, {})
        time, counter = record.get("step_time"), next((name for name in _UNITS if name in known), None)
        batch = record.get("counters", {}).get("batch", 1)
        if not time or counter is None or (counter == "sample_ns" and not record.get("counters")):
            continue
        part = 1 / batch if counter == "sample_ns" else 1.0
        times = (time["estimate_s"] * part, time["low_s"] * part, time["high_s"] * part)
        products = sum(time["by_kind"].get(kind, 0.0) for kind in _PRODUCTS)
        found.append(StepError(row, *times, known[counter] / _UNITS[counter], time["level"], products))
    anchor = next((error for error in found if error.row.name == ANCHOR), None)
    factor = anchor.measured_s / anchor.estimate_s if anchor else None
    return [
        error if error.row.family != "metamath" else error.scaled(factor)
        for error in found
        if error.row.name != ANCHOR and (error.row.family != "metamath" or factor)
    ]


def with_one_given(found: Sequence[StepError]) -> list[StepError]:
    """Return the rows on one card with its products as fast as one row says, which is left out."""
    given = next((error for error in found if error.row.name == GIVEN), None)
    if given is None:
        return []
    rest_s = given.estimate_s * (1 - given.products)
    slower = (given.measured_s - rest_s) / (given.estimate_s * given.products)
    return [
        error.scaled(1 - error.products + error.products * slower)
        for error in found
        if error.row.device == given.row.device and error is not given
    ]


def times_table(found: Sequence[StepError]) -> str:
    """Return errors by source, as a table in Markdown."""
    head = "| source | the card's reach | rows | median | 95th percentile | within the interval of 80 % |"
    lines = [head, "|---|---|--:|--:|--:|--:|"]
    parts = [(FAMILIES[key].title, [error for error in found if error.row.family == key]) for key in FAMILIES]
    for title, part in [*parts, (f"timm, with `{GIVEN[5:]}` given", with_one_given(found))]:
        if part:
            sizes = [abs(error.percent) for error in part]
            inside = 100 * sum(error.is_inside for error in part) / len(part)
            levels = " and ".join(sorted({error.level for error in part}))
            numbers = f"{percentile(sizes, 0.5):.0f} % | {percentile(sizes, 0.95):.0f} % | {inside:.0f} %"
            lines.append(f"| {title} | {levels} | {len(part)} | {numbers} |")
    return "\n".join(lines)
