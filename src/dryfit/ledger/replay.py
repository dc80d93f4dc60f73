"""The state of a study, projected from the events of its ledger: the only memory a study has.

An event that refers to what does not exist, or has ended, is refused first.
"""

import math
from typing import TypeAlias

from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    BaselinesComputed,
    CheckpointMade,
    ComparabilityKey,
    DeviceSetAside,
    Event,
    FirstStepDone,
    GenerationBegan,
    LedgerEvent,
    NodeJoined,
    NodeLost,
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
from dryfit.ledger.state import (
    AttemptState,
    FailureTally,
    GenerationState,
    History,
    PlanState,
    SessionState,
    TrialState,
)
from dryfit.settings.choices import Direction
from dryfit.settings.devices import cpu_of
from dryfit.settings.errors import Action, FailureKind, LedgerError
from dryfit.settings.plan_messages import PlanAnswer
from dryfit.settings.training_messages import ResolveResult
from dryfit.settings.trial import Goal, Outcome, ParetoFront, as_losses, best_first, better

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
    """Return the error of an event that refers to a missing trial or attempt."""
    return LedgerError(
        f"reading the ledger, line {event.seq + 1}",
        found,
        hint="restore the file from a backup, or move the folder aside and start a new study",
    )


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


class StudyState:
    """The state of a study. Pass every event of the ledger, in order, to :meth:`apply`.

    Counts, the best trial, the Pareto front and the history are those of the present generation.

    Attributes:
        created: The study, with its present task and goals.
        generations: A new one begins whenever the study changed so that its trials no longer counted; the first is 1.
        baselines: What the metric is worth without a model; None: nobody has found out.
        best: The best complete trial by the study's metric; one that gave all rows the same answer only where all did.
        finished_since_best: Finished trials since the best trial, or the front, last improved.
        failures: Failed trials of this session since the last one that ended well.
    """

    def __init__(self) -> None:
        self.created: StudyCreated | None = None
        self.resolved: ResolveResult | None = None
        self.baselines: BaselinesComputed | None = None
        self.generations: list[GenerationState] = []
        self.sessions: list[SessionState] = []
        self.trials: list[TrialState] = []
        self.counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.best: TrialState | None = None
        self.finished_since_best = 0
        self.failures = FailureTally()
        self.refused_in_a_row = 0
        self.answers: dict[str, PlanAnswer] = {}
        self._unfinished: dict[int, TrialState] = {}
        self._history = History()
        self._distributions: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        self._front = ParetoFront[TrialState]()

    @property
    def generation(self) -> GenerationState:
        """The present generation; the study must have been created."""
        return self.generations[-1]

    @property
    def present(self) -> list[TrialState]:
        """The trials of the present generation, by number."""
        return self.trials[self.generation.first :] if self.generations else self.trials

    def in_generation(self, number: int) -> list[TrialState]:
        """Return the trials of a generation, by number."""
        if number == len(self.generations):
            return self.present
        return self.trials[self.generations[number - 1].first : self.generations[number].first]

    @property
    def front(self) -> list[TrialState]:
        """With several goals, the complete trials that no other one dominates, in the order they ended; else empty."""
        return self._front.members

    @property
    def complete(self) -> list[TrialState]:
        """The trials of the present generation with a score, by number."""
        return [trial for trial in self.present if trial.score is not None]

    @property
    def ranked(self) -> list[TrialState]:
        """Those of :attr:`complete`, the best first, the earlier of equals before the later."""
        return best_first(self.complete, self.direction)

    @property
    def attempts(self) -> list[AttemptState]:
        """All attempts of the trials of the present generation."""
        return [attempt for trial in self.present for attempt in trial.attempts]

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What is optimised, the metric first; none before the study was created."""
        return self.created.goals if self.created else ()

    @property
    def direction(self) -> Direction:
        """Which values of the metric are better."""
        return self.created.direction if self.created else Direction.MAXIMIZE

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each goal, the metric's first."""
        return tuple(goal.direction for goal in self.goals) or (Direction.MAXIMIZE,)

    @property
    def counted(self) -> int:
        """Number of trials that count towards the total: complete, pruned and failed."""
        return sum(count for outcome, count in self.counts.items() if outcome.counts)

    @property
    def open_trials(self) -> list[TrialState]:
        """Trials that have not ended, by number."""
        return list(self._unfinished.values())

    @property
    def wall_s(self) -> float:
        """Seconds that control processes have worked on the study."""
        return sum(session.work_s for session in self.sessions)

    def wall_until_s(self, now_s: float) -> float:
        """Return :attr:`wall_s`, with the open session counted up to ``now_s`` (Unix seconds)."""
        return self.wall_s + max(0.0, now_s - self.sessions[-1].last_at_s)

    def generation_wall_until_s(self, now_s: float) -> float:
        """Return :meth:`wall_until_s` without the sessions before the present generation."""
        before = self.sessions[: self.generation.session]
        return self.wall_until_s(now_s) - sum(session.work_s for session in before)

    def history(self) -> History:
        """Return the trials as samplers and pruners see them, with the reused ones of earlier generations.

        The object is updated by this call: call it again after each event.
        """
        first = self.generation.first if self.generations else 0
        for trial in self._unfinished.values():
            if trial.number >= first:
                self._history.put(trial.record())
        return self._history

    def apply(self, event: Event) -> None:
        """Apply one event.

        Raises:
            LedgerError: It refers to a trial, an attempt or a report that does not exist, or has ended.
        """
        check_order(
            event,
            created=self.created is not None,
            generations=len(self.generations),
            sessions=len(self.sessions),
            trials=len(self.trials),
        )
        match event:
            case StudyCreated():
                self.created = event
                self.generations.append(
                    GenerationState(1, event.name, event.comparability, event.at, points=event.points)
                )
            case StudyRevised(comparability=comparability):
                self._change_comparability(comparability)
                self.generation.comparability = comparability
                self._remake_history()
            case GenerationBegan():
                self._begin(event)
            case SessionOpened():
                self._open(event)
            case SessionClosed():
                self.sessions[-1].closed = event.reason
            case Resolved():
                self.resolved = event.result
                if self.generations and not self.generation.comparability.data:
                    data = event.result.data_fingerprint
                    self.generation.comparability = self.generation.comparability.model_copy(update={"data": data})
            case BaselinesComputed():
                self.baselines = event
            case TrialAsked():
                self._ask(event)
            case TrialPlanned():
                self._plan(event)
            case DeviceSetAside():
                self.sessions[-1].set_aside[event.device] = event.reason
            case NodeJoined() | NodeLost() | ParallelSet():
                self.sessions[-1].take(event)
            case TrialFinished():
                self._finish(trial_of(event, self.trials), event)
            case ReportMade():
                trial = trial_of(event, self.trials)
                attempt_of(event, trial)
                trial.reports.append(event.point)
            case VerdictGiven():
                trial = trial_of(event, self.trials)
                trial.verdicts[event.n] = event
                trial.system_attrs.update(event.system_attrs)
            case AttemptPlaced() | AttemptStarted() | FirstStepDone() | CheckpointMade() | AttemptEnded():
                apply_to_attempt(event, trial_of(event, self.trials), self.sessions[-1] if self.sessions else None)
        if self.sessions:
            self.sessions[-1].last_at_s = event.at

    def _open(self, event: SessionOpened) -> None:
        if not self.sessions or self.sessions[-1].closed is not None:
            self.refused_in_a_row = 0  # after a killed session the count goes on
        if self.sessions:
            self.sessions[-1].superseded = True
        self.sessions.append(SessionState(event, event.at))
        self.failures = FailureTally()

    def _begin(self, event: GenerationBegan) -> None:
        """Begin a generation: counts are zero again, trials are kept."""
        self._change_comparability(event.comparability)
        if event.generation == len(self.generations):  # it has no trial yet
            del self.generations[-1]
        self.generations.append(
            GenerationState(
                number=event.generation,
                name=event.name,
                comparability=event.comparability,
                began_at_s=event.at,
                first=len(self.trials),
                session=max(0, len(self.sessions) - 1),
                reasons=event.reasons,
                reused=event.reused,
                points=event.points,
            )
        )
        self._remake_history()
        self.counts = dict.fromkeys(Outcome, 0)
        self.best, self._front = None, ParetoFront[TrialState]()
        self.finished_since_best = self.refused_in_a_row = 0
        self.failures = FailureTally()

    def _remake_history(self) -> None:
        """Make the history again: its trials changed, or the study file's values did."""
        reused = [self.trials[number] for number in self.generation.reused]
        self._history = History(trial.record() for trial in (*reused, *self.present))

    def _change_comparability(self, new: ComparabilityKey) -> None:
        """Change what new trials are compared by; earlier ones keep the study file's values that they had."""
        assert self.created is not None
        old = self.generation.comparability
        before = old.own or {}
        if before and (before != new.own or old.space != new.space):
            for trial in self.trials:
                if not trial.own:
                    trial.own = before
        goal, *also = new.goals
        self.created = self.created.model_copy(
            update={
                "task": new.task,
                "metric": goal.name,
                "direction": goal.direction,
                "also": tuple(also),
                "space": new.space,
            }
        )

    def _plan(self, event: TrialPlanned) -> None:
        answer = event.answer or self.answers.get(event.key)
        if answer is None:
            raise wrong_reference(event, f"no earlier event has a plan with key {event.key}")
        self.answers[event.key] = answer
        trial = trial_of(event, self.trials)
        trial.plan = trial.plans[event.key] = PlanState(event.key, answer)

    def _ask(self, event: TrialAsked) -> None:
        # Thousands of trials share few sets of distributions: each set is kept once.
        drawn_from = self._distributions.setdefault(tuple(event.distributions.items()), event.distributions)
        trial = TrialState(
            number=event.number,
            params=event.params,
            internal=event.internal,
            distributions=drawn_from,
            seed=event.seed,
            fingerprint=event.fingerprint,
            fold_reports=event.fold_reports,
            enqueued=event.enqueued,
            asked_at_s=event.at,
            generation=len(self.generations) or 1,
        )
        self.trials.append(trial)
        self._unfinished[trial.number] = trial
        self._history.put(trial.record())

    def _finish(self, trial: TrialState, event: TrialFinished) -> None:
        trial.outcome = event.outcome
        trial.finished_at_s = event.at
        trial.value = event.value
        trial.also = event.also
        trial.best = event.best
        trial.folds = event.folds
        trial.steps = event.steps
        trial.reason = event.reason
        trial.observed = event.observed
        self._unfinished.pop(trial.number, None)
        if self.generations and trial.generation != self.generation.number:
            return
        self._history.put(trial.record())
        self.counts[event.outcome] += 1
        self.refused_in_a_row = self.refused_in_a_row + 1 if event.outcome is Outcome.REFUSED else 0
        if not event.outcome.counts:
            return
        if event.outcome is Outcome.FAILED:
            self.failures.failed(trial.attempts[-1].failure if trial.attempts else None)
        else:
            self.failures = FailureTally()
        improves = event.value is not None and self._outranks_best(trial, event.value)
        if improves:
            self.best = trial
        if self.created is not None and self.created.also:
            improves = self._join_front(trial)
        self.finished_since_best = 0 if improves else self.finished_since_best + 1

    def _outranks_best(self, trial: TrialState, value: float) -> bool:
        """Whether a trial with a value is the best so far; one that collapsed only where all before it did too."""
        if self.best is not None and self.best.is_collapsed != trial.is_collapsed:
            return self.best.is_collapsed and not math.isnan(value)
        best_value = self.best.value if self.best and self.best.value is not None else math.nan
        return better(value, best_value, self.direction)

    def _join_front(self, trial: TrialState) -> bool:
        """Add a trial to the Pareto front if it belongs there; return whether it improved the front.

        A trial with a missing or NaN value is never in it.
        """
        values = trial.values or ()
        losses = as_losses(values, self.directions) if len(values) == len(self.directions) else None
        return losses is not None and self._front.join(trial, losses)
