"""How far a study is, or several: its trials, machines, and the best so far."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from pydantic import Field

from dryfit.documents.comparison import Comparison, read_comparison
from dryfit.documents.document import (
    Answer,
    Block,
    Document,
    Line,
    View,
    counted,
    document_of,
    duration_text,
    measured_text,
    params_text,
    time_text,
)
from dryfit.documents.plans import Plans, plan_totals, totals_text
from dryfit.documents.report_tables import (
    Troubles,
    file_locations,
    front_table,
    outcomes_table,
    trials_table,
    trouble_lines,
    troubles_of,
    values_text,
)
from dryfit.documents.worth import Standing, collapses_of, judgement, standing_of, strongest_baseline
from dryfit.ledger.events import Compatibility, GenerationBegan, StudyRevised
from dryfit.ledger.folder import StudyLayout
from dryfit.ledger.replay import StudyState
from dryfit.ledger.state import AttemptEnd, SessionState
from dryfit.search.followers import followed_bytes, said_in, trouble_of
from dryfit.settings.devices import node_of
from dryfit.settings.errors import ExitStatus
from dryfit.settings.memory_terms import DeviceSpec
from dryfit.settings.task_facts import task_word
from dryfit.settings.text import Shown, Table, gib, number_text
from dryfit.settings.trial import Outcome, Scalar, best_first
from dryfit.tasks.row_metrics import Interval

# The machines of a study from its ledger: hardware, running trials, number of losses.


class NodeView(View):
    """One machine with an agent.

    Attributes:
        specs: What each of its devices is; None: not known.
        trials: The trials that run there.
        attempts: How many attempts at trials ran there so far.
        time_s: How long they took, together.
        losses: How many times it was given up.
        lost: Why it is not there any more; empty: it is.
        heard_s: How long ago it was heard last, in seconds; None: it is not there any more, or nobody has looked.
    """

    node: str
    host: str
    pid: int
    cores: int
    host_bytes: int
    devices: tuple[str, ...]
    specs: tuple[DeviceSpec | None, ...] = ()
    epoch: int
    trials: tuple[int, ...]
    attempts: int
    time_s: float
    losses: int
    lost: str
    heard_s: float | None = None


class NodesView(Answer):
    """The machines that joined in the last session; whether it is still going on, as far as the ledger says."""

    running: bool
    nodes: tuple[NodeView, ...]


class LogEnd(View):
    """The end of one log."""

    name: str
    file: str
    text: str


class NodeLogs(Answer):
    """Log ends of a machine: its agent, its fork server, and the trials that run there."""

    node: str
    logs: tuple[LogEnd, ...]


def nodes_view(state: StudyState, heard_s: Callable[[str], float | None] = lambda _node: None) -> NodesView:
    """Return the machines of a study's last session, apart from that of its control process.

    Args:
        state: The study.
        heard_s: Says how long ago a node was heard last, in seconds, by its name; None where that is not known.
    """
    sessions = state.sessions[-1:]
    views = (
        one if one.lost else one.model_copy(update={"heard_s": heard_s(one.node)}) for one in _views(state, sessions)
    )
    return NodesView(running=any(one.is_open for one in sessions), nodes=tuple(views))


def nodes_ever(state: StudyState) -> tuple[tuple[str, Table], ...]:
    """Return the table of all machines that ever joined, with its heading; nothing where none did."""
    nodes = _views(state, state.sessions)
    return (("Machines that joined", _table(nodes)),) if nodes else ()


@document_of.register
def _(logs: NodeLogs) -> Document:
    """Return the ends of a machine's logs, one below the other."""
    parts = (("", f"== {log.name}: {log.file}", log.text.rstrip() or "(nothing)") for log in logs.logs)
    return Document(tuple(line for part in parts for text in part for line in text.split("\n"))[1:])


@document_of.register
def _(view: NodesView) -> Document:
    return Document((_table(view.nodes) if view.nodes else "no other machine has joined in its last session",))


