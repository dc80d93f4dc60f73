"""A trial's story as lines: its parameters, what happened, and where its files are."""

from pathlib import Path

from pydantic import ValidationError

from dryfit.core.jobs.load_report import LoadReport
from dryfit.core.regular_files import contents
from dryfit.core.text.words import few
from dryfit.reporting.data.story_view import MomentKind, TrialStory
from dryfit.reporting.terminal.tables import duration_text, number_text, time_text, value_text


def story_lines(story: TrialStory) -> list[str]:
    """Return a story as ``dryfit show STUDY TRIAL`` prints it."""
    lines = [f"trial {story.number}: {story.end}"]
    lines += [f"  {name} = {value_text(value)}" for name, value in story.params.items()]
    lines.append(f"  seed {story.seed}, fingerprint {story.fingerprint}")
    lines += [f"  collapsed: {story.collapsed}"] if story.collapsed is not None else []
    lines += [f"  {line}" for line in (*_fold_lines(story), *story.memory)]
    if story.attempts:
        lost = f", {duration_text(story.lost_s)} of it lost" if story.lost_s else ""
        lines.append(f"  worked: {duration_text(story.time_s)} in {len(story.attempts)} attempt(s){lost}")
    return [*lines, "", *_moment_lines(story), "", *_file_lines(story)]


def _fold_lines(story: TrialStory) -> list[str]:
    """Return a line for each fold: its values and its best step."""
    return [
        f"fold {index + 1}: {', '.join(map(number_text, fold.values))} at step {fold.best_step} of {fold.steps}"
        for index, fold in enumerate(story.folds)
    ]


def _moment_lines(story: TrialStory) -> list[str]:
    lines: list[str] = []
    for moment in story.moments:
        indent = "  " if moment.attempt is not None and moment.what is not MomentKind.PLACED else ""
        at = time_text(moment.at) if moment.at is not None else " " * len(time_text(0.0))
        note = "note: " if moment.what is MomentKind.NOTE else ""
        lines.append(f"  {at}  {indent}{note}{moment.text}")
        lines += [f"  {' ' * len(at)}  {indent}  {line}" for line in moment.details]
    return lines


def _file_lines(story: TrialStory) -> list[str]:
    lines: list[str] = []
    for attempt in story.attempts:
        if not attempt.ended:
            lines.append(f"  attempt {attempt.number}: running, or lost with its control process")
        lines.append(f"  log: {attempt.log}")
        lines += [f"  stacks: {attempt.stacks}"] if attempt.stacks is not None else []
    if story.load_report is not None:
        lines += _origin_lines(Path(story.load_report))
    lines += [f"  weights: {story.weights}"] if story.weights is not None else []
    lines += [f"  answers, row by row: {path}" for path in story.scored]
    return lines


def _origin_lines(path: Path) -> list[str]:
    """Return lines on where the trial's initial weights came from."""
    try:
        report = LoadReport.model_validate_json(contents(path) or b"")
    except ValidationError:
        return [f"  loaded: {path} cannot be read; it may be of another version of dryfit"]
    parts = [report.summary(), *(f"{count} {cast}" for cast, count in report.casts.items())]
    lines = [f"  loaded: {', '.join(parts)}"]
    if report.random:
        lines.append(f"    random: {few(report.random)}")
    return [*lines, f"    load report: {path}"]
