"""What searches by several tools have cost, as a table, and whether dryfit's reaches its goals."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ARMS: Final = {
    "a": "(a) Optuna, median pruner, HF Trainer",
    "b": "(b) Ray Tune, ASHA, HF Trainer",
    "c": "(c) dryfit as `dryfit init` gives it",
    "d": "(d) the same, `parallel = 1`, fp32",
}
GOAL: Final = 0.5
"""What share of another tool's time (c) may take."""


@dataclass(frozen=True)
class Result:
    """One search by one tool.

    Attributes:
        arm: Which, a key of :data:`ARMS`.
        work: What was searched, and with which rows; equal where results compare.
        wall_s: Seconds to the end, starts included.
        cpu_s: CPU seconds of all processes.
        peak_rss_mib: The most memory at one time, shared pages counted in each process.
        peak_pss_mib: The same, shared pages counted once.
        killed: Processes that had to be ended after it.
        validations: Seconds from the start, and value, of each validation of any trial; larger values are better.
    """

    arm: str
    seed: int
    work: dict[str, Any]
    began_at_s: float
    wall_s: float
    cpu_s: float
    peak_rss_mib: float
    peak_pss_mib: float
    killed: int
    validations: list[tuple[float, float]]

    @property
    def score(self) -> float:
        """The best validation."""
        return max((value for _, value in self.validations), default=math.nan)

    def reached_s(self, score: float) -> float | None:
        """Return when a validation was first as good; None where none was."""
        return next((at_s for at_s, value in sorted(self.validations) if value >= score), None)

    def write(self, file: Path) -> None:
        """Write it whole or not at all."""
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        beside.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Result":
        """Read one."""
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(**found | {"validations": [(at_s, value) for at_s, value in found["validations"]]})

    def __str__(self) -> str:
        """One line."""
        return f"{self.wall_s:.0f} s, {self.score:.3f}, {self.cpu_s:.0f} CPU s, {self.peak_rss_mib:.0f} MiB"


def table(results: Sequence[Result]) -> str:
    """Return markdown: a row for each arm, medians over seeds with the extremes, and a line for each goal."""
    by_arm = {arm: {one.seed: one for one in results if one.arm == arm} for arm in ARMS}
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    lines = [
        "| | to finish, s | to (a)'s best score, s | best score | CPU s | peak memory, MiB | shared pages once |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for arm, found in by_arm.items():
        ours = list(found.values())
        cells = [
            _spread([one.wall_s for one in ours], 0),
            _reached(_to_first_best(found, by_arm.get("a", {}))),
            _spread([one.score for one in ours], 3),
            *(_spread([getattr(one, what) for one in ours], 0) for what in ("cpu_s", "peak_rss_mib", "peak_pss_mib")),
        ]
        lines.append(f"| {ARMS[arm]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *goals(by_arm)])


def goals(by_arm: dict[str, dict[int, Result]]) -> list[str]:
    """Return a line for each goal of (c) that there are results for."""
    ours, lines = by_arm.get("c", {}), list[str]()
    for arm in ("a", "b"):
        theirs = by_arm.get(arm, {})
        seeds = sorted(set(ours) & set(theirs))
        if not seeds:
            continue
        ratios = [ours[at].wall_s / theirs[at].wall_s for at in seeds]
        lines.append(_time_goal(f"time to finish over ({arm})'s", ratios))
        first = by_arm.get("a", {})
        reached = zip(*(_to_first_best(one, first, seeds) for one in (ours, theirs)), strict=True)
        ratios = [math.inf if our is None else our / their for our, their in reached if their is not None]
        if ratios:
            lines.append(_time_goal(f"time to (a)'s best score over ({arm})'s", ratios))
        lines.append(_score_goal(arm, [ours[at].score for at in seeds], [theirs[at].score for at in seeds]))
        if arm == "b":
            ratios = [ours[at].peak_rss_mib / theirs[at].peak_rss_mib for at in seeds]
            lines.append(f"- peak memory over (b)'s: {_spread(ratios, 2)}; below 1: {_met(max(ratios) < 1)}")
    return lines


def _to_first_best(
    found: dict[int, Result], first: dict[int, Result], seeds: Sequence[int] | None = None
) -> list[float | None]:
    """Return when each seed's search was as good as the first arm's of that seed ever; seeds without that left out."""
    seeds = sorted(set(found) & set(first)) if seeds is None else [seed for seed in seeds if seed in first]
    return [found[seed].reached_s(first[seed].score) for seed in seeds]


def _reached(times_s: Sequence[float | None]) -> str:
    there = [one for one in times_s if one is not None]
    missed = len(times_s) - len(there)
    words = [_spread(there, 0)] if there else []
    return ", ".join([*words, *([f"{missed} of {len(times_s)} missed"] if missed else [])])


def _time_goal(what: str, ratios: Sequence[float]) -> str:
    """A search that never got there counts as infinitely long, so a median over seeds stands one miss of three."""
    return f"- {what}: {_spread(ratios, 2)}; at most {GOAL}: {_met(statistics.median(ratios) <= GOAL)}"


def _score_goal(arm: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Judge medians; they may differ by as much as the other arm's seeds do."""
    behind = statistics.median(theirs) - statistics.median(ours)
    spread = max(theirs) - min(theirs)
    what = f"- best score less ({arm})'s: {-behind:+.3f}"
    if len(ours) < 2:
        return f"{what}; one seed says nothing of their spread"
    return f"{what}; not lower by more than the seeds' spread of {spread:.3f}: {_met(behind <= spread)}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _spread(values: Sequence[float], digits: int) -> str:
    """Median, with minimum and maximum where there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"
