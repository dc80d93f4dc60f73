import gzip
import math
from pathlib import Path

import numpy
import pytest

from dryfit.settings.errors import FileError
from dryfit.tasks import scored_rows
from dryfit.tasks.scored_rows import RowFacts, ScoredRow, kept, read_facts, read_rows, write_facts, write_rows

ROWS = [
    ScoredRow("a", {"class": 1, "span": [[0, 4]]}, {"class": 0, "span": None}, (0.75, 0.25), {"token_f1": 0.0}),
    ScoredRow("ü\u202e\x1b", {"class": 0, "span": []}, {"class": 0, "span": [3, 9]}, (0.1, 0.9), {"loss": math.inf}),
]

HEAD = b'{"v": 1, "split": "test", "of": 2, "metrics": {}}\n'
WRONG_ROWS = (
    b'{"id": "a", "truth": {"class": 0}, "answer": {"class": 2}, "p": [0.5, 0.5]}\n',
    b'{"id": "a", "truth": {"class": -1}, "answer": {"class": 0}, "p": [0.5, 0.5]}\n',
    b'{"id": "a", "truth": {"class": 1e400}, "answer": {"class": [0]}, "p": [0.5, 0.5]}\n',
    b'{"id": "a", "truth": {}, "answer": {"span": null}}\n',
    (
        b'{"id": "a", "truth": {"class": 0}, "answer": {"class": 0}, "p": [1.0]}\n'
        b'{"id": "b", "truth": {"class": 0}, "answer": {"class": 0}, "p": [0.5, 0.5]}\n'
    ),
    b'{"id": "a", "truth": {}, "answer": {}, "values": {"loss": []}}\n',
)


def test_rows_come_back(tmp_path: Path) -> None:
    write_rows(tmp_path / "scored", "validation", ROWS, {"f1_macro": 0.5, "auroc": math.nan})
    found = read_rows(tmp_path / "scored" / "validation.jsonl.gz")
    assert (found.split, found.of, found.metrics["f1_macro"]) == ("validation", 2, 0.5)
    assert math.isnan(found.metrics["auroc"])
    assert found.rows[0] == ROWS[0]
    assert found.rows[1].id == ROWS[1].id and math.isnan(found.rows[1].values["loss"])


def test_equal_rows_make_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_rows(tmp_path / name, "fold-1", ROWS, {})
    assert (tmp_path / "one/fold-1.jsonl.gz").read_bytes() == (tmp_path / "other/fold-1.jsonl.gz").read_bytes()


def test_probabilities_of_fp32_are_kept_exactly(tmp_path: Path) -> None:
    p = tuple(float(one) for one in numpy.random.default_rng(0).random(50).astype(numpy.float32))
    write_rows(tmp_path, "test", [ScoredRow("a", {"class": 0}, {"class": 0}, p)], {})
    back = read_rows(tmp_path / "test.jsonl.gz").rows[0].p
    assert [numpy.float32(one) for one in back] == [numpy.float32(one) for one in p]


def test_large_splits_are_thinned_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ScoredRow(f"row-{at}", {"text": "x" * 2000}, {"text": "y"}) for at in range(300)]
    monkeypatch.setattr(scored_rows, "MOST_BYTES", 60_000)
    write_rows(tmp_path, "validation", rows, {})
    found = read_rows(tmp_path / "validation.jsonl.gz")
    assert found.of == 300 and 30 <= len(found.rows) <= 120
    assert {row.id for row in found.rows} == {f"row-{at}" for at in kept([row.id for row in rows], len(found.rows))}
    assert len(found.rows[0].truth["text"]) == 500
    smaller = kept([row.id for row in rows[:200]], 20)
    assert set(smaller) >= set(kept([row.id for row in rows], 20)) & set(range(200))


def test_facts_come_back(tmp_path: Path) -> None:
    facts = {"a": RowFacts("person 1", "Does the writer sleep badly?"), "b": RowFacts("b")}
    write_facts(tmp_path / "new" / "rows.jsonl.gz", facts)
    assert read_facts(tmp_path / "new" / "rows.jsonl.gz") == facts


NO_SUCH_FILES = {
    "of another version": b'{"v": 2, "split": "test", "of": 0, "metrics": {}}\n',
    "empty": b"",
    "a list": b"[1]\n",
    "a row without its parts": b'{"v": 1, "split": "test", "of": 1, "metrics": {}}\n{"id": "a"}\n',
    "an id of another type": HEAD + b'{"id": 1, "truth": 3, "answer": {}}\n',
    "metrics of another type": b'{"v": 1, "split": "test", "of": 1, "metrics": []}\n',
    **{f"wrong row {number}": HEAD + row for number, row in enumerate(WRONG_ROWS)},
    "a line cut off": b'{"v": 1, "split": "test"\n',
    "deeply nested": b"[" * 100_000,
}


@pytest.mark.parametrize("name", NO_SUCH_FILES)
def test_what_is_no_such_file_is_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path, gzip.compress(NO_SUCH_FILES[name]))


def test_what_does_not_inflate_as_it_should_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, b"")
    refused(tmp_path, b"not gzip")
    refused(tmp_path, gzip.compress(HEAD)[:-9])
    refused(tmp_path, gzip.compress(b'{"v": 1}\n' + b"\0" * (40 << 20)))  # a small file that inflates
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(FileError):
        read_rows(tmp_path / "endless")


def refused(folder: Path, content: bytes) -> None:
    path = folder / "validation.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"validation\.jsonl\.gz"):
        read_rows(path)
