"""Child job PREDICT: predict rows with a trained model.

Rows are read, tokenised and predicted some thousands at a time, so memory does not grow with the file. Within such a
chunk, rows of similar length are batched together; they are written in the order they were read. A chunk of an ensemble
is smaller by the number of its members, so that their outputs take no more memory than those of one model.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import DataError
from dryfit.core.jobs.train import PredictRequest, PredictResult
from dryfit.core.settings.execution import DeviceKind
from dryfit.core.wire import Note, Phase, Progress, sync_path
from dryfit.jobs.ensemble import EnsemblePredictor
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.configs import load_tokenizer
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.guard import check_tokens, model_bounds
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import UnlabelledRow, unlabelled_row
from dryfit.tasks.rows.sources import BadRow, RawRow, stream_rows
from dryfit.tasks.saved.model_input import ModelInput, read_model_input
from dryfit.tasks.saved.saved_ensemble import is_ensemble
from dryfit.tasks.saved.saved_model import load
from dryfit.train.device import find_device
from dryfit.train.validation import kept_in_order

CHUNK_ROWS = 4096
_MOST_NOTES = 20


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model, ready to predict rows.

    Attributes:
        model: In eval mode, on its device.
        tokenizer: Its tokenizer.
        model_input: What it reads.
        batch_rows: Rows at once.
        source: Its folder; tasks with a tokenizer of their own beside the model's look for it there.
    """

    model: TaskModel
    tokenizer: PreTrainedTokenizerBase
    model_input: ModelInput
    batch_rows: int
    source: FolderSource | None = None

    @property
    def models(self) -> int:
        """How many models predict each row."""
        return 1

    @property
    def task(self) -> Task:
        """The task that the model was trained on."""
        context = replace(self.model_input.context, saved=self.source)
        return make_task(self.model_input.task, context)

    def unfit(self, rows: Sequence[UnlabelledRow]) -> Mapping[int, DataError]:
        """Return the rows that the model cannot read, by index, each with its error."""
        return self.task.unfit(rows, self.tokenizer)

    def predict(
        self, rows: list[UnlabelledRow], beat: Callable[[], None] = lambda: None
    ) -> Iterator[dict[str, object]]:
        """Predict each row, in order.

        Args:
            rows: At least one.
            beat: Called once a batch.

        Raises:
            DataError: A row has tokens that the model has no place for.
        """
        task = self.task
        written = task.generate(self.model, rows, self.tokenizer, batch_rows=self.batch_rows, beat=beat)
        if written is not None:
            return written
        tokens = task.tokenise_unlabelled(rows, self.tokenizer)
        bounds = replace(model_bounds(self.model), labels=None)
        check_tokens("to predict", tokens, bounds, hint="the model's folder is damaged: its tokenizer is not its own")
        collate = partial(task.collate_unlabelled, tokens)
        kept = kept_in_order(self.model, tokens, task, collate, batch_rows=self.batch_rows, after=lambda *_: beat())
        return task.predictions(kept, tokens, rows)


def predict(body: PredictRequest, channel: ChildChannel) -> PredictResult:
    """Predict every row of a source; the output appears by one rename, when it is complete.

    Raises:
        LoadError: The model's folder is not one that dryfit saved.
        DataError: The source is absent, or cannot be read to its end.
        MachineError: CUDA is asked for and not there.
    """
    torch.set_num_threads(body.threads)
    channel.send(Phase(name="load"))
    device, _ = find_device(body.device)
    rows = stream_rows(body.source)  # absent sources are refused before the model is loaded
    predictor = _predictor(body, device)
    channel.send(Phase(name="evaluate"))
    with Path(body.temporary).open("w", encoding="utf-8") as file:
        counts = predict_rows(predictor, rows, file, channel)
        file.flush()
        os.fsync(file.fileno())
    Path(body.temporary).replace(body.out)
    sync_path(Path(body.out).parent)
    return PredictResult(rows=counts.rows, bad=counts.bad, device=device)


def _predictor(body: PredictRequest, device: DeviceKind) -> Predictor | EnsemblePredictor:
    """Load the predictor of a folder.

    Raises:
        LoadError: The folder is not one that dryfit saved.
    """
    folder = Path(body.model_dir)
    if is_ensemble(folder):
        return EnsemblePredictor.of(folder, device, batch_rows=body.batch_rows, trust=body.trust)
    model_input = read_model_input(folder).with_task_folder(folder, trust=body.trust)
    source = FolderSource(str(folder), trust_remote_code=body.trust)
    return Predictor(
        model=cast("TaskModel", load(folder, device="cuda" if device is DeviceKind.CUDA else "cpu", trust=body.trust)),
        tokenizer=load_tokenizer(source),
        model_input=model_input,
        batch_rows=body.batch_rows,
        source=source,
    )


@dataclass(slots=True)
class Counts:
    """The number of rows read, and of those that could not be predicted."""

    rows: int = 0
    bad: int = 0


def predict_rows(
    predictor: Predictor | EnsemblePredictor, rows: Iterator[RawRow | BadRow], file: TextIO, channel: ChildChannel
) -> Counts:
    """Write one line for each row, in order: a prediction or an error."""
    counts = Counts()
    while chunk := list(islice(rows, max(1, CHUNK_ROWS // predictor.models))):
        checked = _checked(chunk, predictor)
        good = [row for row in checked if isinstance(row, UnlabelledRow)]
        predictions = predictor.predict(good, channel.beat) if good else iter(())
        for raw, row in zip(chunk, checked, strict=True):
            if isinstance(row, DataError):
                counts.bad += 1
                _send_note(row, counts.bad, channel)
                line: dict[str, Any] = {
                    "row": raw.number,
                    "id": _id_of(raw, predictor.model_input),
                    "error": _error_text(row),
                }
            else:
                line = {"row": raw.number, "id": row.id, **next(predictions)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        counts.rows += len(chunk)
        channel.send(Progress(step=counts.rows, total_steps=0, epoch=0.0))
    if counts.bad > _MOST_NOTES:
        channel.send(Note(text=f"{counts.bad - _MOST_NOTES} more bad rows; each has a line with an error"))
    return counts


def _checked(chunk: list[RawRow | BadRow], predictor: Predictor | EnsemblePredictor) -> list[UnlabelledRow | DataError]:
    """Return each row as the model reads it, or its error."""
    read = predictor.model_input
    checked: list[UnlabelledRow | DataError] = []
    for raw in chunk:
        try:
            checked.append(
                raw.error
                if isinstance(raw, BadRow)
                else unlabelled_row(raw, text=read.text, criterion=read.criterion, row_id=read.id)
            )
        except DataError as error:
            checked.append(error)
    readable = [index for index, row in enumerate(checked) if isinstance(row, UnlabelledRow)]
    rows = [row for row in checked if isinstance(row, UnlabelledRow)]
    for index, error in (predictor.unfit(rows) if rows else {}).items():
        checked[readable[index]] = error
    return checked


def _id_of(raw: RawRow | BadRow, read: ModelInput) -> str | None:
    """Return the id of a row that cannot be predicted, if it has one."""
    value = raw.values.get(read.id) if isinstance(raw, RawRow) else None
    return str(value) if isinstance(value, str | int) else None


def _error_text(error: DataError) -> str:
    return f"{error.doing}: {error.found}"


def _send_note(error: DataError, number: int, channel: ChildChannel) -> None:
    if number <= _MOST_NOTES:
        channel.send(Note(text=_error_text(error)))