def _views(state: StudyState, sessions: Sequence[SessionState]) -> tuple[NodeView, ...]:
    """Return the machines of some sessions, each as it was last, with all that it did in them."""
    counted = {id(session) for session in sessions}
    attempts = [one for trial in state.trials for one in trial.attempts if id(one.session) in counted]
    last = {name: (session, node) for session in sessions for name, node in session.nodes.items()}
    views: list[NodeView] = []
    for name, (session, node) in last.items():
        own = [one for one in attempts if node_of(one.place) == name]
        views.append(
            NodeView.of(
                node.joined,
                node=name,
                trials=tuple(one.trial for one in own if one.end is AttemptEnd.RUNNING),
                attempts=len(own),
                time_s=round(sum(one.time_s for one in own), 3),
                losses=sum(one.nodes[name].losses for one in sessions if name in one.nodes),
                lost=node.lost or ("" if session.is_open else "the session is over"),
            )
        )
    return tuple(views)


def _table(nodes: Sequence[NodeView]) -> Table:
    heading = ("node", "host", "cores", "memory", "devices", "trials now", "attempts", "time", "losses", "state")
    rows = [
        (
            node.node,
            node.host,
            str(node.cores),
            gib(node.host_bytes),
            _devices_text(node),
            " ".join(map(str, node.trials)) or "none",
            str(node.attempts),
            duration_text(node.time_s),
            str(node.losses),
            node.lost or ("joined" if node.heard_s is None else f"joined, heard {node.heard_s:.0f} s ago"),
        )
        for node in nodes
    ]
    return Table(heading, tuple(rows))


def _devices_text(node: NodeView) -> str:
    """Return a machine's devices by name, and what they are: ``0,1: 2 x NVIDIA H200, 139.7 GiB``."""
    counts = Counter(f"{spec.name}, {gib(spec.capacity_bytes)}" for spec in node.specs if spec is not None)
    kinds = "; ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items())
    return ": ".join(part for part in (",".join(node.devices), kinds) if part) or "none"


# Progress of one study or several: the output of ``status`` and ``tune``.


class TrialCounts(View):
    """Number of trials by outcome; ``total`` is the number asked for."""

    complete: int
    pruned: int
    refused: int
    failed: int
    cancelled: int
    running: int
    total: int


class BestTrial(View):
    """The best complete trial."""

    number: int
    value: float
    spread: float | None = Field(description="sample standard deviation of its folds; null without folds")
    folds: tuple[float, ...] = Field(description="what each of its folds has come to, in order")
    params: dict[str, Scalar]
    collapsed: str | None = Field(description="in words how it gave all rows the same answer; null: it did not")


class BaselinesView(View):
    """What the metric is worth without a model, and whether the best trial is better."""

    values: dict[str, float] = Field(description="the study's metric of each baseline")
    words: dict[str, str] = Field(description="what each baseline answers")
    notes: tuple[str, ...] = Field(description="baselines that are missing, and why")
    strongest: str | None = Field(description="the best of them by the study's metric")
    beaten: bool | None = Field(description="whether the best trial's value is better; null: there is none")
    difference: Interval | None = Field(description="best trial minus strongest baseline, on the rows both have")


class GoalView(View):
    """One goal of a study."""

    metric: str
    direction: str


class ParetoTrial(View):
    """A trial of the Pareto front; its values are in the order of the goals."""

    number: int
    values: tuple[float, ...]
    spreads: tuple[float, ...] = Field(description="of its folds, in the order of the goals; empty without folds")
    params: dict[str, Scalar]


class Overhead(View):
    """Milliseconds from the placement of an attempt to the first line of its process; None without attempts."""

    median: float | None
    p95: float | None


class GenerationView(View):
    """The present generation, which the counts, the best trial and the front belong to."""

    number: int
    began_at_s: float = Field(description="Unix time")
    reasons: tuple[str, ...] = Field(description="why the one before could not go on")
    mirror: str = Field(description="what it is called in the Optuna mirror")
    earlier: int = Field(description="trials of earlier generations; they are kept")
    used: int = Field(description="those of them that samplers and pruners learn from")


class TrackerView(View):
    """How far one entry of `study.track` is."""

    entry: str
    behind_bytes: int = Field(description="of the ledger, that the tracker lacks or is being given")
    failing_since_s: float | None = None
    error: str | None = None


