"""How long each kind of child may take: to start, in silence, in all, and to stop."""

from dryfit.config.schema import RuntimeSettings
from dryfit.core.failure import FailureKind, PastFailure
from dryfit.runtime.children.child_spec import ChildLimits

STANDALONE_LIMITS = ChildLimits(start_s=120.0, hang_s=600.0, total_s=None, stop_grace_s=1.0)
"""Limits of jobs that belong to no study."""


def preparing_limits(runtime: RuntimeSettings) -> ChildLimits:
    """Return the limits of a study's child that trains nothing."""
    return ChildLimits(
        start_s=runtime.start_timeout_s, hang_s=runtime.hang_timeout_s, total_s=None, stop_grace_s=runtime.stop_grace_s
    )


def training_limits(runtime: RuntimeSettings, past: tuple[PastFailure, ...] = ()) -> ChildLimits:
    """Return the limits of a child that trains.

    After one failure as a hang, a trial gets ``runtime.hang_timeout_s`` from then on: the limit that was learned from
    its pace was wrong, or it hangs for good.

    Args:
        runtime: The study's settings.
        past: Earlier failures of the trial.
    """
    return ChildLimits(
        start_s=runtime.start_timeout_s,
        hang_s=runtime.hang_timeout_s,
        total_s=runtime.trial_timeout_s,
        stop_grace_s=runtime.stop_grace_s,
        hang_learned=not any(failure.kind is FailureKind.HANG for failure in past),
    )
