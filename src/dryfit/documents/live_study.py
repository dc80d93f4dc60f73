"""A running study: present state and remaining time, as a panel or as progress lines."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from dryfit.documents.document import Document, document_of, duration_text
from dryfit.documents.plans import totals_text
from dryfit.documents.report_tables import goal_names, trouble_lines
from dryfit.documents.summary import StudySummary, summarise
from dryfit.documents.worth import flaws_of_best, strongest_baseline
from dryfit.ledger.events import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStarted,
    Event,
    SessionOpened,
    TrialAsked,
    TrialFinished,
)
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.ledger import LedgerTail
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptEnd, AttemptState, SessionState, TrialState
from dryfit.processes.attempt import parse_messages
from dryfit.settings.devices import HERE, node_of, place_in_words
from dryfit.settings.text import LineTail, few, gib, number_text
from dryfit.settings.trial import Outcome
from dryfit.settings.wire import BEAT_FILE, MESSAGES_FILE, Message, Phase, Progress

# Estimates of the time a trial and a study still need; None where too little has been observed.


_LEAST_STEPS = 2
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The progress of a running trial between two observations.

    Attributes:
        first_step: Steps done at the first observation of this process, those before its checkpoint included.
        step: Steps done now.
        total_steps: Steps of the whole trial; 0 if unknown.
        elapsed_s: Seconds between the observations, validations and checkpoints included.
    """

    first_step: int
    step: int
    total_steps: int
    elapsed_s: float

    @property
    def fraction(self) -> float:
        """The share of the trial that is done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A running trial, for the study's estimate.

    Attributes:
        elapsed_s: Seconds since its process was placed.
        pace: Its progress.
    """

    elapsed_s: float
    pace: Pace


def trial_left_s(pace: Pace) -> float | None:
    """Return the seconds to the trial's last step at its present pace, early stopping left aside."""
    done = pace.step - pace.first_step
    if pace.total_steps <= 0 or done < _LEAST_STEPS or pace.elapsed_s < _LEAST_S:
        return None
    return max(0, pace.total_steps - pace.step) * pace.elapsed_s / done


def expected_end(reached: float, ends: Sequence[float]) -> float:
    """Return the share of its steps after which a trial will end: the mean of the earlier ends beyond its own progress.

    Args:
        reached: The share it has done.
        ends: Shares after which earlier trials ended; below 1 for pruned and early-stopped ones.
    """
    return statistics.fmean([end for end in ends if end > reached] or [1.0])


def study_left_s(
    *,
    waiting: int,
    running: Sequence[Running],
    finished_s: Sequence[float],
    ends: Sequence[float] = (),
    parallel: int = 1,
) -> float | None:
    """Return the seconds to the end of a study whose further trials are like those before.

    Args:
        waiting: Number of trials without a process.
        running: Trials with a process.
        finished_s: Time of each finished trial, pruned and failed ones included.
        ends: As in :func:`expected_end`.
        parallel: Number of trials that run side by side.
    """
    lefts = [_expected_left_s(trial, ends) for trial in running]
    typical_s = _typical_s(running, lefts, finished_s)
    if typical_s is None and (waiting or None in lefts):
        return None
    guess_s = typical_s or 0.0
    known = [
        max(0.0, guess_s - trial.elapsed_s) if left is None else left
        for trial, left in zip(running, lefts, strict=True)
    ]
    work_s = sum(known) + waiting * guess_s
    # No schedule is shorter than the longest trial, or than all work divided by all slots.
    return max([work_s / max(1, parallel), guess_s if waiting else 0.0, *known])


def _expected_left_s(trial: Running, ends: Sequence[float]) -> float | None:
    left_s = trial_left_s(trial.pace)
    fraction = trial.pace.fraction
    if left_s is None or fraction >= 1:
        return left_s
    return left_s * (expected_end(fraction, ends) - fraction) / (1 - fraction)


def _typical_s(running: Sequence[Running], lefts: Sequence[float | None], finished_s: Sequence[float]) -> float | None:
    """Return the mean time of a trial: of the finished ones, else of the expected times of the running ones."""
    expected_s = [trial.elapsed_s + left for trial, left in zip(running, lefts, strict=True) if left is not None]
    times_s = finished_s or expected_s
    return statistics.fmean(times_s) if times_s else None


