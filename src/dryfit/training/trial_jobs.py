"""Child jobs TRAIN and FINAL: train a trial, or a configuration once more, and save its model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import transformers.models.bert.modeling_bert
import transformers.models.distilbert.modeling_distilbert
import transformers.models.electra.modeling_electra
import transformers.models.modernbert.modeling_modernbert
import transformers.models.roberta.modeling_roberta  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dryfit.parallel.processes import ProcessGroup, run_in_process_group
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import NonFiniteError
from dryfit.settings.task_facts import facts_of, reads, task_word
from dryfit.settings.training_messages import (
    ANALYSIS_FILE,
    Analysis,
    FinalRequest,
    FinalResult,
    StopReason,
    TrainRequest,
    TrainResult,
)
from dryfit.settings.trial import MetricPoint, best_point
from dryfit.settings.version import VERSION
from dryfit.settings.wire import Note, Phase
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.rows import TEST, TRAIN, VALIDATION
from dryfit.tasks.saved_models import DRYFIT_FILE, model_input, read_model_input, save_trained
from dryfit.tasks.scored_rows import write_rows
from dryfit.tasks.tokens import Tokens, joined
from dryfit.training.batches import epoch_size, read_tokens, send_remarks, trial_task
from dryfit.training.checkpoint import newest_checkpoint, save_between_folds
from dryfit.training.device import release_memory
from dryfit.training.model import trial_parts
from dryfit.training.model_card import Trained, analysed
from dryfit.training.run import FixedLength, FoldPosition, TrialParts
from dryfit.training.start import fold_score, folds_result, start_training, train_result
from dryfit.training.step import ErrorContext
from dryfit.training.trainer import Evaluated, evaluate, run_training

# Child job TRAIN: train one trial, from its request to its result.


# Imported before the fork, so that a trial need not do it: what most studies train.


# Compiles a thousand patterns on its first call (0.1 s) and keeps them: once before the fork, not in each trial.
get_checkpoint_conversion_mapping("bert")


def train(body: TrainRequest, channel: ChildChannel) -> TrainResult:
    """Train one trial, or go on with it from its newest good checkpoint.

    Args:
        body: What to learn, how to run it and where its files lie.
        channel: How to report, and to hear verdicts and stop requests.

    Returns:
        The best validation, and why training ended.

    Raises:
        DryfitError: A setting, the data, the model's weights or a checkpoint is wrong, or the loss is not finite.
    """
    result = run_in_process_group(body.plan, channel, lambda group: _train(body, channel, group))
    if body.diagnostic:
        channel.send(Note(text="what ended the attempt before did not come back, although every kernel was waited for"))
    return result


def _train(body: TrainRequest, channel: ChildChannel, group: ProcessGroup) -> TrainResult:
    """Train once, or once for each fold that is not done yet, each time on the rows of the others.

    Every fold has a seed of its own and draws nothing that depends on those before, so that it is the same training
    whether this process has done these, another one has, or nobody.
    """
    task = start_training(body, channel)
    checkpoint = newest_checkpoint(body, channel)
    position = first = FoldPosition.of(body, () if checkpoint is None else checkpoint.folds)
    while True:
        tokens = read_tokens(body, task, only=(TRAIN, VALIDATION), fold=position.fold(body.config.data))
        if position is first:  # once: each fold has all rows, on one side or the other
            send_remarks(channel, task, tokens)
        parts = trial_parts(body, channel, tokens, position=position, group=group)
        run = run_training(parts, checkpoint)
        if position.folds == 1:
            return train_result(body, run, group)
        score = fold_score(parts, run)
        if score is None:
            return folds_result(body, position, run.stopped_by, group, fold_steps=run.step)
        del parts, tokens
        release_memory(body.plan.device)
        position = position.after(score)
        if position.is_complete:
            return folds_result(body, position, None, group)
        if group.rank == 0:
            save_between_folds(body, channel, position)
        stop = channel.stop_requested()
        if stop is not None:
            return folds_result(body, position, stop, group)
        checkpoint = None


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
