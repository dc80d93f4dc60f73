"""A trial's story as one JSON object: what ``show STUDY TRIAL --json`` prints."""

from enum import StrEnum

from dryfit.core.failure import Action, FailureKind
from dryfit.core.settings.trial import FoldScore, MetricPoint, Outcome, Scalar
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.data.plan_view import PlanView
from dryfit.store.events import Observed


class MomentKind(StrEnum):
    """What a moment of a story is about."""

    ASKED = "asked"
    SESSION = "session"
    PLANNED = "planned"
    PLACED = "placed"
    STARTED = "started"
    FIRST_STEP = "first_step"
    REPORT = "report"
    VERDICT = "verdict"
    CHECKPOINT = "checkpoint"
    NOTE = "note"
    FAILURE = "failure"
    RESULT = "result"
    FINISHED = "finished"


class Moment(View):
    """One thing that happened.

    Attributes:
        at: Unix seconds; None of notes, which stand between the moments around them.
        attempt: In which attempt; None: outside of any.
        what: What kind of thing.
        text: One line.
        details: Further lines.
    """

    at: float | None
    attempt: int | None
    what: MomentKind
    text: str
    details: tuple[str, ...] = ()


class FailureView(View):
    """How an attempt failed; see :class:`~dryfit.store.events.FailureFacts`."""

    kind: FailureKind
    sentence: str
    action: Action
    error_type: str
    error: str
    place: str
    detail: str


class AttemptView(View):
    """One process of the trial. What is unknown is null, ``failure`` also where it left a result.

    Attributes:
        terms: In words, how it was run otherwise than the one before.
        checkpoint_step: The newest step it could be gone on from.
        time_s: How long its process worked.
        lost_s: How much of that came to nothing.
        log: Its log file.
        stacks: The stacks of its threads, where they were written down.
    """

    number: int
    device: str | None
    needs_bytes: int | None
    terms: tuple[str, ...]
    placed_at: float
    pid: int | None
    first_line_ms: float | None
    first_step_ms: float | None
    checkpoint_step: int | None
    ended: bool
    failure: FailureView | None
    time_s: float
    lost_s: float
    log: str
    stacks: str | None


class TrialStory(Answer):
    """The answer of ``dryfit show STUDY TRIAL --json``.

    Attributes:
        end: How it ended, in words.
        values: By goal, of a complete trial.
        best: Index of the report that gave the value; null with folds.
        folds: What each fold has come to that was done, in order; of a trial that trains once none.
        spreads: By goal, the sample standard deviation of the folds, of a complete trial.
        given: The known point it was made from.
        plan: Of its memory.
        memory: What is known of its memory, planned and observed, in words.
        moments: All that happened, in order.
        load_report: Where each tensor of its model came from.
        weights: The folder of its best weights.
        time_s: How long its processes worked.
        lost_s: How much of that came to nothing.
    """

    study: str
    number: int
    end: str
    outcome: Outcome | None
    reason: str
    values: dict[str, float]
    best: int | None
    folds: tuple[FoldScore, ...]
    spreads: dict[str, float]
    steps: int
    params: dict[str, Scalar]
    given: dict[str, Scalar]
    seed: int
    fingerprint: str
    asked_at: float
    finished_at: float | None
    reports: tuple[MetricPoint, ...]
    plan: PlanView | None
    memory: tuple[str, ...]
    observed: Observed | None
    attempts: tuple[AttemptView, ...]
    moments: tuple[Moment, ...]
    time_s: float
    lost_s: float
    load_report: str | None
    weights: str | None
