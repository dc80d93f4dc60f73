"""Rules between an event of a ledger and those before it: what it refers to must be there, and not have ended."""

from typing import TypeAlias

from dryfit.core.errors import LedgerError
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    CheckpointMade,
    Event,
    FirstStepDone,
    GenerationBegan,
    LedgerEvent,
    ReportMade,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.store.state import AttemptState, TrialState

OfAttempt: TypeAlias = AttemptStarted | FirstStepDone | ReportMade | CheckpointMade | AttemptEnded
"""Events about an attempt that was placed before."""


def check_order(event: Event, *, created: bool, generations: int, sessions: int, trials: int) -> None:
    """Check an event about the study against what the events before it have made.

    Args:
        event: The event.
        created: Whether the study has been created.
        generations: The number of generations.
        sessions: The number of sessions.
        trials: The number of trials.

    Raises:
        LedgerError: It is out of place.
    """
    match event.type:
        case "study_created" if created:
            raise wrong_reference(event, "the study is created a second time")
        case "study_revised" if not generations:
            raise wrong_reference(event, "no study was created before")
        case "session_closed" | "device_set_aside" | "parallel_set" | "node_joined" | "node_lost" if not sessions:
            raise wrong_reference(event, "no session was opened before")
        case _:
            pass
    if isinstance(event, TrialAsked) and event.number != trials:
        raise wrong_reference(event, f"trial {event.number} comes where trial {trials} belongs")
    if isinstance(event, GenerationBegan):
        if not generations or event.generation not in (generations, generations + 1):
            raise wrong_reference(event, f"generation {event.generation} comes after generation {generations}")
        missing = next((number for number in event.reused if not 0 <= number < trials), None)
        if missing is not None:
            raise wrong_reference(event, f"it goes on from trial {missing}, which was not asked for")


def trial_of(
    event: TrialPlanned | AttemptPlaced | VerdictGiven | TrialFinished | OfAttempt, trials: list[TrialState]
) -> TrialState:
    """Return the trial that an event is about.

    Raises:
        LedgerError: There is none, it has finished, or what the event says of it does not follow what was said before.
    """
    if not 0 <= event.number < len(trials):
        raise wrong_reference(event, f"no trial {event.number} was asked for")
    trial = trials[event.number]
    if trial.outcome is not None:
        raise wrong_reference(event, f"trial {event.number} has finished before")
    if isinstance(event, AttemptPlaced) and event.attempt != len(trial.attempts) + 1:
        raise wrong_reference(event, f"attempt {event.attempt} comes where {len(trial.attempts) + 1} belongs")
    if isinstance(event, ReportMade) and event.point.n <= (last := trial.reports[-1].n if trial.reports else -1):
        raise wrong_reference(event, f"report {event.point.n} of trial {event.number} comes after report {last}")
    if isinstance(event, VerdictGiven) and all(point.n != event.n for point in reversed(trial.reports)):
        raise wrong_reference(event, f"trial {event.number} has no report {event.n}")
    return trial


def attempt_of(event: OfAttempt, trial: TrialState) -> AttemptState:
    """Return the attempt that an event is about.

    Raises:
        LedgerError: There is none, or it has ended.
    """
    if not 1 <= event.attempt <= len(trial.attempts):
        raise wrong_reference(event, f"trial {trial.number} has no attempt {event.attempt}")
    attempt = trial.attempts[event.attempt - 1]
    if attempt.ended:
        raise wrong_reference(event, f"attempt {event.attempt} has ended before")
    return attempt


def wrong_reference(event: LedgerEvent, found: str) -> LedgerError:
    """Return the error of an event that refers to what is not there."""
    return LedgerError(
        f"reading the ledger, line {event.seq + 1}",
        found,
        hint="restore the file from a backup, or move the folder aside and start a new study",
    )
