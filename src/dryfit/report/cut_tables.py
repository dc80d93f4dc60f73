"""How a model is cut over ranks, as a table and lines."""

from collections.abc import Sequence

from dryfit.core.cut import CutRow, CutSummary, Sent
from dryfit.core.units import gib
from dryfit.core.words import few
from dryfit.report.tables import Table


def cut_table(cut: CutSummary) -> Table:
    """One row for each kind of parameter, those of all layers together."""
    rows = [(row.name, str(row.count), _shapes(row), row.how) for row in cut.rows]
    return Table(("parameter", "count", "whole -> of a rank", "cut by"), tuple(rows))


def cut_lines(cut: CutSummary) -> list[str]:
    """What a rank holds and sends, what the proof found, and why the rest is whole."""
    share = cut.weight_bytes / cut.whole_weight_bytes
    weights = f"{gib(cut.weight_bytes)} of {gib(cut.whole_weight_bytes)}"
    lines = [
        f"cut over {cut.degree} ranks, each on a device of its own: all memory is that of one rank",
        f"weights of a rank: {weights} ({share:.1%}), {cut.cut} parameters cut, {cut.whole} whole",
        _sent_text(cut.sent),
        f"proved: outputs differ by {cut.output_error:.0e}, gradients by {cut.gradient_error:.0e}",
    ]
    return lines + [f"whole: {few(kept.names)}: {kept.reason}" for kept in cut.kept_whole]


def _sent_text(sent: Sent | None) -> str:
    if sent is None:
        return "sent by a rank in an optimizer step: unknown"
    total = gib(sent.forward_bytes + sent.backward_bytes)
    parts = f"{gib(sent.forward_bytes)} forward, {gib(sent.backward_bytes)} backward"
    return f"sent by a rank in an optimizer step: {total} ({parts})"


def _shapes(row: CutRow) -> str:
    if row.shape == row.local_shape:
        return _shape(row.shape)
    return f"{_shape(row.shape)} -> {_shape(row.local_shape)}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
