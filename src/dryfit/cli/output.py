"""Results on stdout, everything else on stderr; plain text where nobody looks at a terminal."""

import os
import sys
import traceback

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dryfit.api import Diagnosis, End, Finding, SpacePlan, Status, StudyRun, TuneAllResult, TuneResult
from dryfit.core.errors import DryfitError, ExitStatus, InternalError
from dryfit.core.jobs import CalibrateResult, PlanAnswer
from dryfit.core.jobs.checkpoint_health import Health
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.settings.trial import Outcome
from dryfit.core.text.secrets import redacted, secrets_of
from dryfit.reporting.data.final_results import (
    TopTable,
    TrainedEnsemble,
    TrainedModel,
    ensemble_lines,
    ensemble_table,
    scores_table,
    top_table,
    trained_lines,
)
from dryfit.reporting.data.observed_memory import plan_totals, totals_text
from dryfit.reporting.data.several import several_table
from dryfit.reporting.data.summary import StudySummary
from dryfit.reporting.data.troubles import trouble_lines
from dryfit.reporting.terminal.calibration_text import calibration_lines, calibration_table
from dryfit.reporting.terminal.findings import finding_lines, verdict_line
from dryfit.reporting.terminal.generation_text import generation_text
from dryfit.reporting.terminal.health_table import health_table, health_verdict
from dryfit.reporting.terminal.plan_tables import (
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
from dryfit.reporting.terminal.shard_tables import shard_lines, shard_table
from dryfit.reporting.terminal.tables import (
    Table,
    duration_text,
    file_locations,
    front_table,
    measured_text,
    outcomes_table,
    params_text,
    trials_table,
    values_text,
)
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState

_OUTCOME_STYLES = {Outcome.COMPLETE: "green", Outcome.PRUNED: "yellow", Outcome.FAILED: "red"}

_VERDICT_STYLES = {
    VerdictKind.FITS: "green",
    VerdictKind.FITS_WITH: "green",
    VerdictKind.REFUSED: "red",
    VerdictKind.UNKNOWN: "yellow",
}

_STATUS_STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red"}

_SENTENCES = {
    End.DONE: "done",
    End.NO_IMPROVEMENT: "done: no better trial for as long as study.patience allows",
    End.TOO_MANY_FAILURES: "stopped: too many trials failed in a row (see `dryfit show`)",
    End.SAME_FAILURE: "stopped: its trials fail in the same way (see `dryfit show`)",
    End.BAD_DATA: "stopped: no trial could use the data (see `dryfit show`)",
    End.REFUSED: "stopped: nothing fits the device",
    End.MAX_HOURS: "stopped: study.max_hours is used up",
    End.STOPPED: "stopped",
    End.INTERRUPTED: "interrupted",
    End.PAUSED: "paused",
    End.BROKEN: "stopped by an internal error",
}


def console(*, stderr: bool = False) -> Console:
    """A console that heeds ``NO_COLOR`` and ``CI``, and wraps nothing that a program may read."""
    stream = sys.stderr if stderr else sys.stdout
    plain = bool(os.environ.get("CI")) or not stream.isatty()
    return Console(file=stream, no_color=plain or None, force_terminal=False if plain else None, soft_wrap=True)


def print_json(model: BaseModel) -> None:
    """One object, on stdout."""
    sys.stdout.write(model.model_dump_json(by_alias=True) + "\n")


def print_error(error: DryfitError) -> None:
    """An error with its four parts, on stderr."""
    text = Text()
    head, *rest = redacted(str(error), secrets_of(os.environ)).splitlines()
    text.append("error: ", style="bold red")
    text.append("\n".join([head, *rest]))
    console(stderr=True).print(text)


def print_bug(error: BaseException) -> None:
    """An error of ours: the trace, and a request to report it."""
    sys.stderr.write(redacted("".join(traceback.format_exception(error)), secrets_of(os.environ)))
    print_error(InternalError("running this command", f"{type(error).__name__}: {error}", hint="please report it"))


def print_table(table: Table) -> None:
    """A table: aligned on a terminal, tab-separated elsewhere."""
    out = console()
    if not out.is_terminal:
        for row in (table.heads, *table.rows):
            sys.stdout.write("\t".join(row) + "\n")
        return
    rich_table = RichTable(*table.heads, box=None, header_style="bold", pad_edge=False)
    for row in table.rows:
        style = next((style for outcome, style in _OUTCOME_STYLES.items() if row[1:2] == (str(outcome),)), None)
        rich_table.add_row(*row, style=style)
    out.print(rich_table)


def print_study(state: StudyState, layout: StudyLayout, *, trials: bool) -> None:
    """Outcomes, the best trial and where everything lies; one row a trial on request."""
    out = console()
    if trials and state.trials:
        print_table(trials_table(state))
        out.print()
    print_table(outcomes_table(state))
    out.print()
    if state.front:
        out.print(f"Pareto front: {len(state.front)} trial(s) that no other beats in all goals", highlight=False)
        print_table(front_table(state))
    elif state.best is not None and state.created is not None:
        metric = state.created.metric
        out.print(f"best: trial {state.best.number}, {metric} {values_text(state.best)}", highlight=False)
        out.print(f"  {params_text(state.best.params)}", highlight=False)
    else:
        out.print("best: no trial has completed yet", highlight=False)
    totals = plan_totals(state)
    if totals is not None:
        out.print(f"plans: {totals_text(totals)}", highlight=False)
    for name, path in file_locations(state, layout):
        out.print(f"  {name}: {path}", highlight=False)


def print_health(health: Health) -> None:
    """What was found in a checkpoint, and the verdict as the last line."""
    print_table(health_table(health))
    out = console()
    for error in health.errors:
        out.print(Text(error))
    out.print(Text(health_verdict(health), style="green" if health.healthy else "red"))


def print_plan(answer: PlanAnswer) -> None:
    """The verdict, what memory is needed for, and what would change it."""
    out = console()
    out.print(Text(headline(answer), style=_VERDICT_STYLES[answer.verdict]))
    refused = answer.verdict is VerdictKind.REFUSED
    for line in refusal_lines(answer) if refused else ():
        out.print(Text(line))
    memory = answer.memory
    if memory is not None:
        if not refused:
            out.print(Text(f"peak at {peak_text(memory)}"))
        for table in (requirement_table(answer, memory), memory_table(memory)):
            out.print()
            print_table(table)
    if answer.sharding is not None:
        out.print()
        print_table(shard_table(answer.sharding))
        for line in shard_lines(answer.sharding):
            out.print(Text(line))
    if answer.ladder:
        out.print()
        print_table(ladder_table(answer.ladder))
    if answer.cannot_shard:
        out.print(Text(f"no fallback to several devices: {answer.cannot_shard}"))
    out.print(Text(trust_text(answer), style="dim"))


def print_space(plan: SpacePlan) -> None:
    """Which part of a space fits."""
    print_table(space_table(plan))
    out = console()
    for line in space_lines(plan):
        out.print(Text(line))


def print_calibration(found: CalibrateResult) -> None:
    """Plans beside measurements, then what is kept of them."""
    print_table(calibration_table(found.comparisons))
    out = console()
    for line in calibration_lines(found):
        out.print(Text(line))


def print_finding(finding: Finding, *, quiet: bool) -> None:
    """One check; with ``quiet`` only where something is to be done."""
    if quiet and finding.status is Status.PASS:
        return
    out = console()
    for line in finding_lines(finding):
        text = Text(line)
        text.stylize(_STATUS_STYLES[finding.status], 0, len(finding.status))
        out.print(text)


def print_verdict(diagnosis: Diagnosis) -> None:
    """Whether anything is in the way."""
    console().print(Text(verdict_line(diagnosis), style="green" if diagnosis.healthy else "red"))


def print_trained(model: TrainedModel | TrainedEnsemble) -> None:
    """A trained model, and its scores; those of an ensemble beside those of its members."""
    one = isinstance(model, TrainedModel)
    out = console()
    for line in trained_lines(model) if one else ensemble_lines(model):
        out.print(Text(line))
    print_table(scores_table(model) if one else ensemble_table(model))


def print_top(table: TopTable) -> None:
    """The best configurations over several seeds; what failed goes to stderr."""
    print_table(top_table(table))
    err = console(stderr=True)
    for one in table.configurations:
        for run in one.runs:
            if run.error is not None:
                err.print(Text(f"trial {one.trial}, seed {run.seed}: {run.error}"))
    if not table.complete:
        err.print("stopped; the same command goes on with the runs that are left", highlight=False)


def print_status(summary: StudySummary, owner: int | None) -> None:
    """How far a study is, in a few lines."""
    out = console()
    counts = summary.trials
    who = f"process {owner} runs it" if owner is not None else "nobody runs it"
    done = counts.complete + counts.pruned + counts.failed
    goals = ", ".join(goal.metric for goal in summary.goals)
    out.print(f"study {summary.study} ({summary.task}, {goals}): {who}", highlight=False)
    out.print(
        f"  {done}/{counts.total} trials: {counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed, "
        f"{counts.refused} refused, {counts.running} open; {duration_text(summary.wall_s)} of work",
        highlight=False,
    )
    generation = summary.generation
    if generation.number > 1:
        text = generation_text(
            generation.number,
            began_at_s=generation.began_at_s,
            reasons=generation.reasons,
            earlier=generation.earlier,
            told=generation.used,
        )
        out.print(Text(f"  {text}"))
    if summary.best is not None:
        best = summary.best
        value = measured_text(best.value, best.spread)
        out.print(f"  best {value}: trial {best.number}  {params_text(best.params)}", highlight=False)
    if summary.pareto:
        numbers = ", ".join(str(trial.number) for trial in summary.pareto)
        out.print(f"  Pareto front: trials {numbers}", highlight=False)
    if summary.plans is not None:
        out.print(f"  plans: {totals_text(summary.plans)}", highlight=False)
    for line in trouble_lines(summary.troubles):
        out.print(Text(f"  {line}"))


def print_advice(result: TuneResult) -> None:
    """What would fit, where nothing did."""
    if result.advice:
        console(stderr=True).print(Text(result.advice))


def print_end(result: TuneResult) -> None:
    """One line on how the session ended, and what to type next if something is left to do."""
    err = console(stderr=True)
    err.print(_end_text(result), highlight=False)
    if not result.end.is_final:
        err.print(f"go on with: dryfit resume {result.folder}", highlight=False)


def _end_text(result: TuneResult) -> str:
    counts = result.summary.trials
    said = f"{_SENTENCES[result.end]}: {counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed"
    said += f", {counts.refused} refused" if counts.refused else ""
    return f"{said} of {counts.total}, {duration_text(result.summary.wall_s)}"


def run_text(run: StudyRun) -> str:
    """What became of one of several studies, in a line."""
    if run.result is not None:
        return f"{'' if run.worked_on else 'before: '}{_end_text(run.result)}"
    if run.error is None:
        return "not begun"
    first = redacted(str(run.error), secrets_of(os.environ)).splitlines()[0]
    return f"could not run: {first}"


def print_several(result: TuneAllResult) -> None:
    """A row for each study; what went wrong, and what to type next, goes to stderr."""
    print_table(several_table(result.summary))
    err = console(stderr=True)
    for run in result.studies:
        if run.error is not None:
            err.print(f"study {run.turn.name} could not run", highlight=False)
            print_error(run.error)
        elif run.result is not None and run.result.advice:
            err.print(f"study {run.turn.name}", highlight=False)
            print_advice(run.result)
    if result.status in (ExitStatus.STOPPED, ExitStatus.INTERRUPTED):
        err.print("the same command goes on", highlight=False)
