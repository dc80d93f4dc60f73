"""What a folder's file system can do."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dryfit.study import machine_checks as tried
from dryfit.study.machine_checks import look_at_folder, nearest_folder


def test_a_good_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = look_at_folder(tmp_path)
    assert (facts.folder, facts.not_writable, facts.not_locked, facts.not_durable) == (tmp_path, "", "", "")
    assert facts.free_bytes > 0 and facts.file_system
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_yet_is_judged_by_the_nearest_above(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "file").touch()
    assert look_at_folder(tmp_path / "file" / "b").folder == tmp_path
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tried.tempfile, "TemporaryDirectory", refuse)
    assert look_at_folder(tmp_path).not_writable == "Read-only file system"


def test_locks_that_keep_nobody_out_or_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    assert look_at_folder(tmp_path).not_locked == "two holders got the same lock"

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert look_at_folder(tmp_path).not_locked == "No locks available"


def test_a_file_system_that_cannot_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert look_at_folder(tmp_path).not_durable == "Invalid argument"


def test_the_longest_mount_point_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(f"{tmp_path}x", "tmpfs")]
    monkeypatch.setattr(tried.psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "study").mkdir()
    assert look_at_folder(tmp_path / "study").file_system == "nfs4"
