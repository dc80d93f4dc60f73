"""From a failure and those before it to what follows. Pure; the table is :data:`dryfit.core.failure.PERMITTED`."""

from dryfit.core.failure import (
    PERMITTED,
    Action,
    AttemptTerms,
    Failure,
    FailureKind,
    PastFailure,
    Permission,
    RecoveryAction,
)
from dryfit.core.sharding.device_groups import devices_of

_DELAY_FACTOR = 4.0
"""How much longer each further attempt after the same kind of failure waits."""

_DELAY_MAX_S = 300.0
_DELAY_STEPS_MAX = 8

_NOT_ITS_OWN = frozenset(
    {
        FailureKind.INTERRUPTED,
        FailureKind.PREEMPTED,
        FailureKind.LOST,
        FailureKind.DISK_FULL,
        FailureKind.INTERNAL,
    }
)
"""What ends an attempt without a word on what it was run for."""


ANOTHER_ATTEMPT = frozenset(
    {Action.RETRY, Action.FALLBACK, Action.EXCLUSIVE, Action.ELSEWHERE, Action.LIGHTER, Action.DIAGNOSE}
)
"""Actions after which the trial gets another process."""


def _since_progress(past: tuple[PastFailure, ...]) -> tuple[PastFailure, ...]:
    """The failures after the last attempt that reached a new checkpoint."""
    for index in range(len(past) - 1, -1, -1):
        if past[index].reached_checkpoint:
            return past[index + 1 :]
    return past


def decide_recovery(
    failure: Failure,
    past: tuple[PastFailure, ...],
    *,
    retries: int,
    reached_checkpoint: bool = False,
    fallbacks_left: int = 0,
    diagnosable: bool = False,
) -> RecoveryAction:
    """Decide what follows a failure.

    Two limits hold for retries: those of the kind's own stages, over the failures since the trial last made progress,
    and ``retries``, over all failures of the trial that count. An attempt that reached a new checkpoint counts for
    neither. A trial that is run once more only to learn where it fails ends with that attempt, whatever ends it.

    Args:
        failure: The failure at hand.
        past: Earlier failures of the same trial, oldest first, without this one.
        retries: Most retries of one trial that count.
        reached_checkpoint: Whether the attempt that failed now had reached a new checkpoint.
        fallbacks_left: How many fallbacks of the trial's plan have not been tried.
        diagnosable: Whether the trial can be run slowly to learn where it fails.
    """
    permission = PERMITTED[failure.kind]
    if attempt_terms(past).diagnostic and failure.kind not in _NOT_ITS_OWN:
        return RecoveryAction(Action.GIVE_UP, failure.sentence)
    used = 0 if reached_checkpoint else sum(one.kind is failure.kind for one in _since_progress(past))
    action = _stage(permission, used)
    if (action is Action.FALLBACK and fallbacks_left == 0) or (action is Action.DIAGNOSE and not diagnosable):
        return RecoveryAction(permission.then, failure.sentence)
    if action is None:
        reason = f"{failure.sentence} (failure {used + 1} of this kind without a new checkpoint between)"
        return RecoveryAction(permission.then, reason)
    again = action in ANOTHER_ATTEMPT
    if again and permission.counts and not reached_checkpoint and sum(_counts(one) for one in past) >= retries:
        return RecoveryAction(permission.then, f"{failure.sentence} (the trial's {retries} retries are used up)")
    delay_s = min(_DELAY_MAX_S, permission.first_delay_s * _DELAY_FACTOR ** min(used, _DELAY_STEPS_MAX))
    return RecoveryAction(action, failure.sentence, delay_s if again else 0.0)


def _stage(permission: Permission, used: int) -> Action | None:
    """What is due after so many failures of the kind; None: all stages are used up."""
    for stage in permission.stages:
        if stage.times is None or used < stage.times:
            return stage.action
        used -= stage.times
    return None


def _counts(past: PastFailure) -> bool:
    return PERMITTED[past.kind].counts and not past.reached_checkpoint


def attempt_terms(past: tuple[PastFailure, ...]) -> AttemptTerms:
    """What the failures of a trial so far ask of its next attempt.

    What was asked for once holds until the trial ends: an attempt that dies for another reason is no proof that the
    first one is gone.
    """
    actions = [one.action for one in past]
    return AttemptTerms(
        exclusive=Action.EXCLUSIVE in actions,
        diagnostic=Action.DIAGNOSE in actions,
        lighter=actions.count(Action.LIGHTER),
        avoid=frozenset(
            device
            for one in past
            if one.action is Action.ELSEWHERE and one.device is not None
            for device in devices_of(one.device)
        ),
    )


def terms_text(terms: AttemptTerms) -> tuple[str, ...]:
    """The terms as the ledger keeps them for a trial's story; empty where they ask for nothing."""
    words: list[str] = []
    if terms.exclusive:
        words.append("alone on its device")
    if terms.diagnostic:
        words.append("slowly, to learn where it fails: blocking launches, device assertions")
    if terms.lighter:
        words.append(f"with fewer loader workers (step {terms.lighter}), tensors shared through files")
    if terms.avoid:
        words.append(f"rather not on device {', '.join(sorted(terms.avoid))}")
    return tuple(words)
