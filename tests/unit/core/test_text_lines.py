from pathlib import Path

import pytest

from dryfit.settings.errors import DataError
from dryfit.settings.text import decoded, existing_file, without_mark


def test_the_nearest_name_is_named(tmp_path: Path):
    (tmp_path / "posts.csv").write_text("")
    assert existing_file(f"{tmp_path}/posts.csv", allowed="a file") == tmp_path / "posts.csv"
    with pytest.raises(DataError, match="there is no such file") as caught:
        existing_file(f"{tmp_path}/post.csv", allowed="a file")
    assert caught.value.hint == f"did you mean {tmp_path}/posts.csv?"
    for name, found in {"none/at/all.csv": "there is no such file", "": "it is a folder"}.items():
        with pytest.raises(DataError, match=found) as caught:
            existing_file(f"{tmp_path}/{name}", allowed="a file")
        assert caught.value.hint == "check the path"


def test_bytes_that_are_no_text_are_named():
    assert decoded("é".encode(), "reading x") == "é"
    with pytest.raises(DataError, match="reading x, line 3: byte 0xe9 at position 1 is not UTF-8"):
        decoded(b"a\xe9b", "reading x, line 3")


def test_only_a_mark_at_the_beginning_is_left_out():
    assert list(without_mark(iter(["\ufeffa", "\ufeffb"]))) == ["a", "\ufeffb"]
    assert list(without_mark(iter([]))) == []
