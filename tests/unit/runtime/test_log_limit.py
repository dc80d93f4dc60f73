"""A log that grows without end keeps its beginning, its last lines, and little of the disk."""

from pathlib import Path

import pytest

from dryfit.processes import attempt
from dryfit.processes.attempt import HEAD_BYTES, MOST_BYTES, TAIL_BYTES, LogLimit

LINE = b"a line of sixty-four bytes, counted with its end, as all others\n"


def write(log: Path, lines: int) -> None:
    with log.open("ab", buffering=0) as file:
        file.write(LINE * lines)


def taken(log: Path) -> int:
    return log.stat().st_blocks * 512


def can_free(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(b"x" * 2**21)
    try:
        attempt._free(probe, 2**20, 2**21)
    except OSError:
        return False
    return taken(probe) <= 2**20


def test_a_long_log_keeps_both_ends_and_says_what_is_missing(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"the heading\n")
    write(log, 2 * MOST_BYTES // len(LINE))
    with log.open("ab") as file:
        file.write(b"\r50 %\r100 %")  # a progress bar ends no line
    size = log.stat().st_size
    LogLimit(log).settle()
    found = log.read_bytes()
    assert len(found) < MOST_BYTES
    head, note, tail = found[:HEAD_BYTES], found[HEAD_BYTES:-TAIL_BYTES], found[-TAIL_BYTES:]
    assert head.startswith(b"the heading\n" + LINE) and tail.endswith(LINE + b"\r50 %\r100 %")
    assert note == b"\n[dryfit: %d bytes of this log are left out here]\n" % (size - HEAD_BYTES - TAIL_BYTES)
    LogLimit(log).settle()
    assert log.read_bytes() == found


def test_a_log_that_is_being_written_takes_little_of_the_disk_and_loses_nothing_at_its_ends(tmp_path):
    if not can_free(tmp_path):
        pytest.skip("this file system cannot give back a part of a file")
    log = tmp_path / "log.txt"
    log.write_bytes(b"the heading\n")
    limit, written = LogLimit(log), len(b"the heading\n")
    for number in range(40):
        write(log, 2**20 // len(LINE))
        with log.open("ab") as file:
            file.write(b"round %d\n" % number)
        written += 2**20 + len(b"round %d\n" % number)
        limit.trim()
        assert taken(log) <= MOST_BYTES + 2**20
    assert log.stat().st_size == written  # nothing was moved: the writer may be in the middle of a line
    limit.settle()
    found = log.read_bytes()
    assert found.startswith(b"the heading\n" + LINE) and found.endswith(LINE + b"round 39\n")
    assert b"round 38\n" in found and b"\0" not in found and len(found) < MOST_BYTES


def test_where_space_cannot_be_given_back_the_end_is_the_same(tmp_path, monkeypatch):
    def refused(path: Path, begin: int, end: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(attempt, "_free", refused)
    log = tmp_path / "log.txt"
    write(log, 2 * MOST_BYTES // len(LINE))
    limit = LogLimit(log)
    limit.trim()
    assert log.stat().st_size == 2 * MOST_BYTES
    limit.settle()
    assert log.stat().st_size < MOST_BYTES