# The present state of a running study, kept up to date from its events and messages.
#
# :class:`LiveStudy` takes events and messages as they come, from an observer or from the study's files, and returns a
# :class:`LiveView`. It prints nothing.


PLANNING, WAITING, STARTING = "planning", "waiting", "starting"


@dataclass(frozen=True, slots=True)
class Vitals:
    """Host memory and heartbeat of a process; None where unknown.

    Attributes:
        rss_bytes: Resident host memory now.
        beat_age_s: Seconds since its last heartbeat.
    """

    rss_bytes: int | None = None
    beat_age_s: float | None = None


def read_vitals(folder: Path, pid: int | None, now_s: float) -> Vitals:
    """Read the vitals of an attempt's process: one ``stat`` of its heartbeat file, one query of the process.

    Args:
        folder: The folder of the attempt.
        pid: Its process id; None if unknown.
        now_s: Unix time.
    """
    rss_bytes, beat_age_s = None, None
    with suppress(OSError):
        beat_age_s = max(0.0, now_s - (folder / BEAT_FILE).stat().st_mtime)
    if pid is not None:
        with suppress(psutil.Error, OSError):  # gone meanwhile
            rss_bytes = int(psutil.Process(pid).memory_info().rss) or None  # 0: it has ended and was not reaped yet
    return Vitals(rss_bytes, beat_age_s)


@dataclass(frozen=True, slots=True)
class TrialView:
    """A trial in progress.

    Attributes:
        number: Its number.
        phase: ``planning``, ``waiting``, ``starting``, or the phase its process reports: load, train, evaluate, save.
        step: Optimizer steps done.
        total_steps: Steps of the whole trial; 0 if unknown.
        loss: The last reported training loss.
        goals: The value of each goal at the last validation; empty before the first.
        curve: The study's metric at each validation, earlier attempts included.
        device_bytes: Memory that it holds on its device; None if unknown.
        rss_bytes: Resident host memory of its process; None if unknown.
        beat_age_s: Seconds since its last heartbeat.
        left_s: Estimated seconds to its last step.
        node: The machine that it runs on.
    """

    number: int
    phase: str
    step: int
    total_steps: int
    loss: float | None
    goals: tuple[float | None, ...]
    curve: tuple[float, ...]
    device_bytes: int | None
    rss_bytes: int | None
    beat_age_s: float | None
    left_s: float | None
    node: str = HERE

    @property
    def memory_bytes(self) -> int | None:
        """Its memory on the device where that is known, else on the host."""
        return self.rss_bytes if self.device_bytes is None else self.device_bytes


@dataclass(frozen=True, slots=True)
class LiveView:
    """A running study.

    Attributes:
        goals: Names of the goals, the study's metric first.
        trials: The trials in progress, by number.
        total: Number of trials asked for.
        counted: Number of trials done.
        counts: Number of trials by outcome.
        elapsed_s: Seconds of work on the study, earlier sessions included.
        left_s: Estimated seconds to its end.
        best: Number of the best trial, and its value of the study's metric.
        baseline: The study's metric of the strongest baseline; None: not known.
        flaws: Why the best trial is worth nothing, as far as is known.
        front: Number of trials on the Pareto front; 0 with one goal.
        note: What the control process does at the moment.
    """

    goals: tuple[str, ...]
    trials: tuple[TrialView, ...]
    total: int
    counted: int
    counts: dict[Outcome, int]
    elapsed_s: float
    left_s: float | None
    best: tuple[int, float] | None
    baseline: float | None
    flaws: tuple[str, ...]
    front: int
    note: str


@dataclass(slots=True)
class _Live:
    """A trial's progress, as far as its process has reported it."""

    phase: str
    attempt: int = 0
    pid: int | None = None
    node: str = HERE
    placed_s: float | None = None
    loss: float | None = None
    device_bytes: int | None = None
    step: int = 0
    total_steps: int = 0
    first_step: int | None = None
    first_s: float = 0.0

    def pace(self, now_s: float) -> Pace:
        """Return its pace since its first progress message."""
        first = self.step if self.first_step is None else self.first_step
        return Pace(first, self.step, self.total_steps, now_s - self.first_s)


