"""How far the mirror and the trackers are, as lines of `dryfit status`."""

from dryfit.reporting.data.summary import StudySummary, TrackerView
from dryfit.reporting.terminal.tables import time_text


def follower_lines(summary: StudySummary) -> list[str]:
    """Return a line of a mirror that cannot be written, and one of each tracker."""
    mirror = summary.mirror
    lines = [f"the mirror could not be written since {time_text(mirror.since_s)}: {mirror.error}"] if mirror else []
    return [*lines, *(_tracker_line(tracker) for tracker in summary.trackers)]


def _tracker_line(tracker: TrackerView) -> str:
    if tracker.failing_since_s is not None:
        return f"{tracker.entry} could not be written since {time_text(tracker.failing_since_s)}: {tracker.error}"
    if tracker.behind_bytes:
        return f"{tracker.entry} lacks the last {tracker.behind_bytes} bytes of the ledger"
    return f"{tracker.entry} has everything"
