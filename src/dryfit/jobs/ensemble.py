"""Child job ENSEMBLE: evaluate several trained models together and put them into one folder; and predict with it.

The models take turns: one is in memory at a time, and on the device. The outputs of each are kept on the host until the
last has run.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import DataError
from dryfit.core.jobs.analysis import ANALYSIS_FILE
from dryfit.core.jobs.ensemble import EnsembleMember, EnsembleRequest, EnsembleResult
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.settings.task_facts import task_word
from dryfit.core.version import VERSION
from dryfit.core.wire import Note, Phase
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.configs import load_tokenizer
from dryfit.scoring.row_files import write_rows
from dryfit.scoring.scored_row import ScoredRow
from dryfit.tasks.averaging import Answers, ModelOutputs, averaging
from dryfit.tasks.base import Batch, Outputs, Task, TaskModel
from dryfit.tasks.guard import BatchGuard, check_tokens, model_bounds
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import TEST, VALIDATION, UnlabelledRow
from dryfit.tasks.saved.model_input import ModelInput
from dryfit.tasks.saved.saved_ensemble import EnsembleFolder, read_ensemble, save_ensemble
from dryfit.tasks.saved.saved_model import load
from dryfit.tasks.tokens.token_set import TokenSet
from dryfit.train.data import read_tokens, trial_task
from dryfit.train.device import prepare_device
from dryfit.train.export.analysed import analysed
from dryfit.train.export.ensemble_card import ensemble_card
from dryfit.train.export.model_card import README_FILE
from dryfit.train.validation import kept_in_order


def said_by(
    model: TaskModel,
    tokens: TokenSet,
    task: Task,
    collate: Callable[[Sequence[int]], Batch],
    *,
    batch_rows: int,
    beat: Callable[[], None],
    guard: BatchGuard | None = None,
) -> ModelOutputs:
    """Run a model on rows, and return the outputs that a mean of models needs.

    Args:
        model: In eval mode, on its device.
        tokens: The rows as it reads them.
        task: What it learned.
        collate: Makes the batch of some rows.
        batch_rows: Rows at once.
        beat: Called once a batch, as a sign of life.
        guard: Checks each batch and its outputs.

    Raises:
        DataError: A batch is one that the model has no place for.
        ConfigError: The task has no mean; or what it keeps of a batch is not as wide as of the others.
    """
    meaning = averaging(task)
    by_token: dict[int, torch.Tensor] = {}

    def after(rows: Sequence[int], outputs: Outputs, batch: Batch) -> None:
        of_tokens = meaning.keep_tokens(outputs, batch)
        if of_tokens is not None:
            tokens_BLK = of_tokens.cpu()
            by_token.update((row, tokens_BLK[index, : int(tokens.lengths_R[row])]) for index, row in enumerate(rows))
        beat()

    kept_RK = kept_in_order(model, tokens, task, collate, batch_rows=batch_rows, after=after, guard=guard)
    return ModelOutputs(
        kept_RK=kept_RK,
        by_token_TK=torch.cat([by_token[row] for row in range(len(by_token))]) if by_token else None,
        # Of the tokens themselves nothing is needed any more.
        tokens=replace(tokens, ids_T=tokens.ids_T.new_empty(0), types_T=None),
    )


def ensemble(body: EnsembleRequest, channel: ChildChannel) -> EnsembleResult:
    """Evaluate models together on validation and test, and put them into one folder.

    Returns:
        Their scores together.

    Raises:
        DryfitError: A model cannot be loaded any more, or the data has changed.
    """
    first = body.members[0].training
    torch.set_num_threads(first.plan.threads)
    for note in prepare_device(first.plan, os.environ).notes:
        channel.send(Note(text=note))
    learned = trial_task(first.config)
    task = averaging(learned)
    outputs = _all_outputs(body, channel)
    rows = {name: said[0].tokens.sources for name, said in outputs.items()}
    means = {name: task.averaged(said) for name, said in outputs.items()}
    fitted = dict(means[VALIDATION].fit()) if VALIDATION in means else {}
    test = _metrics(means.get(TEST), fitted)
    split, scored = _scored(outputs, means, fitted)
    if split == TEST and body.scored_dir:
        write_rows(Path(body.scored_dir), TEST, scored, test or {})
    result = EnsembleResult(
        validation=_metrics(means.get(VALIDATION), fitted),
        test=test,
        rows=rows,
        members=tuple(member.result for member in body.members),
        model_dir=body.model_dir,
        analysis=analysed(scored, split, learned, first.config, fitted=fitted, facts_file=body.facts_file),
    )
    channel.send(Phase(name="save"))
    _save(body, result, fitted)
    return result


def _all_outputs(body: EnsembleRequest, channel: ChildChannel) -> dict[str, list[ModelOutputs]]:
    """Return the outputs of each model for each split that may be evaluated."""
    names = (TEST,) if body.with_validation else (VALIDATION, TEST)
    outputs = defaultdict[str, list[ModelOutputs]](list)
    for number, member in enumerate(body.members, start=1):
        channel.send(Phase(name="load"))
        channel.send(Note(text=f"model {number} of {len(body.members)}: trial {member.training.config.number}"))
        for name, said in _said_of_splits(member, names, channel):
            outputs[name].append(said)
    return outputs


def _said_of_splits(
    member: EnsembleMember, names: tuple[str, ...], channel: ChildChannel
) -> Iterator[tuple[str, ModelOutputs]]:
    training = member.training
    config, plan = training.config, training.plan
    tokens = read_tokens(training, trial_task(config), only=names)
    task = trial_task(config, tokens)
    trust = config.settings.model.trust_remote_code
    model = _loaded(Path(member.model_dir), plan.device, trust=trust)
    for name in names:
        if name not in tokens.splits:
            continue
        channel.send(Phase(name="evaluate"))
        split = tokens.splits[name]
        yield (
            name,
            said_by(
                model,
                split,
                task,
                partial(task.collate, split),
                batch_rows=plan.eval_rows,
                beat=channel.beat,
                guard=BatchGuard(name, split, model_bounds(model)),
            ),
        )


def _loaded(folder: Path, device: DeviceKind, *, trust: bool) -> TaskModel:
    return cast("TaskModel", load(folder, device="cuda" if device is DeviceKind.CUDA else "cpu", trust=trust))


def _scored(
    outputs: Mapping[str, Sequence[ModelOutputs]], means: Mapping[str, Answers], fitted: Mapping[str, float]
) -> tuple[str, list[ScoredRow]]:
    """Return the rows of test with their answers; where there is no such split, those of validation."""
    split = TEST if TEST in means else VALIDATION
    if split not in means:
        return split, []
    return split, list(means[split].scored_rows(outputs[split][0].tokens.source_names, fitted))


def _metrics(mean: Answers | None, fitted: Mapping[str, float]) -> dict[str, float] | None:
    return None if mean is None else {name: float(value) for name, value in mean.metrics(fitted).items()}


def _save(body: EnsembleRequest, result: EnsembleResult, fitted: Mapping[str, float]) -> None:
    config = body.members[0].training.config
    facts: dict[str, Any] = {
        "task": task_word(config.task),
        "study": body.study,
        "metric": config.metric,
        "metrics": result.validation,
        "test_metrics": result.test,
        "trials": [member.training.config.number for member in body.members],
        "seeds": [member.training.config.seed for member in body.members],
        "data_fingerprint": config.data_fingerprint,
        "dryfit": VERSION,
        "torch": torch.__version__,
    }
    analysis = {} if result.analysis is None else {ANALYSIS_FILE: result.analysis.model_dump_json()}
    save_ensemble(
        Path(body.attempt_model_dir),
        [Path(member.model_dir) for member in body.members],
        fitted=fitted,
        facts=facts,
        texts={README_FILE: ensemble_card(body, result), **analysis},
    )


@dataclass(frozen=True, slots=True)
class EnsemblePredictor:
    """An ensemble, ready to predict rows.

    Attributes:
        ensemble: Its folder.
        tokenizers: Of the members.
        device: Where each member takes its turn.
        batch_rows: Rows at once.
        trust: Run code that comes with a model.
        held: Members that stay in memory, by their folders; the others are loaded for each call.
    """

    ensemble: EnsembleFolder
    tokenizers: tuple[PreTrainedTokenizerBase, ...]
    device: DeviceKind
    batch_rows: int
    trust: bool = False
    held: Mapping[Path, TaskModel] = field(default_factory=dict[Path, TaskModel])

    @classmethod
    def of(
        cls, folder: Path, device: DeviceKind, *, batch_rows: int, trust: bool = False, hold: bool = False
    ) -> "EnsemblePredictor":
        """Read an ensemble's folder.

        Args:
            folder: The ensemble's.
            device: Where its members compute.
            batch_rows: Rows at once.
            trust: Run code that comes with a model.
            hold: Load all members now and keep them; otherwise each is loaded when rows are predicted.

        Raises:
            LoadError: It is damaged, or its members do not belong together.
        """
        ensemble = read_ensemble(folder, trust=trust)
        sources = [FolderSource(str(folder), trust_remote_code=trust) for folder in ensemble.folders]
        tokenizers = tuple(map(load_tokenizer, sources))
        held = {member: _loaded(member, device, trust=trust) for member in ensemble.folders} if hold else {}
        return cls(ensemble, tokenizers, device, batch_rows, trust, held)

    @property
    def model_input(self) -> ModelInput:
        """The input of the first member; the others have the same columns."""
        return self.ensemble.reads[0]

    @property
    def models(self) -> int:
        """How many models predict each row."""
        return len(self.ensemble.folders)

    def unfit(self, rows: Sequence[UnlabelledRow]) -> Mapping[int, DataError]:
        """Return the rows that a member cannot read, by index, each with its error."""
        bad: dict[int, DataError] = {}
        for task, tokenizer in zip(self._tasks, self.tokenizers, strict=True):
            bad = {**task.unfit(rows, tokenizer), **bad}
        return bad

    def predict(
        self, rows: Sequence[UnlabelledRow], beat: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, object]]:
        """Predict each row by the mean of all members, in order.

        Args:
            rows: At least one; none is unfit.
            beat: Called once a batch.

        Raises:
            LoadError: A member's files are damaged.
            DataError: A row has tokens that a member has no place for.
        """
        said = [
            self._said(rows, folder, task, tokenizer, beat)
            for folder, task, tokenizer in zip(self.ensemble.folders, self._tasks, self.tokenizers, strict=True)
        ]
        return self.ensemble.task.averaged(said).predictions(rows, self.ensemble.fitted)

    def _said(
        self,
        rows: Sequence[UnlabelledRow],
        folder: Path,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        beat: Callable[[], None],
    ) -> ModelOutputs:
        held = self.held.get(folder)
        model = _loaded(folder, self.device, trust=self.trust) if held is None else held
        tokens = task.tokenise_unlabelled(rows, tokenizer)
        bounds = replace(model_bounds(model), labels=None)
        check_tokens("to predict", tokens, bounds, hint="the model's folder is damaged: its tokenizer is not its own")
        collate = partial(task.collate_unlabelled, tokens)
        return said_by(model, tokens, task, collate, batch_rows=self.batch_rows, beat=beat)

    @property
    def _tasks(self) -> list[Task]:
        both = zip(self.ensemble.folders, self.ensemble.reads, strict=True)
        sources = ((FolderSource(str(folder), trust_remote_code=self.trust), read) for folder, read in both)
        return [make_task(read.task, replace(read.context, saved=source)) for source, read in sources]
