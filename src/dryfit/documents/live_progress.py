"""The progress of a search, as a live panel on a terminal, as lines elsewhere: of this process on stderr, of another
on stdout.
"""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dryfit.documents.command_output import console, run_text, show
from dryfit.documents.document import document_of, params_text
from dryfit.documents.live_study import (
    LiveStudy,
    StudyFollower,
    StudyPanel,
    Watched,
    study_progress_line,
    trial_progress_line,
    watched_lines,
)
from dryfit.documents.plans import choice_text, plan_text
from dryfit.documents.summary import began_text, revised_text
from dryfit.documents.worth import flaws_of_best, strongest_baseline
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    BaselinesComputed,
    DeviceSetAside,
    Event,
    GenerationBegan,
    NodeJoined,
    NodeLost,
    ParallelSet,
    ReportMade,
    SessionOpened,
    StudyRevised,
    TrialAsked,
    TrialFinished,
    TrialPlanned,
    VerdictGiven,
)
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import TrialState
from dryfit.settings.devices import place_in_words
from dryfit.settings.errors import Action, ExitStatus
from dryfit.settings.memory_terms import VerdictKind
from dryfit.settings.text import number_text
from dryfit.settings.trial import MetricPoint, Outcome
from dryfit.settings.wire import Message, Note, Progress
from dryfit.study.functions import StudyRun, Turn

_REFRESH_PER_S = 4
_PROGRESS_EVERY_S = 60.0
_BEST = "best so far"


def event_line(event: Event, state: StudyState) -> str | None:
    """Return an event as one line that people and ``grep`` can read; None for events not worth a line."""
    match event:
        case SessionOpened(total=total, notes=notes):
            done = f", {state.counted} of them done" if state.counted else ""
            return "\n".join([f"study {state.created.name if state.created else ''}: {total} trials{done}", *notes])
        case StudyRevised():
            return revised_text(event)
        case GenerationBegan():
            return began_text(event, state)
        case BaselinesComputed():
            return _baseline_line(state)
        case TrialAsked(number=number, params=params):
            return f"trial {number}: new  {params_text(params)}"
        case TrialPlanned(number=number, answer=answer) if answer is not None:
            return _planned_line(state.trials[number])
        case AttemptPlaced(number=number, attempt=attempt, terms=terms) if attempt > 1:
            return f"trial {number}: {', '.join([f'attempt {attempt}', *terms])}"
        case DeviceSetAside(device=device, reason=reason):
            return f"{place_in_words(device)} is set aside: {reason}"
        case NodeJoined(node=node, host=host, cores=cores, devices=joined):
            return f"node {node} joined: {host}, {cores} core(s), {len(joined)} CUDA device(s)"
        case NodeLost(node=node, why=why, trials=trials):
            again = f"; {trials} trial(s) start again elsewhere" if trials else ""
            return f"node {node} is gone: {why}{again}"
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
            star = ""
            if state.best is not None and state.best.number == number:
                star = f"  ({'; '.join([_BEST, *flaws_of_best(state)])})"
            if state.front:
                star = "  (on the Pareto front)" if number in {trial.number for trial in state.front} else ""
            shown = f" {', '.join(map(number_text, (value, *also)))}" if value is not None else ""
            why = f"  {reason}" if reason else ""
            return f"trial {number}: {outcome}{shown}{why}{star}"
        case _:
            return None


def _baseline_line(state: StudyState) -> str | None:
    """Return what the metric is worth without a model; None where no baseline has it."""
    strongest = strongest_baseline(state)
    if strongest is None:
        return None
    metric = state.goals[0].name
    return f"strongest baseline: {metric} {number_text(strongest.metrics[metric])}, {strongest.words}"


def _goals_text(point: MetricPoint, state: StudyState) -> str:
    """Return the values of the study's goals in one validation."""
    if state.created is None:
        return f"value {number_text(point.value)}"
    further = [f"{goal.name} {number_text(point.metrics.get(goal.name))}" for goal in state.created.also]
    return ", ".join([f"{state.created.metric} {number_text(point.value)}", *further])


def _planned_line(trial: TrialState) -> str | None:
    """Return the line of a planned trial; None for a refused one, whose end gets a line of its own."""
    plan = trial.plan
    if plan is None or plan.answer.verdict is VerdictKind.REFUSED:
        return None
    run_with = f"  {choice_text(plan.execution)}" if plan.execution is not None else ""
    return f"trial {trial.number}: plan {plan_text(plan)}{run_with}"


