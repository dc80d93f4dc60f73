"""Folders that are written whole or not at all, and what caches hold."""

import os
import socket
from pathlib import Path

import pytest

from dryfit.settings.files import copy_folder, publishing, read_cached, sync_tree, write_cached
from dryfit.settings.wire import ErrorParts


def test_a_folder_takes_the_place_of_another_with_all_that_was_written(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "place"
    for text in ("old", "new"):
        with publishing(place) as folder:
            assert folder != place and not any(folder.iterdir())
            (folder / text).write_text(text)
    assert [path.name for path in place.iterdir()] == ["new"]
    assert list(place.parent.iterdir()) == [place]


def test_what_could_not_be_written_leaves_nothing_and_the_old_folder_stays(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").touch()
    with pytest.raises(OSError, match="full"), publishing(place) as folder:
        (folder / "half").touch()
        raise OSError("full")
    assert list(tmp_path.iterdir()) == [place] and [path.name for path in place.iterdir()] == ["old"]


def test_pipes_sockets_and_links_that_lead_nowhere_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may leave them in its folder, which is kept as it is."""
    left, kept = tmp_path / "left", tmp_path / "kept"
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "file").write_text("text")
    (left / "newest").symlink_to("deep")
    (left / "gone").symlink_to("nowhere")
    os.mkfifo(left / "pipe")
    monkeypatch.chdir(left)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        sync_tree(left)
        with publishing(kept) as folder:
            copy_folder(left, folder, os.link)
    assert {path.name for path in kept.iterdir()} == {"deep", "newest", "gone"}
    assert (kept / "newest").readlink() == Path("deep") and (kept / "gone").is_symlink()
    assert (kept / "deep" / "file").samefile(left / "deep" / "file")


def test_a_cache_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    file, said = tmp_path / "cache" / "one.json", ErrorParts(code="DATA", doing="a", found="b")
    assert read_cached(file, ErrorParts) is None
    write_cached(file, said)
    assert read_cached(file, ErrorParts) == said
    file.write_text('{"code": 1')
    assert read_cached(file, ErrorParts) is None
    file.unlink()
    os.mkfifo(file)
    assert read_cached(file, ErrorParts) is None
    write_cached(file / "below a pipe", said)
