import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import tiny
from dryfit.settings.errors import ConfigError, DataError
from dryfit.settings.tables import DataSettings
from dryfit.tasks.rows import check_classes, fingerprint, label_counts, load_splits
from golden import Golden, refusal


def splits_of(folder: Path, train: list[dict], validation: list[dict], **settings):
    return load_splits(
        DataSettings(
            train=str(tiny.write_jsonl(folder / "train.jsonl", train)),
            validation=str(tiny.write_jsonl(folder / "validation.jsonl", validation)),
            **settings,
        )
    )


def good(count: int = 6, start: int = 0) -> list[dict]:
    rows = tiny.rows(count, start=start)
    for index, row in enumerate(rows):
        row["label"] = index % 2
    return rows


def changed(index: int, **values) -> list[dict]:
    rows = good()
    rows[index] |= values
    return rows


def without(index: int, column: str) -> list[dict]:
    rows = good()
    del rows[index][column]
    return rows


def test_good_rows_are_read_whole(tmp_path: Path) -> None:
    rows = good()
    splits = splits_of(tmp_path, rows, good(4, start=6))
    assert [row.id for row in splits["train"]] == [row["id"] for row in rows]
    assert [row.text for row in splits["train"]] == [row["text"] for row in rows]
    assert label_counts(splits["train"]) == {0: 3, 1: 3}
    assert splits["train"][3].place == f"{tmp_path}/train.jsonl, line 4"


def test_bad_rows_are_named_with_file_line_and_value(tmp_path: Path, golden: Golden) -> None:
    cases = [
        changed(2, label=2),
        changed(2, label=-1),
        changed(1, label=None),
        changed(1, label=float("nan")),
        changed(1, label=0.5),
        changed(1, label="1"),
        changed(1, label=True),
        without(4, "label"),
        without(4, "text"),
        without(4, "criterion"),
        without(0, "group"),
        changed(3, text="  \n"),
        changed(3, text=None),
        changed(3, criterion=""),
        changed(5, id="r0"),
        changed(5, id=None),
        changed(0, evidence=[[0, 10_000]]),
        changed(0, evidence=[[5, 5]]),
        changed(0, evidence=[[-1, 5]]),
        changed(0, evidence=[[0]]),
        changed(0, evidence="all"),
    ]
    told = [refusal(splits_of, tmp_path, case, good(4, start=6)) for case in cases]
    golden("data", [one.replace(f"{tmp_path}/", "") for one in told])


def test_the_same_group_in_two_splits(tmp_path: Path) -> None:
    validation = good(4, start=6)
    validation[2]["group"] = "g1"
    with pytest.raises(DataError, match="group 'g1' is in the split train too: .*line 2") as caught:
        splits_of(tmp_path, good(), validation)
    assert "validation.jsonl, line 3" in caught.value.doing


def test_duplicate_ids_across_splits(tmp_path: Path) -> None:
    validation = good(4, start=6)
    validation[0]["id"] = "r2"
    with pytest.raises(DataError, match="id 'r2' is there already: .*train.jsonl, line 3"):
        splits_of(tmp_path, good(), validation)


def test_empty_split_and_absent_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"validation.jsonl: it has no rows"):
        splits_of(tmp_path, good(), [])
    with pytest.raises(DataError, match="no row has label 2, 3"):
        check_classes(splits_of(tmp_path, good(), good(4, start=6), num_labels=4), DataSettings(num_labels=4))


def test_criterion_in_some_splits_only(tmp_path: Path) -> None:
    validation = [{key: value for key, value in row.items() if key != "criterion"} for row in good(4, start=6)]
    with pytest.raises(DataError, match="column 'criterion' is in some splits only"):
        splits_of(tmp_path, good(), validation)


