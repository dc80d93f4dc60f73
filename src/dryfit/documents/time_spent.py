"""Where a study's time went: time per slot and session, from the ledger and the phases in trials' messages."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from dryfit.documents.document import duration_text
from dryfit.documents.pages import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, Section, axis, bars
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptState, SessionState
from dryfit.settings.text import Table
from dryfit.settings.wire import Phase


class Spent(StrEnum):
    """What a slot did. A slot is room for one trial: a session has as many as may run side by side."""

    PREPARING = "before the first trial: data, baselines, measurement"
    STARTING = "starting processes"
    LOADING = "loading data and model"
    TRAINING = "training"
    VALIDATING = "validating"
    WORKING = "training and validating, not told apart"
    SAVING = "saving, and waiting for verdicts"
    ENDING = "ending processes"
    IDLE = "idle slots"


WORK: Final = frozenset({Spent.TRAINING, Spent.VALIDATING, Spent.WORKING})
"""What a trial is for: steps (forward, backward, update, batches), and the validations that the study file asks for.

Any other tool would have to do these too; all else is the price of the search's process.
"""

_PHASES: Final = {
    "load": Spent.LOADING,
    "train": Spent.TRAINING,
    "evaluate": Spent.VALIDATING,
    "save": Spent.SAVING,
}


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The slot-seconds of a study, all sessions together; each second of each slot is in one of them."""

    seconds: Mapping[Spent, float]

    @property
    def total_s(self) -> float:
        """All of them."""
        return sum(self.seconds.values())

    def share(self, *kinds: Spent) -> float:
        """Return the share of some kinds; 0 where no time has passed."""
        return sum(self.seconds[kind] for kind in kinds) / self.total_s if self.total_s else 0.0

    @property
    def beside_work(self) -> float:
        """The share that is no trial's own work."""
        return 1 - self.share(*WORK) if self.total_s else 0.0


def time_spent(state: StudyState, phases: Callable[[AttemptState], Sequence[Phase]]) -> TimeSpent:
    """Divide the time of a study's sessions.

    Args:
        state: The study's state.
        phases: Returns what an attempt's process has told of its phases; nothing where that is gone, or where it is a
            user's own code.
    """
    seconds = dict.fromkeys(Spent, 0.0)
    steps = {trial.number: trial.steps for trial in state.trials if trial.outcome is not None}
    for session in state.sessions:
        own = [attempt for attempt in state.attempts if attempt.session is session]
        before_s, slots = _before(session, own), _slots(session, own)
        seconds[Spent.PREPARING] += slots * before_s
        busy_s = 0.0
        for attempt in own:
            for kind, spent_s in _of_attempt(attempt, phases(attempt), steps.get(attempt.trial)):
                seconds[kind] += spent_s
                busy_s += spent_s
        seconds[Spent.IDLE] += max(0.0, slots * (session.work_s - before_s) - busy_s)
    return TimeSpent(seconds)


def _before(session: SessionState, own: Sequence[AttemptState]) -> float:
    first_s = min((attempt.placed_at_s for attempt in own), default=session.last_at_s)
    return max(0.0, min(first_s, session.last_at_s) - session.opened_at_s)


def _slots(session: SessionState, own: Sequence[AttemptState]) -> int:
    """Return how many trials the session ran side by side: as it said, or more where several machines did."""
    said = session.side_by_side if session.side_by_side is not None else session.opened.parallel
    changes = sorted(
        change for one in own if one.end_s > one.placed_at_s for change in ((one.placed_at_s, 1), (one.end_s, -1))
    )
    most = now = 0
    for _, change in changes:  # at one moment ends come first
        now += change
        most = max(most, now)
    return max(said, most, 1)


def _of_attempt(attempt: AttemptState, told: Sequence[Phase], steps: int | None) -> list[tuple[Spent, float]]:
    """Divide an attempt's time from its placement to its end."""
    life_s = attempt.end_s - attempt.placed_at_s

    def at(after_ms: float | None) -> float:
        return life_s if after_ms is None else min(max(after_ms / 1000, 0.0), life_s)

    marks: list[tuple[float, Spent]] = [(0.0, Spent.STARTING)]
    timed = [phase for phase in told if phase.after_ms is not None]
    if attempt.overhead_ms is not None:
        marks.append((at(attempt.overhead_ms), Spent.LOADING))
        if not timed:
            begun_ms = attempt.first_step_ms if attempt.first_step_ms is not None else attempt.overhead_ms
            marks.append((at(begun_ms), Spent.WORKING))
    marks += [(at(phase.after_ms), _PHASES[phase.name]) for phase in timed]
    last = timed[-1] if timed else None
    if last is not None and last.name == "train" and steps is not None and last.step >= steps > 0:
        marks[-1] = marks[-1][0], Spent.ENDING  # back from the last validation, it has nothing more to train
    marks.append((life_s, Spent.ENDING))
    return [(kind, max(0.0, until_s - since_s)) for (since_s, kind), (until_s, _) in pairwise(marks)]


_COLORS: Final = {
    Spent.TRAINING: BLUE,
    Spent.VALIDATING: GREEN,
    Spent.WORKING: BLUE,
    Spent.PREPARING: ORANGE,
    Spent.STARTING: RED,
    Spent.LOADING: PURPLE,
    Spent.SAVING: "#b8860b",
    Spent.ENDING: "#5b6570",
    Spent.IDLE: GREY,
}


def with_time(section: Section, spent: TimeSpent) -> Section:
    """Return the section of a timeline with where the time went added, if any was spent."""
    if not spent.total_s:
        return section
    text = (
        f"The second bar is the time of all slots together, {duration_text(spent.total_s)}: {spent.beside_work:.1%} of"
        " it is neither training nor validating. A slot is room for one trial."
    )
    return replace(
        section,
        texts=(*section.texts, text),
        charts=(*section.charts, spent_figure(spent)),
        tables=(("Where the time went", spent_table(spent)), *section.tables),
    )


def spent_table(spent: TimeSpent) -> Table:
    """Return a row for each way in which time was spent, work first."""
    rows = [(kind, duration_text(spent.seconds[kind]), f"{spent.share(kind):.1%}") for kind in _kinds(spent)]
    return Table(("slots were", "time", "share"), tuple(rows))


def spent_figure(spent: TimeSpent) -> Figure:
    """Plot the same as one stacked bar."""
    data = [
        bars(
            [round(spent.seconds[kind], 3)],
            ["all slots"],
            hover="%{text}",
            color=_COLORS[kind],
            name=re.split("[:,]", kind)[0],
            text=[f"{kind}: {duration_text(spent.seconds[kind])} ({spent.share(kind):.1%})"],
            textposition="none",
        )
        for kind in _kinds(spent)
    ]
    layout: Figure = {
        "barmode": "stack",
        "xaxis": axis("seconds, of all slots together", rangemode="tozero"),
        "yaxis": {"type": "category", "automargin": True},
        "height": 300,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def _kinds(spent: TimeSpent) -> list[Spent]:
    """Return what took time: work first, then the most first."""
    found = [kind for kind in Spent if spent.seconds[kind] > 0]
    return sorted(found, key=lambda kind: (kind not in WORK, -spent.seconds[kind]))
