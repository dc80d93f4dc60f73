"""How predictions compare with measurements: errors, their summary, a table and a picture.

Pure: nothing is read, run or written here. Whatever predicts can be scored: give ``name -> counter -> value``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from published_list import ANCHOR, FAMILIES, Row

Values = Mapping[str, Mapping[str, int]]
"""Of each row's name, the value of each counter: bytes, or a batch."""

TARGETS: Final = {"allocated": (0.2, 1.5), "reserved": (1.0, 3.0)}
"""Of each counter, the largest median and 95th percentile of the errors, in per cent."""

BATCH_TARGETS: Final = (93.0, 1.0)
"""The least share of equal batches, and the largest share of false "fits", in per cent."""

NEAR: Final = ("image-gen", "metamath")
"""Families whose torch was this one or the one before; the others ran on versions years apart."""

OVER_PERCENT: Final = 5.0
"""A row with a larger error is explained."""


@dataclass(frozen=True, slots=True)
class Error:
    """One counter of one row."""

    row: Row
    counter: str
    predicted: int
    measured: int

    @property
    def percent(self) -> float:
        """By how much more is predicted than was measured, in per cent of what was."""
        return 100 * (self.predicted - self.measured) / self.measured


def anchored(predicted: Values, measured: Values, rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Return predictions in which allocated memory of MetaMathQA is the anchor's measured value plus a difference.

    Which rows are long is unknown, but all methods see the same ones: what differs is the method's own. Without a
    prediction of the anchor these rows have none.
    """
    result = {name: dict(values) for name, values in predicted.items()}
    anchor, published = predicted.get(ANCHOR, {}).get("allocated"), measured.get(ANCHOR, {}).get("allocated")
    for row in rows:
        values = result.get(row.name)
        if row.family != "metamath" or values is None or "allocated" not in values:
            continue
        difference = None if anchor is None else values["allocated"] - anchor
        if row.name == ANCHOR or difference is None or published is None:
            del values["allocated"]
        else:
            values["allocated"] = published + difference
    return result


def errors(rows: Sequence[Row], predicted: Values, measured: Values) -> list[Error]:
    """Return the errors of all counters that both have, in the order of the rows."""
    return [
        Error(row, counter, value, measured[row.name][counter])
        for row in rows
        for counter, value in predicted.get(row.name, {}).items()
        if counter in measured.get(row.name, {}) and counter != "fits"
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, between two neighbours in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of one counter, without their sign."""

    rows: int
    median: float
    p95: float
    most: float


def summary(found: Sequence[Error]) -> Summary | None:
    """Return what errors come to; None where there are none."""
    sizes = [abs(error.percent) for error in found]
    return Summary(len(sizes), percentile(sizes, 0.5), percentile(sizes, 0.95), max(sizes)) if sizes else None


@dataclass(frozen=True, slots=True)
class Batches:
    """How batches that fit compare with batches that ran."""

    rows: int
    same: int
    false_fits: int
    smaller: int


def batches(found: Sequence[Error]) -> Batches:
    """Count rows whose batch is the same, larger (it does not fit after all) or smaller."""
    signs = [(error.predicted > error.measured) - (error.predicted < error.measured) for error in found]
    return Batches(len(signs), signs.count(0), signs.count(1), signs.count(-1))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """How verdicts compare with runs that ended, or ran out of memory.

    Attributes:
        rows: Names of rows with a verdict, by what happened: 1 where the run ended.
        false_fits: Names of those that ran out of memory, of which a rehearsal said that they fit.
        false_refusals: Names of those that ran, of which a rehearsal said that they do not fit.
    """

    rows: Mapping[str, int]
    false_fits: tuple[str, ...]
    false_refusals: tuple[str, ...]


def verdicts(rows: Sequence[Row], predicted: Values, measured: Values) -> Verdicts:
    """Hold the counter ``fits`` of each row that has both against what happened."""
    both = {
        row.name: (predicted[row.name]["fits"], measured[row.name]["fits"])
        for row in rows
        if "fits" in predicted.get(row.name, {}) and "fits" in measured.get(row.name, {})
    }
    return Verdicts(
        {name: happened for name, (_, happened) in both.items()},
        tuple(name for name, (said, happened) in both.items() if said > happened),
        tuple(name for name, (said, happened) in both.items() if said < happened),
    )


def summary_table(found: Sequence[Error], seen: bool | None = None) -> str:
    """Return errors by source and counter, as a table in Markdown."""
    lines = ["| source | counter | rows | median | 95th percentile | largest |", "|---|---|--:|--:|--:|--:|"]
    kept = [error for error in found if seen is None or error.row.seen == seen]
    named = [(FAMILIES[key].title, [error for error in kept if error.row.family == key]) for key in FAMILIES]
    near = [error for error in kept if error.row.family in NEAR]
    for title, part in [*named, ("both of PEFT", near)]:
        for counter in TARGETS:
            of = summary([error for error in part if error.counter == counter])
            if of:
                numbers = f"{of.median:.2f} % | {of.p95:.2f} % | {of.most:.1f} %"
                lines.append(f"| {title} | {counter} | {of.rows} | {numbers} |")
    for counter, (median, p95) in TARGETS.items():
        lines.append(f"| *target* | {counter} | | {median} % | {p95} % | |")
    return "\n".join(lines)


def apart(row: Row, record: Mapping[str, Any]) -> str:
    """Return the versions of a rehearsal that are not those of the measurement; empty: all are the row's own."""
    versions = record.get("stack") or {}
    return " ".join(
        f"{name} {versions.get(name) or '?'}" for name, own in row.pins.items() if versions.get(name) != own
    )


def rows_table(found: Sequence[Error], predictions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return each row with its errors and what it was rehearsed with, as a table in Markdown."""
    lines = [
        "| row | measured on | rehearsed with | allocated, GB | error | reserved, GB | error |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    by_row: dict[str, dict[str, Error]] = {}
    for error in found:
        by_row.setdefault(error.row.name, {})[error.counter] = error
    for name, of in by_row.items():
        if "batch" in of:
            continue
        row = next(iter(of.values())).row
        cells = []
        for counter in TARGETS:
            error = of.get(counter)
            cells += [f"{error.measured / 1e9:.3f}", f"{error.percent:+.2f} %"] if error else ["", ""]
        seen, own = " (seen)" if row.seen else "", apart(row, predictions.get(name, {})) or "the same"
        lines.append(f"| {name}{seen} | {row.stack} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLOURS: Final = {
    "image-gen": "#1b9e77",
    "metamath": "#d95f02",
    "fms": "#7570b3",
    "timm": "#e7298a",
    "nanochat": "#66a61e",
    "modded-nanogpt": "#b2182b",
    "nanovlm": "#1f78b4",
    "litgpt": "#a6761d",
    "litgpt 4-bit": "#e6ab02",
    "litgpt x4": "#666666",
}
WIDTH, HEIGHT, EDGE = 640, 520, 60


def picture(found: Sequence[Error]) -> str:
    """Return an SVG: measured to the right, predicted upwards, both in GB and logarithmic, with a colour by source."""
    shown = [error for error in found if error.counter in TARGETS]
    values = [value / 1e9 for error in shown for value in (error.predicted, error.measured)] or [1.0, 10.0]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def at(value: float) -> tuple[float, float]:
        share = (math.log10(value) - low) / (high - low)
        return EDGE + share * (WIDTH - 2 * EDGE), HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE)

    style = "text{font:13px sans-serif;fill:#444}.axis{stroke:#999;fill:none}.even{stroke:#bbb;stroke-dasharray:4 4}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Predicted against measured memory</title>",
        f"<style>{style}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<path class="axis" d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}"/>',
        f'<path class="even" d="M{EDGE} {HEIGHT - EDGE}L{WIDTH - EDGE} {EDGE}"/>',
    ]
    for tick in (1, 2, 5, 10, 20, 50, 100):
        if low <= math.log10(tick) <= high:
            x, y = at(tick)
            parts.append(f'<text x="{x:.0f}" y="{HEIGHT - EDGE + 18}" text-anchor="middle">{tick}</text>')
            parts.append(f'<text x="{EDGE - 8}" y="{y + 4:.0f}" text-anchor="end">{tick}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">measured on a GPU, GB</text>')
    parts.append(
        f'<text transform="translate(16 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">predicted, GB</text>'
    )
    for error in shown:
        x, y = at(error.measured / 1e9)[0], at(error.predicted / 1e9)[1]
        fill = COLOURS[error.row.family] if error.counter == "allocated" else "none"
        label = f"{error.row.name}, {error.counter}: {error.percent:+.2f} %"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{COLOURS[error.row.family]}">'
            f"<title>{label}</title></circle>"
        )
    families = [key for key in FAMILIES if any(error.row.family == key for error in shown)]
    for n, key in enumerate(families):
        y = EDGE + 18 * n
        parts.append(f'<circle cx="{EDGE + 16}" cy="{y}" r="4" fill="{COLOURS[key]}"/>')
        parts.append(f'<text x="{EDGE + 26}" y="{y + 4}">{FAMILIES[key].title}</text>')
    parts.append(f'<text x="{EDGE + 10}" y="{EDGE + 18 * len(families) + 4}">filled: allocated; open: reserved</text>')
    return "\n".join([*parts, "</svg>", ""])