def test_text_alone_without_ids_or_groups(tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": row["label"]} for row in good()]
    splits = splits_of(tmp_path, rows, rows)
    assert {row.criterion for row in splits["train"]} == {None}
    assert splits["train"][1].id == f"{tmp_path}/train.jsonl:2"


def test_not_utf8(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "train.jsonl", good())
    path.write_bytes(path.read_bytes().replace(b'"r1"', b'"r\xff"'))
    with pytest.raises(DataError, match="byte 0xff at position 9 is not UTF-8") as caught:
        load_splits(DataSettings(train=str(path), validation=str(path)))
    assert caught.value.doing.endswith("train.jsonl, line 2")


@pytest.mark.parametrize(("text", "found"), [("[1, 2]", "is no object"), ('{"id": 1', "not JSON"), ("3", "no object")])
def test_a_line_that_is_no_object(tmp_path: Path, text: str, found: str) -> None:
    path = tiny.write_jsonl(tmp_path / "train.jsonl", good(2))
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(DataError, match=found) as caught:
        load_splits(DataSettings(train=str(path), validation=str(path)))
    assert caught.value.doing.endswith("train.jsonl, line 3")


def test_missing_file_names_a_near_one(tmp_path: Path) -> None:
    tiny.write_jsonl(tmp_path / "train.jsonl", good())
    with pytest.raises(DataError, match="there is no such file") as caught:
        load_splits(DataSettings(train=str(tmp_path / "trian.jsonl"), validation="x.jsonl"))
    assert caught.value.hint == f"did you mean {tmp_path}/train.jsonl?"
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"files of kind '.xlsx' are not read"):
        load_splits(DataSettings(train=str(tmp_path / "rows.xlsx"), validation="x.jsonl"))


def test_sources_that_exclude_each_other_or_are_absent() -> None:
    with pytest.raises(ConfigError, match=r"data\.validation not given"):
        load_splits(DataSettings(train="a.jsonl"))
    with pytest.raises(ConfigError, match=r"data\.file and data\.train are both given"):
        load_splits(DataSettings(train="a.jsonl", file="b.jsonl"))


def test_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"id": row["id"], "criterion": row["criterion"], "text": row["text"] + ', "so"\nit is', "label": row["label"]}
        for row in good()
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    lines = ["id,criterion,text,label"]
    for row in rows:
        quoted = row["text"].replace('"', '""')
        lines.append(f'{row["id"]},{row["criterion"]},"{quoted}",{row["label"]}')
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    found = {
        kind: fingerprint(load_splits(DataSettings(file=str(tmp_path / f"rows.{kind}"), validation_fraction=0.3)))
        for kind in ("csv", "parquet", "jsonl")
    }
    assert len(set(found.values())) == 1, found


def test_bad_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,text,label\n1,good,0\n2,bad\n")
    with pytest.raises(DataError, match="the row has not 3 columns") as caught:
        load_splits(DataSettings(file=str(path)))
    assert caught.value.doing.endswith("line 3")
    path.write_text("id,text,label\n1,good,0.0\n")
    with pytest.raises(DataError, match="label is '0.0', not an integer"):
        load_splits(DataSettings(file=str(path)))


