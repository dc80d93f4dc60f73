"""A running study as a panel for a terminal of any width, and as progress lines for everything else.

Both show a :class:`~dryfit.reporting.terminal.live.LiveView`, whether this process runs the study or another does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from dryfit.core.settings.trial import Outcome
from dryfit.core.sharding.device_groups import HERE
from dryfit.core.text.units import gib
from dryfit.reporting.terminal.live import LiveView, TrialView
from dryfit.reporting.terminal.tables import duration_text, number_text

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
    """Return how far a trial is in one line; what is not known is left out."""
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
    """Return how far a study is in one line; ``position`` says which of several it is (``2 of 3``)."""
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
