"""How commands print: results on stdout, everything else on stderr; without colours where that is no terminal."""

import errno
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any, TextIO, cast

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from dryfit.api import Diagnosis, End, Finding, SpacePlan, Status, StudyRun, TuneAllResult, TuneResult
from dryfit.cli.streams import RawStream, SafeStream
from dryfit.core.errors import DryfitError, ExitStatus, InternalError, MachineError
from dryfit.core.jobs.checkpoint_health import Health
from dryfit.core.jobs.memory import VerdictKind
from dryfit.core.jobs.plan import CalibrateResult, PlanAnswer
from dryfit.core.jobs.rehearsal import RehearsalAnswer
from dryfit.core.settings.trial import Outcome
from dryfit.core.text.secrets import redacted, secrets_of
from dryfit.core.text.words import printable
from dryfit.reporting import rehearsals
from dryfit.reporting.comparison import Comparison, comparison_table, read_comparison
from dryfit.reporting.document import Table, duration_text, measured_text, params_text
from dryfit.reporting.finals import (
    TopTable,
    TrainedEnsemble,
    TrainedModel,
    analysis_tables,
    ensemble_lines,
    ensemble_table,
    scores_table,
    top_table,
    trained_lines,
)
from dryfit.reporting.findings import finding_lines, health_table, health_verdict, verdict_line
from dryfit.reporting.plans import (
    calibration_lines,
    calibration_table,
    headline,
    ladder_table,
    memory_table,
    peak_text,
    plan_totals,
    refusal_lines,
    requirement_table,
    shard_lines,
    shard_table,
    space_lines,
    space_table,
    totals_text,
    trust_text,
)
from dryfit.reporting.summary import StudySummary, follower_lines, generation_text, several_table
from dryfit.reporting.trials import file_locations, front_table, outcomes_table, trials_table, values_text
from dryfit.reporting.troubles import trouble_lines
from dryfit.reporting.worth import collapses_of, judgement, standing_of
from dryfit.store.layout import StudyLayout
from dryfit.store.replay import StudyState

_HINTS = {
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "the system has no more open files",
    errno.EAGAIN: "raise the limit on processes (`ulimit -u`)",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder on a file system that can be written to",
    errno.EACCES: "let its owner give you the right to it (chmod, chown), or choose another place",
    errno.EPERM: "let its owner give you the right to it (chmod, chown), or choose another place",
    errno.ENOENT: "go to a folder that exists",
}

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


class SafeConsole(Console):
    """A console that escapes control characters in texts before it adds those of its styles."""

    def __init__(self, stream: TextIO, **settings: Any) -> None:
        super().__init__(file=cast(TextIO, RawStream(stream)) if isinstance(stream, SafeStream) else stream, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with every text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console(*, stderr: bool = False) -> SafeConsole:
    """Return a console that honours ``NO_COLOR`` and ``CI`` and does not wrap lines."""
    stream = sys.stderr if stderr else sys.stdout
    plain = bool(os.environ.get("CI")) or not stream.isatty()
    return SafeConsole(stream, no_color=plain or None, force_terminal=False if plain else None, soft_wrap=True)


def print_json(model: BaseModel) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(model.model_dump_json(by_alias=True) + "\n")


def print_error(error: DryfitError) -> None:
    """Print an error on stderr, without secrets."""
    message = "\n".join(redacted(str(error), secrets_of(os.environ)).splitlines())
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), message))


def print_bug(error: BaseException) -> None:
    """Print an error of dryfit's own: the traceback, and a request to report it."""
    sys.stderr.write(redacted("".join(traceback.format_exception(error)), secrets_of(os.environ)))
    print_error(InternalError("running this command", f"{type(error).__name__}: {error}", hint="please report it"))


def print_machine_error(error: OSError) -> None:
    """Print an error of the machine or its file system that nothing before could name better."""
    found = (error.strerror or str(error)) + (f": {error.filename}" if error.filename else "")
    print_error(MachineError("running this command", found, hint=_HINTS.get(error.errno or 0, "")))


def _print(*lines: str, style: str = "", stderr: bool = False) -> None:
    out = console(stderr=stderr)
    for line in lines:
        out.print(Text(line, style=style))


def print_table(table: Table) -> None:
    """Print a table on stdout: aligned on a terminal, tab-separated elsewhere."""
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


