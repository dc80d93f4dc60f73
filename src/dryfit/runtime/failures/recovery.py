"""Decide the recovery from a failure by the trial's earlier failures and :data:`dryfit.core.failure.PERMITTED`."""

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
from dryfit.core.sharding.device_groups import device_in_words, devices_of

_DELAY_FACTOR = 4.0
"""Factor of the delay for each further failure of the same kind."""

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
"""Kinds that say nothing about what the attempt was run for."""


ANOTHER_ATTEMPT = frozenset(
    {Action.RETRY, Action.FALLBACK, Action.EXCLUSIVE, Action.ELSEWHERE, Action.LIGHTER, Action.DIAGNOSE}
)
"""Actions after which the trial gets another attempt."""


def _since_progress(past: tuple[PastFailure, ...]) -> tuple[PastFailure, ...]:
    """Return the failures since the last attempt that reached a new checkpoint."""
    progress = [index for index, failure in enumerate(past) if failure.reached_checkpoint]
    return past[progress[-1] + 1 :] if progress else past


def decide_recovery(
    failure: Failure,
    past: tuple[PastFailure, ...],
    *,
    retries: int,
    reached_checkpoint: bool = False,
    fallbacks_left: int = 0,
    diagnosable: bool = False,
) -> RecoveryAction:
    """Decide the recovery from a failure.

    Two limits hold: the stages of the kind, over the failures since the trial last made progress; and ``retries``, over
    all failures of the trial that count. An attempt that reached a new checkpoint counts for neither. A diagnostic
    attempt is the trial's last, however it ends.

    Args:
        failure: The failure.
        past: Earlier failures of the same trial, oldest first.
        retries: Maximum number of retries of a trial.
        reached_checkpoint: Whether the failed attempt had reached a new checkpoint.
        fallbacks_left: Number of fallbacks of the trial's plan not tried yet.
        diagnosable: Whether the trial can be run in diagnostic mode, slowly, to learn where it fails.
    """
    permission = PERMITTED[failure.kind]
    if attempt_terms(past).diagnostic and failure.kind not in _NOT_ITS_OWN:
        return RecoveryAction(Action.GIVE_UP, failure.sentence)
    used = 0 if reached_checkpoint else sum(earlier.kind is failure.kind for earlier in _since_progress(past))
    action = _stage(permission, used)
    if (action is Action.FALLBACK and fallbacks_left == 0) or (action is Action.DIAGNOSE and not diagnosable):
        return RecoveryAction(permission.then, failure.sentence)
    if action is None:
        reason = f"{failure.sentence} (failure {used + 1} of this kind without a new checkpoint between)"
        return RecoveryAction(permission.then, reason)
    again = action in ANOTHER_ATTEMPT
    if again and permission.counts and not reached_checkpoint and sum(map(_counts, past)) >= retries:
        return RecoveryAction(permission.then, f"{failure.sentence} (the trial's {retries} retries are used up)")
    delay_s = min(_DELAY_MAX_S, permission.first_delay_s * _DELAY_FACTOR ** min(used, _DELAY_STEPS_MAX))
    return RecoveryAction(action, failure.sentence, delay_s if again else 0.0)


def _stage(permission: Permission, used: int) -> Action | None:
    """Return the action after ``used`` failures of the kind; None if all stages are used up."""
    for stage in permission.stages:
        if stage.times is None or used < stage.times:
            return stage.action
        used -= stage.times
    return None


def _counts(past: PastFailure) -> bool:
    return PERMITTED[past.kind].counts and not past.reached_checkpoint


def attempt_terms(past: tuple[PastFailure, ...]) -> AttemptTerms:
    """Return how the next attempt of a trial is to run after its failures so far.

    Terms hold until the trial ends: an attempt that fails for another reason is no proof that the first is gone.
    """
    actions = [failure.action for failure in past]
    return AttemptTerms(
        exclusive=Action.EXCLUSIVE in actions,
        diagnostic=Action.DIAGNOSE in actions,
        lighter=actions.count(Action.LIGHTER),
        avoid=frozenset(
            device
            for failure in past
            if failure.action is Action.ELSEWHERE and failure.device is not None
            for device in devices_of(failure.device)
        ),
    )


def terms_text(terms: AttemptTerms) -> tuple[str, ...]:
    """Return the terms in words, as the ledger keeps them; empty without any."""
    words: list[str] = []
    if terms.exclusive:
        words.append("alone on its device")
    if terms.diagnostic:
        words.append("slowly, to learn where it fails: blocking launches, device assertions")
    if terms.lighter:
        words.append(f"with fewer loader workers (step {terms.lighter}), tensors shared through files")
    if terms.avoid:
        words.append(f"rather not on device {', '.join(map(device_in_words, sorted(terms.avoid)))}")
    return tuple(words)
