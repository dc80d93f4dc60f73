"""How long a training process may be silent before it hangs: learned from its own steps.

A sign of life is made by the training thread, and only where work was done: after an optimizer step, a micro-batch, a
validated batch. So the time between two of them is the time that its own work takes.
"""

from dataclasses import dataclass, field

FACTOR = 20.0
"""A silence so many times longer than the longest one so far in the same phase is a hang."""

LEAST_S = 120.0
"""No shorter silence is one: a disk may stall, a kernel may be compiled for a new shape."""

LEAST_GAPS = 10
"""Silences that must have been seen in a phase before anything is concluded: the first steps compile and warm up."""


def silence_limit_s(most_s: float, longest_s: float, gaps: int) -> float:
    """The longest silence that is no hang yet: ``max(LEAST_S, FACTOR * longest_s)``, and never more than ``most_s``.

    Args:
        most_s: ``runtime.hang_timeout_s``.
        longest_s: The longest silence so far that ended with a sign of life.
        gaps: How many silences were seen.
    """
    if gaps < LEAST_GAPS:
        return most_s
    return min(most_s, max(LEAST_S, FACTOR * longest_s))


@dataclass(slots=True)
class SilenceLimits:
    """What one process has shown of its pace, phase by phase."""

    _longest_s: dict[str, float] = field(default_factory=dict[str, float])
    _gaps: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, phase: str, gap_s: float) -> None:
        """A sign of life came after ``gap_s`` in a phase."""
        self._longest_s[phase] = max(gap_s, self._longest_s.get(phase, 0.0))
        self._gaps[phase] = self._gaps.get(phase, 0) + 1

    def limit_s(self, phase: str, most_s: float) -> float:
        """As :func:`silence_limit_s`, for a phase."""
        return silence_limit_s(most_s, self._longest_s.get(phase, 0.0), self._gaps.get(phase, 0))