class MirrorTrouble(View):
    """Since when the Optuna mirror cannot be written, and why."""

    since_s: float = Field(description="Unix time")
    error: str


class NodeCounts(View):
    """How many machines with agents a running study has, and how many it has lost."""

    joined: int
    lost: int


class StudySummary(Shown, Answer):
    """What ``dryfit status --json`` prints."""

    study: str
    task: str
    metric: str
    direction: str
    goals: tuple[GoalView, ...] = Field(description="all that is optimised, the metric first")
    generation: GenerationView
    trials: TrialCounts
    best: BestTrial | None = Field(description="by the study's metric; one that collapsed only where all did")
    baselines: BaselinesView | None = Field(description="null: nobody has found out")
    collapsed: tuple[int, ...] = Field(description="complete trials that gave all rows the same answer")
    pareto: tuple[ParetoTrial, ...] | None = Field(description="the Pareto front, of a study with several goals")
    judgement: tuple[str, ...] = Field(description="whether the best trial is worth anything, in sentences")
    comparison: Comparison | None = Field(
        default=None, description="what `dryfit compare` found, as long as the best trial is the same"
    )
    wall_s: float
    trial_overhead_ms: Overhead
    plans: Plans | None = None
    troubles: Troubles
    nodes: NodeCounts | None = Field(default=None, description="other machines that have joined, while it runs")
    mirror: MirrorTrouble | None = Field(default=None, description="where the Optuna mirror cannot be written")
    trackers: tuple[TrackerView, ...] = Field(default=(), description="each entry of `study.track`, and how far it is")


def summarise(state: StudyState, layout: StudyLayout | None = None) -> StudySummary:
    """Return the summary of a study.

    Args:
        state: The study's state, after ``study_created``.
        layout: Its folder, for what its ledger does not say; None: that is left out.
    """
    created = state.created
    assert created is not None
    overheads = [
        attempt.overhead_ms for trial in state.trials for attempt in trial.attempts if attempt.overhead_ms is not None
    ]
    best, generation = state.best, state.generation
    collapses, standing = collapses_of(state), standing_of(state, layout)
    return StudySummary(
        study=created.name,
        task=task_word(created.task),
        metric=created.metric,
        direction=created.direction,
        goals=tuple(GoalView(metric=goal.name, direction=goal.direction) for goal in created.goals),
        generation=GenerationView.of(
            generation, mirror=generation.name, earlier=generation.first, used=len(generation.reused)
        ),
        trials=TrialCounts(
            **{str(outcome): state.counts[outcome] for outcome in Outcome},
            running=sum(trial.outcome is None for trial in state.present),
            total=state.sessions[-1].opened.total if state.sessions else 0,
        ),
        best=BestTrial.of(
            best,
            spread=next(iter(best.spreads), None),
            folds=tuple(fold.value for fold in best.folds),
            collapsed=best.collapsed or None,
        )
        if best is not None and best.value is not None
        else None,
        baselines=_baselines(state, standing),
        collapsed=tuple(trial.number for trial in collapses.trials),
        judgement=judgement(standing, collapses),
        comparison=read_comparison(layout, state) if layout is not None else None,
        pareto=tuple(ParetoTrial.of(trial, values=trial.values or ()) for trial in state.front)
        if created.also
        else None,
        wall_s=round(state.wall_s, 3),
        trial_overhead_ms=Overhead(
            median=round(statistics.median(overheads), 3) if overheads else None,
            p95=float(np.percentile(overheads, 95, method="inverted_cdf")) if overheads else None,
        ),
        plans=plan_totals(state),
        troubles=troubles_of(state),
        nodes=_node_counts(state),
        mirror=_mirror_trouble(layout) if layout is not None else None,
        trackers=tuple(_trackers(layout)) if layout is not None else (),
    )


