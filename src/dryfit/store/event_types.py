"""What observers of a study are given, as ``dryfit.events``: events, messages of running trials, states, the layout."""

from dryfit.core.failure import Action, FailureKind
from dryfit.core.settings.trial import MetricPoint, Outcome
from dryfit.core.wire import Message, Note, Phase, Progress
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    BaselinesComputed,
    CheckpointMade,
    DeviceSetAside,
    Event,
    FailureFacts,
    FirstStepDone,
    GenerationBegan,
    ParallelSet,
    ReportMade,
    Resolved,
    SessionClosed,
    SessionOpened,
    StudyCreated,
    StudyRevised,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

__all__ = [
    "Action",
    "AttemptEnded",
    "AttemptPlaced",
    "AttemptStarted",
    "BaselinesComputed",
    "CheckpointMade",
    "DeviceSetAside",
    "Event",
    "FailureFacts",
    "FailureKind",
    "FirstStepDone",
    "GenerationBegan",
    "Message",
    "MetricPoint",
    "Note",
    "Outcome",
    "ParallelSet",
    "Phase",
    "Progress",
    "ReportMade",
    "Resolved",
    "SessionClosed",
    "SessionOpened",
    "StudyCreated",
    "StudyLayout",
    "StudyRevised",
    "StudyState",
    "TrialAsked",
    "TrialFinished",
    "TrialPlanned",
    "TrialState",
    "VerdictGiven",
]
