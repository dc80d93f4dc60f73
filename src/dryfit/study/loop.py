"""The trials of a study, step by step: each decision is written to the ledger before it is carried out."""

import time
from collections.abc import Callable, Mapping, Sequence

from dryfit.ledger.events import AttemptPlaced, Event, TrialAsked, TrialFinished
from dryfit.ledger.folder import attempt_key
from dryfit.ledger.state import TrialState
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.failures import attempt_terms, terms_text
from dryfit.processes.node import Nodes
from dryfit.processes.packing import need_on
from dryfit.search.enqueued import Point, enqueued_points
from dryfit.search.samplers import GpProcess, SamplerInput, suggest_at, suggest_next
from dryfit.settings.devices import node_of, on_cpu
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.splits import derive_seed
from dryfit.settings.study_file import SamplerName
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import FirstStep
from dryfit.study.context import StudyContext, fold_reports, trial_fingerprint
from dryfit.study.driver import drive
from dryfit.study.messages import MessageHandler, RunningAttempt
from dryfit.study.next_step import (
    AskTrial,
    End,
    EndSession,
    Limits,
    Live,
    PlaceTrial,
    PlanTrial,
    RefuseTrial,
    StopTrials,
    Wait,
    next_step,
    tripped,
)
from dryfit.study.observers import Observer
from dryfit.study.placements import Placements
from dryfit.study.requests import Placement, child_spec
from dryfit.study.stops import StopRequests
from dryfit.study.trial_ends import AttemptFinalizer
from dryfit.study.trial_plans import TrialPlanner, refusal_text, smallest_left

_IDLE_S = 0.5


