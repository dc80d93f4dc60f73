import datetime
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dryfit.processes.channel import ChildChannel
from dryfit.settings.errors import DataError
from dryfit.settings.training_messages import RowsRequest
from dryfit.training.resolve import copy_rows


def copied(source: Path, *columns: str) -> list[dict]:
    folder = source.parent / "job"
    folder.mkdir()
    channel = ChildChannel(folder, wakeup_fifo=None, placed_at_s=0.0)
    out = source.parent / "out.jsonl"
    result = copy_rows(RowsRequest(source=str(source), columns=columns, out=str(out)), channel)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert result.rows == len(lines)
    return lines


def test_named_columns_of_every_row_and_why_a_row_has_none(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1, "b": "x"}\nnonsense\n{"a": 2}\n{"a": [3], "b": null, "c": 4}\n', encoding="utf-8")
    assert copied(source, "a", "b") == [
        {"row": 1, "values": {"a": 1, "b": "x"}},
        {"row": 2, "error": "not JSON: Expecting value at column 1"},
        {"row": 3, "error": "there is no column 'b'"},
        {"row": 4, "values": {"a": [3], "b": None}},
    ]


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    day = datetime.date(2020, 1, 1)
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "day": [day]}), source)
    (row,) = copied(source, "a", "day")
    assert row == {"row": 0, "error": "Object of type date is not JSON serializable"}


def test_all_columns_whatever_they_hold(tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "day": [datetime.date(2020, 1, 1)]}), source)
    assert copied(source) == [{"row": 0, "values": {"a": "x", "day": {"unwritten": "date"}}}]


def test_a_source_without_the_column(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="there is no column 'b', 'c'") as caught:
        copied(source, "a", "b", "c")
    assert caught.value.allowed == "its columns: a"
