"""How a model is sharded over ranks, as a table and as lines."""

from collections.abc import Iterable, Sequence

from dryfit.core.sharding.shard_summary import Sent, ShardRow, ShardSummary
from dryfit.core.text.units import gib
from dryfit.core.text.words import few
from dryfit.reporting.terminal.tables import Table


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