def _baselines(state: StudyState, standing: Standing | None) -> BaselinesView | None:
    if state.baselines is None:
        return None
    metric, scores = state.goals[0].name, state.baselines.result.baselines
    strongest, interval = strongest_baseline(state), standing.difference if standing is not None else None
    known = interval is not None and interval.is_known
    return BaselinesView(
        values={one.name: one.metrics[metric] for one in scores if metric in one.metrics},
        words={one.name: one.words for one in scores},
        notes=state.baselines.result.notes,
        strongest=strongest.name if strongest is not None else None,
        beaten=standing.beats if standing is not None else None,
        difference=interval if known else None,
    )


def _node_counts(state: StudyState) -> NodeCounts | None:
    session = state.sessions[-1] if state.sessions else None
    if session is None or not session.nodes or not session.is_open:
        return None
    lost = sum(bool(node.lost) for node in session.nodes.values())
    return NodeCounts(joined=len(session.nodes) - lost, lost=lost)


def _mirror_trouble(layout: StudyLayout) -> MirrorTrouble | None:
    trouble = trouble_of(layout.mirror_status)
    return None if trouble is None else MirrorTrouble(since_s=trouble[0], error=trouble[1])


def _trackers(layout: StudyLayout) -> Iterator[TrackerView]:
    for status in layout.tracker_statuses:
        entry, trouble = said_in(status).get("entry"), trouble_of(status)
        if not isinstance(entry, str):
            continue
        position = layout.tracker(status.stem.removeprefix("track-")).position
        behind = max(0, layout.ledger.stat().st_size - max(0, followed_bytes(position)))
        since_s, error = trouble or (None, None)
        yield TrackerView(entry=entry, behind_bytes=behind, failing_since_s=since_s, error=error)


@document_of.register
def status_document(summary: StudySummary, now: str = "") -> Document:
    """Return a study's progress; ``now`` is the process that runs it, where known."""
    counts, best = summary.trials, summary.best
    done = counts.complete + counts.pruned + counts.failed
    told = f"{counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed, {counts.refused} refused"
    lines = [
        f"{done}/{counts.total} trials: {told}, {counts.running} open; {duration_text(summary.wall_s)} of work",
        *filter(None, [generation_text(summary.generation)]),
        *summary.judgement,
        *(summary.comparison.judgement if summary.comparison is not None else ()),
    ]
    if best is not None:
        lines.append(f"best {measured_text(best.value, best.spread)}: trial {best.number}  {params_text(best.params)}")
    if summary.pareto:
        lines.append(f"Pareto front: trials {', '.join(str(trial.number) for trial in summary.pareto)}")
    if summary.plans is not None:
        lines.append(f"plans: {totals_text(summary.plans)}")
    if summary.nodes is not None:
        lines.append(f"other machines: {summary.nodes.joined} joined, {summary.nodes.lost} lost (see dryfit nodes)")
    lines += [*trouble_lines(summary.troubles), *follower_lines(summary)]
    goals = ", ".join(goal.metric for goal in summary.goals)
    head = f"study {summary.study} ({summary.task}, {goals}){now and ': '}{now}"
    return Document((head, *(f"  {line}" for line in lines)))


def owner_text(owner: int | None) -> str:
    """Return the owner of a study as text: the process with this number, or none."""
    return f"process {owner} runs it" if owner is not None else "nobody runs it"


def study_document(state: StudyState, layout: StudyLayout) -> Document:
    """Return the trials, the outcomes, the best trial, and where the files are."""
    blocks: list[Block] = [trials_table(state), ""] if state.trials else []
    blocks += [outcomes_table(state), "", *judgement(standing_of(state, layout), collapses_of(state))]
    comparison, totals = read_comparison(layout, state), plan_totals(state)
    blocks += comparison.judgement if comparison is not None else ()
    if state.front:
        blocks += [f"Pareto front: {len(state.front)} trial(s) that no other beats in all goals", front_table(state)]
    elif state.best is not None and state.created is not None:
        blocks += [f"best: trial {state.best.number}, {state.created.metric} {values_text(state.best)}"]
        blocks += [f"  {params_text(state.best.params)}"]
    else:
        blocks += ["best: no trial has completed yet"]
    blocks += [f"plans: {totals_text(totals)}"] if totals is not None else []
    return Document((*blocks, *(f"  {name}: {path}" for name, path in file_locations(state, layout))))


