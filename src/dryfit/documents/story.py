"""A trial's story: everything the ledger and its folder record about it, in order of time."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError, field_serializer

from dryfit.documents.document import Answer, Document, View, document_of, duration_text, time_text, value_text
from dryfit.documents.plans import plan_json, plan_lines, plan_text
from dryfit.documents.report_tables import values_text
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptEvent,
    AttemptPlaced,
    AttemptStarted,
    CheckpointMade,
    Event,
    FailureFacts,
    FirstStepDone,
    Observed,
    ReportMade,
    SessionOpened,
    TrialAsked,
    TrialEvent,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.ledger.folder import StudyLayout, TrialLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptState, PlanState, TrialState
from dryfit.processes.attempt import read_messages
from dryfit.settings.check_messages import LoadReport
from dryfit.settings.devices import HERE, cpu_of, place_in_words
from dryfit.settings.errors import Action
from dryfit.settings.files import contents
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.text import Shown, few, gib, number_text
from dryfit.settings.trial import FoldScore, MetricPoint, Outcome, Scalar
from dryfit.settings.wire import LOG_FILE, STACKS_FILE, Checkpointed, FirstStep, Message, Note, Report, Started
from dryfit.tasks.scored_rows import row_files


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
    failure: FailureFacts | None
    time_s: float
    lost_s: float
    log: str
    stacks: str | None

    @field_serializer("failure")
    def _failure_json(self, failure: FailureFacts | None) -> dict[str, object] | None:
        return None if failure is None else failure.model_dump(exclude={"v", "phase"})


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
    plan: PlanAnswer | None
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

    @field_serializer("plan")
    def _plan_json(self, plan: PlanAnswer | None) -> object:
        return None if plan is None else plan_json(plan)


_MOST_NOTES = 50

FOLLOWED: dict[Action, str] = {
    Action.RETRY: "it is tried again",
    Action.FALLBACK: "it goes on with the next fallback of its plan",
    Action.EXCLUSIVE: "it is tried again, alone on its device",
    Action.ELSEWHERE: "it is tried again on another device",
    Action.LIGHTER: "it is tried again with less of the host",
    Action.DIAGNOSE: "it is run once more, slowly, to learn where it fails",
    Action.UNPLANNED: "its memory stays unknown",
    Action.GIVE_UP: "the trial ends as failed",
    Action.PRUNE: "the trial ends as pruned",
    Action.PAUSE: "the study stops, and the trial goes on when it is resumed",
    Action.STOP_STUDY: "the study ends, and the trial stays open",
}
"""What follows a failure, as a sentence."""


def trial_story(state: StudyState, number: int, events: Sequence[Event], layout: StudyLayout) -> TrialStory:
    """Return everything known of one trial.

    Args:
        state: The study's state after ``events``.
        number: The number of one of its trials.
        events: The events of the ledger.
        layout: The study's files, from which the notes of the trial's processes are read.
    """
    trial, paths = state.trials[number], layout.trial(number)
    runs = bool(trial.attempts) and not trial.attempts[-1].ended
    own = paths.files_of(len(trial.attempts)) if runs else paths  # what it has found comes to its trial when it ends
    created = state.created
    goals = [goal.name for goal in state.goals]
    return TrialStory.of(
        trial,
        study=created.name if created is not None else "",
        end=_end_text(trial),
        values=dict(zip(goals, trial.values or (), strict=False)),
        spreads=dict(zip(goals, trial.spreads, strict=False)),
        given=trial.enqueued,
        asked_at=trial.asked_at_s,
        finished_at=trial.finished_at_s,
        plan=trial.plan.answer if trial.plan is not None else None,
        memory=tuple(line.removeprefix("  ") for line in plan_lines(trial)),
        attempts=tuple(_attempt_view(attempt, paths) for attempt in trial.attempts),
        moments=tuple(_moments(trial, state, events, paths)),
        time_s=round(trial.time_s, 3),
        lost_s=round(trial.lost_s, 3),
        load_report=_existing(own.load_report) or _existing(paths.load_report),
        weights=_existing(own.best) or _existing(paths.best),
        scored=tuple(map(str, row_files(own.scored) or row_files(paths.scored))),
        collapsed=trial.collapsed or None,
    )


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _attempt_view(attempt: AttemptState, paths: TrialLayout) -> AttemptView:
    folder = paths.attempt(attempt.number)
    stacks = folder / STACKS_FILE
    return AttemptView.of(
        attempt,
        placed_at=attempt.placed_at_s,
        first_line_ms=attempt.overhead_ms,
        time_s=round(attempt.time_s, 3),
        lost_s=round(attempt.lost_s, 3),
        log=str(folder / LOG_FILE),
        stacks=str(stacks) if stacks.exists() and stacks.stat().st_size else None,
    )


def _moments(trial: TrialState, state: StudyState, events: Sequence[Event], paths: TrialLayout) -> Iterator[Moment]:
    notes = {attempt.number: _notes(read_messages(paths.attempt(attempt.number))) for attempt in trial.attempts}
    asked = False
    for event in events:
        if isinstance(event, SessionOpened) and asked:
            text = f"a new run of the study (process {event.pid})"
            yield Moment(at=event.at, attempt=None, what=MomentKind.SESSION, text=text)
        if not isinstance(event, TrialEvent) or event.number != trial.number:
            continue
        asked = True
        if isinstance(event, AttemptEnded):  # the notes after the last event of the attempt
            yield from _note_moments(event.attempt, notes.pop(event.attempt, {}))
        moment = _moment(event, trial, state)
        if moment is not None:
            yield moment
            if isinstance(event, AttemptEvent):
                anchor = _anchor(event, moment.what)
                yield from _note_moments(event.attempt, {anchor: notes.get(event.attempt, {}).pop(anchor, [])})
        if isinstance(event, TrialFinished):
            return
    for attempt, left in notes.items():  # it runs, or its end has not been examined yet
        yield from _note_moments(attempt, left)


Anchor = tuple[MomentKind, int]


def _anchor(event: AttemptEvent, kind: MomentKind) -> Anchor:
    """Return the message of an attempt that an event was written for."""
    match event:
        case ReportMade(point=point):
            return kind, point.n
        case CheckpointMade(step=step):
            return kind, step
        case _:
            return kind, 0


def _note_moments(attempt: int, notes: Mapping[Anchor, Sequence[str]]) -> Iterator[Moment]:
    for texts in notes.values():
        yield from (Moment(at=None, attempt=attempt, what=MomentKind.NOTE, text=text) for text in texts)


def _notes(messages: Sequence[Message]) -> dict[Anchor, list[str]]:
    """Return the notes of a process by the last message before them that the ledger has an event for."""
    notes: dict[Anchor, list[str]] = {}
    anchor: Anchor = (MomentKind.PLACED, 0)
    count = 0
    for message in messages:
        match message:
            case Started():
                anchor = (MomentKind.STARTED, 0)
            case FirstStep():
                anchor = (MomentKind.FIRST_STEP, 0)
            case Report(point=point):
                anchor = (MomentKind.REPORT, point.n)
            case Checkpointed(step=step):
                anchor = (MomentKind.CHECKPOINT, step)
            case Note(text=text):
                count += 1
                if count <= _MOST_NOTES:
                    notes.setdefault(anchor, []).append(text)
            case _:
                pass
    if count > _MOST_NOTES:
        notes.setdefault(anchor, []).append(f"{count - _MOST_NOTES} more notes stand in messages.jsonl")
    return notes


def _moment(event: Event, trial: TrialState, state: StudyState) -> Moment | None:
    attempt = event.attempt if isinstance(event, AttemptEvent) else None
    match event:
        case TrialAsked():
            drawn = f", drawn by another sampler: {event.fallback}" if event.fallback else ""
            kind, text = MomentKind.ASKED, ("asked, from an enqueued point" if event.enqueued else "asked") + drawn
        case TrialPlanned():
            plan = PlanState(event.key, event.answer or state.answers[event.key])
            kind, text = MomentKind.PLANNED, f"planned: {plan_text(plan)}"
        case AttemptPlaced():
            kind, text = MomentKind.PLACED, _placed_text(event)
        case AttemptStarted():
            said = "goes on under another session" if event.again else f"first line after {event.overhead_ms:.0f} ms"
            kind, text = MomentKind.STARTED, f"{said} (process {event.pid})"
        case FirstStepDone():
            kind, text = MomentKind.FIRST_STEP, f"first step after {event.after_ms:.0f} ms"
        case ReportMade():
            kind, text = MomentKind.REPORT, _report_text(event.point, state)
        case VerdictGiven(proceed=False):
            attempt = len(trial.attempts)
            kind, text = MomentKind.VERDICT, f"verdict on report {event.n}: stop ({event.reason})"
        case CheckpointMade():
            kind, text = MomentKind.CHECKPOINT, f"checkpoint at step {event.step}"
        case AttemptEnded():
            return _end(event, trial.attempts[event.attempt - 1])
        case TrialFinished():
            kind, text = MomentKind.FINISHED, _end_text(trial)
        case _:
            return None
    return Moment(at=event.at, attempt=attempt, what=kind, text=text)


def _placed_text(event: AttemptPlaced) -> str:
    parts = [f"attempt {event.attempt}"]
    if event.device is not None or event.node != HERE:
        parts[0] += f" on {place_in_words(event.device or cpu_of(event.node))}"
    if event.needs_bytes is not None:
        parts.append(f"counted with {gib(event.needs_bytes)}")
    return ", ".join([*parts, *event.terms])


def _report_text(point: MetricPoint, state: StudyState) -> str:
    metric = state.created.metric if state.created is not None else "value"
    shown = {metric: point.value, **point.metrics}
    # Only a trial that trains has epochs: a validation comes after at least a part of one.
    kind, epoch = ("validation", f", epoch {point.epoch:.2f}") if point.epoch else ("report", "")
    fold = f" of fold {point.fold}, so far {number_text(point.value)}" if point.fold else ""
    values = "  ".join(f"{name} {number_text(value)}" for name, value in shown.items())
    return f"{kind} {point.n}: step {point.step}{epoch}{fold}: {values}"


def _end(event: AttemptEnded, attempt: AttemptState) -> Moment:
    worked = duration_text(attempt.time_s)
    if event.failure is None:
        text = f"attempt {event.attempt}: ended with a result, after {worked}"
        return Moment(at=event.at, attempt=event.attempt, what=MomentKind.RESULT, text=text)
    failure = event.failure
    return Moment(
        at=event.at,
        attempt=event.attempt,
        what=MomentKind.FAILURE,
        text=f"attempt {event.attempt}: {failure.kind}: {failure.sentence}",
        details=(*_error_lines(failure), *_loss_lines(attempt), f"then: {FOLLOWED[failure.action]}"),
    )


def _error_lines(failure: FailureFacts) -> Iterator[str]:
    """Return the exception of a failure, unless its sentence already has all of it."""
    error = failure.error.strip().splitlines()
    if failure.error_type and not (error and failure.sentence.endswith(error[0]) and len(error) == 1):
        yield f"{failure.error_type}: {error[0]}" if error else failure.error_type
        yield from (f"  {line}" for line in error[1:])
    elif len(error) > 1:
        yield from error
    if failure.place and not failure.detail:
        yield f"at {failure.place}"
    yield from failure.detail.strip().splitlines()


def _loss_lines(attempt: AttemptState) -> Iterator[str]:
    lost_s, time_s = attempt.lost_s, attempt.time_s
    kept = f", after the checkpoint at step {attempt.checkpoint_step}" if lost_s < time_s and lost_s > 0 else ""
    yield f"worked {duration_text(time_s)}, {duration_text(lost_s)} of it lost{kept}"


def _end_text(trial: TrialState) -> str:
    text = str(trial.outcome or "open")
    if trial.values is not None:
        text += f", value {values_text(trial)}"
    if trial.best_step is not None:
        text += f" at step {trial.best_step}"
    return text + (f" ({trial.reason})" if trial.reason else "")


def story_lines(story: TrialStory) -> list[str]:
    """Return a story as ``dryfit show STUDY TRIAL`` prints it."""
    lines = [f"trial {story.number}: {story.end}"]
    lines += [f"  {name} = {value_text(value)}" for name, value in story.params.items()]
    lines.append(f"  seed {story.seed}, fingerprint {story.fingerprint}")
    lines += [f"  collapsed: {story.collapsed}"] if story.collapsed is not None else []
    lines += [f"  {line}" for line in (*_fold_lines(story), *story.memory)]
    if story.attempts:
        lost = f", {duration_text(story.lost_s)} of it lost" if story.lost_s else ""
        lines.append(f"  worked: {duration_text(story.time_s)} in {len(story.attempts)} attempt(s){lost}")
    return [*lines, "", *_moment_lines(story), "", *_file_lines(story)]


@document_of.register
def _(story: TrialStory) -> Document:
    return Document(tuple(story_lines(story)))


def _fold_lines(story: TrialStory) -> list[str]:
    """Return a line for each fold: its values and its best step."""
    return [
        f"fold {index + 1}: {', '.join(map(number_text, fold.values))} at step {fold.best_step} of {fold.steps}"
        for index, fold in enumerate(story.folds)
    ]


def _moment_lines(story: TrialStory) -> list[str]:
    lines: list[str] = []
    for moment in story.moments:
        indent = "  " if moment.attempt is not None and moment.what is not MomentKind.PLACED else ""
        at = time_text(moment.at) if moment.at is not None else " " * len(time_text(0.0))
        note = "note: " if moment.what is MomentKind.NOTE else ""
        lines.append(f"  {at}  {indent}{note}{moment.text}")
        lines += [f"  {' ' * len(at)}  {indent}  {line}" for line in moment.details]
    return lines


def _file_lines(story: TrialStory) -> list[str]:
    lines: list[str] = []
    for attempt in story.attempts:
        if not attempt.ended:
            lines.append(f"  attempt {attempt.number}: running, or lost with its control process")
        lines.append(f"  log: {attempt.log}")
        lines += [f"  stacks: {attempt.stacks}"] if attempt.stacks is not None else []
    if story.load_report is not None:
        lines += _origin_lines(Path(story.load_report))
    lines += [f"  weights: {story.weights}"] if story.weights is not None else []
    lines += [f"  answers, row by row: {path}" for path in story.scored]
    return lines


def _origin_lines(path: Path) -> list[str]:
    """Return lines on where the trial's initial weights came from."""
    try:
        report = LoadReport.model_validate_json(contents(path) or b"")
    except ValidationError:
        return [f"  loaded: {path} cannot be read; it may be of another version of dryfit"]
    parts = [report.summary(), *(f"{count} {cast}" for cast, count in report.casts.items())]
    lines = [f"  loaded: {', '.join(parts)}"]
    if report.random:
        lines.append(f"    random: {few(report.random)}")
    return [*lines, f"    load report: {path}"]
