"""What a notebook shows of studies, plans, rehearsals and trials, and how they print: lines and tables."""

from typing import Final

from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.plan import PlanAnswer
from dryfit.core.jobs.rehearsal import RehearsalAnswer
from dryfit.reporting import rehearsals
from dryfit.reporting.document import Card, Table, duration_text, measured_text, params_text
from dryfit.reporting.page import Page
from dryfit.reporting.plans import (
    headline,
    ladder_table,
    memory_table,
    peak_text,
    refusal_lines,
    requirement_table,
    space_lines,
    space_table,
    trust_text,
)
from dryfit.reporting.story import TrialStory, story_lines
from dryfit.reporting.summary import StudySummary
from dryfit.reporting.trials import trials_table
from dryfit.reporting.troubles import trouble_lines
from dryfit.reporting.watch import Watched, study_progress_line, trial_progress_line, watched_lines
from dryfit.store.replay import StudyState
from dryfit.study.planning.plan_requests import SpacePlan

_MOST_TRIALS: Final = 50
"""Rows of a table of trials, the last ones."""


def summary_card(summary: StudySummary) -> Card:
    """Return how far a study is."""
    counts = summary.trials
    done = counts.complete + counts.pruned + counts.failed
    told = f"{counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed, {counts.refused} refused"
    worked = f"{counts.running} open; {duration_text(summary.wall_s)} of work"
    lines = [f"{done}/{counts.total} trials: {told}, {worked}", *summary.judgement]
    if summary.best is not None:
        best = summary.best
        lines.append(f"best {measured_text(best.value, best.spread)}: trial {best.number}  {params_text(best.params)}")
    lines += trouble_lines(summary.troubles)
    goals = ", ".join(f"{goal.direction} {goal.metric}" for goal in summary.goals)
    return Card(f"study {summary.study} ({summary.task}, {goals})", tuple(lines))


def study_card(summary: StudySummary, state: StudyState, owner: int | None) -> Card:
    """Return how far a study is, with its last trials; ``owner`` is the process that runs it, None if none does."""
    card = summary_card(summary)
    table = trials_table(state)
    more = len(table.rows) - _MOST_TRIALS
    caption = f"the last {_MOST_TRIALS} of {len(table.rows)} trials" if more > 0 else ""
    now = f"process {owner} runs it" if owner is not None else "nobody runs it"
    shown = Table(table.heads, table.rows[-_MOST_TRIALS:])
    return Card(f"{card.title}: {now}", card.lines, ((caption, shown),) if shown.rows else ())


def watched_card(watched: Watched) -> Card:
    """Return one reading of a study that another process runs."""
    view = watched.study
    trials = (trial_progress_line(trial, view.goals) for trial in view.trials)
    return Card(study_progress_line(view), (*trials, *watched_lines(watched)))


def plan_card(answer: PlanAnswer) -> Card:
    """Return the verdict of a plan, its memory, and the changes that would lower it."""
    refused, memory = answer.verdict is VerdictKind.REFUSED, answer.memory
    lines = list(refusal_lines(answer)) if refused else []
    tables: list[tuple[str, Table]] = []
    if memory is not None:
        lines += [] if refused else [f"peak at {peak_text(memory)}"]
        tables += [("", requirement_table(answer.device, memory)), ("", memory_table(memory))]
    if answer.ladder:
        tables.append(("what would lower it", ladder_table(answer.ladder)))
    return Card(headline(answer), (*lines, trust_text(answer)), tuple(tables))


def space_card(plan: SpacePlan) -> Card:
    """Return which part of a search space fits."""
    fitting = sum(cell.answer.verdict.fits for cell in plan.cells)
    title = f"{fitting} of {len(plan.cells)} combinations fit on {plan.device.name}"
    return Card(title, tuple(space_lines(plan)), (("", space_table(plan)),))


def rehearsal_card(answer: RehearsalAnswer) -> Card:
    """Return the verdict on a script, where its memory peaks and what holds it."""
    memory = answer.memory
    if not answer.ran or memory is None:
        return Card(rehearsals.headline(answer))
    lines = [*rehearsals.peak_lines(memory), *rehearsals.error_lines(answer.out_of_memory)]
    lines += [*rehearsals.fact_lines(answer), rehearsals.trust_text(answer)]
    tables = (requirement_table(answer.device, memory), memory_table(memory), rehearsals.lines_table(memory))
    return Card(rehearsals.headline(answer), tuple(lines), tuple(("", table) for table in tables if table.rows))


def story_card(story: TrialStory) -> Card:
    """Return everything known of a trial, in the order in which it happened."""
    first, *lines = story_lines(story)
    return Card(first, tuple(lines))


def page_card(page: Page, file: str) -> Card:
    """Return the verdict of a report, its key figures and its first tables; the figures are in its file."""
    tiles = Table(tuple(name for name, _ in page.tiles), (tuple(value for _, value in page.tiles),))
    shown = [
        (caption or section.title, table)
        for section in page.sections
        if section.anchor in ("best", "baselines", "outcomes")
        for caption, table in section.tables
    ]
    return Card(
        f"report of {page.title}", (page.subtitle, page.verdict.strip(), f"with figures: {file}"), (("", tiles), *shown)
    )
