"""Hidden states on disk: whole or absent, within the limit, written by one process at a time."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dryfit.train.frozen.states_file import NoStatesError, StatesFile, StatesFolder, StatesLayout

LENGTHS = (2, 3, 5)
DIGESTS = tuple(bytes([number]) * 16 for number in range(len(LENGTHS)))


def layout(dtype: torch.dtype = torch.float32, width: int = 4) -> StatesLayout:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    return StatesLayout({digest: row for row, digest in enumerate(DIGESTS)}, starts, width, dtype)


def states(of: StatesLayout) -> Iterator[torch.Tensor]:
    for row, length in enumerate(LENGTHS):
        yield (torch.arange(length * of.width).reshape(length, of.width) + 100 * row).to(of.dtype)


def write(folder: StatesFolder, key: str, of: StatesLayout) -> StatesFile:
    with folder.writing(lambda: None, lambda: False):
        return folder.write(key, of, states(of))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_come_back_padded_with_zeros(dtype: torch.dtype, tmp_path: Path) -> None:
    own = layout(dtype)
    with write(StatesFolder(tmp_path, 10**6), "a", own) as file:
        got = file.states([DIGESTS[2], DIGESTS[0]], 6)
        assert got is not None and got.dtype == dtype and got.shape == (2, 6, 4)
        wanted = list(states(own))
        assert torch.equal(got[0, :5], wanted[2]) and not got[0, 5:].any()
        assert torch.equal(got[1, :2], wanted[0]) and not got[1, 2:].any()
        assert file.states([b"x" * 16], 3) is None
        (tmp_path / "a.states").unlink()
        assert torch.equal(file.states([DIGESTS[0]], 2)[0], wanted[0])  # pyright: ignore[reportOptionalSubscript]


def test_what_is_damaged_counts_as_absent(tmp_path: Path) -> None:
    folder, own = StatesFolder(tmp_path, 10**6), layout()
    assert folder.existing("a", own) is None
    write(folder, "a", own).__exit__()
    path = folder.path("a")
    content = path.read_bytes()
    assert len(content) == own.size_bytes
    assert folder.existing("a", layout(torch.float64)) is None, "of other rows or another number format"
    for cut in (0, 10, own.checks_at, len(content) - 1):
        path.write_bytes(content[:cut])
        assert folder.existing("a", own) is None
    path.write_bytes(content[:20] + b"\xff" + content[21:])
    file = folder.existing("a", own)
    assert file is not None
    with file:
        assert file.states([DIGESTS[0]], 2) is None, "its first row is damaged"
        assert file.states([DIGESTS[1]], 3) is not None
        os.truncate(path, 40)
        assert file.states([DIGESTS[2]], 5) is None, "cut short while it is open"


@pytest.mark.parametrize(
    ("what", "name", "said"),
    [
        (os.mkfifo, "lock", "cannot be written"),
        (os.mkdir, "lock", "cannot be written"),
        (os.mkdir, "a.states", "writing them failed"),
        (os.mkdir, ".a.tmp", "writing them failed"),
    ],
)
def test_what_is_no_file_is_said(tmp_path: Path, what: Callable[[Path], None], name: str, said: str) -> None:
    what(tmp_path / name)
    with pytest.raises(NoStatesError, match=said):
        write(StatesFolder(tmp_path, 10_000), "a", layout())


@pytest.mark.parametrize("name", ["a.states", ".a.tmp"])
def test_a_fifo_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = StatesFolder(tmp_path, 10_000)
    os.mkfifo(tmp_path / name)
    assert folder.existing("a", layout()) is None
    with write(folder, "a", layout()) as file:
        assert file.states([DIGESTS[0]], 2) is not None


@pytest.mark.parametrize("limit_bytes", [400, 1])
def test_a_folder_that_cannot_make_room_is_said(tmp_path: Path, limit_bytes: int) -> None:
    (tmp_path / "old.states").mkdir()
    (tmp_path / "older.states").write_bytes(bytes(10_000))
    with pytest.raises(NoStatesError):
        write(StatesFolder(tmp_path, limit_bytes), "a", layout())


def test_the_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    own = layout()
    folder = StatesFolder(tmp_path, 2 * own.size_bytes)
    for age, key in enumerate("ab"):
        write(folder, key, own).__exit__()
        os.utime(folder.path(key), (age + 1, age + 1))
    used = folder.existing("a", own)
    assert used is not None
    with used:
        write(folder, "c", own).__exit__()
        assert {path.stem for path in tmp_path.glob("*.states")} == {"a", "c"}
    small = StatesFolder(tmp_path, own.size_bytes - 1)
    with pytest.raises(NoStatesError, match="execution.frozen_cache is 0 MiB"):
        write(small, "d", own)
    assert {path.stem for path in tmp_path.glob("*.states")} == {"a", "c"}, "for nothing, nothing goes"


def test_a_disk_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dryfit.train.frozen.states_file._KEPT_FREE_BYTES", 2**60)
    with pytest.raises(NoStatesError, match="the disk has"):
        write(StatesFolder(tmp_path, 10**6), "a", layout())
    (tmp_path / "file").touch()
    with pytest.raises(NoStatesError, match="cannot be written"):
        write(StatesFolder(tmp_path / "file", 10**6), "a", layout())


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    """Its lock is the next one's, and what it had begun goes."""
    folder, own = StatesFolder(tmp_path, 10**6), layout()
    pid = os.fork()
    if not pid:

        def slowly() -> Iterator[torch.Tensor]:
            yield next(states(own))
            (tmp_path / "begun").touch()
            time.sleep(600)

        with folder.writing(lambda: None, lambda: False):
            folder.write("a", own, slowly())
        os._exit(0)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    waits: list[int] = []
    with (
        pytest.raises(NoStatesError, match="asked to stop"),
        folder.writing(lambda: waits.append(1), lambda: len(waits) > 1),
    ):
        pytest.fail("two write at once")
    assert folder.existing("a", own) is None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert list(tmp_path.glob(".*.tmp"))
    write(folder, "b", own).__exit__()
    assert {path.name for path in tmp_path.iterdir()} == {"b.states", "lock", "begun"}


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder, own = StatesFolder(tmp_path, 10**6), layout()

    def stopped() -> Iterator[torch.Tensor]:
        yield next(states(own))
        raise NoStatesError("the trial was asked to stop")

    with pytest.raises(NoStatesError, match="asked to stop"), folder.writing(lambda: None, lambda: False):
        folder.write("a", own, stopped())
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}