class LiveStudy:
    """Keeps the state of a running study from events and messages.

    Args:
        clock: Unix time in seconds.
        vitals: Reads the vitals of a process; see :func:`read_vitals`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        vitals: Callable[[Path, int | None, float], Vitals] = read_vitals,
    ) -> None:
        self._clock = clock
        self._vitals = vitals
        self._layout: StudyLayout | None = None
        self._state: StudyState | None = None
        self._trials: dict[int, _Live] = {}
        self._ends: list[float] = []
        self._finished_s: list[float] = []
        self._note = ""

    def on_open(self, layout: StudyLayout) -> None:
        """Learn the study's folder, from which vitals are read."""
        self._layout = layout

    def on_event(self, event: Event, state: StudyState) -> None:
        """Apply an event."""
        self._state = state
        match event:
            case SessionOpened():
                done = [trial for trial in state.present if trial.outcome is not None and trial.outcome.counts]
                self._finished_s = [trial.time_s for trial in done]
            case TrialAsked(number=number):
                self._trials[number] = _Live(WAITING)
            case AttemptPlaced(number=number, attempt=attempt, node=node):
                self._trials[number] = _Live(STARTING, attempt, placed_s=event.at, node=node)
                self._note = ""
            case AttemptStarted(number=number, pid=pid):
                if number not in self._trials:  # this session goes on with it
                    going_on = state.trials[number].attempts[-1]
                    self._trials[number] = _Live(
                        STARTING, going_on.number, placed_s=going_on.placed_at_s, node=node_of(going_on.place)
                    )
                self._trials[number].pid = pid
            case AttemptEnded(number=number) if number in self._trials:
                before = self._trials[number]
                self._trials[number] = _Live(WAITING, step=before.step, total_steps=before.total_steps)
            case TrialFinished():
                self._finish(event, state)
            case _:
                pass

    def on_message(self, number: int, message: Message) -> None:
        """Apply a message of a trial's process, or of its planner while the trial has no process."""
        trial = self._trials.get(number)
        if trial is None:
            return
        match message:
            case Phase(name=name):
                trial.phase = name if trial.attempt else PLANNING
            case Progress(step=step, total_steps=total_steps, loss=loss, device_bytes=device_bytes):
                trial.step, trial.total_steps, trial.loss, trial.device_bytes = step, total_steps, loss, device_bytes
                if trial.first_step is None:
                    trial.first_step, trial.first_s = step, self._clock()
            case _:
                pass

    def on_note(self, text: str) -> None:
        """Remember what the control process does."""
        self._note = text

    def view(self) -> LiveView:
        """Return the study as it is now."""
        now_s, state = self._clock(), self._state
        trials = tuple(self._trial_view(number, now_s) for number in sorted(self._trials))
        if state is None or not state.sessions:
            return LiveView((), trials, 0, 0, dict.fromkeys(Outcome, 0), 0.0, None, None, None, (), 0, self._note)
        best, baseline = state.best, strongest_baseline(state)
        return LiveView(
            goals=goal_names(state),
            trials=trials,
            total=state.sessions[-1].opened.total,
            counted=state.counted,
            counts=dict(state.counts),
            elapsed_s=state.wall_until_s(now_s),
            left_s=self._left_s(state, now_s),
            best=(best.number, best.value) if best is not None and best.value is not None else None,
            baseline=baseline.metrics[state.goals[0].name] if baseline is not None else None,
            flaws=flaws_of_best(state),
            front=len(state.front),
            note=self._note,
        )

    def _finish(self, event: TrialFinished, state: StudyState) -> None:
        """Remember how long the trial took, and after which share of its steps it ended."""
        live = self._trials.pop(event.number, None)
        if event.outcome.counts:
            self._finished_s.append(state.trials[event.number].time_s)
        if live is not None and live.total_steps and event.outcome in (Outcome.COMPLETE, Outcome.PRUNED):
            self._ends.append(min(1.0, event.steps / live.total_steps))

    def _left_s(self, state: StudyState, now_s: float) -> float | None:
        running = [
            Running(now_s - trial.placed_s, trial.pace(now_s))
            for trial in self._trials.values()
            if trial.placed_s is not None
        ]
        session = state.sessions[-1]
        return study_left_s(
            waiting=max(0, session.opened.total - state.counted - len(running)),
            running=running,
            finished_s=self._finished_s,
            ends=self._ends,
            parallel=session.side_by_side or session.opened.parallel,
        )

    def _trial_view(self, number: int, now_s: float) -> TrialView:
        live, state = self._trials[number], self._state
        reports = state.trials[number].reports if state is not None else []
        vitals = Vitals()
        if self._layout is not None and live.attempt:
            pid = live.pid if live.node == HERE else None  # of another machine: here it is nobody, or somebody else
            vitals = self._vitals(self._layout.trial(number).attempt(live.attempt), pid, now_s)
        last, names = (reports[-1] if reports else None), goal_names(state) if state is not None else ()
        return TrialView(
            number=number,
            phase=live.phase,
            step=live.step,
            total_steps=live.total_steps,
            loss=live.loss,
            goals=(last.value, *(last.metrics.get(name) for name in names[1:])) if last is not None else (),
            curve=tuple(point.value for point in reports),
            device_bytes=live.device_bytes,
            rss_bytes=vitals.rss_bytes,
            beat_age_s=vitals.beat_age_s,
            left_s=trial_left_s(live.pace(now_s)),
            node=live.node,
        )


