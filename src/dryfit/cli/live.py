"""What is going on, on stderr: a panel that moves on a terminal, one line an event elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dryfit.api import Observer, StudyRun, Turn
from dryfit.cli.output import console, run_text
from dryfit.cli.panel import StudyPanel, study_progress_line, trial_progress_line
from dryfit.core.errors import ExitStatus
from dryfit.core.failure import Action
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.settings.trial import MetricPoint, Outcome
from dryfit.core.wire import Message, Note, Progress
from dryfit.reporting.data.observed_memory import choice_text, plan_text
from dryfit.reporting.terminal.generation_text import began_text, revised_text
from dryfit.reporting.terminal.live import LiveStudy
from dryfit.reporting.terminal.tables import number_text, params_text
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    DeviceSetAside,
    Event,
    GenerationBegan,
    ParallelSet,
    ReportMade,
    SessionOpened,
    StudyRevised,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState

_REFRESH_PER_S = 4
_PROGRESS_LINE_EVERY_S = 60.0


def event_line(event: Event, state: StudyState) -> str | None:
    """An event as one line a person, or ``grep``, can read; None for those not worth one."""
    match event:
        case SessionOpened(total=total, notes=notes):
            done = f", {state.counted} of them done" if state.counted else ""
            return "\n".join([f"study {state.created.name if state.created else ''}: {total} trials{done}", *notes])
        case StudyRevised():
            return revised_text(event)
        case GenerationBegan():
            return began_text(event, state)
        case TrialAsked(number=number, params=params):
            return f"trial {number}: new  {params_text(params)}"
        case TrialPlanned(number=number, answer=answer) if answer is not None:
            return _planned_line(state.trials[number])
        case AttemptPlaced(number=number, attempt=attempt, terms=terms) if attempt > 1:
            return f"trial {number}: {', '.join([f'attempt {attempt}', *terms])}"
        case DeviceSetAside(device=device, reason=reason):
            return f"device {device} is set aside: {reason}"
        case ParallelSet(parallel=parallel, reason=reason):
            return f"side by side: {parallel} ({reason})"
        case ReportMade(number=number, point=point):
            shown = _goals_text(point, state)
            fold = f", fold {point.fold}" if point.fold else ""
            return f"trial {number}: report {point.n}{fold}, step {point.step}: {shown}"
        case VerdictGiven(number=number, proceed=False, reason=reason):
            return f"trial {number}: stop ({reason})"
        case AttemptEnded(number=number, failure=failure) if failure is not None and failure.action is not Action.PAUSE:
            return f"trial {number}: {failure.kind}: {failure.sentence} -> {failure.action}"
        case TrialFinished(number=number, outcome=outcome, value=value, also=also, reason=reason):
            star = "  (best so far)" if state.best is not None and state.best.number == number else ""
            if state.front:
                star = "  (on the Pareto front)" if number in {trial.number for trial in state.front} else ""
            shown = f" {', '.join(map(number_text, (value, *also)))}" if value is not None else ""
            why = f"  {reason}" if reason else ""
            return f"trial {number}: {outcome}{shown}{why}{star}"
        case _:
            return None


def _goals_text(point: MetricPoint, state: StudyState) -> str:
    """A validation's values of what the study optimises."""
    if state.created is None:
        return f"value {number_text(point.value)}"
    further = [f"{goal.name} {number_text(point.metrics.get(goal.name))}" for goal in state.created.also]
    return ", ".join([f"{state.created.metric} {number_text(point.value)}", *further])


def _planned_line(trial: TrialState) -> str | None:
    """A trial that is refused is told of by its end."""
    plan = trial.plan
    if plan is None or plan.answer.verdict is VerdictKind.REFUSED:
        return None
    run_with = f"  {choice_text(plan.execution)}" if plan.execution is not None else ""
    return f"trial {trial.number}: plan {plan_text(plan)}{run_with}"


class Watcher(Observer, Protocol):
    """Watches one study, or several in turn."""

    def on_turn(self, turn: Turn) -> None:
        """Of several studies, this one is next."""
        ...

    def on_end(self, run: StudyRun) -> None:
        """This is what became of it."""
        ...


def _turn_text(turn: Turn) -> str:
    return f"{turn.number} of {turn.of}"


