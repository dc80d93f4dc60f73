"""Hang detection: the longest silence that a training process is allowed, learned from its own steps.

A sign of life is made by the training thread, and only where work was done: after an optimizer step, a micro-batch, a
validated batch. So the time between two of them is the time that its own work takes.
"""

from dataclasses import dataclass, field

FACTOR = 20.0
"""A silence this many times longer than the longest so far in the same phase is a hang."""

LEAST_S = 120.0
"""No shorter silence is a hang: a disk may stall, a kernel may be compiled for a new shape."""

LEAST_GAPS = 10
"""Silences needed in a phase before a limit is learned: the first steps compile and warm up."""


def silence_limit_s(most_s: float, longest_s: float, gaps: int) -> float:
    """The longest silence that is no hang yet: ``max(LEAST_S, FACTOR * longest_s)``, and never more than ``most_s``.

    Args:
        most_s: ``runtime.hang_timeout_s``.
        longest_s: The longest silence so far that ended with a sign of life.
        gaps: Number of silences so far.
    """
    if gaps < LEAST_GAPS:
        return most_s
    return min(most_s, max(LEAST_S, FACTOR * longest_s))


@dataclass(slots=True)
class SilenceLimits:
    """The silences of one process so far, by phase."""

    _longest_s: dict[str, float] = field(default_factory=dict[str, float])
    _gaps: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, phase: str, gap_s: float) -> None:
        """Record a silence of ``gap_s`` that ended with a sign of life."""
        self._longest_s[phase] = max(gap_s, self._longest_s.get(phase, 0.0))
        self._gaps[phase] = self._gaps.get(phase, 0) + 1

    def limit_s(self, phase: str, most_s: float) -> float:
        """Return :func:`silence_limit_s` for a phase."""
        return silence_limit_s(most_s, self._longest_s.get(phase, 0.0), self._gaps.get(phase, 0))
