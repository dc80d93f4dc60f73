"""Names of classes: given by ``data.labels`` or taken from the training rows, and what a row may say."""

import json
from pathlib import Path

import pytest

import tiny
from dryfit.settings.errors import DataError
from dryfit.settings.tables import DataSettings
from dryfit.tasks.rows import LABELLED, check_classes, label_counts, load_splits, sorted_names, with_names


def written(folder: Path, train: list[object], validation: list[object] | None = None, **settings) -> DataSettings:
    """Rows with these labels; the settings as a study file has them."""

    def rows(labels: list[object], split: str) -> str:
        made = [{"text": f"{split} {at}", "label": label} for at, label in enumerate(labels)]
        return str(tiny.write_jsonl(folder / f"{split}.jsonl", made))

    table = {"train": rows(train, "train"), "validation": rows(validation or train, "validation"), **settings}
    return DataSettings.model_validate_json(json.dumps(table))


def labels_of(data: DataSettings, split: str = "train") -> list[object]:
    return [row.label for row in load_splits(data)[split]]


@pytest.mark.parametrize(
    ("labels", "names", "classes"),
    [
        (["yes", "no", "yes"], ("no", "yes"), [1, 0, 1]),
        ([" yes", "no ", "yes"], ("no", "yes"), [1, 0, 1]),
        ([True, False], ("false", "true"), [1, 0]),
        (["10", "2", "10"], ("2", "10"), [1, 0, 1]),
        (["n/a", 7, 7], ("7", "n/a"), [1, 0, 0]),
    ],
)
def test_names_are_those_of_the_training_rows_sorted(
    tmp_path: Path, labels: list[object], names: tuple[str, ...], classes: list[int]
) -> None:
    data = with_names(written(tmp_path, labels), LABELLED)
    assert data.labels == names
    assert labels_of(data) == classes == labels_of(data, "validation")


@pytest.mark.parametrize("labels", [[0, 1, "yes"], [None, "yes"], [0.5, "yes"], [[], "yes"]])
def test_integers_and_what_is_no_name_are_left_as_they_are(tmp_path: Path, labels: list[object]) -> None:
    data = written(tmp_path, labels)
    assert with_names(data, LABELLED) is data
    with pytest.raises(DataError, match="not an integer"):
        load_splits(data)


def test_integers_of_csv_are_no_names(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,0\nb,1\n", encoding="utf-8")
    data = DataSettings(file=str(tmp_path / "rows.csv"))
    assert with_names(data, LABELLED) is data


def test_a_task_without_classes_has_no_names(tmp_path: Path) -> None:
    data = written(tmp_path, ["yes", "no"])
    assert with_names(data, frozenset({"evidence"})) is data


def test_another_number_of_names_than_classes_is_refused_with_the_line_that_helps(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 names of classes \(maybe, no, yes\), and data.num_labels is 2") as caught:
        with_names(written(tmp_path, ["yes", "maybe", "no"]), LABELLED)
    assert caught.value.hint == 'data.labels = ["maybe", "no", "yes"]'
    with pytest.raises(DataError, match="1 names of classes"):
        with_names(written(tmp_path, ["yes", "yes"]), LABELLED)
    many = [f"text number {at}" for at in range(1500)]
    with pytest.raises(DataError) as caught:
        with_names(written(tmp_path, many), LABELLED)
    assert caught.value.hint == "another data.label"


def test_names_that_are_given_keep_their_order(tmp_path: Path) -> None:
    data = written(tmp_path, ["yes", "no", 1, "0"], labels=["yes", "no"])
    assert data.num_labels == 2
    assert with_names(data, LABELLED) is data
    assert labels_of(data) == [0, 1, 1, 0]  # a number is a class where no name is one


def test_a_number_is_a_name_where_names_are_numbers(tmp_path: Path) -> None:
    data = written(tmp_path, [5, 1, "3"], labels=["1", "3", "5"])
    assert labels_of(data) == [2, 0, 1]
    with pytest.raises(DataError, match="label is 2") as caught:
        load_splits(written(tmp_path, [5, 1, 2], labels=["1", "3", "5"]))
    assert caught.value.allowed == "one of data.labels: 1, 3, 5"


@pytest.mark.parametrize("value", ["Yess", "NO ", None, 0.5, "", 2, -1, ["yes"]])
def test_an_unknown_name_is_refused_with_its_row_and_those_there_are(tmp_path: Path, value: object) -> None:
    data = with_names(written(tmp_path, ["yes", "no"], ["yes", value, "no"]), LABELLED)
    with pytest.raises(DataError) as caught:
        load_splits(data)
    assert caught.value.doing.endswith("validation.jsonl, line 2")
    assert caught.value.found == f"label is {value!r}"
    assert caught.value.allowed == "one of data.labels: no, yes"
    assert caught.value.hint == {"Yess": "did you mean yes?", "NO ": "did you mean no?"}.get(str(value), "")


def test_several_names_of_a_row(tmp_path: Path) -> None:
    labels = [["sad", "tired"], [], ["tired"], ["sad"]]
    data = with_names(written(tmp_path, labels, multi_label=True), LABELLED)
    assert data.labels == ("sad", "tired")
    assert labels_of(data) == [(0, 1), (), (1,), (0,)]
    with pytest.raises(DataError, match="with a class twice"):
        load_splits(written(tmp_path, [["sad", "sad"]], multi_label=True, labels=["sad", "tired"]))
    lines = ["text,label", 'a,"[""sad"", ""tired""]"', "b,[]"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert with_names(DataSettings(file=str(tmp_path / "rows.csv"), multi_label=True), LABELLED).labels == data.labels


def test_a_class_without_rows_is_named(tmp_path: Path) -> None:
    data = written(tmp_path, ["yes", "no"], labels=["maybe", "no", "yes"])
    splits = load_splits(data)
    assert label_counts(splits["train"]) == {1: 1, 2: 1}
    with pytest.raises(DataError, match="no row has label maybe"):
        check_classes(splits, data)


def test_names_sort_as_numbers_only_where_all_are() -> None:
    assert sorted_names({"10", "9", "-1"}) == ["-1", "9", "10"]
    assert sorted_names({"10", "9", "a"}) == ["10", "9", "a"]


@pytest.mark.parametrize("labels", [["a", "a"], ["a", " "], ["a", "b "]])
def test_names_must_be_told_apart(labels: list[str]) -> None:
    with pytest.raises(ValueError, match=r"data\.labels has a name"):
        DataSettings(labels=tuple(labels))
