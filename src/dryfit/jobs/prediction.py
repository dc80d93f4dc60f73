"""Predict rows with a saved model: what PREDICT and :class:`dryfit.Predictor` have in common.

Rows are predicted some thousands at a time. Within such a chunk, rows of similar length are batched together; each row
has its line, in order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from dryfit.core.errors import DataError
from dryfit.core.settings.execution import DeviceKind
from dryfit.meta.files.source import FolderSource
from dryfit.meta.loading.configs import load_tokenizer
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.guard import check_tokens, model_bounds
from dryfit.tasks.registry import make_task
from dryfit.tasks.rows.checked_rows import UnlabelledRow, unlabelled_row
from dryfit.tasks.rows.sources import BadRow, RawRow
from dryfit.tasks.saved.model_input import ModelInput, read_model_input
from dryfit.tasks.saved.saved_model import load
from dryfit.train.validation import kept_in_order

CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ModelPredictor:
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


def open_predictor(folder: Path, device: DeviceKind, *, batch_rows: int, trust: bool = False) -> ModelPredictor:
    """Load what predicts rows with the model in a folder.

    Args:
        folder: A saved model's.
        device: Where it computes.
        batch_rows: Rows at once.
        trust: Run code that comes with the model.

    Raises:
        LoadError: The folder is not one that dryfit saved.
    """
    model_input = read_model_input(folder).with_task_folder(folder, trust=trust)
    source = FolderSource(str(folder), trust_remote_code=trust)
    return ModelPredictor(
        model=cast("TaskModel", load(folder, device="cuda" if device is DeviceKind.CUDA else "cpu", trust=trust)),
        tokenizer=load_tokenizer(source),
        model_input=model_input,
        batch_rows=batch_rows,
        source=source,
    )


@dataclass(frozen=True, slots=True)
class CheckedChunk:
    """Rows that are predicted together.

    Attributes:
        raw: As they came.
        checked: Each as the model reads it, or its error.
    """

    raw: Sequence[RawRow | BadRow]
    checked: Sequence[UnlabelledRow | DataError]

    @property
    def errors(self) -> list[DataError]:
        """The errors of the rows that cannot be predicted, in order."""
        return [row for row in self.checked if isinstance(row, DataError)]


def checked_chunks(rows: Iterable[RawRow | BadRow], predictor: ModelPredictor) -> Iterator[CheckedChunk]:
    """Yield rows in chunks that a predictor takes at once, checked."""
    left = iter(rows)
    while chunk := list(islice(left, CHUNK_ROWS)):
        yield CheckedChunk(chunk, _checked(chunk, predictor))


def predicted_lines(
    chunk: CheckedChunk, predictor: ModelPredictor, beat: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Yield what is said of each row of a chunk, in order: a prediction or an error.

    Args:
        chunk: Rows that were checked for this very predictor.
        predictor: Predicts them.
        beat: Called once a batch, as a sign of life.
    """
    good = [row for row in chunk.checked if isinstance(row, UnlabelledRow)]
    predictions = predictor.predict(good, beat) if good else iter(())
    for raw, row in zip(chunk.raw, chunk.checked, strict=True):
        if isinstance(row, DataError):
            yield {"row": raw.number, "id": _id_of(raw, predictor.model_input), "error": error_text(row)}
        else:
            yield {"row": raw.number, "id": row.id, **next(predictions)}


def error_text(error: DataError) -> str:
    """Return what the line of a bad row says."""
    return f"{error.doing}: {error.found}"


def _checked(chunk: list[RawRow | BadRow], predictor: ModelPredictor) -> list[UnlabelledRow | DataError]:
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
