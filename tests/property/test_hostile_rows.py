"""Rows that anybody may have written: each is read as it stands, or refused by its place; never anything else."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import tiny
from dryfit.settings.errors import DataError
from dryfit.settings.tables import DataSettings
from dryfit.settings.text import MOST_CELL_CHARS
from dryfit.settings.wire import MOST_DEPTH, parse_json
from dryfit.study.import_formats import Record, csv_records, read_json
from dryfit.tasks.rows import BadRow, RawRow, load_splits, read_rows, stream_rows

_HALF = pyarrow.array([b"good", b"\xed\xa0\x80"]).cast(pyarrow.string(), safe=False)
"""A text, and half a surrogate pair, which is no text."""


def _line(label: str) -> str:
    return f'{{"text": "It is.", "label": {label}}}'


_DEEP = 100_000
_LINES = {
    "a key twice": ('{"text": "It is.", "label": 0, "label": 1}', "the key 'label' is there twice"),
    "a key twice inside": (_line('{"a": 0, "a": 1}'), "the key 'a' is there twice"),
    "half a pair": ('{"text": "\\ud800", "label": 0}', "half a surrogate pair"),
    "half a pair in a list": ('{"text": "It is.", "label": ["\\uDFFF"]}', "half a surrogate pair"),
    "half a pair as a key": ('{"\\udc00": "It is."}', "half a surrogate pair"),
    "deep lists": (_line("[" * _DEEP + "]" * _DEEP), "nested deeper"),
    "deep objects": (_line('{"a":' * 500 + "0" + "}" * 500), "nested deeper"),
    "one level too deep": (_line("[" * MOST_DEPTH + "]" * MOST_DEPTH), "nested deeper"),
    "5 000 digits": (_line("9" * 5000), "digit"),
    "no end": ("[" * _DEEP, "JSON|nested deeper"),
    "a NUL byte": ("\0", "not JSON"),
    "a list": ("[1, 2]", "is no object"),
}


@pytest.mark.parametrize("name", _LINES)
def test_a_hostile_line_is_refused_by_its_number_and_the_next_one_is_read(tmp_path: Path, name: str) -> None:
    line, found = _LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{_line('0')}\n{line}\n{_line('1')}\n", encoding="utf-8")
    first, bad, last = stream_rows(str(path))
    assert isinstance(first, RawRow) and isinstance(last, RawRow) and isinstance(bad, BadRow)
    assert (first.values["label"], last.values["label"], bad.number) == (0, 1, 2)
    with pytest.raises(DataError, match=found) as caught:
        read_rows(str(path))
    assert caught.value.doing == f"reading {path}, line 2"
    assert len(str(caught.value)) < 1000


def test_json_in_bounds_is_read_as_the_standard_library_reads_it() -> None:
    made = random.Random(7)

    def value(depth: int) -> object:
        kind = made.randrange(6 if depth else 4)
        plain = (
            None,
            made.random() < 0.5,
            made.randrange(-(10**30), 10**30),
            made.choice(["", "\0", "ß", "\U0001f600"]),
        )
        if kind < 4:
            return plain[kind]
        items = [value(depth - 1) for _ in range(made.randrange(4))]
        return items if kind == 4 else {str(index): item for index, item in enumerate(items)}

    for _ in range(300):
        written = value(8)
        assert parse_json(json.dumps(written)) == parse_json(json.dumps(written, ensure_ascii=False)) == written
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json.dumps(parse_json(deepest)) == deepest


def test_a_large_csv_cell_is_read_and_one_past_the_bound_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\n{'a' * 1_000_000},1\n")
    assert len(read_rows(str(path))[0].values["text"]) == 1_000_000
    (record,) = csv_records(str(path), ["text"])
    assert isinstance(record, Record) and len(record.values["text"]) == 1_000_000
    path.write_text(f"text,label\n{'a' * (MOST_CELL_CHARS + 1)},1\n")
    with pytest.raises(DataError, match=str(MOST_CELL_CHARS)):
        read_rows(str(path))
    with pytest.raises(DataError, match=str(MOST_CELL_CHARS)):
        list(csv_records(str(path), ["text"]))


def test_a_cell_with_a_nul_is_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"text,label\na\0b,1\n")
    assert read_rows(str(path))[0].values == {"text": "a\0b", "label": "1"}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        path.write_text("text,label,label\nIt is.,0,1\n")
    else:
        columns = [pyarrow.array(["It is."]), pyarrow.array([0]), pyarrow.array([1])]
        pyarrow.parquet.write_table(pyarrow.table(columns, names=["text", "label", "label"]), path)
    with pytest.raises(DataError, match="'label' is there twice"):
        read_rows(str(path))


@pytest.mark.parametrize("hub", [False, True])
def test_text_that_is_no_text_is_refused_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"label": [0, 1], "text": _HALF}), path)
    source = f"hub:{folder}" if hub else str(path)
    with pytest.raises(DataError, match="utf-8") as caught:
        read_rows(source)
    assert caught.value.doing == f"reading {source}, row 1"


@pytest.mark.parametrize("name", ["hub:", "hub::train", "hub: ", "hub:a\0b", "hub:.../...", "rows\0.jsonl"])
def test_a_name_with_nothing_behind_it(name: str) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(name)
    assert caught.value.allowed and caught.value.found.isprintable()


def _jsonl(path: Path) -> None:
    tiny.write_jsonl(path, tiny.rows(8))


def _csv(path: Path) -> None:
    rows = [f'{row["id"]},{row["group"]},{row["criterion"]},"{row["text"]}",{row["label"]}' for row in tiny.rows(8)]
    path.write_text("\n".join(["id,group,criterion,text,label", *rows]))


def _parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tiny.rows(8)), path)


def _mutated(content: bytes, made: random.Random) -> bytes:
    pieces = [b'"', b"[", b"{", b"\0", b"\xff", b"\\ud800", b"9" * 5000, b",", b"\n", b"1e999", b"NaN", b"[" * 2000]
    at, until = sorted(made.randrange(len(content) + 1) for _ in range(2))
    match made.randrange(4):
        case 0:
            return content[:at] + made.choice(pieces) + content[at:]
        case 1:
            return content[:at] + bytes([made.randrange(256)]) + content[at + 1 :]
        case 2:
            return content[:at] + content[until:]
        case _:
            return content[:until] + content[at:]


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", _jsonl), ("csv", _csv), ("parquet", _parquet)])
def test_a_file_of_rows_is_read_or_refused(tmp_path: Path, suffix: str, write: Callable[[Path], None]) -> None:
    made = random.Random(suffix)
    good, path = tmp_path / f"good.{suffix}", tmp_path / f"rows.{suffix}"
    write(good)
    settings = DataSettings(file=str(path), validation_fraction=0.5)
    refused: list[DataError] = []
    for _ in range(300):
        content = good.read_bytes()
        for _ in range(made.randrange(1, 4)):
            content = _mutated(content, made)
        path.write_bytes(content)
        try:
            load_splits(settings)
        except DataError as error:
            refused.append(error)
    assert len(refused) > 100
    assert all(error.found and len(str(error)) < 2000 for error in refused)


def test_a_json_document_is_read_or_refused(tmp_path: Path) -> None:
    made = random.Random(3)
    path = tmp_path / "squad.json"
    good = json.dumps({"data": [{"paragraphs": [{"context": "It is.", "qas": tiny.rows(3)}]}]}).encode()
    refused: list[DataError] = []
    for _ in range(300):
        path.write_bytes(_mutated(good, made))
        try:
            read_json(str(path))
        except DataError as error:
            refused.append(error)
    assert len(refused) > 50
    assert all(error.found and len(str(error)) < 2000 for error in refused)