class TrialDecider:
    """Runs a study to its end, or to the request to stop.

    Args:
        study: The study.
        nodes: Where children run.
        stops: Requests to stop.
        observers: Watch the study.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        study: StudyContext,
        nodes: Nodes,
        stops: StopRequests,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._study = study
        self._nodes = nodes
        self._stops = stops
        self._observers = observers
        self._clock = clock
        self._gp = GpProcess()
        self._planner = TrialPlanner(study, nodes, self._write)
        self._messages = MessageHandler(study, nodes, self._write, observers)
        self._placements = Placements(study, nodes, self._write, self._note, clock)
        self._finalizer = AttemptFinalizer(
            study, self._messages, self._write, self._note, self._stop_because, self._placements.set_aside, clock
        )
        self._smallest = smallest_left(study.space, study.state) if self._planner.plans else None
        self._stopping: End | None = None
        self._end: End | None = None

    def run(self) -> End:
        """Go on until nothing is left to do or a stop was asked for.

        Raises:
            OSError: The ledger could not be written (a full disk); nothing that it holds is lost.
        """
        going_on = self._go_on_with(self._nodes.take_going_on())
        self._finalizer.reconcile({child.number for child in self._placements.running.values()})
        with self._gp:
            if self._study.config.search.sampler is SamplerName.GP:
                self._gp.warm()
            drive(self, self._nodes, self._stops, going_on)
        assert self._end is not None  # without it the work is not done
        return self._end

    def _go_on_with(self, left: Mapping[str, str]) -> Mapping[str, str]:
        """Count the attempts of this generation that still run on nodes as running; end all others there.

        Args:
            left: The node of each process that an earlier session has left running, by its key.

        Returns:
            The same, without those that are ended.
        """
        state, needs = self._study.state, self._placements.needs(self._planner.readiness(), self._planner.usable)
        for trial in state.open_trials:
            attempt = trial.attempts[-1] if trial.attempts else None
            if attempt is None or attempt.ended or trial.generation != state.generation.number:
                continue
            key = attempt_key(trial.number, attempt.number)
            if left.get(key) == node_of(attempt.place):
                kind = trial.plan.kind if trial.plan is not None else None
                need = need_on(needs[trial.number], trial.number, kind)
                child = RunningAttempt(trial.number, attempt.number, attempt.place, need)
                self._placements.start(key, child, ())
        for key in left.keys() - self._placements.running.keys():
            self._nodes.all()[left[key]].kill(key)
        return {key: node for key, node in left.items() if key in self._placements.running}

    @property
    def _limits(self) -> Limits:
        """The limits as they are now: with a node that joins, more trials may run side by side."""
        runtime, settings = self._study.config.runtime, self._study.config.study
        return Limits(
            total=settings.trials,
            parallel=self._study.parallelism.most,
            max_wall_s=settings.max_hours * 3600 if settings.max_hours is not None else None,
            patience=settings.patience,
            max_failed_in_a_row=runtime.max_failed_in_a_row,
            max_refused_in_a_row=runtime.max_refused_in_a_row,
            device_wait_s=runtime.device_wait_s,
            max_same_failure=runtime.max_same_failure,
        )

    @property
    def running(self) -> Mapping[str, RunningAttempt | int]:
        """The attempts that have a process, and the numbers of the trials that a PLAN child plans."""
        return {**self._placements.running, **self._planner.running}

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        """Take the next step of the study."""
        live = self._live()
        match next_step(self._study.state, self._limits, live):
            case AskTrial(number):
                self._ask(number)
            case PlanTrial(number):
                return self._planner.plan(self._study.state.trials[number])
            case RefuseTrial(number):
                self._refuse(self._study.state.trials[number])
            case PlaceTrial(number) as step:
                return [self._place(self._study.state.trials[number], step, live)]
            case StopTrials(why):
                self._stop(why)
            case Wait(until_s, why):
                self._placements.waiting(why)
                return _IDLE_S if until_s is None else min(_IDLE_S, max(0.0, until_s - self._clock()))
            case EndSession(why, text):
                self._leave(why, text)
                return None
        return ()

    def on_stop(self, why: End) -> None:
        """Stop for a person's, or the system's, sake, unless the study stops already."""
        if self._stopping is None:
            self._stop(why)

    def on_message(self, child: RunningAttempt | int, event: ChildMessage) -> None:
        """Take in a message: of a trial it is written down and judged, of a planner it is passed on."""
        if isinstance(child, int):
            for observer in self._observers:
                observer.on_message(child, event.message)
            return
        if isinstance(event.message, FirstStep):
            self._placements.worked(child)
        self._messages.on_message(event, child)

    def on_exit(self, child: RunningAttempt | int, event: ChildExited) -> None:
        """Take in the end of an attempt, or the plan that a PLAN child has made."""
        if not isinstance(child, int):
            self._placements.end(event)
            self._finalizer.on_exit(child, event.result, event.evidence)
            return
        trouble = self._planner.take(event)
        if trouble is not None:
            trial = self._study.state.trials[trouble.number]
            self._finalizer.follow(trial, trouble.failure, trouble.action, trouble.delay_s)

    def _live(self) -> Live:
        readiness = self._planner.readiness()
        return Live(
            cluster=self._placements.cluster(),
            waiting_until_s=self._finalizer.waiting_until_s,
            stopping=self._stopping,
            now_s=self._clock(),
            planning=self._planner.planning,
            readiness=readiness,
            needs=self._placements.needs(readiness, self._planner.usable),
            idle_since_s=self._placements.idle_since_s,
            nothing_fits=self._smallest is not None and not self._smallest.points,
        )

    def _write(self, event: Event) -> None:
        written = self._study.ledger.append(event)
        for observer in self._observers:
            observer.on_event(written, self._study.state)

    def _note(self, text: str) -> None:
        for observer in self._observers:
            observer.on_note(text)

    def _ask(self, number: int) -> None:
        study, generation = self._study, self._study.state.generation
        inputs = SamplerInput(
            space=study.space,
            history=study.state.history().before(number),
            search=study.config.search,
            directions=study.state.directions,
            seed=study.config.study.seed,
            number=number,
            ask_gp=self._gp.ask,
        )
        known = enqueued_points(study.space, study.config, number - generation.first)
        smallest = self._smallest_wanted()
        suggestion = suggest_at(inputs, smallest) if smallest else suggest_next(inputs, (*known, *generation.points))
        seed = derive_seed(study.config.study.seed, "trial", number)
        fallback = self._gp.take_trouble()
        if fallback:
            self._note(f"trial {number} is drawn by tpe: {fallback}")
        self._write(
            TrialAsked(
                number=number,
                params=dict(suggestion.params),
                internal=dict(suggestion.internal),
                distributions=dict(suggestion.distributions),
                enqueued=dict(suggestion.enqueued),
                seed=seed,
                fingerprint=trial_fingerprint(study, number, suggestion.params, seed),
                fold_reports=fold_reports(study),
                fallback=fallback,
            )
        )

    def _smallest_wanted(self) -> Point:
        """Return the values of a trial that takes least memory, where so far every trial was refused; else none."""
        state = self._study.state
        if self._smallest is None or not state.refused_in_a_row:
            return {}
        ended_otherwise = any(count for outcome, count in state.counts.items() if outcome is not Outcome.REFUSED)
        if ended_otherwise or any(trial.attempts for trial in state.open_trials):
            return {}
        return self._smallest.points[0] if self._smallest.points else {}

    def _refuse(self, trial: TrialState) -> None:
        answers = self._planner.refusals(trial)
        reason = "; ".join(map(refusal_text, answers))
        self._finalizer.finish(TrialFinished(number=trial.number, outcome=Outcome.REFUSED, reason=reason))
        if self._smallest is not None and all(answer.verdict is VerdictKind.REFUSED for answer in answers):
            self._smallest = self._smallest.without(trial.params)

    def _place(self, trial: TrialState, step: PlaceTrial, live: Live) -> ChildSpec:
        attempt, place, need = len(trial.attempts) + 1, step.place, live.need(trial.number, step.kind)
        plans = self._planner.usable(trial)
        plan = next((plan for plan in plans if plan.kind == step.kind), None)
        terms = attempt_terms(trial.past_failures)
        fraction = self._placements.fence(plan, need, place)
        placement = Placement(attempt, place, self._planner.choice(plan), terms, fraction, need.shared_bytes)
        spec = child_spec(self._study, trial, placement)
        self._finalizer.waiting_until_s.pop(trial.number, None)
        self._write(
            AttemptPlaced(
                number=trial.number,
                attempt=attempt,
                node=node_of(place),
                device=None if on_cpu(place) else place,
                needs_bytes=need.host_bytes if on_cpu(place) else need.shared_bytes,
                terms=terms_text(terms),
                plan=plan.key if plan is not None else None,
            )
        )
        passed = [number for number in live.needs if number < trial.number and live.is_ready(number)]
        self._placements.start(spec.key, RunningAttempt(trial.number, attempt, place, need), passed)
        return spec

    def _stop(self, why: End) -> None:
        self._stopping = why
        self._planner.abandon()
        if self._placements.running:
            self._note(f"stopping ({why}): {len(self._placements.running)} running trial(s) write a checkpoint")
        for key, child in self._placements.running.items():
            self._nodes.all()[node_of(child.place)].ask_stop(key)

    def _stop_because(self, why: End, text: str) -> None:
        """Stop for a trial's sake; a pause gives way to whatever stops the study already."""
        if why is End.PAUSED and self._stopping is not None:
            return
        self._note(text)
        self._stop(why)

    def _leave(self, why: End, text: str) -> None:
        if text:
            self._note(text)
        self._planner.abandon()
        trip = tripped(self._study.state, self._limits)
        if trip is not None and trip.end is why:
            self._note(trip.sentence)
        self._end = why