def test_broken_parquet(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(DataError, match="not Parquet"):
        load_splits(DataSettings(file=str(tmp_path / "rows.parquet")))


def test_limits_take_the_first_rows(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, good(), good(4, start=6), train_limit=4, validation_limit=1)
    assert [row.id for row in splits["train"]] == ["r0", "r1", "r2", "r3"]
    assert [row.id for row in splits["validation"]] == ["r6"]


def test_group_split_keeps_groups_together_and_is_stable(tmp_path: Path) -> None:
    rows = tiny.rows(200, groups=20)
    path = str(tiny.write_jsonl(tmp_path / "all.jsonl", rows))
    data = DataSettings(file=path, validation_fraction=0.25, test_fraction=0.1, split_seed=5)
    splits = load_splits(data)
    groups = {name: {row.group for row in part} for name, part in splits.items()}
    assert {name: len(part) for name, part in groups.items()} == {"train": 13, "validation": 5, "test": 2}
    assert sum(len(part) for part in splits.values()) == 200
    assert load_splits(data) == splits
    other = load_splits(data.model_copy(update={"split_seed": 6}))
    assert {row.group for row in other["validation"]} != groups["validation"]


def test_group_split_that_leaves_a_split_empty(tmp_path: Path) -> None:
    path = str(tiny.write_jsonl(tmp_path / "all.jsonl", tiny.rows(20, groups=1)))
    with pytest.raises(DataError, match="1 groups, of which validation takes 1"):
        load_splits(DataSettings(file=path))


@pytest.mark.parametrize("column", ["id", "text", "criterion", "label", "group", "evidence"])
def test_fingerprint_sees_every_column(tmp_path: Path, column: str) -> None:
    rows = good()
    before = fingerprint(splits_of(tmp_path / "a", rows, good(4, start=6)))
    value = {"label": 1 - rows[2]["label"], "evidence": [[0, 1]]}.get(column, "another word")
    rows = json.loads(json.dumps(rows))
    rows[2][column] = value
    assert fingerprint(splits_of(tmp_path / "b", rows, good(4, start=6))) != before


def several(count: int = 6, start: int = 0) -> list[dict]:
    rows = good(count, start)
    for index, row in enumerate(rows):
        row["label"] = [[], [2, 0], [1], [0, 1, 2], [0], [1, 2]][index % 6]
    return rows


def test_rows_may_have_any_number_of_classes(tmp_path: Path) -> None:
    splits = splits_of(tmp_path, several(), several(4, start=6), multi_label=True, num_labels=3)
    assert [row.label for row in splits["train"]] == [(), (0, 2), (1,), (0, 1, 2), (0,), (1, 2)]
    assert label_counts(splits["train"]) == {0: 3, 1: 3, 2: 3}
    other = several()
    other[2]["label"] = [2]
    changed = splits_of(tmp_path / "b", other, several(4, start=6), multi_label=True, num_labels=3)
    assert fingerprint(changed) != fingerprint(splits)


def rows_with(label: object) -> list[dict]:
    rows = several()
    rows[3]["label"] = label
    return rows


def test_bad_lists_of_classes(tmp_path: Path, golden: Golden) -> None:
    cases = [
        1,
        None,
        "[1]",
        [3],
        [0, -1],
        [True],
        [0.0],
        ["0"],
        [[0]],
        [1, 0, 1],
    ]
    settings = {"multi_label": True, "num_labels": 3}
    told = [refusal(splits_of, tmp_path, rows_with(case), several(4, start=6), **settings) for case in cases]
    golden("data", [one.replace(f"{tmp_path}/", "") for one in told])


def test_a_list_where_a_row_has_one_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label is \[\], not an integer"):
        splits_of(tmp_path, several(), several(4, start=6), num_labels=3)


@pytest.mark.parametrize("cell", ["", "1", "[1", "[4]", "{}"])
def test_lists_of_classes_in_csv_are_json(tmp_path: Path, cell: str) -> None:
    def write(name: str, cells: list[str]) -> str:
        lines = [f'{name}{index},words,"{one}"' for index, one in enumerate(cells)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["id,text,label", *lines]) + "\n", encoding="utf-8")
        return str(tmp_path / f"{name}.csv")

    def read(train: list[str]) -> list[object]:
        data = DataSettings(train=write("a", train), validation=write("b", ["[0]"]), multi_label=True, num_labels=2)
        return [row.label for row in load_splits(data)["train"]]

    assert read(["[0, 1]", "[]", "[1]"]) == [(0, 1), (), (1,)]
    with pytest.raises(DataError, match=r"a\.csv, line 3"):
        read(["[0, 1]", cell])


def test_a_class_that_no_row_has_or_every_row_has(tmp_path: Path) -> None:
    everyone = several()
    for row in everyone:
        row["label"] = sorted({*row["label"], 1})
    splits = splits_of(tmp_path / "a", everyone, several(4, start=6), multi_label=True, num_labels=3)
    with pytest.raises(DataError, match="every row has label 1"):
        check_classes(splits, DataSettings(multi_label=True, num_labels=3))
    splits = splits_of(tmp_path / "b", several(), several(4, start=6), multi_label=True, num_labels=4)
    with pytest.raises(DataError, match="no row has label 3"):
        check_classes(splits, DataSettings(multi_label=True, num_labels=4))
