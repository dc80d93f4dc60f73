"""Rows of a hub data set, read by the library itself from a data set that lies on disk."""

from pathlib import Path

import datasets
import pytest

import tiny
from dryfit.core.errors import DataError
from dryfit.tasks.rows.sources import read_rows


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
