"""Tables of what gpu_memory.py found, as text and as Markdown."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dryfit.settings.plan_messages import Observation
from dryfit.training.calibrate import spread

MIB = 2**20
Row = Sequence[str]
Results = dict[str, dict[str, dict[str, Any]]]
"""Results by configuration and stage."""


def table(heads: Row, rows: Sequence[Row]) -> str:
    """A Markdown table whose columns line up, so that it is text as well."""
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def mib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / MIB:.1f}"


def compared(results: Results) -> list[dict[str, Any]]:
    """Configurations that were planned and run, with their errors."""
    found = []
    for name, stages in results.items():
        plan, ran = stages.get("plan", {}), stages.get("run", {})
        if plan.get("status") != "ok" or ran.get("status") != "ok":
            continue
        seen = Observation.model_validate(ran["observation"], strict=False)
        found.append(
            {
                "name": name,
                **{key: plan[key] for key in ("family", "precision", "optimizer", "segments")},
                "padded": seen.case.padded,
                "allocated": seen.peak_allocated_bytes,
                "reserved": seen.peak_reserved_bytes,
                "planned_allocated": plan["peak_allocated_bytes"],
                "planned_reserved": plan["peak_reserved_bytes"],
                "context": seen.context_bytes,
                "allocated_error": plan["peak_allocated_bytes"] / seen.peak_allocated_bytes - 1,
                "reserved_error": plan["peak_reserved_bytes"] / seen.peak_reserved_bytes - 1,
            }
        )
    return found


def case_table(rows: list[dict[str, Any]]) -> str:
    heads = ("configuration", "allocated MiB", "planned", "error", "reserved MiB", "planned", "error", "context")
    cells = [
        (
            one["name"],
            mib(one["allocated"]),
            mib(one["planned_allocated"]),
            f"{one['allocated_error']:+.2%}",
            mib(one["reserved"]),
            mib(one["planned_reserved"]),
            f"{one['reserved_error']:+.2%}",
            mib(one["context"]),
        )
        for one in rows
    ]
    return table(heads, cells)


def group_table(rows: list[dict[str, Any]]) -> str:
    """Median, p95 and worst of each group; masks of ones are a group of their own, as their plan is an upper bound."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in rows:
        if not one["padded"]:
            groups["mask of ones (upper bound)"].append(one)
            continue
        groups["all padded"].append(one)
        for key in ("family", "precision", "optimizer", "segments"):
            groups[f"{key}: {one[key]}"].append(one)
    heads = ("group", "runs", "allocated median", "p95", "worst", "reserved median", "p95", "worst", "worst in")
    cells = []
    for group in sorted(groups):
        members = groups[group]
        allocated = spread([one["allocated_error"] for one in members])
        reserved = spread([one["reserved_error"] for one in members])
        worst = max(members, key=lambda one: abs(one["allocated_error"]))
        values = [*(allocated.median, allocated.p95, allocated.worst), *(reserved.median, reserved.p95, reserved.worst)]
        cells.append((group, str(len(members)), *(f"{value:.2%}" for value in values), worst["name"]))
    return table(heads, cells)


def history_table(results: Results) -> str:
    heads = ("configuration", "events", "replay off by MiB", "only planned MiB", "only taken MiB", "first deviation")
    cells = []
    for name, stages in results.items():
        found = stages.get("compare", {})
        if found.get("status") != "ok":
            continue
        one = found["comparison"]
        first = one["first_deviation"]
        where = "none"
        if first:
            sizes = f"{mib(first['planned_bytes'])} planned, {mib(first['observed_bytes'])} taken"
            where = f"{first['phase']} #{first['index']} {first['planned_by']}: {sizes}"
        only = [
            f"{sum(phase[key] for phase in one['phases']) / MIB:.1f}"
            for key in ("only_planned_bytes", "only_observed_bytes")
        ]
        cells.append((name, str(one["replayed_events"]), mib(one["replay_difference_bytes"]), *only, where))
    return table(heads, cells)


def cap_table(results: Results) -> str:
    heads = ("configuration", "smallest cap MiB", "at +2 %", "at -2 %")
    cells = []
    for name, stages in results.items():
        above, below = stages.get("cap-above", {}), stages.get("cap-below", {})
        if above or below:
            cap = mib(stages["plan"]["min_cap_bytes"])
            cells.append((name, cap, above.get("status", "-"), below.get("status", "-")))
    return table(heads, cells)


def kernel_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for one in rows:
        if "error" in one:
            cells.append((one["kernel"], one["error"], "-"))
        else:
            cells.append((one["kernel"], mib(one["measured_bytes"]), mib(one["formula_bytes"])))
    return table(("kernel", "measured MiB", "formula MiB"), cells)


def trouble_table(results: Results) -> str:
    cells = [
        (name, stage, found["status"], found.get("why", "").replace("|", "/")[:160])
        for name, stages in results.items()
        for stage, found in stages.items()
        if found["status"] != "ok" and not stage.startswith("cap-")
    ]
    return table(("configuration", "stage", "status", "why"), cells)
