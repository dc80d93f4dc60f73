"""Messages of trials' processes, and the one loop that waits for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dryfit.ledger.events import AttemptStarted, CheckpointMade, Event, FirstStepDone, ReportMade, VerdictGiven
from dryfit.ledger.state import VerdictState
from dryfit.processes.attempt import read_messages
from dryfit.processes.child_spec import ChildExited, ChildMessage, ChildSpec
from dryfit.processes.node import Nodes
from dryfit.processes.packing import Need
from dryfit.search.pruning import Rules, judge, most_reports
from dryfit.settings.devices import node_of
from dryfit.settings.wire import Checkpointed, FirstStep, Report, Started, Verdict
from dryfit.study.context import StudyContext
from dryfit.study.files import drop_superseded
from dryfit.study.next_step import End
from dryfit.study.observers import Observer
from dryfit.study.stops import StopRequests

# The one loop that acts: starts children, waits for their messages, and passes these to a decider.


C = TypeVar("C")


class Decider(Protocol[C]):
    """Work done by children: which start, and the reaction to their messages and ends."""

    @property
    def running(self) -> Mapping[str, C]:
        """What each running child works on, by the child's key."""
        ...

    def next_starts(self) -> Sequence[ChildSpec] | float | None:
        """Decide what comes next; what must be on record before it happens is written here.

        Returns:
            Children to start, which are in :attr:`running` already; where there are none, the question is asked again.
            Or the seconds to wait for news at most. None: the work is done.
        """
        ...

    def on_stop(self, why: End) -> None:
        """Heed the first request to stop."""
        ...

    def on_message(self, child: C, event: ChildMessage) -> None:
        """Take in a message of a running child."""
        ...

    def on_exit(self, child: C, event: ChildExited) -> None:
        """Take in the end of a child, and remove it from :attr:`running`."""
        ...


def drive(
    decider: Decider[C], nodes: Nodes, stops: StopRequests | None = None, going_on: Mapping[str, str] | None = None
) -> None:
    """Carry out a decider's decisions until its work is done.

    Requests to stop are looked for before each decision. One for an immediate end kills every running child.

    Args:
        decider: The work.
        nodes: Where the children run.
        stops: Requests to stop; None: there are none.
        going_on: The node of each child that runs already, by its key; None: none does.
    """
    stopping = killed = False
    node_by_key = dict(going_on or {})
    while True:
        if stops is not None:
            stops.look()
            if stops.why is not None and not stopping:
                stopping = True
                decider.on_stop(stops.why)
            if stops.at_once and not killed:
                killed = True
                for key in decider.running:
                    nodes.all()[node_by_key[key]].kill(key, "now")
        following = decider.next_starts()
        if following is None:
            return
        if isinstance(following, float | int):
            _hand_on(decider, nodes, node_by_key, following)
            continue
        for spec in following:
            node_by_key[spec.key] = node_of(spec.place)
            nodes.all()[node_by_key[spec.key]].start(spec)


def _hand_on(decider: Decider[C], nodes: Nodes, node_by_key: dict[str, str], timeout_s: float) -> None:
    """Hand on what is heard of children that run.

    Nothing else counts: an earlier event may have ended the interest in a child, or it is an attempt that was given
    up, or one that runs on another node by now. Such a child is killed where it is.
    """
    for event in nodes.wait(timeout_s):
        child = decider.running.get(event.key)
        if child is None or event.node != node_by_key[event.key]:
            if isinstance(event, ChildMessage):
                nodes.all()[event.node].kill(event.key)
            continue
        match event:
            case ChildMessage():
                decider.on_message(child, event)
            case ChildExited():
                del node_by_key[event.key]
                decider.on_exit(child, event)


# Messages of trials' processes: recorded first, then judged by the pruner, then answered.


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """A trial's process; ``need`` is what its place is counted to hold."""

    number: int
    attempt: int
    place: str
    need: Need


class MessageHandler:
    """Handles the messages of one session's trials.

    Args:
        study: The study.
        nodes: Pass verdicts on.
        write: Appends an event to the ledger.
        observers: Get the messages that the ledger does not keep.
    """

    def __init__(
        self,
        study: StudyContext,
        nodes: Nodes,
        write: Callable[[Event], None],
        observers: Sequence[Observer],
    ) -> None:
        self._study = study
        self._nodes = nodes
        self._write = write
        self._observers = observers
        self._rules = Rules(
            search=study.config.search,
            direction=study.state.direction,
            study=study.state.generation.name,
            most_reports=study.config.data.folds * most_reports(study.space, study.config.trial_settings),
        )

    def on_message(self, event: ChildMessage, child: RunningAttempt) -> None:
        """Take in one message of a running process; a report is answered."""
        number, attempt = child.number, child.attempt
        known = self._study.state.trials[number].attempts[attempt - 1]
        match event.message:  # what an earlier session has written down may be said again by a process that outlived it
            case Started(pid=pid, overhead_ms=overhead_ms):
                again = known.pid is not None
                if not again or known.session is not self._study.state.sessions[-1]:
                    self._write(
                        AttemptStarted(number=number, attempt=attempt, pid=pid, overhead_ms=overhead_ms, again=again)
                    )
            case FirstStep(after_ms=after_ms):
                if known.first_step_ms is None:
                    self._write(FirstStepDone(number=number, attempt=attempt, after_ms=after_ms))
            case Checkpointed(step=step):
                if known.checkpoint_step != step:
                    self._write(CheckpointMade(number=number, attempt=attempt, step=step))
                if self._study.config.function is None:
                    drop_superseded(self._study.layout.trial(number), attempt)
            case Report() as report:
                self._keep_report(child, report)
                verdict = Verdict(n=report.point.n, proceed=self._verdict(child, report).proceed)
                self._nodes.all()[event.node].answer(event.key, verdict)
            case message:
                for observer in self._observers:
                    observer.on_message(number, message)

    def catch_up(self, child: RunningAttempt) -> None:
        """Take in the reports of a process that ended while no control process heard it.

        Each gets its verdict all the same, as the pruner builds on earlier verdicts; trials of an earlier generation
        get none.
        """
        trial = self._study.state.trials[child.number]
        judged = trial.generation == self._study.state.generation.number
        for message in read_messages(self._study.layout.trial(child.number).attempt(child.attempt)):
            if isinstance(message, Report):
                self._keep_report(child, message)
                if judged:
                    self._verdict(child, message)

    def _keep_report(self, child: RunningAttempt, report: Report) -> None:
        trial = self._study.state.trials[child.number]
        if not trial.reports or report.point.n > trial.reports[-1].n:  # else an earlier attempt has made it
            self._write(ReportMade(number=child.number, attempt=child.attempt, point=report.point))

    def _verdict(self, child: RunningAttempt, report: Report) -> VerdictState:
        """Return the verdict on a report: the one given before if there is one, else a new one."""
        trial, n = self._study.state.trials[child.number], report.point.n
        if n not in trial.verdicts:
            judged = judge(self._study.state.history(), child.number, self._rules, last=report.last)
            self._write(
                VerdictGiven(
                    number=child.number,
                    n=n,
                    proceed=judged.proceed,
                    system_attrs=dict(judged.system_attrs),
                    reason=judged.reason,
                )
            )
        return trial.verdicts[n]