# A running study as a panel for a terminal of any width and as progress lines, also one that another process runs.
#
# Both show a :class:`~dryfit.documents.live_study.LiveView`.


_MOST_ROWS = 12
_CURVE_CELLS = 10
_GAP = 2
_OLD_BEAT_S = 60.0

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_NO_NUMBER = "?"

_PHASE_STYLES = {"train": "green", "evaluate": "cyan", "save": "cyan", "planning": "magenta", "waiting": "dim"}


def remaining_text(seconds: float) -> str:
    """Return a remaining time, no more precise than the estimate is."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def trial_progress_line(trial: TrialView, goals: Sequence[str]) -> str:
    """Return a trial's progress in one line; unknown parts are left out."""
    parts = [trial.phase]
    if trial.node != HERE:
        parts.append(f"on {trial.node}")
    if trial.total_steps:
        parts.append(f"step {trial.step}/{trial.total_steps} ({_percent(trial)} %)")
    if trial.loss is not None:
        parts.append(f"loss {trial.loss:.4f}")
    parts += [f"{name} {number_text(value)}" for name, value in zip(goals, trial.goals, strict=False)]
    if trial.memory_bytes is not None:
        parts.append(f"memory {gib(trial.memory_bytes)}")
    if trial.beat_age_s is not None:
        parts.append(f"beat {trial.beat_age_s:.1f} s ago")
    if trial.left_s is not None:
        parts.append(f"about {remaining_text(trial.left_s)} left")
    return f"trial {trial.number}: {', '.join(parts)}"


def study_progress_line(view: LiveView, position: str = "") -> str:
    """Return a study's progress in one line; ``position`` is its place among several (``2 of 3``)."""
    return f"study{position and ' '}{position}: {', '.join(_study_parts(view))}"