def follower_lines(summary: StudySummary) -> list[str]:
    """Return a line of a mirror that cannot be written, and one of each tracker."""
    mirror = summary.mirror
    lines = [f"the mirror could not be written since {time_text(mirror.since_s)}: {mirror.error}"] if mirror else []
    return [*lines, *(_tracker_line(tracker) for tracker in summary.trackers)]


def _tracker_line(tracker: TrackerView) -> str:
    if tracker.failing_since_s is not None:
        return f"{tracker.entry} could not be written since {time_text(tracker.failing_since_s)}: {tracker.error}"
    if tracker.behind_bytes:
        return f"{tracker.entry} lacks the last {tracker.behind_bytes} bytes of the ledger"
    return f"{tracker.entry} has everything"


def generation_text(generation: GenerationView) -> str:
    """Describe the present generation in one line; empty for the first."""
    if generation.number == 1:
        return ""
    why = f"since {time_text(generation.began_at_s)}: {'; '.join(generation.reasons)}"
    return f"generation {generation.number} ({why}); {_kept(generation.number, generation.earlier, generation.used)}"


def _kept(number: int, earlier: int, used: int) -> str:
    of = "generation 1" if number == 2 else f"generations 1 to {number - 1}"
    return f"{counted(earlier, 'trial')} of {of} kept, {used} of them used"


def began_text(event: GenerationBegan, state: StudyState) -> str | None:
    """Return the message on a new generation; None for the first."""
    if event.generation == 1:
        return None
    kept = _kept(event.generation, state.generation.first, len(event.reused))
    again = f"; its {len(event.points)} best points are tried again" if event.points else ""
    lines = [f"generation {event.generation} begins ({Compatibility.FORKS}): {kept}{again}; the total counts from zero"]
    return "\n".join([*lines, *(f"  {reason}" for reason in event.reasons)])


def revised_text(event: StudyRevised) -> str | None:
    """Return the message on a changed study file with which the study goes on; None if it has no effect."""
    if not event.reasons:
        return None
    return "\n".join(
        [
            f"the study has changed ({event.compatibility}): its trials so far count as before",
            *(f"  {reason}" for reason in event.reasons),
        ]
    )


def generations_table(state: StudyState) -> Table:
    """Return one row for each generation, the present one first."""
    rows: list[tuple[str, ...]] = []
    for generation in reversed(state.generations):
        trials = state.in_generation(generation.number)
        goal = generation.comparability.goals[0]
        best = best_first(trials, goal.direction)
        rows.append(
            (
                str(generation.number),
                time_text(generation.began_at_s),
                "; ".join(generation.reasons) or "-",
                ", ".join(f"{each.direction} {each.name}" for each in generation.comparability.goals),
                f"{trials[0].number} to {trials[-1].number}" if trials else "none yet",
                str(sum(trial.outcome is Outcome.COMPLETE for trial in trials)),
                f"{number_text(best[0].value)} (trial {best[0].number})" if best else "-",
                str(len(generation.reused)),
                generation.name,
            )
        )
    heads = ("generation", "began (UTC)", "why", "goals", "trials", "complete", "best", "earlier ones used")
    return Table((*heads, "Optuna study"), tuple(rows))


FAILED, NOT_BEGUN = "error", "not_begun"
_OUTCOMES: Final = tuple(name for name in TrialCounts.model_fields if name != "total")
_HEADS: Final = {"running": "open"}


class StudyEntry(View):
    """One of the studies."""

    study: str
    folder: str
    status: ExitStatus | None = Field(description="what `dryfit tune` of it alone exits with; null: not begun")
    end: str = Field(description="why its session ended; error: it could not run; not_begun")
    worked_on: bool = Field(description="false: it was done before, or its turn did not come")
    error: str | None = Field(description="why it could not run")
    advice: str = Field(description="where nothing fits the device: what would; where it was paused: why")
    summary: StudySummary | None = Field(description="as `dryfit status --json` prints it; null: it has no ledger")


