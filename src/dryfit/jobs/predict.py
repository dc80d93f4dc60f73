"""Child job PREDICT: predict the rows of a source with a trained model.

Rows are read, tokenised and predicted chunk by chunk, so memory does not grow with the file.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from dryfit.core.channel import ChildChannel
from dryfit.core.jobs.train import PredictRequest, PredictResult
from dryfit.core.wire import Note, Phase, Progress, sync_path
from dryfit.jobs.prediction import ModelPredictor, checked_chunks, error_text, open_predictor, predicted_lines
from dryfit.tasks.rows.sources import BadRow, RawRow, stream_rows
from dryfit.train.device import find_device

_MOST_NOTES = 20


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
