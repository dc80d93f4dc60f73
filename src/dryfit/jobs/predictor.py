"""``dryfit.Predictor``: a saved model, or several as one, that predicts rows in the process of the caller."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

from dryfit.core.errors import ConfigError, DataError
from dryfit.core.jobs.model_folders import model_folder
from dryfit.core.settings.task_facts import task_word
from dryfit.core.text.words import brief
from dryfit.jobs.prediction import checked_chunks, open_predictor, predicted_lines
from dryfit.tasks.rows.sources import BadRow, RawRow
from dryfit.train.device import find_device

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
