"""Messages of trials' processes, and the one loop that waits for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dryfit.ledger.events import AttemptStarted, CheckpointMade, Event, FirstStepDone, ReportMade, VerdictGiven
from dryfit.processes.attempt import read_messages
from dryfit.processes.child_spec import ChildMessage
from dryfit.processes.node import Nodes
from dryfit.processes.packing import Need
from dryfit.search.pruning import Rules, judge, most_reports
from dryfit.settings.wire import Checkpointed, FirstStep, Report, Started, Verdict
from dryfit.study.context import StudyContext
from dryfit.study.files import drop_superseded
from dryfit.study.observers import Observer

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

    def _verdict(self, child: RunningAttempt, report: Report) -> VerdictGiven:
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