def _study_parts(view: LiveView) -> list[str]:
    counts = [f"{view.counts[outcome]} {outcome}" for outcome in Outcome if view.counts[outcome]]
    parts = [f"{view.counted}/{view.total} trials" + (f" ({', '.join(counts)})" if counts else "")]
    if view.front:
        parts.append(f"{view.front} on the Pareto front")
    elif view.best is not None:
        number, value = view.best
        baseline = [f"baseline {number_text(view.baseline)}"] if view.baseline is not None else []
        beside = ", ".join([f"trial {number}", *(view.flaws or baseline)])
        parts.append(f"best {view.goals[0]} {number_text(value)} ({beside})")
    parts.append(duration_text(view.elapsed_s))
    if view.left_s is not None:
        parts.append(f"about {remaining_text(view.left_s)} left")
    return parts


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the panel: its head and a cell for each trial.

    Attributes:
        rank: On a narrow terminal, the columns with the highest rank are left out first; 0 always stays.
    """

    head: str
    cells: tuple[Text, ...]
    rank: int = 0
    right: bool = True

    @property
    def width(self) -> int:
        """Return its width in terminal cells."""
        return max([cell_len(self.head), *(cell.cell_len for cell in self.cells)])

    @property
    def empty(self) -> bool:
        """Whether all its cells are empty."""
        return not any(cell.plain for cell in self.cells)


@dataclass(frozen=True, slots=True)
class StudyPanel:
    """Draws a study: a row for each trial in progress, then how far the study is.

    Attributes:
        title: Which of several studies this is; empty for a single one.
        footer: Further lines below, each cut to the width.
    """

    view: LiveView
    title: str = ""
    footer: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel in the available width."""
        shown = self.view.trials[:_MOST_ROWS]
        if shown:
            yield _table(_fitting(_columns(shown, self.view.goals, plain=options.ascii_only), options.max_width))
        if len(self.view.trials) > len(shown):
            yield _truncated(Text(f"and {len(self.view.trials) - len(shown)} more trials", style="dim"), options)
        if self.view.total or self.title:
            parts = [self.title] if self.title else []
            parts += _study_parts(self.view) if self.view.total else []
            line = Text("  |  ".join(parts), style="bold")
            yield from line.wrap(console, options.max_width)
        if self.view.note:
            yield _truncated(Text(self.view.note, style="dim"), options)
        for line in self.footer:
            yield _truncated(Text(line), options)


def _truncated(text: Text, options: ConsoleOptions) -> Text:
    text.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
    return text


def _columns(trials: Sequence[TrialView], goals: Sequence[str], *, plain: bool) -> list[_Column]:
    columns = [
        _Column("trial", tuple(Text(str(trial.number), style="bold") for trial in trials)),
        _Column("phase", tuple(Text(trial.phase, _PHASE_STYLES.get(trial.phase, "")) for trial in trials), right=False),
        _Column("node", _cells("" if trial.node == HERE else trial.node for trial in trials), 3, right=False),
        _Column("step", _cells(_step(trial) for trial in trials)),
        _Column("done", _cells(f"{_percent(trial)} %" if trial.total_steps else "" for trial in trials), 5),
        _Column("loss", _cells("" if trial.loss is None else f"{trial.loss:.4f}" for trial in trials), 3),
    ]
    for index, name in enumerate(goals):
        values = [trial.goals[index] if index < len(trial.goals) else None for trial in trials]
        cells = _cells("" if value is None else number_text(value) for value in values)
        columns.append(_Column(name, cells, rank=7 if index else 0))
    curves = (Text(sparkline(trial.curve, _CURVE_CELLS, plain=plain), style="cyan") for trial in trials)
    return [
        *columns,
        _Column("curve", tuple(curves), 4, right=False),
        _Column("memory", _cells("" if trial.memory_bytes is None else gib(trial.memory_bytes) for trial in trials), 6),
        _Column("beat", tuple(_beat(trial) for trial in trials), 2),
        _Column("left", _cells("" if trial.left_s is None else remaining_text(trial.left_s) for trial in trials), 1),
    ]


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the columns that are not empty and fit; those of the highest rank are left out first."""
    chosen = [column for column in columns if not column.empty]
    while sum(column.width + _GAP for column in chosen) - _GAP > width and any(column.rank for column in chosen):
        least = max(chosen, key=lambda column: column.rank)
        chosen = [column for column in chosen if column is not least]
    return chosen


def _table(columns: Sequence[_Column]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    for column in columns:
        table.add_column(column.head, justify="right" if column.right else "left", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _cells(texts: Iterable[str]) -> tuple[Text, ...]:
    return tuple(Text(text) for text in texts)


def _step(trial: TrialView) -> str:
    return f"{trial.step}/{trial.total_steps}" if trial.total_steps else ""


def _percent(trial: TrialView) -> int:
    return 100 * trial.step // trial.total_steps


def _beat(trial: TrialView) -> Text:
    age_s = trial.beat_age_s
    if age_s is None:
        return Text()
    return Text(
        f"{age_s:.1f} s" if age_s < _OLD_BEAT_S else remaining_text(age_s), "red" if age_s >= _OLD_BEAT_S else ""
    )


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """Draw the last values, scaled from the lowest to the highest; values that are not finite are question marks.

    Args:
        values: The values, in order.
        width: Maximum number of characters; earlier values are left out.
        plain: Whether to use ASCII only.
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    levels = _ASCII if plain else _BLOCKS
    if not finite:
        return _NO_NUMBER * len(shown)
    low, high = min(finite), max(finite)
    return "".join(_level(value, low, high, levels) if math.isfinite(value) else _NO_NUMBER for value in shown)


