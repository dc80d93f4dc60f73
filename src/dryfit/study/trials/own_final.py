"""Final training of a user's own Trainer or script: its request and its result."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from dryfit.config.load import load_study_file
from dryfit.core.jobs.train import FinalResult, ScriptRequest, TrainerRequest, TrainResult
from dryfit.core.settings.task_facts import facts_of
from dryfit.core.settings.trial import MetricPoint
from dryfit.core.text.script_command import FOLDER, CommandTemplate
from dryfit.core.user_code import source_hash
from dryfit.core.wire import Checkpointed, Message, Report, digest, sync_path
from dryfit.runtime.children.result_reading import read_messages, read_result
from dryfit.store.layout import FinalLayout, StudyLayout
from dryfit.store.replay import StudyState
from dryfit.store.state import TrialState
from dryfit.study.trials.child_requests import Placement, own_code_request
from dryfit.study.trials.context import AnyStudy

_PREFIX = "eval_"


def own_final_request(
    study: AnyStudy, trial: TrialState, placement: Placement, paths: FinalLayout, *, seed: int, save: bool
) -> TrainerRequest | ScriptRequest:
    """Return the request to train a trial's configuration to its end by the user's own code, as that is today.

    Args:
        study: The study, whose task has such code.
        trial: The trial.
        placement: How it is run.
        paths: Where the run has its files; what its earlier attempts left is gone on from.
        seed: In the place of the trial's.
        save: Whether what it leaves is kept.
    """
    own = study.config.function
    assert own is not None  # the caller has looked
    body = own_code_request(study, own, trial, paths, placement)
    assert isinstance(body, TrainerRequest | ScriptRequest)
    steps = [each.step for each in _messages(paths) if isinstance(each, Checkpointed)]
    identity = {"trial": trial.fingerprint, "number": trial.number, "seed": seed}
    calling = body.calling.model_copy(
        update={
            "seed": seed,
            "fingerprint": digest(identity),
            "reported": (),
            "checkpoint_step": max(steps, default=None) if paths.checkpoints.is_dir() else None,
            "own_file": "",  # today's code: who asks for a model is told where it has changed
        }
    )
    plan = trial.plan
    otherwise = plan is not None and (plan.changes_what_was_asked or placement.choice != plan.execution)
    update = {
        "calling": calling,
        "best_dir": str(paths.files_of(placement.attempt).best) if save else None,
        "choice": placement.choice if otherwise else None,
    }
    return body.model_copy(update=update)


def edited_since(study: AnyStudy) -> Path | None:
    """Return the file of the user's own code if it was edited since the study's last session."""
    own, file = study.config.function, study.resolved.own_file
    if own is None or not file or study.resolved.revisions.get(own.function, "") == source_hash(Path(file)):
        return None
    return Path(file)


def own_final_result(study: AnyStudy, ended: TrainResult, paths: FinalLayout, *, save: bool) -> FinalResult:
    """Return the result of a finished run; its output becomes its model by one rename.

    Nothing changes where that was done before.

    Args:
        study: The study.
        ended: How training ended, with a value.
        paths: Where the run has its files, those of its last attempt taken over.
        save: Whether what it left is kept.
    """
    if save and paths.best.is_dir():
        shutil.rmtree(paths.model, ignore_errors=True)
        paths.best.rename(paths.model)
        sync_path(paths.folder)
    best = next((point for point in _reports(paths) if point.value == ended.value), None)
    names = (study.config.study.metric, *study.config.study.also)
    values = (ended.value, *ended.also)
    goals = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    others = best.metrics if best is not None else {}
    same = {_PREFIX + name for name in goals}  # the Trainer's name of a goal
    return FinalResult(
        training=ended,
        step=best.step if best is not None else ended.steps,
        validation=goals | {name: value for name, value in others.items() if name not in {*goals, *same}},
        test=None,
        rows={},
        model_dir=str(paths.model) if save and paths.model.is_dir() else None,
    )


def own_finished(study: AnyStudy, paths: FinalLayout, *, save: bool) -> FinalResult | None:
    """Return the result of a run if it is done, and what it left is still there where that was to be kept."""
    for attempt in range(paths.attempts, 0, -1):
        ended = read_result(paths.attempt(attempt))
        answer = None if ended is None else ended.answer
        if isinstance(answer, TrainResult) and answer.stopped_by is None:
            there = paths.model.is_dir() or paths.best.is_dir()
            return own_final_result(study, answer, paths, save=save) if there or not save else None
    return None


def how_it_was_run(layout: StudyLayout, state: StudyState) -> str:
    """Return where the best trial of the user's own code left its weights, and how to run a script as it was run."""
    if state.best is None or state.created is None or not facts_of(state.created.task).makes_trainer:
        return ""
    number, left = state.best.number, layout.trial(state.best.number).best
    script = load_study_file(layout.frozen_file).config.script
    kept = (
        f"what trial {number} has left is in {left}" if left.is_dir() else f"`dryfit train {layout.folder}` trains it"
    )
    if script is None:
        return kept
    command = CommandTemplate.parse(script.command)
    words = command.arguments({**state.best.params, FOLDER: "DIR", "seed": state.best.seed, "number": number})
    target = ["-m", command.target] if command.is_module else [command.target]
    return f"{kept}; it was run by: python {shlex.join([*target, *words])}"


def _reports(paths: FinalLayout) -> list[MetricPoint]:
    """Return all reports of a run in the order of their steps; of those of one step the last."""
    points = {each.point.step: each.point for each in _messages(paths) if isinstance(each, Report)}
    return [points[step] for step in sorted(points)]


def _messages(paths: FinalLayout) -> Iterator[Message]:
    for attempt in range(1, paths.attempts + 1):
        yield from read_messages(paths.attempt(attempt))