def print_study(state: StudyState, layout: StudyLayout) -> None:
    """Print the trials, the outcomes, the best trial, and where the files are."""
    if state.trials:
        print_table(trials_table(state))
        _print("")
    print_table(outcomes_table(state))
    _print("")
    comparison = read_comparison(layout, state)
    _print(*judgement(standing_of(state, layout), collapses_of(state)))
    _print(*(comparison.judgement if comparison is not None else ()))
    if state.front:
        _print(f"Pareto front: {len(state.front)} trial(s) that no other beats in all goals")
        print_table(front_table(state))
    elif state.best is not None and state.created is not None:
        _print(f"best: trial {state.best.number}, {state.created.metric} {values_text(state.best)}")
        _print(f"  {params_text(state.best.params)}")
    else:
        _print("best: no trial has completed yet")
    totals = plan_totals(state)
    if totals is not None:
        _print(f"plans: {totals_text(totals)}")
    _print(*(f"  {name}: {path}" for name, path in file_locations(state, layout)))


def print_health(health: Health) -> None:
    """Print what a checkpoint holds, and the verdict as the last line."""
    print_table(health_table(health))
    _print(*health.errors)
    _print(health_verdict(health), style="green" if health.healthy else "red")


def print_plan(answer: PlanAnswer) -> None:
    """Print the verdict of a plan, its memory, and the changes that would lower it."""
    _print(headline(answer), style=_VERDICT_STYLES[answer.verdict])
    refused = answer.verdict is VerdictKind.REFUSED
    if refused:
        _print(*refusal_lines(answer))
    memory = answer.memory
    if memory is not None:
        if not refused:
            _print(f"peak at {peak_text(memory)}")
        for table in (requirement_table(answer.device, memory), memory_table(memory)):
            _print("")
            print_table(table)
    if answer.sharding is not None:
        _print("")
        print_table(shard_table(answer.sharding))
        _print(*shard_lines(answer.sharding))
    if answer.ladder:
        _print("")
        print_table(ladder_table(answer.ladder))
    if answer.cannot_shard:
        _print(f"no fallback to several devices: {answer.cannot_shard}")
    _print(trust_text(answer), style="dim")


def print_rehearsal(answer: RehearsalAnswer, *, ladder: bool) -> None:
    """Print the verdict on a script, where its memory peaks and what holds it, and what would fit."""
    style = _VERDICT_STYLES[VerdictKind.REFUSED if answer.verdict is VerdictKind.FITS_WITH else answer.verdict]
    if not answer.ran:
        _print(rehearsals.headline(answer), style="red", stderr=True)
        _print(*rehearsals.unknown_lines(answer), stderr=True)
        return
    _print(rehearsals.headline(answer), style=style)
    memory = answer.memory
    if memory is not None:
        _print(*rehearsals.peak_lines(memory))
    _print(*rehearsals.error_lines(answer.out_of_memory))
    if memory is not None:
        for table in (
            requirement_table(answer.device, memory),
            memory_table(memory),
            rehearsals.steps_table(memory),
            rehearsals.lines_table(memory),
            rehearsals.modules_table(memory),
        ):
            if table.rows:
                _print("")
                print_table(table)
        _print("")
    _print(*rehearsals.fact_lines(answer))
    if ladder and not answer.fits:
        if answer.ladder:
            print_table(rehearsals.ladder_table(answer.ladder))
        _print(*rehearsals.ladder_lines(answer))
    _print(rehearsals.trust_text(answer), style="dim")


def print_space(plan: SpacePlan) -> None:
    """Print which part of a search space fits."""
    print_table(space_table(plan))
    _print(*space_lines(plan))


def print_calibration(result: CalibrateResult) -> None:
    """Print planned beside measured memory, then the constants that are kept."""
    print_table(calibration_table(result.comparisons))
    _print(*calibration_lines(result))


def print_finding(finding: Finding, *, quiet: bool) -> None:
    """Print one check; with ``quiet``, only one that asks for action."""
    if quiet and finding.status is Status.PASS:
        return
    out = console()
    for line in finding_lines(finding):
        text = Text(line)
        text.stylize(_STATUS_STYLES[finding.status], 0, len(finding.status))
        out.print(text)


def print_verdict(diagnosis: Diagnosis) -> None:
    """Print the verdict on all checks."""
    _print(verdict_line(diagnosis), style="green" if diagnosis.healthy else "red")