def _level(value: float, low: float, high: float, levels: str) -> str:
    if high == low:
        return levels[len(levels) // 2]
    # Halved first: the difference of two large numbers may be infinite.
    part = (value / 2 - low / 2) / (high / 2 - low / 2)
    return levels[min(len(levels) - 1, int(part * len(levels)))]


_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchedMemory:
    """Memory of the trials that run on one device, or on the host.

    Attributes:
        device: Name of the device; None for the host.
        trials: Numbers of the trials that run there.
        planned_bytes: Sum of their planned memory; None unless it is known for all of them.
        observed_bytes: Sum of the memory they hold now; None if it is known for none of them.
        capacity_bytes: Memory of the device.
    """

    device: str | None
    trials: tuple[int, ...]
    planned_bytes: int | None
    observed_bytes: int | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Watched:
    """One reading of a study.

    Attributes:
        running: Whether a process runs it.
        study: Its trials in progress, and how far it is.
        summary: Its counts, plans and failures; None before its first event.
        memory: Memory of the running trials, by device.
    """

    running: bool
    study: LiveView
    summary: StudySummary | None
    memory: tuple[WatchedMemory, ...]


class StudyFollower:
    """Reads the files of a study as they grow. It writes nothing and takes no lock.

    Args:
        layout: The files of the study.
        clock: Unix time in seconds.
        host: Name of this machine.
    """

    def __init__(self, layout: StudyLayout, clock: Callable[[], float] = time.time, host: str | None = None) -> None:
        self._layout = layout
        self._clock = clock
        self._host = platform.node() if host is None else host
        self._begin()

    def _begin(self) -> None:
        self._ledger = LedgerTail(self._layout.ledger)
        self._state = StudyState()
        self._live = LiveStudy(self._clock, self._vitals)
        self._live.on_open(self._layout)
        self._messages: dict[tuple[int, int], LineTail] = {}
        self._summary: StudySummary | None = None

    def readings(self, every_s: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[Watched]:
        """Read the study again and again; the last reading is the first that finds no process running it."""
        while True:
            watched = self.look()
            yield watched
            if not watched.running:
                return
            sleep(every_s)

    def look(self) -> Watched:
        """Read what is new, and return the study as it is now.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        if self._ledger.began_anew():
            self._begin()
        events = self._ledger.read()
        for event in events:
            self._state.apply(event)
            self._live.on_event(event, self._state)
        if events and self._state.created is not None:
            self._summary = summarise(self._state)
        running = self._running()
        self._read_messages(running)
        view = self._live.view()
        return Watched(
            running=bool(self._state.sessions) and self._alive(self._state.sessions[-1]),
            study=view,
            summary=self._summary,
            memory=self._memory(running, {trial.number: trial for trial in view.trials}),
        )

    def _vitals(self, folder: Path, pid: int | None, now_s: float) -> Vitals:
        """Read the vitals of a process; on another machine, only those that its folder has."""
        here = bool(self._state.sessions) and self._state.sessions[-1].opened.host == self._host
        return read_vitals(folder, pid if here else None, now_s)

    def _alive(self, session: SessionState) -> bool:
        """Whether the control process of a session lives; on another machine it does until it closes the session."""
        if session.closed is not None or session.opened.host != self._host:
            return session.closed is None
        with suppress(psutil.Error):
            process = psutil.Process(session.opened.pid)
            # The process id may have been reused since.
            is_same = process.create_time() <= session.opened_at_s + _CLOCK_SLACK_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _running(self) -> list[tuple[TrialState, AttemptState]]:
        newest = [(trial, trial.attempts[-1]) for trial in self._state.open_trials if trial.attempts]
        return [(trial, attempt) for trial, attempt in newest if attempt.end is AttemptEnd.RUNNING]

    def _read_messages(self, running: list[tuple[TrialState, AttemptState]]) -> None:
        keys = {(trial.number, attempt.number) for trial, attempt in running}
        self._messages = {key: tail for key, tail in self._messages.items() if key in keys}
        for number, attempt in sorted(keys):
            path = self._layout.trial(number).attempt(attempt) / MESSAGES_FILE
            tail = self._messages.setdefault((number, attempt), LineTail(path))
            for message in _without_old_progress(parse_messages(list(tail.read()))):
                self._live.on_message(number, message)

    def _memory(
        self, running: list[tuple[TrialState, AttemptState]], views: Mapping[int, TrialView]
    ) -> tuple[WatchedMemory, ...]:
        by_device: dict[str | None, list[tuple[TrialState, AttemptState]]] = {}
        for trial, attempt in running:
            by_device.setdefault(attempt.device, []).append((trial, attempt))
        spec = self._state.resolved.device_spec if self._state.resolved is not None else None
        memory: list[WatchedMemory] = []
        for device in sorted(by_device, key=str):
            planned = [_planned_bytes(trial, attempt) for trial, attempt in by_device[device]]
            trials = [views[trial.number] for trial, _ in by_device[device]]
            # The host memory of a trial on a device says nothing of what it holds on that device.
            observed = [trial.memory_bytes if device is None else trial.device_bytes for trial in trials]
            known = [size_bytes for size_bytes in observed if size_bytes is not None]
            memory.append(
                WatchedMemory(
                    device=device,
                    trials=tuple(trial.number for trial in trials),
                    planned_bytes=sum(size_bytes or 0 for size_bytes in planned) if None not in planned else None,
                    observed_bytes=sum(known) if known else None,
                    capacity_bytes=spec.capacity_bytes if spec is not None and device is not None else None,
                )
            )
        return tuple(memory)


def _without_old_progress(messages: list[Message]) -> list[Message]:
    """Leave out all progress but the last: read at once, older progress would be taken for speed."""
    last = next((message for message in reversed(messages) if isinstance(message, Progress)), None)
    return [message for message in messages if not isinstance(message, Progress) or message is last]


def _planned_bytes(trial: TrialState, attempt: AttemptState) -> int | None:
    """Return the memory an attempt is counted with; before it is counted, that of its plan."""
    if attempt.needs_bytes is not None:
        return attempt.needs_bytes
    plan = trial.plan
    if plan is None or plan.runs_otherwise or plan.answer.memory is None:
        return None
    return plan.answer.memory.required_bytes


@document_of.register
def _(watched: Watched) -> Document:
    view = watched.study
    trials = (trial_progress_line(trial, view.goals) for trial in view.trials)
    return Document((study_progress_line(view), *trials, *watched_lines(watched)))


def watched_lines(watched: Watched) -> list[str]:
    """Return the lines below the trials in progress: memory, plans and failures."""
    summary = watched.summary
    lines = [_memory_line(memory) for memory in watched.memory]
    if summary is None:
        return [*lines, "no run of this study has begun yet"]
    if summary.plans is not None:
        lines.append(f"plans: {totals_text(summary.plans)}")
    lines += trouble_lines(summary.troubles)
    return lines if watched.running else [*lines, "nobody runs this study now"]


def _memory_line(memory: WatchedMemory) -> str:
    place = "host" if memory.device is None else place_in_words(memory.device)
    trials = few((str(number) for number in memory.trials), 8)
    parts = [
        f"{gib(size_bytes)} {what}"
        for size_bytes, what in ((memory.planned_bytes, "planned"), (memory.observed_bytes, "observed"))
        if size_bytes is not None
    ]
    parts += [f"of {gib(memory.capacity_bytes)}"] if memory.capacity_bytes is not None else []
    return f"{place}: trial(s) {trials}: {', '.join(parts) or 'memory unknown'}"
