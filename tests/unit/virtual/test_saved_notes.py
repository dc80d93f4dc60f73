"""The notes of saved files, which the process outside reads after a script that may have written anything there."""

from pathlib import Path

import pytest

from dryfit.gpu.written import Saved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[[1, 2, 3, 4]]",
        '[["a", 1]]',
        "7",
        '[["a", 1, true, "b"]]',
        "9" * 10_000,
        '{"a": 1}',
        "\udcff",
    ],
)
def test_what_is_no_notes_is_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / "saves.json"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert not Saved.read(file).saves
