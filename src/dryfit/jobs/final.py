"""Child job FINAL: train a configuration once more, evaluate it once on test, and save the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import NonFiniteError
from dryfit.core.jobs.analysis import ANALYSIS_FILE, Analysis
from dryfit.core.jobs.train import FinalRequest, FinalResult, StopReason, TrainRequest, TrainResult
from dryfit.core.settings.task_facts import facts_of, reads, task_word
from dryfit.core.settings.trial import MetricPoint, best_point
from dryfit.core.version import VERSION
from dryfit.core.wire import Note, Phase
from dryfit.parallel.layout.processes import ProcessGroup, run_in_process_group
from dryfit.scoring.row_files import write_rows
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.rows.checked_rows import TEST, TRAIN, VALIDATION
from dryfit.tasks.saved.model_input import DRYFIT_FILE, model_input, read_model_input
from dryfit.tasks.saved.saved_model import save_trained
from dryfit.tasks.tokens.token_set import Tokens, joined
from dryfit.train.batches import epoch_size
from dryfit.train.checkpoint import newest_checkpoint
from dryfit.train.data import read_tokens, send_remarks, trial_task
from dryfit.train.error_context import ErrorContext
from dryfit.train.export.analysed import analysed
from dryfit.train.export.model_card import Trained
from dryfit.train.model import trial_parts
from dryfit.train.results import train_result
from dryfit.train.run import FixedLength, TrialParts
from dryfit.train.start import start_training
from dryfit.train.trainer import run_training
from dryfit.train.validation import Evaluated, evaluate


def final(body: FinalRequest, channel: ChildChannel) -> FinalResult | TrainResult:
    """Train, or go on from the newest good checkpoint; then evaluate on test and save.

    Returns:
        The model's scores; how training ended, where a stop was asked for meanwhile.

    Raises:
        DryfitError: As for a trial; or no validation gave a number, so that no weights are the best.
    """
    return run_in_process_group(body.training.plan, channel, lambda group: _final(body, channel, group))


def _final(body: FinalRequest, channel: ChildChannel, group: ProcessGroup) -> FinalResult | TrainResult:
    task = start_training(body.training, channel)
    tokens = read_tokens(body.training, task, only=(TRAIN, VALIDATION, *([TEST] if body.test else [])))
    send_remarks(channel, task, tokens)
    rows = {name: split.sources for name, split in tokens.splits.items()}
    length, fitted = None, dict[str, float]()
    if body.last_step is not None:
        fitted = _chosen_before(body, channel)
        alone = epoch_size(tokens.splits[TRAIN], trial_task(body.training.config, tokens))
        length = FixedLength(body.schedule_steps or _schedule_steps(body, alone), body.last_step)
        both = joined(tokens.splits[TRAIN], tokens.splits[VALIDATION])
        tokens = replace(tokens, splits={**tokens.splits, TRAIN: both})
    parts = trial_parts(body.training, channel, tokens, length=length, group=group)
    if TEST in tokens.splits:  # before the training, not after it
        check_tokens(TEST, tokens.splits[TEST], model_bounds(parts.model))
    run = run_training(parts, newest_checkpoint(body.training, channel))
    ended = train_result(body.training, run, group)
    if run.stopped_by in (StopReason.REQUEST, StopReason.SIGTERM):
        return ended
    best = None
    if length is None:
        best = _take_best(parts, run.points)
        fitted = read_model_input(_best_dir(body.training)).fitted
    test = _evaluated(parts, tokens, TEST, run.step, fitted)  # which nothing has read before
    if test is not None and parts.leads and test.rows:
        write_rows(Path(body.training.scored_dir), TEST, test.rows, test.metrics)
    result = FinalResult(
        training=ended,
        step=best.step if best is not None else run.step,
        validation=best.metrics if best is not None else None,
        test=test.metrics if test is not None else None,
        rows={**rows, "trained": parts.train.sources},
        model_dir=body.model_dir,
        analysis=_analysis(body, parts, tokens, test, run.step, fitted) if body.model_dir is not None else None,
    )
    if body.model_dir is not None:
        channel.send(Phase(name="save", step=result.step))
        _save(body, parts, result, fitted)
    return result


def _chosen_before(body: FinalRequest, channel: ChildChannel) -> dict[str, float]:
    """Return what an earlier model of the configuration fitted on validation; nothing where that is gone."""
    for folder in map(Path, body.chosen_dirs):
        if (folder / DRYFIT_FILE).is_file():
            return read_model_input(folder).fitted
    config, lacks = body.training.config, list[str]()
    if facts_of(config.task).spans and config.settings.span.null_policy == "calibrated":
        lacks.append("threshold of null that was fitted on validation: it is 0")
    if reads(config.task, "head.threshold") and config.settings.head.threshold == "calibrated":
        lacks.append("threshold of classes that was fitted on validation: it is 0.5")
    for what in lacks:
        text = f"no model of trial {config.number} has a {what}"
        channel.send(Note(text=f"{text}. Train the trial once without --with-validation before, and its own is taken"))
    return {}


def _schedule_steps(body: FinalRequest, epoch_rows: int) -> int:
    """Return the steps of the trial's own schedule: those of its training rows alone."""
    return -(-epoch_rows // body.training.plan.effective_batch) * body.training.config.settings.train.epochs


def _take_best(parts: TrialParts, points: tuple[MetricPoint, ...]) -> MetricPoint:
    """Give the model the weights of its best validation.

    Raises:
        NonFiniteError: There is none.
    """
    config = parts.request.config
    best = best_point(points, config.direction)
    if best is None:
        raise NonFiniteError(
            f"training trial {config.number} once more", f"none of {len(points)} validations gave a number"
        )
    parts.layout.group.share(None)  # rank 0 has saved them
    parts.layout.restore(parts.model, _best_dir(parts.request))
    return best


def _best_dir(body: TrainRequest) -> Path:
    """Return the folder of the best weights: this attempt's own where it has some, as they are better than before."""
    own = Path(body.best_dir)
    return own if (own / DRYFIT_FILE).is_file() else Path(body.kept_best_dir)


def _evaluated(
    parts: TrialParts, tokens: Tokens, name: str, step: int, fitted: Mapping[str, float]
) -> Evaluated | None:
    """Evaluate the model on a split; None where the data has no such split."""
    if name not in tokens.splits:
        return None
    parts.channel.send(Phase(name="evaluate", step=step))
    split, beat = tokens.splits[name], parts.channel.beat
    rows = parts.request.plan.eval_rows
    guard = BatchGuard(name, split, model_bounds(parts.model))
    at = ErrorContext(parts, guard)
    at.step = step
    with at:
        return evaluate(parts.model, split, parts.task, batch_rows=rows, beat=beat, guard=guard, fitted=fitted)


def _analysis(
    body: FinalRequest,
    parts: TrialParts,
    tokens: Tokens,
    test: Evaluated | None,
    step: int,
    fitted: Mapping[str, float],
) -> Analysis | None:
    """Return what the model does well and badly on test; without such rows on validation, if it was not trained on."""
    split, found = TEST, test
    if test is None and body.last_step is None:
        split, found = VALIDATION, _evaluated(parts, tokens, VALIDATION, step, fitted)
    if found is None or not parts.leads:
        return None
    config, facts = body.training.config, body.facts_file
    return analysed(found.rows, split, parts.task, config, fitted=fitted, facts_file=facts)


def _save(body: FinalRequest, parts: TrialParts, result: FinalResult, fitted: Mapping[str, float]) -> None:
    """Write the folder, by one rename."""
    whole = parts.layout.whole(parts.model)
    if whole is None:
        return
    config = body.training.config
    read = model_input(config.task, replace(parts.task.context, fitted=fitted))
    analysis = {} if result.analysis is None else {ANALYSIS_FILE: result.analysis.model_dump_json()}
    assert body.model_dir is not None  # a model is asked for
    facts = {
        "task": task_word(config.task),
        "study": body.study,
        "trial": config.number,
        "seed": config.seed,
        "metric": config.metric,
        "step": result.step,
        "metrics": result.validation,
        "test_metrics": result.test,
        **({"labels": read.labels or list(range(parts.task.classes))} if parts.task.classes is not None else {}),
        "input": read.model_dump(mode="json"),
        "data_fingerprint": config.data_fingerprint,
        "dryfit": VERSION,
        "torch": torch.__version__,
    }
    save_trained(
        Path(body.attempt_model_dir),
        whole,
        tokenizer_folders=parts.tokenizer_folders,
        facts=facts,
        place=Path(body.model_dir),
        texts={**Trained(body, result, read, whole).texts(), **analysis},
    )
