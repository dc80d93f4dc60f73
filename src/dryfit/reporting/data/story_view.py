"""A trial's story as the JSON object that ``show STUDY TRIAL --json`` prints."""

from enum import StrEnum

from dryfit.core.failure import Action, FailureKind
from dryfit.core.settings.trial import FoldScore, MetricPoint, Outcome, Scalar
from dryfit.core.text.shown import Shown
from dryfit.reporting.data.json_view import Answer, View
from dryfit.reporting.data.plan_view import PlanView
from dryfit.store.events import Observed


class MomentKind(StrEnum):
    """The kind of a moment in a trial's story."""

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
        at: Unix time in seconds; None for notes, which are ordered by position.
        attempt: Number of the attempt; None outside of any.
        what: Its kind.
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
    """One process of the trial. Unknown values are null; so is ``failure`` if it left a result.

    Attributes:
        terms: In words, how it was run differently from the attempt before.
        checkpoint_step: The newest step it could be resumed from.
        time_s: How long its process worked.
        lost_s: The part of that time whose work was lost.
        log: Its log file.
        stacks: The file with the stacks of its threads, if they were written.
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


class TrialStory(Shown, Answer):
    """The answer of ``dryfit show STUDY TRIAL --json``.

    Attributes:
        end: How it ended, in words.
        values: By goal, of a complete trial.
        best: Index of the report with the value; null with folds.
        folds: The folds that were done, in order; empty without ``data.folds``.
        spreads: By goal, the sample standard deviation of the folds, of a complete trial.
        given: The enqueued point it was made from.
        plan: Its memory plan.
        memory: Its planned and observed memory, in words.
        moments: All that happened, in order.
        load_report: The file that says where each tensor of its model came from.
        weights: The folder of its best weights.
        scored: Files with each row of its best validation, its answer and what was right; of each fold one.
        collapsed: In words how it gave all rows the same answer; null: it did not.
        time_s: How long its processes worked.
        lost_s: The part of that time whose work was lost.
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
    scored: tuple[str, ...]
    collapsed: str | None