class PlainLines:
    """One line an event, for logs and pipes, and now and then one on how far a trial or the study is.

    Args:
        clock: Seconds of any clock.
        study: What the lines on progress are made of.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, study: LiveStudy | None = None) -> None:
        self._clock = clock
        self._study = study or LiveStudy()
        self._told_s: dict[int | None, float] = {None: clock()}
        self._turn = ""

    def on_turn(self, turn: Turn) -> None:
        """Forget the study before, and say which one is next."""
        self._study = LiveStudy()
        self._told_s = {None: self._clock()}
        self._turn = _turn_text(turn)
        self._print(f"study {self._turn}: {turn.name}")

    def on_end(self, run: StudyRun) -> None:
        """Say what became of the study."""
        self._print(f"study {self._turn}: {run.turn.name}: {run_text(run)}")

    def on_open(self, layout: StudyLayout) -> None:
        """Learn where the trials' folders are."""
        self._study.on_open(layout)

    def on_event(self, event: Event, state: StudyState) -> None:
        """Print the event, if it is worth a line."""
        self._study.on_event(event, state)
        line = event_line(event, state)
        if line is not None:
            self._print(line)
        match event:
            case AttemptPlaced(number=number):
                self._told_s[number] = self._clock()
            case TrialFinished(number=number):
                self._told_s.pop(number, None)
                if self._due(None):
                    self._print(study_progress_line(self._study.view(), self._turn))
            case _:
                pass

    def on_message(self, number: int, message: Message) -> None:
        """Print notes, and progress where the last line on it is long ago."""
        self._study.on_message(number, message)
        if isinstance(message, Note):
            self._print(f"trial {number}: {message.text}")
        elif isinstance(message, Progress) and number in self._told_s and self._due(number):
            view = self._study.view()
            self._print(*(trial_progress_line(trial, view.goals) for trial in view.trials if trial.number == number))

    def on_note(self, text: str) -> None:
        """Print what the control process is doing."""
        self._study.on_note(text)
        self._print(text)

    def _due(self, what: int | None) -> bool:
        """Whether a line on a trial (None: on the study) is due; if so, the next is not before long."""
        now_s = self._clock()
        if now_s - self._told_s[what] < _PROGRESS_LINE_EVERY_S:
            return False
        self._told_s[what] = now_s
        return True

    def _print(self, *lines: str) -> None:
        for line in lines:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


class LivePanel:
    """A panel with a row for each trial that is worked on; the lines of :func:`event_line` scroll by above it."""

    def __init__(self, out: Console | None = None) -> None:
        self._study = LiveStudy()
        self._title = ""
        # The panel is drawn by a thread of its own: nothing it reads from disk delays the study.
        self._lock = threading.Lock()
        self._live = Live(
            console=out or console(stderr=True), refresh_per_second=_REFRESH_PER_S, get_renderable=self.render
        )

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Show the panel while the block runs."""
        with self._live:
            yield

    def on_turn(self, turn: Turn) -> None:
        """Forget the study before, and show which one is next."""
        with self._lock:
            self._study = LiveStudy()
            self._title = f"study {_turn_text(turn)}: {turn.name}"

    def on_end(self, run: StudyRun) -> None:
        """Print what became of the study."""
        style = "green" if run.status is ExitStatus.DONE else "red"
        self._live.console.print(Text(f"{self._title}: {run_text(run)}", style=style))

    def on_open(self, layout: StudyLayout) -> None:
        """Learn where the trials' folders are."""
        with self._lock:
            self._study.on_open(layout)

    def on_event(self, event: Event, state: StudyState) -> None:
        """Update the rows, and print the event's line."""
        with self._lock:
            self._study.on_event(event, state)
        line = event_line(event, state)
        if line is not None:
            style = "bold green" if line.endswith(("(best so far)", "(on the Pareto front)")) else _line_style(event)
            self._live.console.print(Text(line, style=style))

    def on_message(self, number: int, message: Message) -> None:
        """Update the row of a running trial."""
        with self._lock:
            self._study.on_message(number, message)
        if isinstance(message, Note):
            self._live.console.print(Text(f"trial {number}: {message.text}"))

    def on_note(self, text: str) -> None:
        """Show what the control process is doing."""
        with self._lock:
            self._study.on_note(text)

    def render(self) -> RenderableType:
        """The panel as it is now."""
        with self._lock:
            return StudyPanel(self._study.view(), self._title)


def _line_style(event: Event) -> str:
    match event:
        case TrialFinished(outcome=Outcome.FAILED) | AttemptEnded():
            return "red"
        case TrialFinished(outcome=Outcome.PRUNED) | VerdictGiven():
            return "yellow"
        case TrialFinished():
            return "green"
        case _:
            return "dim" if isinstance(event, ReportMade) else ""


@contextmanager
def watching(*, quiet: bool) -> Generator[Watcher | None, None, None]:
    """The observer that fits where stderr goes; none if ``quiet``."""
    if quiet:
        yield None
        return
    out = console(stderr=True)
    if out.is_terminal and not out.is_dumb_terminal:
        panel = LivePanel(out)
        with panel.shown():
            yield panel
    else:
        yield PlainLines()
