import json
import os
from pathlib import Path

import pytest

from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.splits import SplitRule
from dryfit.study.import_formats import ImportedRow, LeftOut, Rejected
from dryfit.study.importing import refuse_taken, target_of, write_rows

RULE = SplitRule(validation=0.25, test=0.25, seed=0)


def row(number: int, **values) -> ImportedRow:
    fields = {"id": f"r{number}", "group": f"g{number // 2}", "criterion": "c", "text": "a b", "label": number % 2}
    return ImportedRow(**{**fields, "evidence": ((0, 1),), "place": f"here, line {number}"} | values)


ROWS = [row(number) for number in range(16)]


def test_what_does_not_fit_is_told_counted_and_written_down(tmp_path: Path) -> None:
    notes: list[str] = []
    bad = [row(number, id=f"x{number}", text=" ") for number in range(25)]
    items = [*ROWS[:2], Rejected("there", "broken"), *bad, row(0, place="there, line 9"), LeftOut(3), LeftOut(4)]
    (one,), rejected, left_out = write_rows(items, target_of(tmp_path / "a.jsonl"), RULE, notes.append)
    assert (one.rows, rejected, left_out) == (2, 27, 7)
    faults = [json.loads(line) for line in (tmp_path / "a.rejected.jsonl").read_text().splitlines()]
    assert len(faults) == 27 and len(notes) == 21
    assert faults[0] == {"place": "there", "error": "broken"}
    assert faults[-1] == {"place": "there, line 9", "error": "id 'r0' is there already: here, line 0"}
    assert notes[0] == "there: broken" and notes[-1] == f"7 more do not fit: {tmp_path}/a.rejected.jsonl"


def test_where_no_row_fits_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("old")
    with pytest.raises(DataError, match="no row fits, 2 do not: here, line 1: text is empty"):
        write_rows([row(1, text=""), row(2, text="")], target_of(tmp_path / "a.jsonl"), RULE, print)
    with pytest.raises(DataError, match="there is no row"):
        write_rows([], target_of(tmp_path / "a.jsonl"), RULE, print)
    assert os.listdir(tmp_path) == ["a.jsonl"] and (tmp_path / "a.jsonl").read_text() == "old"


def test_too_few_groups_for_the_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 groups, of which validation takes 1"):
        write_rows(ROWS[:2], target_of(tmp_path / "data"), RULE, print)
    assert not os.listdir(tmp_path)


def test_an_error_in_the_middle_of_a_source_leaves_what_was_there(tmp_path: Path) -> None:
    def broken():
        yield ROWS[0]
        raise DataError("reading x, line 2", "not CSV")

    (tmp_path / "a.jsonl").write_text("old")
    with pytest.raises(DataError, match="not CSV"):
        write_rows(broken(), target_of(tmp_path / "a.jsonl"), RULE, print)
    assert os.listdir(tmp_path) == ["a.jsonl"] and (tmp_path / "a.jsonl").read_text() == "old"


def test_nothing_of_an_earlier_import_stays_beside_this_one(tmp_path: Path) -> None:
    target = target_of(tmp_path / "data")
    write_rows([*ROWS, Rejected("there", "broken")], target, RULE, print)
    with pytest.raises(ConfigError, match=r"test\.jsonl, .*rejected\.jsonl is there already"):
        refuse_taken(target)
    write_rows(ROWS, target, SplitRule(0.5, 0.0, 0), print)
    assert sorted(os.listdir(tmp_path / "data")) == ["train.jsonl", "validation.jsonl"]


def test_a_stale_file_alone_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("old")
    with pytest.raises(ConfigError, match="test"):
        refuse_taken(target_of(tmp_path))
    refuse_taken(target_of(tmp_path / "train.jsonl"))


def test_targets(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "v1.json").mkdir()
    for name, found in {"odd.jsonl": "it is a folder", "file": "of kind ''", "a.csv": "of kind '.csv'"}.items():
        with pytest.raises(ConfigError, match=found):
            target_of(tmp_path / name)
    assert target_of(tmp_path / "v1.json").is_folder and target_of(tmp_path / "data.v2").is_folder
    assert not target_of(tmp_path / "new.jsonl").is_folder
