from pathlib import Path

from dryfit.study.import_formats import (
    ImportedRow,
    Rejected,
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


GOOD = {"text": "t", "label": 1, "id": 7, "group": "g", "criterion": "c", "evidence": [[0, 1]]}
SAME = ColumnMap({name: name for name in GOOD})


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