def print_trained(model: TrainedModel | TrainedEnsemble) -> None:
    """Print a trained model or ensemble with its scores."""
    is_single = isinstance(model, TrainedModel)
    _print(*model.judgement, *(trained_lines(model) if is_single else ensemble_lines(model)))
    print_table(scores_table(model) if is_single else ensemble_table(model))
    if model.analysis is None:
        return
    _print("", f"on {model.analysis.split}")
    for caption, table in analysis_tables(model.analysis):
        _print(*([caption] if caption else []))
        print_table(table)
    _print(*model.analysis.notes, stderr=True)


def print_top(table: TopTable) -> None:
    """Print the best configurations over several seeds; failed runs go to stderr."""
    print_table(top_table(table))
    for configuration in table.configurations:
        for run in configuration.runs:
            if run.error is not None:
                _print(f"trial {configuration.trial}, seed {run.seed}: {run.error}", stderr=True)
    if not table.complete:
        _print("stopped; the same command goes on with the runs that are left", stderr=True)


def print_comparison(comparison: Comparison) -> None:
    """Print whether the best trials really differ, then their values; what limits that goes to stderr."""
    _print(*comparison.judgement)
    print_table(comparison_table(comparison))
    _print(*comparison.notes, stderr=True)


def print_status(summary: StudySummary, owner: int | None) -> None:
    """Print how far a study is; ``owner`` is the process that runs it, None if no process does."""
    counts = summary.trials
    state = f"process {owner} runs it" if owner is not None else "nobody runs it"
    done = counts.complete + counts.pruned + counts.failed
    goals = ", ".join(goal.metric for goal in summary.goals)
    _print(
        f"study {summary.study} ({summary.task}, {goals}): {state}",
        f"  {done}/{counts.total} trials: {counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed, "
        f"{counts.refused} refused, {counts.running} open; {duration_text(summary.wall_s)} of work",
    )
    generation = generation_text(summary.generation)
    if generation:
        _print(f"  {generation}")
    _print(*(f"  {line}" for line in summary.judgement))
    _print(*(f"  {line}" for line in (summary.comparison.judgement if summary.comparison is not None else ())))
    if summary.best is not None:
        best = summary.best
        value = measured_text(best.value, best.spread)
        _print(f"  best {value}: trial {best.number}  {params_text(best.params)}")
    if summary.pareto:
        _print(f"  Pareto front: trials {', '.join(str(trial.number) for trial in summary.pareto)}")
    if summary.plans is not None:
        _print(f"  plans: {totals_text(summary.plans)}")
    if summary.nodes is not None:
        _print(f"  other machines: {summary.nodes.joined} joined, {summary.nodes.lost} lost (see dryfit nodes)")
    _print(*(f"  {line}" for line in trouble_lines(summary.troubles)))
    _print(*(f"  {line}" for line in follower_lines(summary)))


def print_advice(result: TuneResult) -> None:
    """Print what would fit, if nothing did."""
    if result.advice:
        _print(result.advice, stderr=True)


def print_end(result: TuneResult) -> None:
    """Print how the session ended, and how to go on if trials are left."""
    _print(_end_text(result), stderr=True)
    if not result.end.is_final:
        _print(f"go on with: dryfit resume {result.folder}", stderr=True)


def _end_text(result: TuneResult) -> str:
    counts = result.summary.trials
    text = f"{_SENTENCES[result.end]}: {counts.complete} complete, {counts.pruned} pruned, {counts.failed} failed"
    text += f", {counts.refused} refused" if counts.refused else ""
    return f"{text} of {counts.total}, {duration_text(result.summary.wall_s)}"


def run_text(run: StudyRun) -> str:
    """Return in one line how one of several studies ended."""
    if run.result is not None:
        return f"{'' if run.worked_on else 'before: '}{_end_text(run.result)}"
    if run.error is None:
        return "not begun"
    first = redacted(str(run.error), secrets_of(os.environ)).splitlines()[0]
    return f"could not run: {first}"


def print_several(result: TuneAllResult) -> None:
    """Print a row for each study; errors, advice and how to go on go to stderr."""
    print_table(several_table(result.summary))
    for run in result.studies:
        if run.error is not None:
            _print(f"study {run.turn.name} could not run", stderr=True)
            print_error(run.error)
        elif run.result is not None and run.result.advice:
            _print(f"study {run.turn.name}", stderr=True)
            print_advice(run.result)
    if result.status in (ExitStatus.STOPPED, ExitStatus.INTERRUPTED):
        _print("the same command goes on", stderr=True)
