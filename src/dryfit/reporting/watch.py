"""A running study as a panel for a terminal of any width and as progress lines, also one that another process runs.

Both show a :class:`~dryfit.reporting.live.LiveView`.
"""

import math
import platform
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

from dryfit.core.settings.trial import Outcome
from dryfit.core.sharding.device_groups import HERE, place_in_words
from dryfit.core.text.table import number_text
from dryfit.core.text.tail import LineTail
from dryfit.core.text.units import gib
from dryfit.core.text.words import few
from dryfit.core.wire import MESSAGES_FILE, Message, Progress
from dryfit.reporting.document import Document, document_of, duration_text
from dryfit.reporting.live import LiveStudy, LiveView, TrialView, Vitals, read_vitals
from dryfit.reporting.plans import totals_text
from dryfit.reporting.summary import StudySummary, summarise
from dryfit.reporting.troubles import trouble_lines
from dryfit.runtime.children.result_reading import parse_messages
from dryfit.store.layout import StudyLayout
from dryfit.store.ledger import LedgerTail
from dryfit.store.replay import StudyState
from dryfit.store.state import AttemptEnd, AttemptState, SessionState, TrialState

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
        here = bool(self._state.sessions) and self._state.sessions[-1].host == self._host
        return read_vitals(folder, pid if here else None, now_s)

    def _alive(self, session: SessionState) -> bool:
        """Whether the control process of a session lives; on another machine it does until it closes the session."""
        if session.closed is not None or session.host != self._host or session.pid is None:
            return session.closed is None
        with suppress(psutil.Error):
            process = psutil.Process(session.pid)
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
