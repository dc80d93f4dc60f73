"""What an event of an attempt changes in the state of its trial."""

from dryfit.core.failure import Action, FailureKind
from dryfit.core.sharding.device_groups import cpu_of
from dryfit.store.events import AttemptEnded, AttemptPlaced, AttemptStarted, CheckpointMade, FirstStepDone
from dryfit.store.references import attempt_of
from dryfit.store.session_state import SessionState
from dryfit.store.state import AttemptState, TrialState

AttemptEvent = AttemptPlaced | AttemptStarted | FirstStepDone | CheckpointMade | AttemptEnded


def apply_to_attempt(event: AttemptEvent, trial: TrialState, session: SessionState | None) -> None:
    """Change the attempt that an event is about, or add the one that it begins.

    Args:
        event: The event.
        trial: Its trial.
        session: The present one; None: the ledger has none yet.

    Raises:
        LedgerError: The trial has no such attempt, or it has ended.
    """
    if isinstance(event, AttemptPlaced):
        trial.plan = trial.plans.get(event.plan or "", trial.plan)
        trial.attempts.append(
            AttemptState(
                event.attempt,
                event.at,
                event.device or cpu_of(event.node),
                needs_bytes=event.needs_bytes,
                terms=event.terms,
                session=session,
                trial=trial.number,
            )
        )
        return
    attempt = attempt_of(event, trial)
    match event:
        case AttemptStarted():
            attempt.pid = event.pid
            attempt.overhead_ms = event.overhead_ms
            attempt.session = session
        case FirstStepDone():
            attempt.first_step_ms = event.after_ms
        case CheckpointMade():
            attempt.checkpoint_step = event.step
            attempt.checkpoint_at_s = event.at
        case AttemptEnded():
            attempt.ended = True
            attempt.ended_at_s = event.at
            attempt.failure = event.failure
            if trial.plan is not None and event.failure is not None:
                trial.plan.misses += event.failure.kind is FailureKind.OOM_DEVICE
                if event.failure.action is Action.FALLBACK:
                    trial.plan.take_fallback(event.failure.phase)
