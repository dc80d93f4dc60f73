"""Child job ROWS: write the rows of a source as JSON lines, for a process that must not import the readers."""

import json
from pathlib import Path

from dryfit.core.channel import ChildChannel
from dryfit.core.errors import DataError
from dryfit.core.jobs.train import RowsRequest, RowsResult
from dryfit.core.text.words import few
from dryfit.core.wire import Phase, Progress
from dryfit.tasks.rows.sources import BadRow, RawRow, stream_rows

_PROGRESS_EVERY = 10_000


def copy_rows(body: RowsRequest, channel: ChildChannel) -> RowsResult:
    """Write a line for each row, in order.

    Raises:
        DataError: The source is absent, or cannot be read to its end; or its first row lacks a column.
    """
    channel.send(Phase(name="load"))
    count = 0
    with Path(body.out).open("w", encoding="utf-8") as file:
        for row in stream_rows(body.source):
            if isinstance(row, RawRow) and count == 0:
                _check_columns(row, body)
            file.write(json.dumps({"row": row.number, **_line(row, body.columns)}) + "\n")
            count += 1
            channel.beat()
            if count % _PROGRESS_EVERY == 0:
                channel.send(Progress(step=count, total_steps=0, epoch=0.0))
    return RowsResult(rows=count)


def _line(row: RawRow | BadRow, columns: tuple[str, ...]) -> dict[str, object]:
    if isinstance(row, BadRow):
        return {"error": f"{row.error.found}"}
    if not columns:
        return {"values": json.loads(json.dumps(row.values, default=_unwritten))}
    absent = [column for column in columns if column not in row.values]
    if absent:
        return {"error": f"there is no column {few(map(repr, absent))}"}
    values = {column: row.values[column] for column in columns}
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:  # an image, a date, bytes
        return {"error": str(error)}
    return {"values": values}


def _unwritten(value: object) -> dict[str, str]:
    return {"unwritten": type(value).__name__}


def _check_columns(row: RawRow, body: RowsRequest) -> None:
    absent = [column for column in body.columns if column not in row.values]
    if absent:
        raise DataError(
            f"reading {body.source}",
            f"there is no column {few(map(repr, absent))}",
            f"its columns: {few(map(str, row.values), most=20)}",
        )
