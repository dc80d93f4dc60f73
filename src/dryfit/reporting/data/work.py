"""How long the processes of trials worked, and how much of that was lost."""

from collections.abc import Sequence

from dryfit.core.failure import Action
from dryfit.store.state import AttemptState, SessionState, TrialState

_ENDS_THE_TRIAL = frozenset({Action.GIVE_UP, Action.UNPLANNED})


def runs(attempt: AttemptState, sessions: Sequence[SessionState]) -> bool:
    """Whether an attempt's process runs according to the ledger: its session is the last one, and is open."""
    last = len(sessions) - 1
    return not attempt.ended and last >= 0 and attempt.session == last and sessions[last].closed is None


def ended_at_s(attempt: AttemptState, sessions: Sequence[SessionState]) -> float:
    """Return when an attempt ended, in Unix seconds, as far as is known now.

    That is no later than the end of its session: the end of an attempt lost with its control process is only noted by
    the next session, perhaps a night later.
    """
    known = 0 <= attempt.session < len(sessions)
    latest_s = sessions[attempt.session].last_at_s if known else attempt.ended_at_s
    ends = [at_s for at_s in (attempt.ended_at_s, latest_s) if at_s is not None]
    return max(attempt.placed_at_s, min(ends, default=attempt.placed_at_s))


def attempt_time_s(attempt: AttemptState, sessions: Sequence[SessionState]) -> float:
    """Return how long an attempt's process worked."""
    return ended_at_s(attempt, sessions) - attempt.placed_at_s


def trial_time_s(trial: TrialState, sessions: Sequence[SessionState]) -> float:
    """Return how long processes worked on a trial."""
    return sum(attempt_time_s(attempt, sessions) for attempt in trial.attempts)


def lost_time_s(attempt: AttemptState, sessions: Sequence[SessionState]) -> float:
    """Return how much of an attempt's work was lost, in seconds.

    That is 0 for an attempt that runs, left a result or was pruned. If the trial goes on, it is the time since the last
    checkpoint; if the attempt ended its trial, all of its time.
    """
    failure = attempt.failure
    if (
        runs(attempt, sessions)
        or (attempt.ended and failure is None)
        or (failure is not None and failure.action is Action.PRUNE)
    ):
        return 0.0
    goes_on = failure is None or failure.action not in _ENDS_THE_TRIAL
    kept_until_s = attempt.checkpoint_at_s if goes_on and attempt.checkpoint_at_s is not None else attempt.placed_at_s
    return max(0.0, ended_at_s(attempt, sessions) - kept_until_s)