class SeveralSummary(Answer):
    """What ``dryfit tune`` of several studies prints with ``--json``, in the order given."""

    status: ExitStatus = Field(description="what the command exits with")
    studies: tuple[StudyEntry, ...]


class StudyStatus(View):
    """How far one of several studies is."""

    folder: str
    owner: int | None = Field(description="the process that runs it now; null: none does")
    error: str | None = Field(description="why it cannot be read")
    summary: StudySummary | None = Field(description="as `dryfit status --json` prints it; null: it cannot be read")


class SeveralStatuses(Answer):
    """What ``dryfit status`` of several studies prints with ``--json``, in the order given."""

    status: ExitStatus = Field(description="what the command exits with: 2 where a study cannot be read")
    studies: tuple[StudyStatus, ...]


def statuses_table(several: SeveralStatuses) -> Table:
    """Return one row for each study, with a column for each outcome that occurred."""
    shown = _shown_outcomes([entry.summary for entry in several.studies])
    heads = ("study", "task", *(_HEADS.get(name, name) for name in shown), "of", "best", "now", "time", "folder")
    return Table(heads, tuple(_status_row(entry, shown) for entry in several.studies))


@document_of.register
def _(several: SeveralStatuses) -> Document:
    errors = (Line(f"error: {entry.error}", aside=True) for entry in several.studies if entry.error is not None)
    return Document((statuses_table(several), *errors))


def _status_row(entry: StudyStatus, outcomes: Sequence[str]) -> tuple[str, ...]:
    summary = entry.summary
    name = "-" if summary is None else summary.study
    now = "cannot be read" if summary is None else f"process {entry.owner}" if entry.owner else "not running"
    known, time = _known_cells(summary, outcomes)
    return (name, *known, now, time, entry.folder)


def several_table(several: SeveralSummary) -> Table:
    """Return one row for each study, with a column for each outcome that occurred."""
    shown = _shown_outcomes([entry.summary for entry in several.studies])
    heads = ("study", "task", *(_HEADS.get(name, name) for name in shown), "of", "best", "exit", "ended", "time")
    return Table((*heads, "folder"), tuple(_row(entry, shown) for entry in several.studies))


@document_of.register
def _(several: SeveralSummary) -> Document:
    """Return a row for each study; beside it errors, advice, and how to go on."""
    asides: list[str] = []
    for entry in several.studies:
        if entry.error is not None:
            asides += [f"study {entry.study} could not run", *f"error: {entry.error}".splitlines()]
        elif entry.advice:
            asides += [f"study {entry.study}", *entry.advice.splitlines()]
    if several.status in (ExitStatus.STOPPED, ExitStatus.INTERRUPTED):
        asides.append("the same command goes on")
    return Document((several_table(several), *(Line(text, aside=True) for text in asides)))


def _row(entry: StudyEntry, outcomes: Sequence[str]) -> tuple[str, ...]:
    known, time = _known_cells(entry.summary, outcomes)
    status = "-" if entry.status is None else str(int(entry.status))
    before = " before" if entry.status is not None and not entry.worked_on else ""
    return (entry.study, *known, status, entry.end.replace("_", " ") + before, time, entry.folder)


def _shown_outcomes(summaries: Sequence[StudySummary | None]) -> list[str]:
    counts = [summary.trials for summary in summaries if summary is not None]
    return [name for name in _OUTCOMES if any(getattr(count, name) for count in counts)]


def _known_cells(summary: StudySummary | None, outcomes: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the task, the counts, the total and the best value, and the time worked."""
    if summary is None:
        return ("-",) * (len(outcomes) + 3), "-"
    numbers = [str(getattr(summary.trials, name)) for name in (*outcomes, "total")]
    return (summary.task, *numbers, _best_cell(summary)), duration_text(summary.wall_s)


def _best_cell(summary: StudySummary) -> str:
    """Return the best value of the study's metric, and the size of the Pareto front where there are several goals."""
    if summary.best is None:
        return "-"
    best = f"{summary.metric} {measured_text(summary.best.value, summary.best.spread)}"
    return f"{best} (front of {len(summary.pareto)})" if summary.pareto else best
