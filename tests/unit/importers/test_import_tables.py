from pathlib import Path

import pytest

from dryfit.settings.errors import DataError
from dryfit.study.import_formats import (
    ImportedRow,
    Rejected,
    csv_records,
    fault_of,
    mapped_row,
    table_rows,
    tsv_records,
)
from dryfit.study.import_options import ColumnMap
from golden import Golden, refusal
from import_files import RTE, write_text

RTE_MAP = ColumnMap(
    {"criterion": "sentence2", "text": "sentence1", "label": "label"}, labels=("not_entailment", "entailment")
)


def table(path: Path, columns: ColumnMap, *, header: bool = True):
    records = tsv_records(str(path), tuple(columns.columns.values()), header=header)
    return list(table_rows(records, columns, path.stem))


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "RTE.tsv"
    expected = table(write_text(path, RTE), RTE_MAP)
    assert table(write_text(path, "\ufeff" + RTE.replace("\n", "\r\n")), RTE_MAP) == expected


def test_a_table_of_another_form_is_refused(tmp_path: Path, golden: Golden) -> None:
    cases = [
        RTE.replace("\t", ","),
        RTE.replace("\t", ";"),
        RTE.replace("sentence1", "premise"),
        RTE.replace("index", "label"),
        "",
        "\n\n",
    ]
    told = [refusal(table, write_text(tmp_path / "a.tsv", case), RTE_MAP) for case in cases]
    golden("import", [one.replace(f"{tmp_path}/", "") for one in told])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a;b\n1;2\n", "separated by semicolons"),
        ("a\tb\n1\t2\n", "separated by tabs"),
        ("a,c\n1,2\n", "no column 'b'"),
        ("", "it is empty"),
        ('a,b\n1,2\n1,"2\n3,4\n', "the row from line 3 on: not CSV"),
        ('a,b\n1,"2"x\n', "the row from line 2 on: not CSV"),
    ],
)
def test_a_csv_file_of_another_form_is_refused(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(DataError, match=found):
        list(csv_records(str(write_text(tmp_path / "a.csv", text)), ("a", "b")))


def test_csv_rows_are_numbered_by_the_line_they_begin_on(tmp_path: Path) -> None:
    text = '\ufeff"a","b"\r\n1,"x\ny ""z"""\r\n\r\n2,\r\n3\r\n4,w'
    records = list(csv_records(str(write_text(tmp_path / "a.csv", text)), ("a", "b")))
    assert [(one.number, one.values) for one in records if not isinstance(one, Rejected)] == [
        (2, {"a": "1", "b": 'x\ny "z"'}),
        (5, {"a": "2", "b": ""}),
        (7, {"a": "4", "b": "w"}),
    ]
    assert records[2] == Rejected(f"{tmp_path}/a.csv, line 6", "it has 1 columns, not 2")


def test_a_csv_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("a,b\n1,é\n".encode("latin-1"))
    with pytest.raises(DataError, match="line 2: byte 0xe9 at position 2 is not UTF-8"):
        list(csv_records(str(path), ("a", "b")))


GOOD = {"text": "t", "label": 1, "id": 7, "group": "g", "criterion": "c", "evidence": [[0, 1]]}
SAME = ColumnMap({name: name for name in GOOD})


def test_values_of_the_hub_are_taken_as_they_are() -> None:
    row = mapped_row(GOOD, SAME, place="hub, row 0", unnamed="x")
    assert row == ImportedRow("7", "g", "c", "t", 1, ((0, 1),), "hub, row 0")
    assert mapped_row(GOOD | {"evidence": "[[0, 1]]"}, SAME, place="hub, row 0", unnamed="x") == row


def test_values_that_do_not_fit(golden: Golden) -> None:
    cases = [
        ("text", None),
        ("criterion", 3),
        ("id", 1.5),
        ("group", True),
        ("label", 0.5),
        ("label", True),
        ("label", "yes"),
        ("label", "x" * 100),
        ("evidence", None),
        ("evidence", "[[0,"),
        ("evidence", [[0]]),
        ("evidence", [[0, True]]),
        ("evidence", [3]),
    ]
    faults = [mapped_row(GOOD | {field: value}, SAME, place="hub, row 0", unnamed="x") for field, value in cases]
    told = [fault.reason for fault in faults if isinstance(fault, Rejected)]
    assert len(told) == len(cases) and max(map(len, told)) < 150
    golden("import", told)


def test_what_a_study_would_refuse_is_a_fault(golden: Golden) -> None:
    cases = [
        ("text", " \n"),
        ("criterion", ""),
        ("id", ""),
        ("group", " "),
        ("text", "a\ud83d"),
        ("label", -1),
        ("evidence", [[0, 2]]),
        ("evidence", [[1, 1]]),
        ("evidence", [[-1, 1]]),
    ]
    rows = [mapped_row(GOOD | {field: value}, SAME, place="hub, row 0", unnamed="x") for field, value in cases]
    golden("import", [fault_of(row) for row in rows if isinstance(row, ImportedRow)])


def test_names_of_classes_may_stand_for_any_value() -> None:
    columns = ColumnMap({"text": "text", "label": "label"}, labels=("False", "True", "3"))
    found = [mapped_row({"text": "t", "label": value}, columns, place="", unnamed="x") for value in (True, "False", 3)]
    assert [row.label for row in found] == [1, 0, 2]
