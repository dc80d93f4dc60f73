"""What is going on, on stderr: a panel that moves on a terminal, one line an event elsewhere."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dryfit.cli.output import console
from dryfit.core.failure import Action
from dryfit.core.memory import VerdictKind
from dryfit.core.trial import MetricPoint, Outcome
from dryfit.core.wire import Message, Note, Phase, Progress
from dryfit.report.plans import choice_text, plan_text
from dryfit.report.tables import duration_text, number_text, params_text
from dryfit.store.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    ReportMade,
    SessionOpened,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.store.replay import StudyState, TrialState
from dryfit.study.observers import Observer

_REFRESH_PER_S = 4


def event_line(event: Event, state: StudyState) -> str | None:
    """An event as one line a person, or ``grep``, can read; None for those not worth one."""
    match event:
        case SessionOpened(total=total, notes=notes):
            done = f", {state.counted} of them done" if state.counted else ""
            return "\n".join([f"study {state.created.name if state.created else ''}: {total} trials{done}", *notes])
        case TrialAsked(number=number, params=params):
            return f"trial {number}: new  {params_text(params)}"
        case TrialPlanned(number=number, answer=answer) if answer is not None:
            return _planned_line(state.trials[number])
        case AttemptPlaced(number=number, attempt=attempt) if attempt > 1:
            return f"trial {number}: attempt {attempt}"
        case ReportMade(number=number, point=point):
            shown = _goals_text(point, state)
            return f"trial {number}: validation {point.n}, step {point.step}: {shown}"
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


class PlainLines:
    """One line an event, for logs and pipes."""

    def on_event(self, event: Event, state: StudyState) -> None:
        """Print the event, if it is worth a line."""
        line = event_line(event, state)
        if line is not None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def on_message(self, number: int, message: Message) -> None:
        """Print notes; progress would be too much."""
        if isinstance(message, Note):
            sys.stderr.write(f"trial {number}: {message.text}\n")

    def on_note(self, text: str) -> None:
        """Print what the control process is doing."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


@dataclass(slots=True)
class _Row:
    """A running trial, as the panel shows it."""

    placed_s: float
    phase: str = "starting"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    values: list[float] = field(default_factory=list[float])


class LivePanel:
    """A panel with a row for each running trial; the lines of :func:`event_line` scroll by above it."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._state: StudyState | None = None
        self._note = ""
        self._began_s = time.monotonic()
        self._live = Live(console=console(stderr=True), refresh_per_second=_REFRESH_PER_S, get_renderable=self.render)

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Show the panel while the block runs."""
        with self._live:
            yield
            self._rows.clear()

    def on_event(self, event: Event, state: StudyState) -> None:
        """Update the rows, and print the event's line."""
        self._state = state
        match event:
            case AttemptPlaced(number=number):
                self._rows[number] = _Row(time.monotonic())
                self._note = ""
            case ReportMade(number=number, point=point) if number in self._rows:
                self._rows[number].values.append(point.value)
            case AttemptEnded(number=number):
                self._rows.pop(number, None)
            case _:
                pass
        line = event_line(event, state)
        if line is not None:
            style = "bold green" if line.endswith(("(best so far)", "(on the Pareto front)")) else _line_style(event)
            self._live.console.print(Text(line, style=style))

    def on_message(self, number: int, message: Message) -> None:
        """Update the row of a running trial."""
        row = self._rows.get(number)
        if row is None:
            return
        match message:
            case Phase(name=name):
                row.phase = name
            case Progress(step=step, total_steps=total_steps, loss=loss):
                row.step, row.total_steps, row.loss = step, total_steps, loss
            case Note(text=text):
                self._live.console.print(f"trial {number}: {text}", highlight=False)
            case _:
                pass

    def on_note(self, text: str) -> None:
        """Show what the control process is doing."""
        self._note = text

    def render(self) -> RenderableType:
        """The panel as it is now."""
        table = Table.grid(padding=(0, 2))
        for number, row in sorted(self._rows.items()):
            table.add_row(
                Text(f"trial {number}", style="bold"),
                row.phase,
                ProgressBar(total=row.total_steps or None, completed=row.step, width=24, pulse=not row.total_steps),
                f"step {row.step}/{row.total_steps or '?'}",
                f"loss {row.loss:.4f}" if row.loss is not None else "",
                " ".join(number_text(value) for value in row.values[-4:]),
                duration_text(time.monotonic() - row.placed_s),
            )
        return Group(table, self._summary())

    def _summary(self) -> Text:
        state = self._state
        if state is None or not state.sessions:
            return Text(self._note, style="dim")
        counts = state.counts
        parts = [
            f"{state.counted}/{state.sessions[-1].total} trials",
            f"{counts[Outcome.COMPLETE]} complete, {counts[Outcome.PRUNED]} pruned, {counts[Outcome.FAILED]} failed",
            duration_text(time.monotonic() - self._began_s),
        ]
        if state.best is not None:
            parts.append(f"best {number_text(state.best.value)} (trial {state.best.number})")
        if self._note:
            parts.append(self._note)
        return Text("  |  ".join(parts), style="dim")


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
def watching(*, quiet: bool) -> Generator[Observer | None, None, None]:
    """The observer that fits where stderr goes; none if ``quiet``."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and not os.environ.get("CI"):
        panel = LivePanel()
        with panel.shown():
            yield panel
    else:
        yield PlainLines()
