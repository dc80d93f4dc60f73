"""Convert tables to rows by a column map: TSV files in the style of GLUE, and data sets of the Hugging Face hub.

GLUE (Wang et al., "GLUE", ICLR 2019; gluebenchmark.com) has a table for each task: most with a header (RTE: ``index,
sentence1, sentence2, label``), CoLA without; labels are integers or names.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from dryfit.core.text.json_text import parse_json
from dryfit.core.text.words import few
from dryfit.importers.files import Record
from dryfit.importers.items import ImportedRow, Item, Rejected, Span, UnfitError
from dryfit.importers.options import ColumnMap


def table_rows(records: Iterable[Record | Rejected], columns: ColumnMap, prefix: str) -> Iterator[Item]:
    """Convert the rows of a table file, whose cells are text.

    Args:
        records: The file's rows.
        columns: The column of each field.
        prefix: Prefix of row ids, ``PREFIX:LINE``, where no column has them.
    """
    for record in records:
        if isinstance(record, Rejected):
            yield record
        else:
            yield mapped_row(record.values, columns, place=record.place, unnamed=f"{prefix}:{record.number}")


def hub_rows(lines: Iterable[str], columns: ColumnMap, source: str, prefix: str) -> Iterator[Item]:
    """Convert the rows of a hub data set from the lines of the job ROWS: ``{"row", "values"}`` or ``{"row", "error"}``.

    Args:
        lines: The lines.
        columns: The column of each field.
        source: The data set, for messages.
        prefix: Prefix of row ids, ``PREFIX:ROW``, where no column has them.
    """
    for line in lines:
        written = json.loads(line)
        place = f"{source}, row {written['row']}"
        if "error" in written:
            yield Rejected(place, written["error"])
        else:
            yield mapped_row(written["values"], columns, place=place, unnamed=f"{prefix}:{written['row']}")


def mapped_row(values: Mapping[str, Any], columns: ColumnMap, *, place: str, unnamed: str) -> ImportedRow | Rejected:
    """Convert one row of a table.

    Args:
        values: Cell by column; text, or a JSON value.
        columns: The column of each field.
        place: Where the row is, for messages.
        unnamed: Its id, where no column has ids.
    """
    cells = {field: values[column] for field, column in columns.columns.items()}
    try:
        return ImportedRow(
            id=_name(cells, "id") if "id" in cells else unnamed,
            group=_name(cells, "group") if "group" in cells else None,
            criterion=_text(cells, "criterion") if "criterion" in cells else None,
            text=_text(cells, "text"),
            label=_label(cells["label"], columns.labels),
            evidence=_evidence(cells["evidence"]) if "evidence" in cells else None,
            place=place,
        )
    except UnfitError as error:
        return Rejected(place, str(error))


def _text(cells: Mapping[str, Any], field: str) -> str:
    value = cells[field]
    if not isinstance(value, str):
        raise UnfitError(f"{field} is of type {type(value).__name__}, not text")
    return value


def _name(cells: Mapping[str, Any], field: str) -> str:
    value = cells[field]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnfitError(f"{field} is of type {type(value).__name__}, neither text nor an integer")
    return str(value)


def _label(value: Any, labels: tuple[str, ...]) -> int:
    if labels:
        if str(value) not in labels:
            raise UnfitError(f"label is {_shortened(value)}, none of {few(labels, most=12)}")
        return labels.index(str(value))
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnfitError(f"label is {_shortened(value)}, not an integer (names of classes are given with --labels)")
    return value


def _evidence(value: Any) -> tuple[Span, ...]:
    if isinstance(value, str):
        with suppress(ValueError):  # refused below
            value = parse_json(value or "[]")
    if not isinstance(value, list):
        raise UnfitError(f"evidence is of type {type(value).__name__}, not a list of [start, end)")
    spans: list[Span] = []
    for span in cast(list[Any], value):
        pair = cast(list[Any], span) if isinstance(span, list) else []
        if len(pair) != 2 or not all(type(end) is int for end in pair):
            raise UnfitError(f"evidence has {_shortened(span)}, not [start, end)")
        spans.append((pair[0], pair[1]))
    return tuple(sorted(spans))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