class LiveDisplay:
    """Shows the studies it observes, as a live panel or as lines.

    Each event has the line of :func:`event_line`; with a panel, these lines scroll by above it. Without a panel, a line
    on how far a trial or the study is comes about once a minute.

    Args:
        panel: The terminal to draw a panel on; None for lines on stderr.
        clock: Monotonic time in seconds.
        study: The state to show; by default a new one.
    """

    def __init__(
        self,
        panel: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        study: LiveStudy | None = None,
    ) -> None:
        self._clock = clock
        self._study = study or LiveStudy()
        self._position = ""
        self._title = ""
        self._last_progress_s: dict[int | None, float] = {None: clock()}
        # A thread of its own draws the panel, so what it reads from disk does not delay the study.
        self._lock = threading.Lock()
        self._live = None
        if panel is not None:
            self._live = Live(console=panel, refresh_per_second=_REFRESH_PER_S, get_renderable=self.render)

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Show the panel, if there is one, while the block runs."""
        with self._live or nullcontext():
            yield

    def on_turn(self, turn: Turn) -> None:
        """Forget the study before this one, and name this one."""
        with self._lock:
            self._study = LiveStudy()
            self._position = f"{turn.number} of {turn.of}"
            self._title = f"study {self._position}: {turn.name}"
        self._last_progress_s = {None: self._clock()}
        if self._live is None:
            self._print(self._title)

    def on_end(self, run: StudyRun) -> None:
        """Print how one of several studies ended."""
        self._print(f"{self._title}: {run_text(run)}", "green" if run.status is ExitStatus.DONE else "red")

    def on_open(self, layout: StudyLayout) -> None:
        """Learn where the folders of the trials are."""
        with self._lock:
            self._study.on_open(layout)

    def on_event(self, event: Event, state: StudyState) -> None:
        """Update the panel, and print the event's line."""
        with self._lock:
            self._study.on_event(event, state)
        line = event_line(event, state)
        if line is not None:
            is_best = line.endswith((f"({_BEST})", "(on the Pareto front)"))
            self._print(line, "bold green" if is_best else _line_style(event))
        match event:
            case AttemptPlaced(number=number):
                self._last_progress_s[number] = self._clock()
            case TrialFinished(number=number):
                self._last_progress_s.pop(number, None)
                if self._is_due(None):
                    self._print(study_progress_line(self._study.view(), self._position))
            case _:
                pass

    def on_message(self, number: int, message: Message) -> None:
        """Update a trial's row; print its notes, and its progress where that is due."""
        with self._lock:
            self._study.on_message(number, message)
        if isinstance(message, Note):
            self._print(f"trial {number}: {message.text}")
        elif isinstance(message, Progress) and number in self._last_progress_s and self._is_due(number):
            view = self._study.view()
            for trial in view.trials:
                if trial.number == number:
                    self._print(trial_progress_line(trial, view.goals))

    def on_note(self, text: str) -> None:
        """Show what the control process does."""
        with self._lock:
            self._study.on_note(text)
        if self._live is None:
            self._print(text)

    def render(self) -> RenderableType:
        """Return the panel as it is now."""
        with self._lock:
            return StudyPanel(self._study.view(), self._title)

    def _is_due(self, number: int | None) -> bool:
        """Whether a progress line of a trial (None: of the study) is due now; if so, the wait begins anew."""
        now_s = self._clock()
        if self._live is not None or now_s - self._last_progress_s[number] < _PROGRESS_EVERY_S:
            return False
        self._last_progress_s[number] = now_s
        return True

    def _print(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._live.console.print(Text(line, style=style))
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


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
def watching(*, quiet: bool) -> Generator[LiveDisplay | None, None, None]:
    """Provide the display that fits stderr while the block runs; None if ``quiet``."""
    if quiet:
        yield None
        return
    out = console(stderr=True)
    display = LiveDisplay(out if out.is_terminal and not out.is_dumb_terminal else None)
    with display.shown():
        yield display


_EVERY_S = 1.0
_LINES_EVERY_S = 30.0


def watch(
    follower: StudyFollower,
    *,
    out: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a study until no process runs it any more. Ctrl-C ends the watching, not the study.

    Args:
        follower: Reads the study.
        out: Where to draw the panel; by default stdout, as lines where that is no terminal.
        sleep: Waits for a number of seconds.
        clock: Monotonic time in seconds.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    out = out or console()
    readings = follower.readings(_EVERY_S, sleep)
    if out.is_terminal and not out.is_dumb_terminal:
        with Live(_watched_panel(next(readings)), console=out, auto_refresh=False) as live:
            for watched in readings:
                live.update(_watched_panel(watched), refresh=True)
        return
    last_s: float | None = None
    for watched in readings:
        if last_s is None or not watched.running or clock() - last_s >= _LINES_EVERY_S:
            last_s = clock()
            show(document_of(watched))
            sys.stdout.flush()


def _watched_panel(watched: Watched) -> StudyPanel:
    return StudyPanel(watched.study, footer=watched_lines(watched))
