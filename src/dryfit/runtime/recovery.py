"""From a failure and those before it to what follows. Pure; the table is :data:`dryfit.core.failure.PERMITTED`."""

from dryfit.core.failure import (
    PERMITTED,
    Action,
    AttemptTerms,
    Failure,
    FailureKind,
    PastFailure,
    RecoveryAction,
)

_FIRST_DELAY_S: dict[FailureKind, float] = {FailureKind.NETWORK: 5.0, FailureKind.OOM_HOST: 10.0}
"""Kinds that need time to pass; each further one of the same kind waits ``_DELAY_FACTOR`` times longer."""

_DELAY_FACTOR = 4.0
_DELAY_MAX_S = 300.0
_DELAY_STEPS_MAX = 8


def _since_progress(past: tuple[PastFailure, ...]) -> tuple[PastFailure, ...]:
    """The failures after the last attempt that reached a new checkpoint."""
    for index in range(len(past) - 1, -1, -1):
        if past[index].reached_checkpoint:
            return past[index + 1 :]
    return past


def decide(
    failure: Failure,
    past: tuple[PastFailure, ...],
    *,
    retries: int,
    reached_checkpoint: bool = False,
    rungs_left: int = 0,
) -> RecoveryAction:
    """Decide what follows a failure.

    Two limits hold for retries: the kind's own, over the failures since the trial last made progress, and
    ``retries``, over all failures of the trial that count. An attempt that reached a new checkpoint counts for
    neither.

    Args:
        failure: The failure at hand.
        past: Earlier failures of the same trial, oldest first, without this one.
        retries: Most retries of one trial that count.
        reached_checkpoint: Whether the attempt that failed now had reached a new checkpoint.
        rungs_left: How many fallbacks of the trial's plan have not been tried.
    """
    permission = PERMITTED[failure.kind]
    if permission.action is Action.RUNG and rungs_left == 0:
        return RecoveryAction(permission.then, failure.sentence)
    if permission.action is not Action.RETRY:
        return RecoveryAction(permission.action, failure.sentence)
    if reached_checkpoint:
        return RecoveryAction(Action.RETRY, failure.sentence, _FIRST_DELAY_S.get(failure.kind, 0.0))
    used = sum(one.kind is failure.kind for one in _since_progress(past))
    if permission.limit is not None and used >= permission.limit:
        reason = f"{failure.sentence} (failure {used + 1} of this kind without a new checkpoint between)"
        return RecoveryAction(permission.then, reason)
    counted = sum(_counts(one) for one in past)
    if permission.counts and counted >= retries:
        return RecoveryAction(permission.then, f"{failure.sentence} (the trial's {retries} retries are used up)")
    delay_s = min(_DELAY_MAX_S, _FIRST_DELAY_S.get(failure.kind, 0.0) * _DELAY_FACTOR ** min(used, _DELAY_STEPS_MAX))
    return RecoveryAction(Action.RETRY, failure.sentence, delay_s)


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
        avoid=frozenset(one.device for one in past if one.action is Action.ELSEWHERE and one.device is not None),
    )


def terms_in_words(terms: AttemptTerms) -> tuple[str, ...]:
    """The terms as the ledger keeps them for a trial's story; empty where they ask for nothing."""
    words = []
    if terms.exclusive:
        words.append("alone on its device")
    if terms.diagnostic:
        words.append("slowly, to learn where it fails: blocking launches, device assertions")
    if terms.lighter:
        share = f"1/{2**terms.lighter}"
        words.append(f"with {share} of the loader workers, tensors shared through files")
    if terms.avoid:
        words.append(f"not on device {', '.join(sorted(terms.avoid))}")
    return tuple(words)
