"""Rows of a hub data set, read by the library itself from a data set that lies on disk."""

from pathlib import Path

import datasets.config
import pytest

import dryfit
import tiny
from dryfit.settings.errors import DataError
from dryfit.settings.study_file_reading import load_study_file
from dryfit.tasks.rows import read_rows, with_names


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tiny.write_jsonl(tmp_path / "set" / "train.jsonl", tiny.rows(12))
    tiny.write_jsonl(tmp_path / "set" / "test.jsonl", tiny.rows(5, start=12))
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("split", "count"), [(":train", 12), ("", 12), (":test", 5), (":test:default", 5), ("::default", 12)]
)
def test_a_split_of_a_data_set(hub: Path, split: str, count: int) -> None:
    rows = read_rows(f"hub:{hub}{split}")
    expected = tiny.rows(12) if count == 12 else tiny.rows(5, start=12)
    assert [row.values["text"] for row in rows] == [row["text"] for row in expected]
    assert [row.values["label"] for row in rows] == [row["label"] for row in expected]


def test_a_split_that_is_not_there(hub: Path) -> None:
    with pytest.raises(DataError, match="SPLIT"):
        read_rows(f"hub:{hub}:nowhere")


@pytest.mark.parametrize(("split", "count"), [(":train", 12), ("", 12), (":test:default", 5)])
def test_a_study_of_its_own_begins_with_a_split(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, count: int
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # it is read in a process of its own
    said: list[str] = []
    file = dryfit.init_rows(tmp_path / "study", f"hub:{hub}{split}", columns={"label": "label"}, on_note=said.append)
    assert said[0].startswith(f"hub:{hub}{split}: {count} rows, columns ")
    assert said[1].startswith("text: text; criterion: criterion; label: label; ")
    data = load_study_file(file).config.data
    assert (data.file, data.text, data.criterion) == (f"hub:{hub}{split}", "text", "criterion")
    assert data.num_labels == 2
    assert with_names(data, {"label"}).labels == data.labels


def test_a_study_of_a_split_that_is_not_there_is_not_begun(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        dryfit.init_rows(tmp_path / "study", f"hub:{hub}:nowhere")
    assert not (tmp_path / "study").exists()
