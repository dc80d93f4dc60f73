"""Rows predicted with a saved model: by the job PREDICT, and by ``dryfit.Predictor``."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO, cast, final

import torch
from transformers import PreTrainedTokenizerBase

from dryfit.meta.checkpoint_files import FolderSource
from dryfit.meta.configs import load_tokenizer
from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.files import sync_path
from dryfit.settings.memory_terms import DeviceKind
from dryfit.settings.task_facts import task_word
from dryfit.settings.text import brief
from dryfit.settings.training_messages import PredictRequest, PredictResult, model_folder
from dryfit.settings.wire import Note, Phase, Progress
from dryfit.tasks.base import Task, TaskModel
from dryfit.tasks.guard import check_tokens, model_bounds
from dryfit.tasks.own import make_task
from dryfit.tasks.rows import BadRow, RawRow, UnlabelledRow, stream_rows, unlabelled_row
from dryfit.tasks.saved_models import ModelInput, load, read_model_input
from dryfit.training.device import find_device
from dryfit.training.trainer import kept_in_order

# Predict rows with a saved model: what PREDICT and :class:`dryfit.Predictor` have in common.
#
# Rows are predicted some thousands at a time. Within such a chunk, rows of similar length are batched together; each
# row has its line, in order.


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
        kept = kept_in_order(self.model, tokens, task, collate, batch_rows=self.batch_rows, beat=beat)
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


# Child job PREDICT: predict the rows of a source with a trained model.
#
# Rows are read, tokenised and predicted chunk by chunk, so memory does not grow with the file.


_MOST_NOTES = 20


def predict(body: PredictRequest, channel: ChildChannel) -> PredictResult:
    """Predict every row of a source; the output appears by one rename, when it is complete.

    Raises:
        LoadError: The model's folder is not one that dryfit saved.
        DataError: The source is absent, or cannot be read to its end.
        MachineError: CUDA is asked for and not there.
    """
    torch.set_num_threads(body.threads)
    device, _ = find_device(body.device)
    rows = stream_rows(body.source)  # absent sources are refused before the model is loaded
    predictor = open_predictor(Path(body.model_dir), device, batch_rows=body.batch_rows, trust=body.trust)
    channel.send(Phase(name="evaluate"))
    with Path(body.temporary).open("w", encoding="utf-8") as file:
        counts = predict_rows(predictor, rows, file, channel)
        file.flush()
        os.fsync(file.fileno())
    Path(body.temporary).replace(body.out)
    sync_path(Path(body.out).parent)
    return PredictResult(rows=counts.rows, bad=counts.bad, device=device)


@dataclass(slots=True)
class Counts:
    """The number of rows read, and of those that could not be predicted."""

    rows: int = 0
    bad: int = 0


def predict_rows(
    predictor: ModelPredictor, rows: Iterator[RawRow | BadRow], file: TextIO, channel: ChildChannel
) -> Counts:
    """Write one line for each row, in order: a prediction or an error."""
    counts = Counts()
    for chunk in checked_chunks(rows, predictor):
        for error in chunk.errors[: max(0, _MOST_NOTES - counts.bad)]:
            channel.send(Note(text=error_text(error)))
        for line in predicted_lines(chunk, predictor, channel.beat):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        counts.rows += len(chunk.raw)
        counts.bad += len(chunk.errors)
        channel.send(Progress(step=counts.rows, total_steps=0, epoch=0.0))
    if counts.bad > _MOST_NOTES:
        channel.send(Note(text=f"{counts.bad - _MOST_NOTES} more bad rows; each has a line with an error"))
    return counts


# ``dryfit.Predictor``: a saved model, or several as one, that predicts rows in the process of the caller.


_DEVICES: Final = ("auto", "cpu", "cuda")
_MOST_BATCH: Final = 65_536
_SOURCE: Final = "the rows given"


@final
class Predictor:
    """A trained model that stays loaded and predicts rows; what it says is what ``dryfit predict`` says of them.

    Calls from several threads take turns. It cannot be sent to another
    process: make it in the process that uses it, after a fork.

    Args:
        model: A folder that ``dryfit train`` wrote, or a trial's best weights.
        device: ``auto``, ``cpu`` or ``cuda``.
        batch: Rows at once.
        trust: Run code that comes with the model, and that of a task of your own.

    Attributes:
        columns: What a row must have: the text's column, and the criterion's where the model reads one.

    Raises:
        LoadError: The folder is absent, damaged or not a model's; if models lie in it, they are named.
        ConfigError: ``device`` or ``batch`` is no such value.
        MachineError: There is no such device.
    """

    def __init__(self, model: Path | str, *, device: str = "auto", batch: int = 64, trust: bool = False) -> None:
        doing = f"opening a predictor of {model}"
        if device not in _DEVICES:
            raise ConfigError(doing, f"device is {brief(device)}", ", ".join(_DEVICES))
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= _MOST_BATCH:
            raise ConfigError(doing, f"batch is {brief(batch)}", f"an integer from 1 to {_MOST_BATCH}")
        self._folder = model_folder(model, doing)
        self._device, _ = find_device(device)
        self._predictor = open_predictor(self._folder, self._device, batch_rows=batch, trust=trust)
        self._turn = threading.Lock()  # tokenizers keep their settings of truncation and padding in themselves
        read = self._predictor.model_input
        self.columns = tuple(column for column in (read.criterion, read.text) if column is not None)

    def __repr__(self) -> str:
        """Return the folder, what the model learned, and where it is."""
        word = task_word(self._predictor.model_input.task)
        return f"Predictor({str(self._folder)!r}: {word}, {', '.join(self.columns)}, {self._device})"

    def __call__(self, rows: Iterable[str | Mapping[str, Any]], *, allow_bad: bool = False) -> list[dict[str, Any]]:
        """Predict rows.

        Texts are cut, or read in windows, as they were in training, so none is too long.

        Args:
            rows: Each a dict with the columns of the training rows, of which labels and others are not read; or a plain
                text, where the model reads nothing else.
            allow_bad: Give a row that cannot be predicted a dict with its ``error``; otherwise it is an error of the
                call, raised before any row is predicted.

        Returns:
            For each row a dict, as ``dryfit predict`` writes it: ``row`` (its index), ``id`` (or None), and what the
            task predicts.

        Raises:
            DataError: There are no rows; or one is neither text nor dict, lacks a column, or leaves no room for text.
        """
        raw = [self._raw_row(row, index) for index, row in enumerate(_several(rows))]
        with self._turn:
            chunks = list(checked_chunks(raw, self._predictor))
            errors = [error for chunk in chunks for error in chunk.errors]
            if errors and not allow_bad:
                first, more = errors[0], f" (of {len(raw)} rows {len(errors)} are bad)" if len(errors) > 1 else ""
                hint = "with allow_bad=True each bad row has its error, and the others their predictions"
                raise DataError(first.doing, f"{first.found}{more}", first.allowed, first.hint or hint)
            return [line for chunk in chunks for line in predicted_lines(chunk, self._predictor)]

    def _raw_row(self, row: object, index: int) -> RawRow | BadRow:
        """Return a row as a file would have it, or what is wrong with it."""
        doing, wanted = f"reading {_SOURCE}, row {index}", " and ".join(map(repr, self.columns))
        allowed = f"a dict with {wanted}"
        if isinstance(row, Mapping):
            values = {str(name): value for name, value in row.items()}
        elif not isinstance(row, str):
            allowed = allowed if len(self.columns) > 1 else f"a text, or {allowed}"
            return BadRow(index, DataError(doing, f"it is {brief(row)}, of type {type(row).__name__}", allowed))
        elif len(self.columns) > 1:
            read = self._predictor.model_input
            return BadRow(index, DataError(doing, f"it is a text alone: {read.criterion!r} is missing", allowed))
        else:
            values = {self._predictor.model_input.text: row}
        half = next((name for name in self.columns if not _is_encodable(values.get(name))), None)
        if half is not None:
            found = f"{half} has half a surrogate pair, which is no character"
            return BadRow(index, DataError(doing, found, "text that UTF-8 can encode"))
        return RawRow(values, _SOURCE, index)


def _several(rows: object) -> list[object]:
    """Return a list of rows.

    Raises:
        DataError: It is one row, nothing to go through, or empty.
    """
    doing, allowed = "predicting rows", "a list of texts or dicts, one at least"
    if isinstance(rows, str | bytes | Mapping):
        what = "text" if isinstance(rows, str | bytes) else "dict"
        raise DataError(doing, f"one {what} was given, and no list", allowed, "put it into a list: predictor([row])")
    if hasattr(rows, "iterrows"):  # going through a data frame gives the names of its columns
        raise DataError(doing, "a data frame was given", allowed, 'predictor(frame.to_dict("records"))')
    if not isinstance(rows, Iterable):
        raise DataError(doing, f"{brief(rows)} was given, of type {type(rows).__name__}", allowed)
    given = list[object](rows)
    if not given:
        raise DataError(doing, "the list is empty", allowed)
    return given


def _is_encodable(value: object) -> bool:
    """Return whether UTF-8 can encode a value; what is no text at all is refused elsewhere, with its column's name."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        return False
    return True
